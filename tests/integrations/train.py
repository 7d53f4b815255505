"""A training script like any other: transformers' Trainer, a DeepSpeed config, bf16. It knows no safe_rope.

Run as ``python train.py CHECKPOINT DS_CONFIG OUTPUT [MEASURE]``, by any launcher. Where MEASURE is given,
each rank calls that module's function ``measure(model, folder)`` when training is over.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 16) % 97
        return {"input_ids": ids, "labels": ids}


def training_arguments(output: str, **settings: object) -> TrainingArguments:
    settings |= {"per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "save_strategy": "no"}
    try:
        return TrainingArguments(output, bf16=True, report_to=[], **settings)
    except ValueError:
        # Newer releases want to be told that there is no GPU; older ones leave DeepSpeed out where they are.
        return TrainingArguments(output, bf16=True, report_to=[], use_cpu=True, **settings)


def main(checkpoint: str, ds_config: str, output: str, measure: str | None = None) -> None:
    arguments = training_arguments(output, deepspeed=ds_config if ds_config != "none" else None)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.bfloat16)
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers())
    trainer.train()
    if measure:
        importlib.import_module(measure).measure(trainer.model, output)
    if os.environ.get("FAIL_AT_THE_END"):
        raise RuntimeError("as asked")


if __name__ == "__main__":
    main(*sys.argv[1:])
