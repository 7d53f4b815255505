import deepspeed
from transformers import AutoConfig, AutoModelForCausalLM

import safe_rope

config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
deepspeed.init_distributed()
model_config = AutoConfig.from_pretrained("my-model")
with safe_rope.guard(strict=True), deepspeed.zero.Init(config_dict_or_path=config):
    model = AutoModelForCausalLM.from_config(model_config)

engine, *_ = deepspeed.initialize(model=model, config=config)
safe_rope.audit(engine).raise_if_damaged()
