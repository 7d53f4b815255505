"""Protected modules under torch.func, torch.jit.trace and torch.fx: as in stock, and exact or told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import safe_rope
from safe_rope.errors import PrecisionWarning

LENGTH, DIM = 300, 16
X = (torch.arange(LENGTH * 2 * DIM) % 17 - 8).reshape(1, LENGTH, 2 * DIM).bfloat16() / 8


def rates() -> torch.Tensor:
    return 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)


class Tables(nn.Module):
    """Counts in the dtype of its frequencies, and keeps what it made last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq)
        self.last = phase.cos()
        return self.last.to(x.dtype)


class ReadsWhatIsKept(nn.Module):
    """Reads what its child keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Tables()
        self.proj = nn.Linear(2 * DIM, 2 * DIM)

    def forward(self, x: torch.Tensor) -> Any:
        self.rotary(x)
        return self.rotary.last


class Turns(nn.Module):
    """Turns what it is given in place, by angles in its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)

    def forward(self, x: torch.Tensor) -> None:
        phase = torch.outer(torch.arange(x.shape[1]).to(x.dtype), self.inv_freq.to(x.dtype)).repeat(1, 4)
        x.mul_(phase.cos())


class TurnsInPlace(nn.Module):
    """Has a child turn what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.one = Turns(), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.one.weight
        self.rotary(y)
        return y


class TurnsBoth(Turns):
    """Turns q and k in place, one after the other."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> None:  # type: ignore[override]
        for x in (q, k):
            phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).repeat(1, 4)
            x.copy_((x.float() * phase.cos()).to(x.dtype))


class TurnsBothInPlace(TurnsInPlace):
    """Has a child turn two of what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = TurnsBoth()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = x * self.one.weight, -x * self.one.weight
        self.rotary(q, k)
        return q - k


class Pairs:
    """Cos, and whatever is done with it."""

    def __init__(self, cos: torch.Tensor) -> None:
        self.cos = cos


class ReturnsAnObject(nn.Module):
    """Returns an object, into which nothing in a graph can look."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Wrapped()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos: torch.Tensor = self.rotary(x).cos
        return cos


class Wrapped(Turns):
    def forward(self, x: torch.Tensor) -> Pairs:  # type: ignore[override]
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return Pairs(phase.cos().to(x.dtype))


class Phases(nn.Module):
    """Returns phases."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length, dtype=self.inv_freq.dtype), self.inv_freq)


class TakesSines(nn.Module):
    """Takes sines of its child's phases, as the vision tower of Qwen2-VL."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Phases()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotary(x.shape[1]).sin().to(x.dtype)


class Holder(nn.Module):
    """Holds a table that another module reads."""

    def __init__(self) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LENGTH).float(), rates()).repeat(1, 4)
        self.register_buffer("cos_cached", phase.cos(), persistent=False)

    def forward(self) -> torch.Tensor:
        return self.cos_cached


