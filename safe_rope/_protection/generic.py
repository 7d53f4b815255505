"""Full protection for rotary classes that nobody has described: found out by asking the stock module.

The module as its constructor makes it is asked for cos and sin at a few positions. Each channel of its answer
is looked for among the channels of our own table for its config; only if all of them are found, to the bit,
is the module protected with that table and that order of channels. So half and interleaved layouts, tables
of half the width, several position axes (mrope) and whatever order a new release thinks of are one case.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safe_rope import constructors
from safe_rope._protection.rotary import RotaryState
from safe_rope._recognition.channels import Channels, match
from safe_rope._recognition.holdings import entries
from safe_rope._recognition.specs import Convention, cached_length, calling_convention, layer_types
from safe_rope.frequencies import Bits
from safe_rope.registry import RopePatch
from safe_rope.rotation import _installed

logger = logging.getLogger(__name__)

_AXES = (3, 4)
"""How many position axes a module is asked with; the first number that it takes counts."""
_POSITIONS = ((0, 1, 2, 5, 11, 257, 1023), (3, 4, 7, 250, 300, 512, 2049))
_found: weakref.WeakKeyDictionary[nn.Module, tuple[Channels, bool] | None] = weakref.WeakKeyDictionary()


def generic_state(
    module: nn.Module,
    reference: nn.Module,
    namespaces: tuple[str, ...],
    true: Mapping[str, torch.Tensor],
    *,
    tables: str,
    apply: str,
    inv_freq: Bits = "checkpoint",
) -> RotaryState | None:
    """Return the state that protects ``module`` fully, or None if that would not be the stock computation.

    Args:
        module: a module that no patch covers.
        reference: the same module as its constructor makes it with nothing intercepted.
        namespaces: names of the Python modules whose functions may apply what the module returns.
        true: what the module's tables should hold, by name.
        tables: as for `safe_rope.guard`.
        apply: as for `safe_rope.guard`.
        inv_freq: as for `safe_rope.guard`.

    """
    stock = type(reference)
    convention = calling_convention(stock)
    if convention is None or any(True for _ in reference.parameters()):
        return None
    if reference not in _found:
        try:
            with constructors.pristine(follow=False), torch.inference_mode(False), torch.no_grad():
                _found[reference] = _probe(reference, convention)
        except Exception:
            logger.info("%s is not of the shape that is known", stock.__name__, exc_info=True)
            _found[reference] = None
    found = _found[reference]
    if found is None:
        return None
    channels, follows_x = found
    patch = patch_for(stock, namespaces)
    state = RotaryState.read(
        module,
        patch,
        convention,
        tables=tables,
        apply=apply,
        true=true,
        inv_freq=inv_freq,
    )
    state.patch, state.channels, state.follows_x = patch, channels, follows_x
    settle_application(state, namespaces)
    return state


def settle_application(state: RotaryState, namespaces: tuple[str, ...]) -> None:
    """Decide whether what a state's module returns is applied in FP32, and whether also inside of a graph.

    Args:
        state: of the module; its patch names the functions.
        namespaces: names of the Python modules of whoever holds the module.

    """
    assert state.patch is not None
    places = [(module, name) for module in state.patch.modules for name in state.patch.applications]
    there = {module for module, name in places if _installed.exists(module, name)}
    if not there:
        state.apply = "stock"
    # Eagerly, a table finds out whom it meets; in a graph that has to be known before.
    state.applied_in_graphs = not namespaces or bool(there.intersection(namespaces))


def patch_for(stock: type, namespaces: tuple[str, ...]) -> RopePatch:
    """Return what a `RopePatch` for a class that nobody has described says: one for each Python module."""
    modules = tuple(dict.fromkeys((stock.__module__, *namespaces)))
    found = tuple(dict.fromkeys(name for module in modules for name in _applications(module)))
    family = f"generic ({', '.join(modules)})"
    return RopePatch(family=family, modules=modules, rotary_classes=(stock.__name__,), applications=found)


def _applications(module_name: str) -> Iterator[str]:
    """Names of the functions of a Python module that rotate by cos and sin."""
    for name, value in list(vars(sys.modules.get(module_name, sys)).items()):
        if not ("rot" in name or "rope" in name) or isinstance(value, type) or not callable(value):
            continue
        try:
            parameters = inspect.signature(value).parameters
        except (TypeError, ValueError):
            continue
        if "cos" in parameters and "sin" in parameters:
            yield name


# ---- asking the stock module ---------------------------------------------------------------------------


def _probe(reference: nn.Module, convention: Convention) -> tuple[Channels, bool] | None:
    """Return the channels of the stock module's tables, and whether they have the dtype of x."""
    stock = type(reference)
    patch = RopePatch(family="probe", modules=(stock.__module__,), rotary_classes=(stock.__name__,))
    true = {name: value for name, value in entries(reference) if isinstance(value, torch.Tensor)}
    state = RotaryState.read(reference, patch, convention, tables="fp32", apply="stock", true=true)
    if convention == "length":
        return _probe_rows(reference, state)
    answers: list[Channels] = []
    count = _count_axes(reference)
    for layer_type in layer_types(reference):
        for ids in _samples(state, layer_type, count):
            module = copy.deepcopy(reference)
            try:
                cos, sin = _ask(module, ids, layer_type)
            except Exception:
                continue  # some want several axes always, some never do
            own = copy.deepcopy(state).lookup(copy.deepcopy(reference), ids, layer_type)
            found = match((cos, sin), own, axes=ids.dim() == 3)
            if found is None:
                return None
            answers.append(found)
    channels = next((a for a in answers if a.axes is not None), answers[0]) if answers else None
    if channels is None or any(a.order != channels.order for a in answers):
        return None
    ids = torch.tensor(_POSITIONS)
    if channels.axes is not None or not _takes_two_dimensions(reference, ids):
        ids = ids.expand(count, -1, -1)
    low = _ask(copy.deepcopy(reference), ids, layer_types(reference)[0], torch.bfloat16)[0].dtype
    return channels, low == torch.bfloat16


