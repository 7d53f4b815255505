"""Decide how a module is protected, and do it: fully where it can be, pinned where it holds positions.

Shared by `safe_rope.guard`, which sees modules being built, and `safe_rope.protect`, which finds them built.
Nothing is changed before `Protection.carry_out`.
"""

from __future__ import annotations

import copy
import logging
from typing import NamedTuple

import torch
from torch import nn

from safe_rope._applied import applied_by, made_in_first_forward
from safe_rope._generic import generic_state, patch_for
from safe_rope._holdings import get_table
from safe_rope._pinned import shared
from safe_rope._rebuild import (
    Arguments,
    Rebuilt,
    infer_arguments,
    made_later,
    may_hold_positions,
    rebuild,
)
from safe_rope._rotary_state import RotaryState
from safe_rope.frequencies import Bits
from safe_rope.recognition import is_position_module
from safe_rope.registry import RopePatch, find
from safe_rope.rewrite import (
    is_pinned,
    is_protected,
    pin_module,
    plan,
    protect_module,
    stock_class,
)

logger = logging.getLogger(__name__)


class Options(NamedTuple):
    """What `safe_rope.guard` or `safe_rope.protect` was asked for."""

    tables: str
    apply: str
    inv_freq: Bits = "checkpoint"


class Reference(NamedTuple):
    """The same module as its constructor makes it with nothing intercepted: where in what was rebuilt."""

    rebuilt: Rebuilt
    path: str = ""

    @property
    def module(self) -> nn.Module:
        """The rebuilt module itself."""
        return self.rebuilt.module.get_submodule(self.path)


class References:
    """Rebuilds the parts of a model that exists already, each when it is first asked for.

    A model that has a config is rebuilt as a whole, any other module from what its attributes say.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._rebuilt: dict[str, Rebuilt | None] = {}

    def find(self, path: str) -> Reference | None:
        """Return the counterpart of the module at ``path``, or None where it cannot be rebuilt."""
        module = self._model.get_submodule(path)
        names = path.split(".") if path else []
        for depth in range(len(names) + 1):
            root = ".".join(names[:depth])
            part = self._model.get_submodule(root)
            if depth < len(names) and not _is_configured(part):
                continue
            rebuilt, rest = self._rebuild(root, part), ".".join(names[depth:])
            if rebuilt is not None and _corresponds(rebuilt, rest, module):
                return Reference(rebuilt, rest)
        return None

    def _rebuild(self, root: str, part: nn.Module) -> Rebuilt | None:
        if root not in self._rebuilt:
            stock = stock_class(part)
            arguments = (
                Arguments((copy.deepcopy(part.config),), {})
                if _is_configured(part)
                else infer_arguments(part, stock)
            )
            try:
                self._rebuilt[root] = rebuild(stock, arguments) if arguments is not None else None
            except Exception:
                logger.info("%s cannot be built again", stock.__name__, exc_info=True)
                self._rebuilt[root] = None
        return self._rebuilt[root]


def _is_configured(module: nn.Module) -> bool:
    """Whether the module is a model of transformers, which its config alone makes."""
    return hasattr(type(module), "config_class") and hasattr(module, "config")


def _corresponds(rebuilt: Rebuilt, path: str, module: nn.Module) -> bool:
    try:
        return type(rebuilt.module.get_submodule(path)) is stock_class(module)
    except AttributeError:
        return False


class Protection(NamedTuple):
    """What is to be done for one module."""

    module: nn.Module
    patch: RopePatch | None = None
    state: RotaryState | None = None
    pins: dict[str, tuple[torch.Tensor, bool]] | None = None

    def carry_out(self) -> None:
        """Protect the module."""
        if self.state is not None and self.patch is not None:
            protect_module(self.module, self.patch, self.state)
        elif self.pins is not None:
            if self.patch is not None and self.patch.adjust is not None:
                self.patch.adjust(self.module)
            pin_module(self.module, self.pins, self.patch)


class Unprotectable(NamedTuple):
    """A module that holds positions and cannot be protected, and why."""

    module: nn.Module
    reason: str


def concerns(module: nn.Module) -> bool:
    """Whether ``module`` may hold positions and nothing has been done for it yet."""
    if type(module).__module__.startswith("torch.") or is_protected(module) or is_pinned(module):
        return False
    return find(module) is not None or may_hold_positions(module)


def prepare(
    module: nn.Module,
    reference: Reference | None,
    namespaces: tuple[str, ...],
    options: Options,
) -> Protection | Unprotectable | None:
    """Work out how to protect ``module``; None where it holds no positions.

    Args:
        module: what `concerns` says yes to.
        reference: its rebuilt counterpart, where there is one.
        namespaces: names of the Python modules whose functions may apply what the module returns, besides
            its own.
        options: what `safe_rope.guard` was asked for.

    Raises:
        ConfigError: a patch covers the module, and its configuration contradicts itself.

    """
    patch = find(module)
    if patch is not None and patch.source == "spec":
        rebuilt = reference.module if reference is not None else None
        state = plan(module, patch, reference=rebuilt, **options._asdict())
        return Protection(module, patch=patch, state=state)
    if reference is None:
        if patch is not None or is_position_module(module):
            return Unprotectable(
                module, "its constructor cannot be run again, as its arguments are not known"
            )
        return None
    if patch is None or patch.source == "results":  # own tables are better, where a release allows them
        generic = generic_state(module, reference.module, namespaces, **options._asdict())
        if generic is not None:
            return Protection(module, patch=generic.patch, state=generic)
    if patch is not None and patch.adjust is not None:
        patch.adjust(reference.module)
    pins = _pins(module, reference)
    if not pins and (patch is None or patch.source not in ("states", "results")):
        return None
    if options.apply == "stock":
        patch = None
    elif patch is None:
        patch = applied_by(reference.module, patch_for(stock_class(module), namespaces))
    return Protection(module, patch=patch, pins=pins)


def _pins(module: nn.Module, reference: Reference) -> dict[str, tuple[torch.Tensor, bool]]:
    pins = {}
    for name, (values, finished) in reference.rebuilt.tables(reference.path).items():
        current = get_table(module, name)
        # A patch may make a buffer of a parameter, and zero.Init leaves no shape of that.
        if name in module._parameters or (
            isinstance(current, torch.Tensor) and current.shape == values.shape
        ):
            pins[name] = (shared(values), finished)
        else:
            # Not silently: a cache that has grown in a low dtype is wrong, and stays so.
            now = tuple(current.shape) if isinstance(current, torch.Tensor) else type(current).__name__
            logger.warning(
                "%s.%s is %s, and its constructor makes %s: it is left as it is",
                type(module).__name__,
                name,
                now,
                tuple(values.shape),
            )
    for name, values in made_in_first_forward(reference.module, made_later(reference.module)).items():
        if get_table(module, name) is None:
            pins[name] = (shared(values), False)
    return pins
