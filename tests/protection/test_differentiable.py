"""What a gradient flows to in the place of a table: it arrives as in the stock model, and is never lost."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from held_model import SOURCE
from support import written_modules
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import safe_rope
from safe_rope._base import torch_private

PHASE = "        phase = "
KINDS = {
    "full": SOURCE,
    "pinned": SOURCE.replace(PHASE, f"        if x.dim() > 9:\n            raise ValueError\n{PHASE}"),
}
WAYS = ("eager", "graph")
NUMBERS = itertools.count()
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=KINDS)
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Dynamo of torch 2.4 refuses a second module of a name that it has seen.
    (module,) = written_modules.write(
        tmp_path, monkeypatch, **{f"modeling_learned_{next(NUMBERS)}": KINDS[request.param]}
    )
    return module


def guarded(written: Any) -> Any:
    with safe_rope.guard():
        return written.HeldModel()


def called(model: Any, way: str) -> Callable[..., Tensor]:
    is_whole = not torch_private.GRAPHS_LOSE_GRADIENTS
    return torch.compile(model, backend="aot_eager", fullgraph=is_whole) if way == "graph" else model


def set_anew(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    learned = torch.full((8,), 0.1, requires_grad=True)
    model.rotary.inv_freq = model.rotary.inv_freq * (1 + learned)
    return called(model, way)(x), learned


def set_twice(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    set_anew(model, x, way)[0].sum().backward()
    begun = model.rotary.inv_freq.detach()
    learned = torch.full((8,), 0.1, requires_grad=True)
    model.rotary.inv_freq = begun * (1 + learned)
    return called(model, way)(x), learned


def set_after_a_call(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    called(model, way)(x)
    return set_anew(model, x, way)


def given_to_a_call(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    own = (model.rotary.inv_freq * 1.1).detach().requires_grad_()
    return functional_call(model, {"rotary.inv_freq": own}, (x,)), own


def made_a_parameter(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    own = nn.Parameter(model.rotary.inv_freq.clone())
    del model.rotary.inv_freq
    model.rotary.inv_freq = own
    return called(model, way)(x), own


def asked_for_it(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    model.rotary.inv_freq.requires_grad_()
    return called(model, way)(x), model.rotary.inv_freq


def parametrized(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 1.1))

        def forward(self, inv_freq: Tensor) -> Tensor:
            return inv_freq * self.scale

    scaled = Scaled()
    nn.utils.parametrize.register_parametrization(model.rotary, "inv_freq", scaled)
    return model(x), scaled.scale


def positions(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    own = (torch.arange(x.shape[1])[None] + 0.5).requires_grad_()
    return model.attention(x, *called(model.rotary, way)(x, own)), own


def cos(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    own, sin = model.rotary(x, torch.arange(x.shape[1])[None])
    return called(model.attention, way)(x, own.requires_grad_(), sin), own


def set_and_moved(model: Any, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    """Between the module and what applies it, cos and sin are copied, as code for batches does."""
    own = torch.full((8,), 0.1, requires_grad=True)
    model.rotary.inv_freq = model.rotary.inv_freq * (1 + own)
    cos, sin = model.rotary(x, torch.arange(x.shape[1])[None])
    both = (table.repeat(len(x), 1, 1)[:, : x.shape[1]].clone() for table in (cos, sin))
    return called(model.attention, way)(x, *both), own


ACTS = (
    set_anew,
    set_twice,
    set_after_a_call,
    given_to_a_call,
    made_a_parameter,
    asked_for_it,
    parametrized,
    positions,
    cos,
    set_and_moved,
)


def errors(written: Any, model: Any, act: Any, way: str, dtype: torch.dtype, seed: int = 1) -> list[float]:
    """How far the output and the gradient are from those of the unguarded model in float64."""
    results = []
    for one in (written.HeldModel().double(), model):
        low = torch.float64 if one is not model else dtype
        one.attention.to(low)
        x = torch.randn(8, 40, 32, generator=torch.Generator().manual_seed(seed)).to(low)
        output, learned = act(one, x, way if one is model else "eager")
        output.double().pow(2).sum().backward()
        assert learned.grad is not None
        results.append((output.detach(), learned.grad))
    return [float((got.double() - true).norm() / true.norm()) for true, got in zip(*results, strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_a_gradient_arrives_as_exact_as_in_the_stock_model(
    act: Any, dtype: torch.dtype, way: str, written: Any
) -> None:
    got = errors(written, guarded(written), act, way, dtype)
    stock = errors(written, written.HeldModel(), act, "eager", dtype)
    by_chance = 1.5 if dtype == torch.bfloat16 else 1.1  # eight numbers of one batch
    assert got[0] <= 1.1 * stock[0] + 1e-6, (got, stock)
    assert got[1] <= by_chance * stock[1] + 1e-6, (got, stock)


def test_gradients_beside_bf16_are_more_exact_than_those_of_the_stock_model(written: Any) -> None:
    def mean(make: Callable[[], Any]) -> float:
        model = make()
        found = [errors(written, model, given_to_a_call, "eager", torch.bfloat16, seed) for seed in range(12)]
        return sum(one[1] for one in found) / len(found)

    assert mean(lambda: guarded(written)) < mean(written.HeldModel)


def test_what_was_lent_for_a_call_leaves_the_tables_as_they_were(written: Any) -> None:
    model = guarded(written).to(torch.bfloat16)
    x = written.states(model).bfloat16()
    known, expected = model.rotary._buffers["inv_freq"], model(x)
    given_to_a_call(model, x, "eager")
    assert model.rotary._buffers["inv_freq"] is known
    assert torch.equal(model(x), expected)


def test_what_is_set_for_good_is_moved_cast_and_copied_as_in_stock(written: Any) -> None:
    model = guarded(written)
    learned = (model.rotary.inv_freq * 1.5).detach().requires_grad_()
    model.rotary.inv_freq = learned
    model(written.states(model))
    other = copy.deepcopy(model)
    assert other.rotary.inv_freq.requires_grad
    assert torch.equal(other(written.states(model)), model(written.states(model)))
    model.load_state_dict(model.state_dict())
    assert model.rotary.inv_freq is learned
    model.rotary.inv_freq = learned.detach() * 2
    assert torch.equal(model.to(torch.bfloat16).rotary.inv_freq, learned.detach() * 2)


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual"])
def test_a_transform_sees_it(transform: str, written: Any) -> None:
    def slope(model: Any) -> Tensor:
        begun = model.rotary.inv_freq.detach().clone() * 1.1
        q, ids = torch.linspace(-1, 1, 320).reshape(1, 1, 20, 16), torch.arange(20)[None]

        def output(own: Tensor) -> Tensor:
            cos, sin = functional_call(model.rotary, {"inv_freq": own}, (q, ids))
            return model.attention.rotary_fn(q, q, cos, sin)[0].pow(3).sum()

        if transform == "grad":
            return torch.func.grad(output)(begun)
        if transform == "jvp":
            return torch.func.jvp(output, (begun,), (torch.ones_like(begun),))[1]
        with forward_ad.dual_level():
            result = output(forward_ad.make_dual(begun, torch.ones_like(begun)))
            return forward_ad.unpack_dual(result).tangent

    true, got = slope(written.HeldModel()), slope(guarded(written))
    assert got is not None
    assert torch.allclose(got, true, rtol=1e-4, atol=1e-4)


def test_a_constructor_that_learns_its_frequencies_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCE.replace(
        'self.register_buffer("inv_freq", inv_freq, persistent=False)',
        "self.learned = nn.Parameter(torch.ones(8))\n        self.inv_freq = inv_freq * self.learned",
    ).replace("* 0.3\n", "* 0.03\n")
    (written,) = written_modules.write(tmp_path, monkeypatch, modeling_graph=source)
    gradients = []
    for model in (written.HeldModel(), guarded(written)):
        model(written.states(model)).pow(2).sum().backward()
        gradients.append(model.rotary.learned.grad)
    assert torch.allclose(*gradients)


def test_the_audit_says_of_it_what_it_says_of_the_stock_model(written: Any) -> None:
    verdicts = []
    for model in (written.HeldModel(), guarded(written)):
        model.rotary.inv_freq.mul_(0.5)
        model(written.states(model))
        model.rotary.inv_freq = (model.rotary.inv_freq * 1.3).detach().requires_grad_()
        model(written.states(model))
        verdicts.append([one.verdict for one in safe_rope.audit(model).modules])
    assert verdicts == [["unknown"], ["unknown"]]
