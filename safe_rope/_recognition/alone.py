"""Run a module's own code for its answer alone: nothing that it writes to is anybody else's.

A forward may count its calls or make a cache longer: a copy of the module and of the arguments takes that.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from safe_rope._base.torch_private import pytree
from safe_rope._recognition.ask import answering
from safe_rope._recognition.holdings import slots, twin

_SHARED = (types.ModuleType, type(threading.Lock()), type(threading.RLock()))
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def twin_alone(module: nn.Module, stock: type[nn.Module], of: nn.Module | None = None) -> nn.Module:
    """Return a ``stock`` with copies of the module's attributes, its parameters excepted.

    Args:
        module: a module, or a stand-in for one.
        stock: the class of the twin.
        of: the module that a stand-in stands in for, to which attributes may lead back, as bound methods do.

    Raises:
        UnansweredError: an attribute cannot be copied, as a Python generator.

    """
    other = twin(module, stock)
    attributes = vars(other)
    attributes["_parameters"] = dict(module._parameters)
    memo = _memo(attributes.values()) | {id(one): other for one in (module, of) if one is not None}
    for name, value in attributes.items():
        if not isinstance(value, (*_PLAIN, *_SHARED)):
            attributes[name] = _copy(value, memo)
    for name in slots(other):
        object.__setattr__(other, name, _copy(getattr(other, name), memo))
    return other


def copied_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return copies of a call's arguments, without autograd.

    Raises:
        UnansweredError: one of them cannot be copied.

    """
    copies: tuple[Any, Any] = _copy((args, kwargs), _memo([args, kwargs]))
    return copies


def _memo(values: Iterable[Any]) -> dict[int, Any]:
    """Return what `copy.deepcopy` is told: parameters stay themselves, other tensors lose their graph."""
    memo: dict[int, Any] = {}
    for leaf in pytree.tree_leaves(list(values)):
        if isinstance(leaf, nn.Module):
            memo.update({id(parameter): parameter for parameter in leaf.parameters()})
            # ZeRO-3 of DeepSpeed 0.14 has put dictionaries there that cannot be copied.
            memo.update({id(one._parameters): dict(one._parameters) for one in leaf.modules()})
        elif isinstance(leaf, nn.Parameter):
            memo[id(leaf)] = leaf
        elif isinstance(leaf, torch.Tensor):
            memo[id(leaf)] = leaf.detach().clone()
    return memo


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    with answering(f"{type(value).__name__} cannot be copied:"):
        return copy.deepcopy(value, memo)
