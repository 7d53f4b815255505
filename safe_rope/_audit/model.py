"""`audit`: measure every rotary module of a live model against float64, and say where damage comes from."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

import torch
from torch import nn

from safe_rope import constructors
from safe_rope._audit import counted
from safe_rope._audit.elsewhere import add_elsewhere, rounded_elsewhere
from safe_rope._audit.held import may_be_cast_beside
from safe_rope._audit.lost_counts import add_lost_counts
from safe_rope._audit.module import ModuleAuditor
from safe_rope._audit.reference import TOLERANCE
from safe_rope._audit.report import AuditReport
from safe_rope._audit.torchs import add_rounded
from safe_rope._audit.wrappers import compute_dtypes, pending_casts, unwrapped
from safe_rope._base.text import class_name
from safe_rope._base.torch_private import is_compiled
from safe_rope._base.uninterrupted import run_waiting
from safe_rope._protection.frozen import frozen_positions, random_tables, unkept_tables
from safe_rope._protection.plan import concerns
from safe_rope._protection.rewrite import is_kept
from safe_rope._recognition.reference import References, own_class, stock_class
from safe_rope._recognition.specs import calling_convention, is_position_module
from safe_rope._recognition.walk import parts
from safe_rope.errors import ConfigError, UnsupportedModelError
from safe_rope.registry import find

logger = logging.getLogger(__name__)


def audit(model: nn.Module, positions: Iterable[SupportsIndex] | None = None) -> AuditReport:
    """Measure the position tables of ``model`` against float64; change nothing.

    Measured are the tensors ``*inv_freq``, ``cos_cached`` and ``sin_cached`` of every rotary module,
    protected or not, and what a copy of it returns from ``forward``. The reference is the phase position *
    inv_freq in float64, with the FP32 inv_freq that the config asks for, and its cos and sin times
    attention_scaling.

    A phase error, in radians, is the largest over the frequencies and over the positions. For ``*inv_freq``,
    and for a ``forward`` that computes from a damaged one, it is |error of inv_freq| * position, with full
    turns counted. The position is the largest measured one below max_position_embeddings for the tensor, and
    the largest damaged one for ``forward``. `ModuleAudit.rows` count the turns too, if the frequencies that
    the module multiplied explain the measured angle. Of a ready table only the angle between the measured
    pair and the true one is known, which is at most pi.

    A table is damaged when its phases are off by more than 2**-20 of the phase (2**-20 rad for phases below
    1), or its values by as much. Correct FP32 arithmetic stays below that at every position, one rounding of
    inv_freq, a position, cos or sin to bfloat16 or float16 does not.

    Args:
        model: any `torch.nn.Module`: a model, a DeepSpeed engine at any ZeRO stage, FSDP in either form, a
            PEFT, DDP or compiled model. Paths in the report are those in ``model`` as it is given. Buffers
            that FSDP is to cast at the first forward are measured as they will be then.
        positions: where ``forward`` is measured, instead of 0, 1, 255 to 257, 2047 to 2049, and, with max =
            max_position_embeddings, max - 1 and 2 * max.

    Raises:
        UnsupportedModelError: ``model`` is no module.
        ConfigError: ``positions`` is empty or holds something other than integers from 0 on.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"audit() needs a torch.nn.Module, got {type(model).__name__}; "
            "pass the model, not its name or config"
        )
    asked = None if positions is None else _checked(positions)
    inner, around = unwrapped(model)
    report = AuditReport(
        model_class=class_name(own_class(type(inner))),
        tolerance=TOLERANCE,
        wrappers=tuple(class_name(type(wrapper)) for wrapper in around),
    )
    casts = pending_casts(model)
    with constructors.pristine(), torch.inference_mode(False), torch.no_grad():
        everything = list(parts(inner))
        references = {id(part.root): References(part.root) for part in everything if not part.within}
        classes = {stock_class(part.module) for part in everything}
        prefix = next(path for path, module in model.named_modules() if module is inner)
        places = ((_joined(prefix, part.path), stock_class(part.module)) for part in everything)
        # What is asked below may empty what functions remember.
        elsewhere = list(rounded_elsewhere(places, {id(part.module) for part in everything}))
        above = {id(part.module): part.parent for part in everything}
        for path, module, _, root, within in everything:
            run_waiting()
            whole = _joined(prefix, path)
            try:
                if _is_audited(module):
                    found = references[id(root)].find(within), find(module), casts.get(module), classes
                    auditor = ModuleAuditor(report, whole, module, *found)
                    chain = (*_up_from(module, above), *reversed(around))
                    auditor.dtypes = compute_dtypes(chain)
                    auditor.is_compiled = any(map(is_compiled, chain))
                    auditor.wrappers = list(_wrappers(module, above))
                    auditor.run(asked)
                else:
                    add_rounded(report, whole, module)
                add_lost_counts(report, whole, module, functools.partial(references[id(root)].find, within))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a module's own code raises what it likes, SystemExit too
                logger.info("%s cannot be audited", whole, exc_info=True)
                report.add_unmeasured(whole, class_name(own_class(type(module))), error)
        add_elsewhere(report, elsewhere)
    return report


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _up_from(module: nn.Module, above: dict[int, nn.Module]) -> Iterator[nn.Module]:
    """Yield a module, what holds it, and so on."""
    yield module
    while (parent := above[id(module)]) is not module:
        yield (module := parent)


def _wrappers(module: nn.Module, above: dict[int, nn.Module]) -> Iterator[nn.Module]:
    """Yield what stands around a rotary module without weights, and takes positions as it does."""
    convention = calling_convention(stock_class(module))
    for parent in itertools.islice(_up_from(module, above), 1, None):
        is_like_it = calling_convention(type(parent)) == convention and len(parent._modules) == 1
        if convention is None or not is_like_it or next(parent.parameters(), None) is not None:
            return
        yield parent


def _is_audited(module: nn.Module) -> bool:
    left = any(frozen_positions((module,))) or any(unkept_tables(module)) or any(random_tables(module))
    known = left or is_kept(module) or concerns(module) or is_position_module(module)
    return known or counted.may_be_asked(module) or any(may_be_cast_beside(module))


def _checked(positions: Iterable[SupportsIndex]) -> list[int]:
    given: Any = positions
    try:
        given = list(positions)
        asked = sorted({-1 if isinstance(one, bool) else operator.index(one) for one in given})
    except TypeError:
        asked = []
    if not asked or asked[0] < 0:
        raise ConfigError(
            f"positions must be one or more integers from 0 on, got {given!r}; pass e.g. [0, 4095, 100_000]"
        )
    return asked
