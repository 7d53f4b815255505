"""audit() changes neither the model nor its surroundings, and is not changed by them."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from audited import PlainRotary, of, use
from rotary_models import build, first_rotary, rope_types
from torch import Tensor, nn

import safe_rope
from safe_rope.registry import find
from safe_rope.rotation import _installed


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module: identity, version and bits of tensors, values of the rest."""
    seen: dict[str, Any] = {"rng": torch.get_rng_state().tolist(), "dtype": torch.get_default_dtype()}
    for path, module in model.named_modules():
        tensors = {**vars(module), **module._buffers, **module._parameters}
        seen[f"{path} class"] = type(module)
        seen[f"{path} names"] = (sorted(vars(module)), sorted(module._buffers))
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                bits = None if value.is_meta else value.detach().clone()
                seen[f"{path}.{name}"] = (id(value), value._version, value.dtype, value.grad is None, bits)
            elif isinstance(value, int | float | str | None):
                seen[f"{path}.{name}"] = value
    return seen


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, tuple) and value and isinstance(value[-1], torch.Tensor):
            assert value[:-1] == after[name][:-1], name
            assert value[-1].equal(after[name][-1]), name
        else:
            assert value == after[name] or value is after[name], name


@pytest.mark.parametrize("protected", [False, True], ids=["stock", "protected"])
@pytest.mark.parametrize("rope_type", rope_types())
@pytest.mark.parametrize("used", [0, 6000, 12000])
def test_an_audit_changes_nothing(rope_type: str, protected: bool, used: int) -> None:
    model = build(rope_type=rope_type)
    if protected:
        safe_rope.protect(model)
    if used:
        use(model, used)
    before = snapshot(model)
    report = safe_rope.audit(model)
    assert_same(before, snapshot(model))
    assert report.ok, str(report)
    assert len(report.modules[0].rows) == 10


class Growing(nn.Module):
    """Rotates by rows for a few positions, made anew for more when they are asked for."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 1e4 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
        self.grow(rows)

    def grow(self, rows: int) -> None:
        self.rows = rows
        t = torch.arange(rows, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        phases = torch.outer(t, self.inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", phases.cos(), persistent=False)
        self.register_buffer("sin_cached", phases.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] > self.rows:
            self.grow(x.shape[-2])
        rows = slice(x.shape[-2])
        return x * self.cos_cached[rows].to(x.dtype) + x.roll(4, -1) * self.sin_cached[rows].to(x.dtype)


class Rotates(nn.Module):
    """A layer whose child rotates."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.rope = nn.Linear(16, 32), Growing()

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qk(x).chunk(2, -1))
        length = x.shape[1]
        position = torch.arange(length, device=x.device)
        far = (position[None, :] - position[:, None]).to(q.dtype)
        return (self.rope(q) @ self.rope(k).transpose(-1, -2) + far).softmax(-1)


def test_what_an_audit_asks_a_copy_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """The model's own call rounds no phase."""
    with safe_rope.guard():
        model = nn.Sequential(nn.Linear(16, 16), Rotates())
    model.bfloat16()
    assert safe_rope.audit(model).ok
    model(torch.zeros(1, 6, 16, dtype=torch.bfloat16))
    assert [warning for warning in recwarn if issubclass(warning.category, safe_rope.PrecisionWarning)] == []


def test_an_audit_leaves_the_application_and_its_count_alone() -> None:
    model = build()
    safe_rope.protect(model)
    patch = find(first_rotary(model))
    namespace = sys.modules[patch.modules[0]]
    wrapper = namespace.apply_rotary_pos_emb
    gc.collect()
    users = {key: replacement.users for key, replacement in _installed._installed.items()}
    assert not any("__safe_rope" in str(key) for key in users), "what a function runs is no application"
    assert safe_rope.audit(model).ok
    gc.collect()
    assert {key: replacement.users for key, replacement in _installed._installed.items()} == users

    def foreign(*args: Any, **kwargs: Any) -> None: ...

    namespace.apply_rotary_pos_emb = foreign
    try:
        report = safe_rope.audit(model)
        assert namespace.apply_rotary_pos_emb is foreign
    finally:
        namespace.apply_rotary_pos_emb = wrapper
    assert not report.ok
    assert "apply_rotary_pos_emb was replaced" in of(report, "application", "unknown")[0].source


