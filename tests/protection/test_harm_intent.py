"""What a parent, a user or a checkpoint puts into a table is meant, and stays in full precision."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import no_harm
import pytest
import torch
from no_harm import BF16, DIM, FP32, Holder, Rope, Saved
from support import families
from torch import nn

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group")


# ---- by the parent, while it is built ------------------------------------------------------------------


def assign(rope: Any) -> None:
    rope.inv_freq = rope.inv_freq / 4


def divide_in_place(rope: Any) -> None:
    rope.inv_freq.div_(4)


def augmented(rope: Any) -> None:
    rope.inv_freq /= 4


def register(rope: Any) -> None:
    rope.register_buffer("inv_freq", rope.inv_freq / 4, persistent=False)


def copy_in(rope: Any) -> None:
    rope.inv_freq.copy_(no_harm.frequencies(base=5e5))


def one_row(rope: Any) -> None:
    rope.inv_freq[-4:] = 0.0


def set_data(rope: Any) -> None:
    rope.inv_freq.data = rope.inv_freq.data / 4


def through_data(rope: Any) -> None:
    rope.inv_freq.data.div_(4)


WRITES: dict[str, Callable[[Any], None]] = {
    write.__name__: write
    for write in (assign, divide_in_place, augmented, register, copy_in, one_row, set_data, through_data)
}


class Changing(nn.Module):
    """A model that changes the table of the position module that it has just made."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.rope = Rope()
        write(self.rope)
        self.layer = nn.Linear(4, 4)


@pytest.mark.parametrize("load", no_harm.FILLED)
@pytest.mark.parametrize("write", WRITES)
def test_what_a_parent_changes_stays_changed(write: str, load: str) -> None:
    truth = Changing(WRITES[write])
    model, _ = no_harm.guarded(lambda: Changing(WRITES[write]), load)
    no_harm.assert_right(model.rope, truth.rope)


@pytest.mark.parametrize("write", WRITES)
def test_what_a_parent_changes_on_meta_is_right_or_named(write: str) -> None:
    truth = Changing(WRITES[write])
    model, said = no_harm.guarded(lambda: Changing(WRITES[write]), "meta")
    no_harm.assert_right_or_named(said, "rope", model.rope, truth.rope)


# ---- by a script, once it is built ---------------------------------------------------------------------


class Extendable(nn.Module):
    """Has a method that makes its tables, of as many rows as that is asked for."""

    def __init__(self, length: int = 64, base: float = 1e4) -> None:
        super().__init__()
        self.base = base
        self.extend(length)

    def extend(self, length: int) -> None:
        phase = torch.arange(length).float()[:, None] * no_harm.frequencies(base=self.base)
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = position_ids.clamp(max=63)
        return self.cos[rows].to(x.dtype), self.sin[rows].to(x.dtype)


def longer(rope: Extendable) -> None:
    rope.extend(640)


def of_another_base(rope: Extendable) -> None:
    rope.base = 1e6
    rope.extend(64)


def assigned(rope: Extendable) -> None:
    rope.cos, rope.sin = rope.cos * 2, rope.sin * 2


def changed(write: Callable[[Any], None]) -> Extendable:
    rope = Extendable()
    write(rope)
    return rope


@pytest.mark.parametrize("write", [longer, of_another_base, assigned])
def test_what_a_script_changes_stays_changed(write: Callable[[Any], None]) -> None:
    truth = changed(write)
    for load in no_harm.FILLED:
        model, _ = no_harm.guarded(lambda: changed(write), load)
        assert model.cos.shape == truth.cos.shape
        no_harm.assert_right(model, truth, ("cos", "sin"))


@pytest.mark.parametrize("write", [longer, of_another_base, assigned])
@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.filterwarnings("ignore::safe_rope.errors.PrecisionWarning")
@pytest.mark.contract
def test_what_a_script_changes_on_meta_is_named(write: Callable[[Any], None], is_registered: bool) -> None:
    with safe_rope.guard() as session:
        with torch.device("meta"):
            rope = changed(write)
            model = nn.Sequential(rope) if is_registered else rope
        model.to_empty(device="cpu")
    named = " ".join(str(entry) for entry in session.report.unprotected)
    assert "cos: it was written to while it stood on meta" in named, session.report
    assert "sin: it was written to while it stood on meta" in named, session.report
    assert rope.cos.shape == changed(write).cos.shape


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x * self.calls


