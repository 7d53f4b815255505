"""Whole models of diffusers, as small as they can be built: _libraries_diffusion.jsonl has config and input.

An input is a word and numbers: ``f 1 16 4`` are random floats of that shape, ``c 0.5 2`` the same one twice,
``p 256 16 3`` positions below 256, as floats, ``i 1000 2`` integers below 1000, ``b 1 8`` all true. ``ints``
and ``bools`` are tensors that are written out, ``new`` is a module, a class in it and its arguments. Other
numbers in a list become a tuple; all else is passed as it stands.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import torch

from laboratory.libraries.subject import Cast, Family, Subject, floats, ints, lib

CONFIGS = Path(__file__).with_name("diffusion.jsonl")


def diffusers() -> list[Subject]:
    """One subject for each line of the file, and the text encoder of Kolors."""
    rows = [json.loads(line) for line in CONFIGS.read_text().splitlines()]
    return [*(_subject(row["name"], row["class"], row["init"], row["inputs"]) for row in rows), _kolors()]


def _subject(name: str, cls: str, init: dict[str, Any], inputs: dict[str, Any]) -> Subject:
    def build(diffusers: Any) -> Any:
        return getattr(diffusers, cls)(**copy.deepcopy(init))

    return Family("diffusers", "diffusers", whole=True)(name, build, functools.partial(_ask, inputs))


def _kolors() -> Subject:
    def build(x: Any) -> Any:
        config = x.ChatGLMConfig(
            num_layers=2,
            padded_vocab_size=128,
            hidden_size=64,
            ffn_hidden_size=96,
            kv_channels=16,
            num_attention_heads=4,
            multi_query_attention=True,
            multi_query_group_num=2,
            seq_length=256,
            rmsnorm=True,
            original_rope=True,
        )
        return x.ChatGLMModel(config)

    def ask(model: Any, to: Cast) -> Any:
        return model(ints(100, 1, 64), return_dict=False)[0]

    kolors = Family("diffusers", "diffusers.pipelines.kolors.text_encoder", whole=True)
    return kolors("ChatGLMModel", build, ask)


def _ask(inputs: dict[str, Any], model: Any, to: Cast) -> Any:
    given = {name: _input(value, to, index) for index, (name, value) in enumerate(inputs.items())}
    return model(**given, return_dict=False)


def _input(value: Any, to: Cast, seed: int) -> Any:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    if isinstance(value, list):
        return [_input(item, to, seed) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"ints"}:
            return torch.tensor(value["ints"])
        if value.keys() == {"bools"}:
            return torch.tensor(value["bools"], dtype=torch.bool)
        if value.keys() == {"new"}:
            module, cls, *arguments = value["new"]
            return getattr(lib(module), cls)(*arguments)
        return {int(key) if key.isdigit() else key: _input(item, to, seed) for key, item in value.items()}
    if not isinstance(value, str) or not re.fullmatch(r"[fcpib]( [\d.]+)*", value):
        return value
    word, *numbers = value.split()
    if word == "f":
        return to(floats(*map(int, numbers), seed=seed))
    if word == "b":
        return torch.ones(*map(int, numbers), dtype=torch.bool)
    first, shape = float(numbers[0]), [int(number) for number in numbers[1:]]
    if word == "c":
        return to(torch.full(shape, first))
    whole = ints(int(first), *shape, seed=seed)
    return whole if word == "i" else to(whole.float())