@pytest.mark.parametrize("make", [build, PlainRotary], ids=["llama", "plain"])
def test_the_surroundings_have_no_influence(make: Any) -> None:
    model = make()
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    expected = report.to_dict()
    with torch.autocast("cpu", torch.bfloat16):
        assert safe_rope.audit(model).to_dict() == expected
    with torch.inference_mode():
        assert safe_rope.audit(model).to_dict() == expected
    with torch.device("meta"):
        assert safe_rope.audit(model).to_dict() == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert safe_rope.audit(model).to_dict() == expected
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


class Steps(nn.Module):
    """Makes sines of time steps beside weights, which its forward may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.w = nn.Embedding(1000, 64, max_norm=1.0), nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.w.weight
        self.calls, self.known = torch.zeros(1), {"weight": self.w.weight}
        self.project = self.w.forward

    def forward(self, timesteps: Tensor, label_ids: Tensor) -> Tensor:
        weight = self.w.weight
        is_same = weight is self.tied.weight is self.known["weight"]
        if not (is_same and type(weight) is nn.Parameter and weight.requires_grad and weight.is_small):
            raise ValueError  # an assert of pytest's names pytest, into which the audit looks
        self.write()
        phases = timesteps[:, None].float() * 1e4 ** (-torch.arange(32) / 32)
        made = torch.cat([phases.cos(), phases.sin()], -1).to(self.w.weight.dtype)
        if self.low:
            made = made + (timesteps[:, None].to(made.dtype) * 0.3).sin()
        return self.project(made) + self.labels(label_ids)

    def write(self) -> None:
        """Nothing: the embedding writes."""

    low = False


class Clamps(Steps):
    def write(self) -> None:
        self.w.weight.data.clamp_(min=0)


class Copies(Steps):
    def write(self) -> None:
        with torch.no_grad():
            self.w.bias.copy_(torch.ones(64))
            self.calls += 1


class Freezes(Steps):
    def write(self) -> None:
        self.tied.weight.requires_grad_(False)
        self.w.bias.grad = torch.ones_like(self.w.bias)


class Registers(Steps):
    def write(self) -> None:
        self.w.register_forward_hook(lambda *given: None)
        self.register_forward_pre_hook(lambda *given: None)


@pytest.mark.parametrize("cls", [Steps, Clamps, Copies, Freezes, Registers])
def test_weights_that_a_forward_writes_to_are_its_copys_own(cls: type[Steps]) -> None:
    model = nn.Sequential(cls()).to(torch.bfloat16)
    model[0].w.weight.is_small = True
    before, hooks = (
        snapshot(model),
        [len(one._forward_hooks | one._forward_pre_hooks) for one in model.modules()],
    )
    trained = [one.requires_grad for one in model.parameters()]
    assert safe_rope.audit(model).ok
    model[0].low = True
    assert safe_rope.audit(model).damaged, "it was asked"
    del model[0].low
    assert_same(before, snapshot(model))
    assert hooks == [len(one._forward_hooks | one._forward_pre_hooks) for one in model.modules()]
    assert trained == [one.requires_grad for one in model.parameters()]


def test_hooks_and_foreign_wrappers_are_neither_called_nor_copied() -> None:
    model = build()
    rotary = first_rotary(model)

    class Engine:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the engine was copied")

        def hook(self, *args: Any) -> None:
            raise AssertionError("the hook was called")

    rotary.register_forward_pre_hook(Engine().hook)
    rotary.engine = Engine()
    assert safe_rope.audit(model).ok
