import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

import safe_rope

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

with safe_rope.guard(strict=True):
    model = AutoModelForCausalLM.from_pretrained("my-model", dtype=torch.bfloat16)

mesh = dist.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=precision)
fully_shard(model, mesh=mesh, mp_policy=precision)
safe_rope.audit(model).raise_if_damaged()

ids = torch.arange(16, device=mesh.device_type)[None]
model(input_ids=ids, labels=ids).loss.backward()
dist.destroy_process_group()
