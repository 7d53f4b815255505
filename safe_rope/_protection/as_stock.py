"""What the stock forward does with a call, and FP32: asked on copies, so that nothing of it stays."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from safe_rope._base.random_states import random_states_kept
from safe_rope._base.tensors import flattened, in_real_numbers
from safe_rope._base.torch_private import pytree, unrecorded
from safe_rope._protection.calls import Call
from safe_rope._protection.shown import seen, tell_once
from safe_rope._protection.stand_ins import as_it_is, rounded, stand_in_for
from safe_rope._recognition.alone import copied_arguments, twin_alone
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.explained import COMPUTED_LOW
from safe_rope._recognition.holdings import attributes, get_table, set_table
from safe_rope._recognition.leads_back import Back
from safe_rope._recognition.outside import OutOfReachError
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.untouched import Untouched

logger = logging.getLogger(__name__)


def ask(call: Call) -> tuple[Any, nn.Module] | None:
    """Return what `as_stock` does; None where the call cannot be asked."""
    try:
        with unrecorded():
            return as_stock(call)
    except UnansweredError:
        logger.info("%s cannot be asked", type(call.module).__name__, exc_info=True)
        return None


def as_stock(call: Call) -> tuple[Any, nn.Module]:
    """Return what the stock forward returns, None where it raises, and the copy of the module that it ran on.

    A class that remembers results outside of its modules is run as stock from then on: what it remembers is
    everybody's.

    Raises:
        UnansweredError: what it may change cannot be copied, or it changes a container that it is given.

    """
    if call.state.runner.leads_back(call.module) is Back.SHARED:
        raise UnansweredError("what it holds leads back to it, from a copy, too")
    stand_in, _ = stand_in_for(call, rounded, watched=True)
    try:
        remembered = Untouched(stock_class(call.module), attributes(call.module))
    except OutOfReachError as error:
        raise UnansweredError(str(error)) from error
    asked = call.with_arguments(*copied_arguments(call.args, call.kwargs))
    before = pytree.tree_leaves((asked.args, asked.kwargs))
    stand_in = twin_alone(stand_in, type(stand_in), call.module)
    _show_caches(call.state, stand_in)
    given, has_run = None, False
    try:
        with torch.no_grad(), random_states_kept(call.device), remembered, seen("as stock"):
            try:
                given, has_run = remembered.run(asked.on, stand_in), True
            except Exception:
                logger.info("%s does not run as stock", type(call.module).__name__, exc_info=True)
    except Exception as error:  # a graph that is captured lets nobody read a random state
        raise UnansweredError("what it may change cannot be kept") from error
    finally:
        if remembered.changed:
            call.state.runner.as_stock = True
    if not has_run:
        if call.state.runner.leads_back(call.module) is not Back.NOT:
            raise UnansweredError("what it holds leads back to it, and a copy does not run")
        return None, stand_in
    known = set(map(id, before))
    made = [leaf for leaf in pytree.tree_leaves((asked.args, asked.kwargs)) if id(leaf) not in known]
    if any(
        isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in made
    ):
        call.state.runner.is_opaque = not call.watched
        raise UnansweredError("it puts what it makes into what it is given")
    return given, stand_in


def refusal_of_fp32(call: Call) -> Exception | None:
    """Return what the forward raises in FP32, if anything; it runs on copies, and nothing of it stays."""
    stand_in, _ = stand_in_for(call, as_it_is, watched=True)
    try:
        untouched = Untouched(stock_class(call.module), attributes(call.module))
        asked = call.with_arguments(*copied_arguments(call.args, call.kwargs))
        stand_in = twin_alone(stand_in, type(stand_in), call.module)
        with unrecorded(), torch.no_grad(), random_states_kept(call.device), untouched:
            untouched.run(asked.in_fp32, stand_in)
    except Exception as error:
        logger.info("%s raises in FP32", type(call.module).__name__, exc_info=True)
        return error
    return None


def compare_remembered(call: Call, given: Any) -> None:
    """Warn where a class whose results are remembered outside of its modules computes them too coarsely.

    A call that has twice as much to count as any before is looked at anew.
    """
    stock, runner = stock_class(call.module), call.state.runner
    size = max((leaf.numel() for leaf in call.leaves), default=1)
    if call.watched or "forward" in call.state.notes or size < 2 * runner.compared:
        return
    runner.compared = max(size, 1)
    try:
        asked = call.with_arguments(*copied_arguments(call.args, call.kwargs))
        untouched = Untouched(stock, attributes(call.module))
        with torch.no_grad(), random_states_kept(call.device), untouched:
            true = untouched.run(asked.in_fp32, twin_alone(call.module, stock))
    except Exception:
        logger.info("%s cannot be run in FP32", stock.__name__, exc_info=True)
        true = None
    pairs = list(zip(flattened(given)[0], flattened(true)[0], strict=False))
    if true is None or any(isinstance(b, torch.Tensor) and _is_off(a, b) for a, b in pairs):
        text = (
            f"{stock.__module__}.{stock.__name__} computes positions in low precision and remembers them on "
            "a class or in a module, for all that ask for them: they are as in the stock model. Compute them "
            "in torch.float32 and round what forward returns"
        )
        tell_once(call.state.notes, "forward", COMPUTED_LOW, text)


def _show_caches(state: Any, stand_in: nn.Module) -> None:
    """Let a copy of the module see what its forward has kept in the dtypes of the stock model."""
    for name, (dtype, _) in state.caches.items():
        cache = get_table(stand_in, name)
        if isinstance(cache, torch.Tensor) and cache.dtype == torch.float32:
            set_table(stand_in, name, cache.to(dtype))


def _is_off(stock: Any, true: torch.Tensor) -> bool:
    if not isinstance(stock, torch.Tensor) or stock.shape != true.shape:
        return False
    if stock.is_complex() and true.is_complex():
        stock, true = in_real_numbers(stock), in_real_numbers(true)
    if not stock.is_floating_point():
        return False
    eps = torch.finfo(stock.dtype).eps
    scale = float(true.abs().max()) if true.numel() else 1.0
    return bool(((stock.double() - true.double()).abs() > 2 * eps * scale).any())
