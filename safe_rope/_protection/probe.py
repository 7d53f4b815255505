"""Full protection: find out by asking the stock module whether our own tables give its cos and sin.

The module as its constructor makes it is asked for cos and sin at a few positions. Each channel of its answer
is looked for among the channels of our own table for its config. If all of them are found, to the bit, the
module is protected with that table and that order of channels. So half and interleaved layouts, tables of
half the width, several position axes (mrope) and whatever order a new release thinks of are one case.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from safe_rope._base.by_identity import ByIdentity
from safe_rope._base.forwards import A_TENSOR, functions_of, reads_of
from safe_rope._protection.plain_forwards import computes_alone
from safe_rope._protection.rotary import RotaryState
from safe_rope._recognition.applications import Applications
from safe_rope._recognition.ask import UnansweredError, ask, copied, cos_and_sin, undisturbed
from safe_rope._recognition.channels import Channels, match
from safe_rope._recognition.holdings import entries
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import (
    Convention,
    cached_length,
    calling_convention,
    layer_types,
    position_buffers,
)
from safe_rope.errors import ConfigError, UnsupportedModelError
from safe_rope.frequencies import Bits
from safe_rope.registry import RopePatch
from safe_rope.rotation import _installed
from safe_rope.rotation._plain_code import TRUSTED

logger = logging.getLogger(__name__)

_AXES = (3, 4)
"""How many position axes a module is asked with; the first number that it takes counts."""
_POSITIONS = ((0, 1, 2, 5, 11, 257, 1023), (3, 4, 7, 250, 300, 512, 2049))
_MOST_KNOWN = 256
_FAR = (4095, 4096, 8191, 8200, 32767, 33000, 65540, 131072, 200003, 1048577)


class _Answer(NamedTuple):
    """What the stock module's tables are; whether they have the dtype of x; see `RotaryState`."""

    channels: Channels
    follows_x: bool
    remembers_length: bool = True


_found = ByIdentity[nn.Module, _Answer | None]()
_known: dict[Hashable, tuple[_Answer, int]] = {}
"""Answers of transformers' own code, with how many position axes it was asked with; see `_question`."""


def full_state(
    module: nn.Module,
    reference: nn.Module,
    patch: RopePatch | None,
    true: Mapping[str, torch.Tensor],
    found: Applications,
    namespaces: tuple[str, ...],
    *,
    tables: str,
    apply: str,
    inv_freq: Bits,
) -> RotaryState | None:
    """Return the state that protects ``module`` fully, or None if that would not be the stock computation.

    Args:
        module: any module; it is not changed.
        reference: the same module as its constructor makes it with nothing intercepted.
        patch: a patch that covers it.
        true: what the module's tables should hold, by name.
        found: the functions in its surroundings that rotate.
        namespaces: names of the Python modules of whoever holds the module.
        tables: as for `safe_rope.guard`.
        apply: as for `safe_rope.guard`.
        inv_freq: as for `safe_rope.guard`.

    """
    if any(True for _ in reference.parameters()):
        return None
    convention = calling_convention(type(reference))
    reads = reads_of(stock_class(module))
    if convention is None:
        return None
    if reads.has_numbers or reads.has_config:
        return None  # what somebody changes there later would be none of ours
    if not computes_alone(module, stock_class(module)):
        return None
    if reference not in _found:
        _found[reference] = _answer(reference, patch, convention)
    answer = _found[reference]
    if answer is None:
        return None
    state = RotaryState.read(
        module, patch, convention, tables=tables, apply=apply, true=true, inv_freq=inv_freq
    )
    if state.is_set_otherwise(reference):
        return None  # the reference has not been asked for that
    shown = {f"{frequencies.prefix}inv_freq" for frequencies in state.sets.values()}
    if any(name in shown - true.keys() and value is not None for name, value in entries(reference)):
        return None  # they turn nothing yet, as zeros, and the config's would
    if A_TENSOR in state.settings.values():
        return None  # a checkpoint may fill it with other values than those that the reference was asked with
    state.channels, state.follows_x, state.remembers_length = answer
    state.applied = found
    there = {module for module, name in found.places if _installed.exists(module, name)}
    if not there:
        state.apply = "stock"
    # Eagerly, a table finds out whom it meets; in a graph that has to be known before.
    state.applied_in_graphs = not namespaces or bool(there.intersection(namespaces))
    return state


