import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import safe_rope

accelerator = Accelerator(cpu=not torch.cuda.is_available())
with safe_rope.guard(strict=True):
    model = AutoModelForCausalLM.from_pretrained("my-model", dtype=torch.bfloat16)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
safe_rope.audit(model).raise_if_damaged()  # after prepare: this is what will be trained

ids = torch.arange(16, device=accelerator.device)[None]
accelerator.backward(model(input_ids=ids, labels=ids).loss)
optimizer.step()
