import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import safe_rope
from safe_rope.integrations import SafeRopeCallback

with safe_rope.guard(strict=True):
    model = AutoModelForCausalLM.from_pretrained("my-model", dtype=torch.bfloat16)

data = Dataset.from_dict({"text": ["where a token stands", "is cos and sin"] * 4})
gpu = torch.cuda.is_available()
trainer = SFTTrainer(
    model,
    SFTConfig("out", max_steps=2, use_cpu=not gpu, bf16=gpu, report_to=[]),
    train_dataset=data,
    processing_class=AutoTokenizer.from_pretrained("my-model"),
    callbacks=[SafeRopeCallback()],
)
trainer.train()
