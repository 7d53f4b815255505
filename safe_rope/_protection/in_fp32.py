"""FP32 application for modules that keep their own computation: cos and sin are not rounded on their way.

A pinned module (`safe_rope._protection.pinned`) computes as its authors wrote it. Where what it returns, or
a table that it holds, is cos and sin for an application function that is FP32-aware (`safe_rope.rotation`),
rounding to the activations' dtype is left to that function. A module that is itself the application is run
like one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from safe_rope import constructors
from safe_rope._base.dtypes import LOW
from safe_rope._base.torch_private import pytree
from safe_rope._recognition.holdings import get_table
from safe_rope.registry import RopePatch
from safe_rope.rotation import CosSin, marked, round_results, without_autocast

_LENGTHS = ("seq_len", "seqlen", "length")

_map = pytree.tree_map_only


def run_in_fp32(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, rotates: bool
) -> Any:
    """Run the stock ``forward``, which lowers what it returns to its input's dtype, on inputs in FP32.

    Args:
        module: a module whose frequencies are in FP32.
        forward: the stock forward.
        args: its arguments.
        kwargs: its keyword arguments.
        rotates: whether it returns q and k rotated, rather than cos and sin.

    Returns:
        what ``forward`` returns: q and k rounded to the dtypes that they came in, cos and sin in FP32 and
        marked for the application function.

    """
    states = [leaf for leaf in _tensors((args, kwargs)) if leaf.is_floating_point()]
    dtypes = [leaf.dtype for leaf in states]
    args, kwargs = raise_arguments(args, kwargs)
    with without_autocast(states[0].device.type if states else "cpu"):
        result = forward(module, *args, **kwargs)
    if rotates:
        return round_results(result, dtypes)
    if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
        return CosSin(result)  # in a graph, too: phases have to go through cos and sin first
    return _map(torch.Tensor, lambda leaf: marked(leaf) if leaf.dtype == torch.float32 else leaf, result)


def raise_arguments(args: Any, kwargs: Any) -> Any:
    """Return args and kwargs with every tensor of low precision in FP32."""
    return _map(torch.Tensor, _raised, (args, kwargs))


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ---- modules that nobody has described -----------------------------------------------------------------


def applied_by(reference: nn.Module, patch: RopePatch) -> RopePatch | None:
    """Return how what ``reference`` returns is applied; None where that is not known to be cos and sin.

    Args:
        reference: a module as its constructor makes it, on CPU in FP32.
        patch: the application functions in its surroundings (`safe_rope._protection.generic.patch_for`).

    """
    if not patch.applications or any(True for _ in reference.parameters()):
        return None
    try:
        with _in_peace():
            found = any(_is_cos_sin(answer) for answer, _ in _answers(reference))
    except Exception:  # whatever it takes, it is not of this shape
        return None
    return dataclasses.replace(patch, source="results") if found else None


def made_in_first_forward(reference: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """Return what the first forward of ``reference`` makes of the attributes that are still None.

    Args:
        reference: a module as its constructor makes it, on CPU in FP32; it stays as it is.
        names: of those attributes.

    """
    made: dict[str, torch.Tensor] = {}
    try:
        with _in_peace():
            for _, module in _answers(reference) if names else ():
                values = {name: get_table(module, name) for name in names}
                made = {k: v.detach() for k, v in values.items() if isinstance(v, torch.Tensor)}
                if made:
                    break
    except Exception:  # whatever it takes, it is not of this shape
        return {}
    return {name: value for name, value in made.items() if value.dtype == torch.float32}


@contextlib.contextmanager
def _in_peace() -> Iterator[None]:
    with (
        constructors.pristine(follow=False),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.random.fork_rng(devices=()),  # in training some jitter their positions
    ):
        yield


def _answers(reference: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Ask copies of ``reference`` in each of the ways that rotary modules are asked, as its signature fits.

    Each comes with its answer.
    """
    parameters = inspect.signature(type(reference).forward).parameters
    required = [p for p in parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    names = [p.name for p in required][1:]
    if "layer_type" in parameters and names[1:] == ["position_ids"]:
        names.append("layer_type")  # None by default, and then nothing is found
    ids = torch.arange(12).view(1, 12)
    types = getattr(reference, "layer_types", None) or (None,)
    first: list[Any] = [torch.zeros(1, 12, 64), torch.zeros(1, 3, 64, 64)]
    second: list[Any] = [ids, ids.expand(3, 1, 12), ids.view(1, 12, 1).expand(1, 12, 2)]
    if names and names[0] in _LENGTHS:
        first = [12]
    elif len(names) == 2 and names[1] in _LENGTHS:
        first, second = [torch.arange(12.0).view(1, 12)], [12]
    for x in first:
        for positions in second:
            values = [x, positions, types[0]][: len(names)]
            if len(values) < len(names):
                return
            with contextlib.suppress(Exception):
                asked = copy.deepcopy(reference)
                yield asked(*values), asked


def _is_cos_sin(answer: Any) -> bool:
    if not isinstance(answer, tuple) or len(answer) != 2:
        return False
    cos, sin = answer
    if not (isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor)) or cos.shape != sin.shape:
        return False
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.numel() < 4:
        return False
    square = cos.double() ** 2 + sin.double() ** 2
    scale = square.reshape(-1)[0]
    turns = bool((sin != sin.reshape(-1)[0]).any())
    return turns and bool(scale > 0) and bool(((square - scale).abs() < 1e-5 * scale).all())