@pytest.mark.filterwarnings("ignore::safe_rope.errors.PrecisionWarning")
def test_a_compiled_forward_that_sets_a_buffer_is_not_compiled_for_each_guard() -> None:
    torch._dynamo.reset()
    model = Counted()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        with safe_rope.guard(), safe_rope.guard():
            result = compiled(torch.ones(3))
    assert torch.equal(result, model.calls)
    assert model.calls[0] == torch._dynamo.config.recompile_limit + 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_sets_a_buffer_of_what_torchscript_has_compiled() -> None:
    model = nn.Module()
    model.register_buffer("held", torch.ones(3))
    with safe_rope.guard():
        scripted = torch.jit.script(model)
        scripted.register_buffer("held", torch.zeros(3))
    assert torch.equal(scripted.held, torch.zeros(3))


# ---- by a constructor that nobody saw ------------------------------------------------------------------


class KeepsItsSize(Rope):
    """Says its size of itself, and not its base."""

    def __init__(self, dim: int = DIM, base: float = 1e4) -> None:
        super().__init__(dim, base)
        self.dim = dim


class KeepsTheScaledBase(Rope):
    """What it calls its base is not what it was called with."""

    def __init__(self, dim: int = DIM, base: float = 1e4) -> None:
        self_base = base * 4.0 ** (dim / (dim - 2))
        super().__init__(dim, self_base)
        self.dim, self.base = dim, self_base


UNSEEN: dict[str, Callable[[], Rope]] = {
    "KeepsItsSize": lambda: KeepsItsSize(base=5e5),
    "KeepsTheScaledBase": KeepsTheScaledBase,
}


@pytest.mark.parametrize("how", ["protect", "put into a model in a guard"])
@pytest.mark.parametrize("style", UNSEEN)
def test_an_older_module_keeps_what_it_holds(style: str, how: str) -> None:
    truth, rope = UNSEEN[style](), UNSEEN[style]()
    if how == "protect":
        model = nn.Sequential(rope)
        no_harm.protected(model)
    else:
        model, _ = no_harm.guarded(lambda: nn.Sequential(rope))
    no_harm.assert_right(model[0], truth)
    no_harm.assert_right(copy.deepcopy(model).half().float()[0], truth)


@pytest.mark.parametrize("style", UNSEEN)
def test_what_protect_does_not_understand_is_named(style: str) -> None:
    said = no_harm.protected(nn.Sequential(UNSEEN[style]()))
    assert said.names("0", style)


# ---- by the user, afterwards ---------------------------------------------------------------------------

