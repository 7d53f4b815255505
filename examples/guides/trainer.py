import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import safe_rope
from safe_rope.integrations import SafeRopeCallback


class Tokens(torch.utils.data.Dataset):  # your data set
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.arange(index, index + 16)
        return {"input_ids": ids, "labels": ids}


# With deepspeed="ds_config.json" the arguments come before the model, which is then loaded partitioned.
arguments = TrainingArguments("out", max_steps=2, use_cpu=not torch.cuda.is_available(), report_to=[])
with safe_rope.guard(strict=True):
    model = AutoModelForCausalLM.from_pretrained("my-model", dtype=torch.bfloat16)

trainer = Trainer(model, arguments, train_dataset=Tokens(), callbacks=[SafeRopeCallback()])
trainer.train()
