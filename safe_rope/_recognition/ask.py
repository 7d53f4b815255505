"""Ask a module for cos and sin, in the way that its forward takes positions.

Nothing else in the library calls a foreign module for its answer alone. Whatever such a module raises comes
out as `UnansweredError`, so that no error of our own is taken for an answer.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from safe_rope import constructors
from safe_rope._base.functions import signature_of
from safe_rope._base.random_states import random_states_kept
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.rebuild import unwatched
from safe_rope._recognition.specs import calling_convention

_LENGTHS = ("seq_len", "seqlen", "length")
_SAMPLE = 12
"""How many positions a module is asked for whose convention is not known."""
_FEW = 1024
"""Parameters that a rotary module may have: some for each frequency, and no weights of a layer."""
_TIMES, _ANY = 64, 2**22
"""How many times the numbers of a table one operation may make that leads to it, or how many in any case."""


class UnansweredError(Exception):
    """A module cannot be copied or called, or returns something other than cos and sin; says which."""


def ask(
    module: nn.Module,
    positions: Tensor | int,
    layer_type: str | None = None,
    *,
    x: Tensor | None = None,
) -> Any:
    """Return what ``module.forward`` answers: cos and sin, if it is a rotary module of the usual kind.

    Args:
        module: a module with a calling convention; its forward may change it, so that `copied` is asked where
            that matters.
        positions: position_ids [(axes,) batch, n], or a length for a module that is called with one.
        layer_type: for a module with parameters of their own for each layer type.
        x: the activations, of which such modules read dtype and device; FP32 on CPU if None.

    Raises:
        UnansweredError: forward raises.

    """
    names = list(signature_of(type(module).forward).parameters)
    takes_type = layer_type is not None and "layer_type" in names
    kwargs: dict[str, Any] = {"layer_type": layer_type} if takes_type else {}
    shape = (1, 1, 1, 8) if isinstance(positions, int) else (*positions.shape[-2:], 8)
    x = torch.zeros(shape) if x is None else x
    by_length = calling_convention(type(module)) == "length"
    kwargs["seq_len" if by_length else "position_ids"] = positions
    takes_x = names[1:2] != list(kwargs)[-1:]
    return _called(module, *((x,) if takes_x else ()), **kwargs)


def cos_and_sin(answer: Any) -> tuple[Tensor, Tensor]:
    """Return the two tables of an answer.

    Raises:
        UnansweredError: it is something else.

    """
    if not (isinstance(answer, tuple | list) and len(answer) == 2):
        raise UnansweredError(f"forward returned {type(answer).__name__}, not cos and sin")
    return answer[0], answer[1]


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module`` to call ``forward`` of, which shares its configuration and hooks.

    Raises:
        UnansweredError: it cannot be copied.

    """
    # Most of what a copy takes is spent on a dozen hooks that nobody has, and on the configuration.
    kept = (value for name, value in vars(module).items() if "hooks" in name or name.endswith("config"))
    shared = {id(value): value for value in kept}
    with answering("it cannot be copied:"):
        return copy.deepcopy(module, shared)


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with answering("forward raised"):
        return module.forward(*args, **kwargs)