AFTERWARDS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda model: model,
    "to(bfloat16)": lambda model: model.to(BF16),
    "half and back": lambda model: model.half().float(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("then", AFTERWARDS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("how", ["guard", "protect"])
def test_what_a_user_writes_is_adopted(how: str, write: str, then: str) -> None:
    if how == "guard":
        model, _ = no_harm.guarded(lambda: Holder(Rope()))
    else:
        model = Holder(Rope())
        no_harm.protected(model)
    model.rope(torch.zeros(1), no_harm.POSITIONS)
    truth = Rope()
    with torch.no_grad():
        WRITES[write](truth)
        WRITES[write](model.rope)
    no_harm.assert_right(AFTERWARDS[then](model).rope, truth)


@pytest.mark.parametrize("then", ["as it is", "to(bfloat16)", "deepcopy"])
@pytest.mark.parametrize("write", ["assign", "divide_in_place", "copy_in"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_a_user_writes_into_a_model_of_transformers_is_adopted(
    family: str, write: str, then: str
) -> None:
    stock = families.build(family)
    with safe_rope.guard(tables="fp32"):
        model = families.build(family)
    with torch.no_grad():
        for changed in (stock, model):
            for rotary in families.rotary_modules(changed).values():
                if write == "copy_in":
                    rotary.inv_freq.copy_(no_harm.frequencies(2 * len(rotary.inv_freq), 5e5))
                else:
                    WRITES[write](rotary)
    model = AFTERWARDS[then](model)
    for path, rotary in families.rotary_modules(model).items():
        truth = stock.get_submodule(path)
        assert torch.equal(no_harm.in_full_precision(rotary), truth.inv_freq), path
        for got, true in zip(families.read_tables(rotary), families.read_tables(truth), strict=True):
            assert torch.equal(got, true), path


# ---- by a checkpoint -----------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["as it is", "to(bfloat16)", "deepcopy"])
@pytest.mark.parametrize("assigned", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bfloat16", "float32"])
def test_other_values_of_a_checkpoint_win(dtype: torch.dtype, assigned: bool, then: str) -> None:
    model, _ = no_harm.guarded(lambda: Holder(Saved()))
    values = (no_harm.frequencies() / 4).to(dtype)
    loaded = {**model.state_dict(), "rope.inv_freq": values}
    model.load_state_dict(loaded, assign=assigned)
    truth = Saved()
    truth.inv_freq.copy_(values)
    no_harm.assert_right(AFTERWARDS[then](model).rope, truth)


@pytest.mark.parametrize("assigned", [False, True], ids=["copied", "assigned"])
def test_the_known_values_rounded_are_the_known_values(assigned: bool) -> None:
    model, _ = no_harm.guarded(lambda: Holder(Saved()))
    loaded = {**model.state_dict(), "rope.inv_freq": no_harm.frequencies().to(BF16)}
    model.load_state_dict(loaded, assign=assigned)
    no_harm.assert_right(model.rope, Saved())


@pytest.mark.parametrize("assigned", [False, True], ids=["copied", "assigned"])
def test_values_that_differ_by_a_few_units_in_full_precision_win(assigned: bool) -> None:
    model, _ = no_harm.guarded(lambda: Holder(Saved()))
    values = no_harm.frequencies() * (1 + 2.0**-20)
    model.load_state_dict({**model.state_dict(), "rope.inv_freq": values}, assign=assigned)
    truth = Saved()
    truth.inv_freq.copy_(values)
    no_harm.assert_right(model.rope, truth)


# ---- by the model itself, while it runs ----------------------------------------------------------------


class Running(nn.Module):
    """Levels that are counted out first, and follow what comes in from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("levels", torch.linspace(0, 1, 5))
        self.register_buffer("steps", torch.arange(5.0))
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.levels.lerp_(x.detach().reshape(-1, 5).mean(0), 0.25)
        self.steps += 1
        return self.layer(x * self.levels + self.steps)


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_what_a_model_learns_while_it_runs_is_never_reset(dtype: torch.dtype, how: str) -> None:
    torch.manual_seed(0)
    truth = Holder(Running())
    if how == "guard":
        model, _ = no_harm.guarded(lambda: Holder(Running()))
    else:
        model = Holder(Running())
        no_harm.protected(model)
    model.load_state_dict(truth.state_dict())
    stock = copy.deepcopy(truth).to(dtype)
    model.to(dtype)
    for step in range(1, 9):
        x = torch.full((2, 5), step / 4)
        true, expected = truth.rope(x), stock.rope(x.to(dtype))
        got = model.rope(x.to(dtype))
        assert got.dtype == expected.dtype
        for name in ("levels", "steps"):
            worst = (getattr(truth.rope, name) - getattr(stock.rope, name).float()).abs().max()
            error = (getattr(truth.rope, name) - getattr(model.rope, name).float()).abs().max()
            assert error <= worst, (name, step)
        assert torch.allclose(got.float(), true, atol=0.05 if dtype == BF16 else 0.0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.rope.levels, model.rope.levels)
    assert model.state_dict()["rope.levels"].dtype == stock.state_dict()["rope.levels"].dtype


@pytest.mark.parametrize("initialised", [False, True])
def test_what_a_model_initialises_over_frequencies_of_its_own_is_there_as_in_stock(initialised: bool) -> None:
    # transformers 5 writes the formula's frequencies over those of each class that is called like its own.
    modules = families.rotary_modules(families.build("llama"))
    if "model.rotary_emb" not in modules:
        pytest.skip("each layer of this transformers makes its own")
    parent = type(modules["model.rotary_emb"])

    class OwnRotaryEmbedding(parent):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inv_freq = self.inv_freq * 0.3

    class OwnModel(families.model_class("llama")):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.rotary_emb = OwnRotaryEmbedding(config)
            if initialised:
                self.post_init()

    config = families.config("llama")
    ids = torch.arange(40)[None]
    outputs = []
    for guarded in (False, True):
        torch.manual_seed(0)
        with safe_rope.guard(tables="fp32") if guarded else contextlib.nullcontext():
            model = OwnModel(config).eval()
        rotary = model.model.rotary_emb
        tables = rotary.inv_freq, getattr(rotary, "original_inv_freq", torch.empty(0))
        outputs.append((*tables, model(ids).logits))
        if initialised or guarded:
            assert safe_rope.audit(model).ok
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)