def _answer(reference: nn.Module, patch: RopePatch | None, convention: Convention) -> _Answer | None:
    try:
        with undisturbed():
            return _probe(reference, patch, convention)
    except (UnansweredError, ConfigError, UnsupportedModelError):
        logger.info("%s is not of the shape that is known", type(reference).__name__, exc_info=True)
        return None


def _probe(reference: nn.Module, patch: RopePatch | None, convention: Convention) -> _Answer | None:
    reference = copied(reference)
    true = {name: value for name, value in entries(reference) if isinstance(value, torch.Tensor)}
    state = RotaryState.read(reference, patch, convention, tables="fp32", apply="stock", true=true)
    if convention == "length":
        return _probe_rows(reference, state)
    question = _question(reference, patch, state)
    if question in _known:
        answer, axes = _known[question]
        state.channels, state.remembers_length = answer.channels, answer.remembers_length
        if all(_is_alike_elsewhere(reference, state, kind, axes) for kind in layer_types(reference)):
            return answer
    found = _probe_tables(reference, state)
    if found is not None and question is not None:
        if len(_known) == _MOST_KNOWN:
            _known.clear()
        _known[question] = found
    return None if found is None else found[0]


def _question(reference: nn.Module, patch: RopePatch | None, state: RotaryState) -> Hashable | None:
    """What the answer of transformers' own code follows from; None for other code, which may read more."""
    cls = stock_class(reference)
    functions = list(functions_of(cls))
    if not all(str(one.__module__).startswith(TRUSTED) for one in functions):
        return None
    sets = ((kind, one.spec, _bits(one.inv_freq), _bits(one.original)) for kind, one in state.sets.items())
    settings = repr(sorted(state.settings.items()))
    codes = tuple(one.__code__ for one in functions)
    return cls, codes, patch, tuple(sets), settings, tuple(sorted(state.methods.items()))