@contextlib.contextmanager
def answering(said: str) -> Iterator[None]:
    """Let whatever a module's own code raises come out as `UnansweredError`, ``sys.exit()`` too.

    Raises:
        UnansweredError: the code raises.
        KeyboardInterrupt: somebody wants to stop.

    """
    try:
        yield
    except (UnansweredError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UnansweredError(f"{said} {type(error).__name__}: {error}") from error


class Bounded(TorchFunctionMode):
    """Refuses an operation of tensors that make more than ``most`` together: no shape as these was meant."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shapes = [one.shape for one in args if isinstance(one, Tensor)]
        sizes: Iterable[int] = ()
        if len(shapes) > 1:
            with contextlib.suppress(RuntimeError):  # they are multiplied as matrices, or do not match
                sizes = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        if math.prod(sizes) > self._most:
            raise UnansweredError("what it is given makes too much together")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Have modules answer as on CPU in FP32 with nothing intercepted, and leave random states alone."""
    with (
        unwatched(),
        constructors.pristine(follow=False),
        torch.inference_mode(False),
        torch.no_grad(),
        constructors.as_imported_from_torch(),
        random_states_kept(),  # in training some jitter their positions
    ):
        yield


# ---- modules whose convention is not known -------------------------------------------------------------


def returns_cos_sin(reference: nn.Module) -> bool:
    """Whether ``reference``, a module as its constructor makes it, returns cos and sin in FP32.

    So it must for whatever is in the few parameters that it may have, as where frequencies are trained.
    """
    own = {name: parameter for name, parameter in reference._parameters.items() if parameter is not None}
    if len(own) < len(list(reference.parameters())) or sum(p.numel() for p in own.values()) > _FEW:
        return False
    with undisturbed():
        if own:
            reference = copied(reference)
            for name, parameter in own.items():
                values = torch.linspace(0.1, 0.3, parameter.numel()).view(parameter.shape)
                reference._parameters[name] = nn.Parameter(values, requires_grad=False)
        return any(_is_cos_sin(answer) for answer, _ in _answers(reference))


def made_in_first_forward(reference: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Return what the first forward of ``reference`` makes of the attributes that are still None.

    Args:
        reference: a module as its constructor makes it, on CPU in FP32; it stays as it is.
        names: of those attributes.

    """
    if not names:
        return {}
    with undisturbed():
        for _, module in _answers(reference):
            values = {name: get_table(module, name) for name in names}
            made = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
            if made:
                return {name: value for name, value in made.items() if value.dtype == torch.float32}
    return {}


def made_when_called(reference: nn.Module, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a call of ``reference`` makes of attributes that its constructor leaves None.

    Only what has the shape of a table there is, and is the same for other activations, is returned.

    Args:
        reference: a module as its constructor makes it, on CPU in FP32; it stays as it is.
        tables: what a module of its class holds in those attributes, by name; only their shapes count.

    """
    wanted = dict(tables)
    made: dict[str, Tensor] = {}
    if not wanted or sum(p.numel() for p in reference.parameters()) > _FEW:
        return made
    with undisturbed():
        for table in tables.values():
            for arguments in _calls_that_make(reference, table.shape):
                if not wanted:
                    return made
                found = _made_alike(reference, wanted, arguments)
                made.update(found)
                wanted = {name: one for name, one in wanted.items() if name not in found}
    return made


def _made_alike(
    reference: nn.Module, wanted: Mapping[str, Tensor], arguments: list[list[Any]]
) -> dict[str, Tensor]:
    """Return what each of some calls, one as good as another, makes of the same attributes."""
    results: list[dict[str, Tensor]] = []
    most = max(_ANY, _TIMES * max(table.numel() for table in wanted.values()))
    for values in arguments:
        with contextlib.suppress(UnansweredError), Bounded(most):
            asked = copied(reference)
            _called(asked, *values)
            held = {name: get_table(asked, name) for name in wanted}
            results.append({n: one.detach() for n, one in held.items() if isinstance(one, Tensor)})
    if len(results) < len(arguments):
        return {}
    first, *others = results
    return {
        name: one
        for name, one in first.items()
        if one.shape == wanted[name].shape
        and all(name in other and torch.equal(one, other[name]) for other in others)
    }


def _calls_that_make(reference: nn.Module, shape: torch.Size) -> Iterator[list[list[Any]]]:
    """Yield arguments with which forward may make a table of ``shape``, for two kinds of activations each."""
    try:
        parameters = signature_of(type(reference).forward).parameters
    except (TypeError, ValueError):
        return
    required = [p for p in parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    count, width = len(required) - 1, shape[-1] if shape else 0
    for n in sorted({size for size in shape[:-1] if size > 1}, reverse=True):
        sizes = ((1, 1, n, width), (1, n, 1, width), (1, n, width), (n, 1, width), (1, n, 2 * width))
        for size in sizes:
            x, other = torch.zeros(size), torch.linspace(0.5, 1.0, size[-1]).expand(size)
            yield [[x] * count, [other] * count]
            for last in (n, torch.arange(n).view(1, n)) if count else ():
                yield [[*[one] * (count - 1), last] for one in (x, other)]


def _answers(reference: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Ask copies of ``reference`` in each of the ways that rotary modules are asked, as its signature fits.

    Each comes with its answer.
    """
    try:
        parameters = signature_of(type(reference).forward).parameters
    except (TypeError, ValueError):
        return
    required = [p for p in parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    names = [p.name for p in required][1:]
    if "layer_type" in parameters and names[1:] == ["position_ids"]:
        names.append("layer_type")  # None by default, and then nothing is found
    ids = torch.arange(_SAMPLE).view(1, _SAMPLE)
    types = getattr(reference, "layer_types", None)
    layer_type = types[0] if isinstance(types, list | tuple) and types else None
    first: list[Any] = [torch.zeros(1, _SAMPLE, 64), torch.zeros(1, 3, 64, 64)]
    second: list[Any] = [ids, ids.expand(3, 1, _SAMPLE), ids.view(1, _SAMPLE, 1).expand(1, _SAMPLE, 2)]
    if names and names[0] in _LENGTHS:
        first = [_SAMPLE]
    elif len(names) == 2 and names[1] in _LENGTHS:
        first, second = [torch.arange(float(_SAMPLE)).view(1, _SAMPLE)], [_SAMPLE]
    for x in first:
        for positions in second:
            values = [x, positions, layer_type][: len(names)]
            if len(values) < len(names):
                return
            with contextlib.suppress(UnansweredError):
                asked = copied(reference)
                yield _called(asked, *values), asked


def _is_cos_sin(answer: Any) -> bool:
    if not isinstance(answer, tuple) or len(answer) != 2:
        return False
    cos, sin = answer
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor)) or cos.shape != sin.shape:
        return False
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.numel() < 4:
        return False
    square = cos.double() ** 2 + sin.double() ** 2
    scale = square.reshape(-1)[0]
    turns = bool((sin != sin.reshape(-1)[0]).any())
    return turns and bool(scale > 0) and bool(((square - scale).abs() < 1e-5 * scale).all())