def _samples(state: RotaryState, layer_type: str | None, axes: int) -> Iterator[torch.Tensor]:
    plain = torch.tensor(_POSITIONS)
    yield plain
    yield torch.stack([plain * (axis + 1) + axis for axis in range(axes)])
    spec = state.sets[layer_type].spec
    if spec.depends_on_length:
        longest = spec.max_position_embeddings or 4096
        yield plain % 7 + 2 * longest
        yield plain % 7


def _count_axes(reference: nn.Module) -> int:
    for count in _AXES:
        ids = torch.tensor(_POSITIONS).expand(count, -1, -1)
        with contextlib.suppress(Exception):
            _ask(copy.deepcopy(reference), ids, layer_types(reference)[0])
            return count
    return _AXES[0]


def _takes_two_dimensions(reference: nn.Module, ids: torch.Tensor) -> bool:
    try:
        _ask(copy.deepcopy(reference), ids, layer_types(reference)[0])
    except Exception:
        return False
    return True


def _ask(
    module: nn.Module, ids: torch.Tensor, layer_type: str | None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(ids.shape[-2], ids.shape[-1], 8, dtype=dtype)
    takes_type = "layer_type" in inspect.signature(type(module).forward).parameters
    answer: Any = module(x, ids, layer_type) if takes_type and layer_type is not None else module(x, ids)
    cos, sin = answer
    return cos, sin


def _probe_rows(reference: nn.Module, state: RotaryState) -> tuple[Channels, bool] | None:
    longest = cached_length(reference)
    for length in (min(longest, 300), longest + 3):
        module, own = copy.deepcopy(reference), copy.deepcopy(state)
        x = torch.zeros(1, 1, 1, 8)
        stock = module(x, seq_len=length)
        rows = own.rows(copy.deepcopy(reference), length)
        if any(not torch.equal(a, b[:length]) for a, b in zip(stock, rows, strict=True)):
            return None
    low = copy.deepcopy(reference)(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), seq_len=7)[0].dtype
    width = 2 * state.sets[None].inv_freq.numel()
    return Channels(tuple(i % (width // 2) for i in range(width))), low == torch.bfloat16