def _bits(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


def _probe_tables(reference: nn.Module, state: RotaryState) -> tuple[_Answer, int] | None:
    answers: list[Channels] = []
    takes_plain, remembers, count = False, True, _count_axes(reference)
    for layer_type in layer_types(reference):
        for ids in _samples(state, layer_type, count):
            asked = copied(reference)
            try:
                answer = ask(asked, ids, layer_type)
                if type(answer) is not tuple:
                    return None
                stock = cos_and_sin(answer)
            except UnansweredError:
                continue  # some want several axes always
            remembers &= _remembers(asked, state, layer_type, int(ids.max()) + 1)
            own = copy.deepcopy(state).lookup(copied(reference), ids, layer_type)
            channels = match(stock, own, axes=ids.dim() == 3)
            if channels is None:
                return None
            takes_plain |= ids.dim() == 2
            answers.append(channels)
    merged = next((a for a in answers if a.axes is not None), answers[0]) if answers else None
    if merged is None or any(a.order != merged.order for a in answers):
        return None
    ids = torch.tensor(_POSITIONS)
    if merged.axes is not None or not takes_plain:
        ids = ids.expand(count, -1, -1)
    x = torch.zeros(*ids.shape[-2:], 8, dtype=torch.bfloat16)
    low = cos_and_sin(ask(copied(reference), ids, layer_types(reference)[0], x=x))[0].dtype
    state.channels, state.remembers_length = merged, remembers
    axes = count if ids.dim() == 3 else 0
    if not all(_is_alike_elsewhere(reference, state, kind, axes) for kind in layer_types(reference)):
        return None
    return _Answer(merged, low == torch.bfloat16, remembers), axes


def _is_alike_elsewhere(reference: nn.Module, state: RotaryState, layer_type: str | None, axes: int) -> bool:
    """Whether our tables are the module's at one position, in a run and far away, for x of any shape."""
    asked, own, beside = copied(reference), copy.deepcopy(state), copied(reference)
    samples = [(torch.tensor([[2049]]), (3, 5, 8)), (torch.arange(300)[None], (3, 2, 5, 8))]
    if not state.sets[layer_type].spec.depends_on_length:
        samples.append((torch.tensor(_FAR)[None], (1, 1, 1, 8)))
    for number, (ids, shape) in enumerate(samples):
        ids = ids.expand(axes, -1, -1) if axes else ids
        stock = cos_and_sin(ask(asked, ids, layer_type, x=torch.full(shape, float(number))))
        mine = (own.widen(half, bool(axes)) for half in own.lookup(beside, ids, layer_type))
        if not all(map(torch.equal, stock, mine)):
            return False
    return not _notes_more(reference, asked)


def _notes_more(reference: nn.Module, asked: nn.Module) -> bool:
    """Whether forward has noted more in a module than a length and tables."""
    before, after = vars(reference), vars(asked)
    plainly = (bool, int, float, str, type(None))
    tables = position_buffers(asked)
    names = (n for n in {*before, *after} if n not in tables and "max_seq_len" not in n)
    pairs = ((before.get(name), after.get(name)) for name in names)
    return any(a != b for a, b in pairs if isinstance(a, plainly) and isinstance(b, plainly))


def _remembers(asked: nn.Module, state: RotaryState, layer_type: str | None, length: int) -> bool:
    """Whether a module that was asked for ``length`` knows the length that its frequencies are for."""
    frequencies = state.sets[layer_type]
    spec, name = frequencies.spec, f"{frequencies.prefix}max_seq_len_cached"
    follows = spec.depends_on_length and frequencies.long_table is None
    if not follows or length <= (spec.max_position_embeddings or 0):
        return True
    return not hasattr(asked, name) or int(getattr(asked, name)) >= length


def _samples(state: RotaryState, layer_type: str | None, axes: int) -> Iterator[torch.Tensor]:
    plain = torch.tensor(_POSITIONS)
    yield plain
    if axes:
        yield torch.stack([plain * (axis + 1) + axis for axis in range(axes)])
    spec = state.sets[layer_type].spec
    if spec.depends_on_length:
        longest = spec.max_position_embeddings or 4096
        yield plain % 7 + 2 * longest
        yield plain % 7


def _count_axes(reference: nn.Module) -> int:
    """How many position axes a module may be asked with, 0 for one that takes no more than one."""
    ids = torch.tensor(_POSITIONS)
    return next((count for count in _AXES if _takes(reference, ids.expand(count, -1, -1))), 0)


def _takes(reference: nn.Module, ids: torch.Tensor) -> bool:
    try:
        cos_and_sin(ask(copied(reference), ids, layer_types(reference)[0]))
    except UnansweredError:
        return False
    return True


def _probe_rows(reference: nn.Module, state: RotaryState) -> _Answer | None:
    longest = cached_length(reference)
    for length in (min(longest, 300), longest + 3):
        stock = cos_and_sin(ask(copied(reference), length))
        rows = copy.deepcopy(state).rows(copied(reference), length)
        if any(not torch.equal(a, b[:length]) for a, b in zip(stock, rows, strict=True)):
            return None
    asked = copied(reference)
    seven = cos_and_sin(ask(asked, 7))
    for shape in ((3, 5, 8), (3, 2, 5, 8)):
        other = cos_and_sin(ask(copied(reference), 7, x=torch.ones(shape)))
        if not all(map(torch.equal, seven, other)):
            return None
    if _notes_more(reference, asked):
        return None
    low = cos_and_sin(ask(copied(reference), 7, x=torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)))[0].dtype
    width = 2 * state.sets[None].inv_freq.numel()
    return _Answer(Channels(tuple(i % (width // 2) for i in range(width))), low == torch.bfloat16)
