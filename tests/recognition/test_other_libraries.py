"""Rotary modules of other libraries, as PyPI has them: true tables, and FP32 rotation in BF16 models."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

DIM, LENGTH = 16, 600
"""A head, and more positions than BF16 counts in ones."""


def imported(package: str, name: str) -> Any:
    """A module of an installed package, without what the package itself imports (torchao, torchvision)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(spec.submodule_search_locations[0])
        *parents, _ = name.split(".")
        for depth in range(len(parents) + 1):
            bare: Any = types.ModuleType(".".join([package, *parents[:depth]]))
            bare.__path__ = [str(folder.joinpath(*parents[:depth]))]
            patch.setitem(sys.modules, bare.__name__, bare)
        return importlib.import_module(f"{package}.{name}")


def torchtune_rotary() -> nn.Module:
    file = imported("torchtune", "modules.position_embeddings")
    return file.RotaryPositionalEmbeddings(DIM, max_seq_len=1024)


def timm_rotary() -> nn.Module:
    """What EVA-02 makes of its config: two axes, a table for the trained grid."""
    file = imported("timm", "layers.pos_embed_sincos")
    return file.RotaryEmbeddingCat(DIM, in_pixels=False, feat_shape=[24, 25], ref_feat_shape=[16, 16])


def timm_rotate(rotary: Any, q: torch.Tensor) -> torch.Tensor:
    """As EVA-02's attention does it."""
    rotate = imported("timm", "layers.pos_embed_sincos").apply_rot_embed_cat
    rotated = rotate(q.transpose(1, 2), rotary.get_embed(), half=False).type_as(q)
    return rotated.transpose(1, 2)


def lucidrains_rotary() -> nn.Module:
    return pytest.importorskip("rotary_embedding_torch").RotaryEmbedding(DIM)


class Attention(nn.Module):
    """A head that rotates its input with whatever it is given."""

    def __init__(self, rotary: nn.Module, rotate: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rotary = rotary
        self.rotate = rotate

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.rotate(self.rotary, q)


def _call(rotary: nn.Module, q: torch.Tensor) -> torch.Tensor:
    return rotary(q)


def _queries(rotary: Any, q: torch.Tensor) -> torch.Tensor:
    return rotary.rotate_queries_or_keys(q.transpose(1, 2)).transpose(1, 2)


LIBRARIES: dict[str, Callable[[], nn.Module]] = {
    "torchtune": lambda: Attention(torchtune_rotary(), _call),
    "rotary-embedding-torch": lambda: Attention(lucidrains_rotary(), _queries),
    "timm": lambda: Attention(timm_rotary(), timm_rotate),
}


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that the rotary module keeps, but a cache that it fills itself."""
    found = {**dict(model.rotary.named_parameters()), **dict(model.rotary.named_buffers())}
    return {n: v.detach() for n, v in found.items() if v.is_floating_point() and n != "cached_freqs"}


def zero_init() -> Any:
    import deepspeed

    zero = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    return deepspeed.zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, **zero})


def same(tables: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> bool:
    return set(tables) == set(truth) and all(
        tables[name].shape == truth[name].shape
        and tables[name].dtype == truth[name].dtype
        and torch.equal(tables[name], truth[name])
        for name in truth
    )


@pytest.mark.usefixtures("deepspeed_group")
@pytest.mark.parametrize("library", LIBRARIES)
def test_tables_are_true_under_zero_init_and_after_casts(library: str) -> None:
    truth = {name: table.clone() for name, table in stored(LIBRARIES[library]()).items()}
    assert truth
    with zero_init():
        assert not same(stored(LIBRARIES[library]()), truth), "zero.Init does damage it"
    with safe_rope.guard() as session, zero_init():
        model = LIBRARIES[library]()
    assert not session.report.unprotected
    family = "pinned" if library == "timm" else library
    assert [entry.family for entry in session.report.protected] == [family]
    assert same(stored(model), truth)
    for change in (nn.Module.bfloat16, nn.Module.half, copy.deepcopy):
        assert same(stored(change(model)), truth)
    if library == "rotary-embedding-torch":  # the others' packages cannot be imported as such
        assert same(stored(pickle.loads(pickle.dumps(model))), truth)


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_q_is_rotated_in_fp32_and_rounded_once(library: str, how: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, LENGTH, 3, DIM).to(torch.bfloat16)
    clean, stock = LIBRARIES[library](), LIBRARIES[library]().to(torch.bfloat16)
    expected = clean(q.float())
    with contextlib.nullcontext() if how == "protect" else safe_rope.guard() as session:
        model = LIBRARIES[library]()
    report = session.report if session else None
    if how == "protect":
        if library == "rotary-embedding-torch":  # it does not say what it was built with
            with pytest.warns(safe_rope.PrecisionWarning, match="arguments are not known"):
                safe_rope.protect(model)
            return
        report = safe_rope.protect(model)
        assert not report.unprotected
    model = model.to(torch.bfloat16)
    if library == "timm":  # nothing of the library's own is known to apply its tables: the report says so
        assert str(report.protected[0]).endswith("applied as stock")
        assert torch.equal(model(q), stock(q))
        return
    for _ in range(2):  # the second time a cache would be read
        assert torch.equal(model(q), expected.to(torch.bfloat16))
    stock(q)
    assert not torch.equal(stock(q), expected.to(torch.bfloat16)), "without the guard it is not"


def test_state_dict_keys_stay_those_of_the_library() -> None:
    plain = LIBRARIES["rotary-embedding-torch"]()
    with safe_rope.guard():
        model = LIBRARIES["rotary-embedding-torch"]()
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