class ReadsATable(nn.Module):
    """Reads the buffer of a child, and multiplies matrices of one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Holder()
        self.proj = nn.Linear(2 * DIM, 2 * DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x * self.rotary.cos_cached[: x.shape[1]])


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _weights(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.eye_(parameter) if parameter.dim() == 2 else nn.init.zeros_(parameter)
    return model


def plain(make: Callable[[], nn.Module]) -> torch.Tensor:
    """What the FP32 model gives without the library, rounded once."""
    result: torch.Tensor = _weights(make())(X.float())
    return result.detach().bfloat16()


def guarded(make: Callable[[], nn.Module]) -> nn.Module:
    with safe_rope.guard():
        model = make()
    return _weights(model).bfloat16().eval().requires_grad_(False)


def stacked(model: nn.Module) -> Any:
    """Two models, whose buffers are what vmap runs over."""
    parameters, buffers = stack_module_state([model, model])

    def one(parameters: Any, buffers: Any) -> Any:
        return functional_call(model, (parameters, buffers), (X,))

    return torch.vmap(one)(parameters, buffers)[0]


def differentiated(model: nn.Module) -> Any:
    """Gradients of each sample, beside its result."""

    def loss(x: torch.Tensor) -> Any:
        result = model(x)
        return result.float().sum(), result

    return torch.vmap(torch.func.grad(loss, has_aux=True))(torch.stack([X, X]))[1][0]


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "vmap over samples": lambda model: torch.vmap(model)(torch.stack([X, X]))[0],
    "vmap over models": stacked,
    "gradients of each sample": differentiated,
    "jit.trace": lambda model: torch.jit.trace(model, (X,), check_trace=False)(X),
    "make_fx": lambda model: make_fx(model)(X)(X),
    "torch.compile": lambda model: torch.compile(model, backend="eager", fullgraph=True)(X),
}
MODELS = (ReadsWhatIsKept, TurnsInPlace, TurnsBothInPlace, TakesSines, ReadsATable)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_exact_or_told_of(
    way: str, make: Callable[[], nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    model = guarded(make)
    if (way, make) == ("torch.compile", ReadsWhatIsKept):
        pytest.skip("nobody asks in a graph which dtype what is kept has in stock")
    result, true = WAYS[way](model), plain(make)
    assert result.dtype == torch.bfloat16
    off = float((result.float() - true.float()).abs().max())
    told = [warning for warning in recwarn if issubclass(warning.category, PrecisionWarning)]
    assert off <= 2**-6 * float(true.float().abs().max()) or (told and make is TakesSines)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_is_asked_afterwards_is_as_before(make: Callable[[], nn.Module]) -> None:
    model = guarded(make)
    before = model(X)
    torch.vmap(model)(torch.stack([X, X]))
    assert torch.equal(model(X), before)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda function, x: torch.func.grad(function)(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "vmap of grad": lambda function, x: torch.vmap(torch.func.grad(function))(torch.stack([x, x])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_model_may_be_cast_inside_a_transform(transform: str) -> None:
    model = guarded(TakesSines)

    def function(x: torch.Tensor) -> torch.Tensor:
        model.half()
        return (model(x).float() * x).sum()

    TRANSFORMS[transform](function, X[..., : DIM // 2].float())
    assert model.rotary.inv_freq.data_ptr()  # what a transform wraps has none
    assert torch.equal(model(X), plain(TakesSines))


def test_what_fx_traces_is_told_of() -> None:
    model = guarded(TakesSines)
    with pytest.warns(PrecisionWarning, match=r"torch\.fx traces .*Phases"):
        torch.fx.symbolic_trace(model)


class Checkpointed(nn.Module):
    """Calls its child in a checkpoint, which Dynamo lets change nothing outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TakesSinesItself()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


class TakesSinesItself(nn.Module):
    """Has a rotary module beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.proj = Sines(), nn.Linear(2 * DIM, DIM // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.rotary(x)


class Sines(nn.Module):
    """Counts in the dtype of its frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq).sin().to(x.dtype)


def test_a_checkpoint_is_in_one_graph_with_what_it_calls() -> None:
    model = guarded(Checkpointed).requires_grad_(True)
    x = X.clone().requires_grad_()
    result = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(result, model(x))
    result.float().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_an_object_that_a_graph_cannot_look_into_is_told_of() -> None:
    torch._dynamo.reset()
    with pytest.warns(PrecisionWarning, match="Wrapped computes from tables"):
        torch.compile(guarded(ReturnsAnObject), backend="eager")(X)


def phi3() -> Any:
    """Return Phi-3 as transformers 5 has it, whose config takes ``rope_parameters``."""
    pytest.importorskip("transformers", "5.0")
    return pytest.importorskip("transformers.models.phi3.modeling_phi3")


class Multiplies(nn.Module):
    """Multiplies by what a rotary module of transformers returns, or returns it."""

    def __init__(self, rope: dict[str, Any], is_bare: bool) -> None:
        super().__init__()
        config = phi3().Phi3Config(
            hidden_size=64,
            num_attention_heads=4,
            max_position_embeddings=128,
            original_max_position_embeddings=32,
            rope_parameters={"rope_theta": 10000.0, **rope},
        )
        self.rotary = phi3().Phi3RotaryEmbedding(config)
        self.is_bare = is_bare

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Any:
        cos, sin = self.rotary(x, positions)
        return torch.stack((cos, sin)) if self.is_bare else torch.cat((x * cos, x * sin), dim=-1)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i / 2 for i in range(8)],
    },
}
RECORDED: dict[str, Callable[..., Any]] = {
    "jit.trace": lambda model, *given: torch.jit.trace(model, given, check_trace=False),
    "make_fx": lambda model, *given: make_fx(model)(*given),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("is_bare", [False, True], ids=["multiplies", "bare"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("way", RECORDED)
def test_what_is_recorded_follows_positions(way: str, rope: str, is_bare: bool) -> None:
    x, positions = X[:, :10, :DIM], torch.arange(10)[None]
    with safe_rope.guard():
        model = Multiplies(ROPES[rope], is_bare)
    recorded = RECORDED[way](model.bfloat16(), x, positions)
    true = Multiplies(ROPES[rope], is_bare)
    for asked in (positions, positions + 50, positions + 3):  # the second is beyond the trained length
        result, expected = recorded(x, asked), true(x.float(), asked)
        assert result.dtype == torch.bfloat16
        assert (result.float() - expected).abs().max() <= 2**-7 * expected.abs().max()
