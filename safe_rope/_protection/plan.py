"""Decide how a module is protected, and do it: fully where it can be, pinned where it holds positions.

Shared by `safe_rope.guard`, which sees modules being built, and `safe_rope.protect`, which finds them built.
Nothing is changed before `Protection.carry_out`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from safe_rope._base import bytecode
from safe_rope._base.dtypes import LOW
from safe_rope._protection.frozen import round_once
from safe_rope._protection.generic import generic_state, patch_for, settle_application
from safe_rope._protection.in_fp32 import applied_by, made_in_first_forward
from safe_rope._protection.pinned import shared
from safe_rope._protection.rewrite import (
    is_pinned,
    is_protected,
    pin_module,
    plan,
    protect_module,
    state_of,
    stock_class,
)
from safe_rope._protection.rotary import RotaryState
from safe_rope._recognition.arguments import Arguments, infer_arguments
from safe_rope._recognition.explained import UNTOLD, Truth, find_truth
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.rebuild import (
    Conditions,
    Rebuilt,
    is_empty_table,
    is_frequency,
    is_position_table,
    made_later,
    may_hold_positions,
    own_tensors,
    rebuild,
)
from safe_rope._recognition.specs import calling_convention, is_position_module, layer_types, read_spec
from safe_rope.errors import UnsupportedModelError
from safe_rope.frequencies import Bits
from safe_rope.registry import RopePatch, find

logger = logging.getLogger(__name__)


class Options(NamedTuple):
    """What `safe_rope.guard` or `safe_rope.protect` was asked for."""

    tables: str
    apply: str
    inv_freq: Bits = "checkpoint"


class Again:
    """A constructor that can be run again: as its authors meant it, and as it ran."""

    def __init__(self, cls: type[nn.Module], arguments: Arguments, conditions: Iterable[Conditions]) -> None:
        self.certain = arguments.certain
        self._cls = cls
        self._arguments = arguments
        self._conditions = tuple(conditions)
        self._replays: list[Rebuilt | None] | None = None
        self.error: Exception | None = None
        try:
            self.rebuilt: Rebuilt | None = rebuild(cls, arguments)
        except Exception as error:  # whatever a constructor raises, the module is there and has to stay
            logger.info("%s cannot be built again", cls.__name__, exc_info=True)
            self.rebuilt, self.error = None, error

    def replays(self) -> list[Rebuilt | None]:
        """Return what the constructor makes under each of the conditions that it may have run in."""
        if self._replays is None:
            self._replays = []
            for conditions in self._conditions:
                try:
                    self._replays.append(rebuild(self._cls, self._arguments, conditions))
                except Exception:
                    logger.info("%s cannot be replayed", self._cls.__name__, exc_info=True)
        return self._replays


class Reference(NamedTuple):
    """A module's counterpart in what its constructor makes, or the constructor of a parent.

    ``plain`` says that nothing was in the way when the module itself was built.
    """

    again: Again | None
    path: str = ""
    plain: bool = False

    @property
    def rebuilt(self) -> Rebuilt | None:
        """What was rebuilt, None where that was not possible."""
        return self.again.rebuilt if self.again is not None else None

    @property
    def module(self) -> nn.Module | None:
        """The rebuilt module itself."""
        return self.rebuilt.module.get_submodule(self.path) if self.rebuilt is not None else None

    def replays_of(self) -> list[Rebuilt | None]:
        """Return what the constructor makes under each of the conditions that it may have run in."""
        return self.again.replays() if self.again is not None else []

    def replays(self, name: str) -> Iterator[torch.Tensor | None]:
        """Yield what each replay has in place of the table ``name``."""
        for replay in self.replays_of():
            try:
                value = (
                    get_table(replay.module.get_submodule(self.path), name) if replay is not None else None
                )
            except AttributeError:
                continue
            yield value if isinstance(value, torch.Tensor) and not value.is_meta else None


class References:
    """Rebuilds the parts of a model that exists already, each when it is first asked for.

    A model that has a config is rebuilt as a whole, any other module from what its attributes say.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._again: dict[str, Again | None] = {}

    def find(self, path: str) -> Reference:
        """Return the counterpart of the module at ``path``."""
        module = self._model.get_submodule(path)
        names = path.split(".") if path else []
        for depth in range(len(names) + 1):
            root = ".".join(names[:depth])
            part = self._model.get_submodule(root)
            if depth < len(names) and not _is_configured(part):
                continue
            again, rest = self._of(root, part), ".".join(names[depth:])
            if again is not None and again.rebuilt is not None and _corresponds(again.rebuilt, rest, module):
                return Reference(again, rest)
        return Reference(None)

    def _of(self, root: str, part: nn.Module) -> Again | None:
        if root not in self._again:
            stock = stock_class(part)
            arguments = (
                Arguments((copy.deepcopy(part.config),), {})
                if _is_configured(part)
                else infer_arguments(part, stock)
            )
            again = None if arguments is None else Again(stock, arguments, Conditions.usual())
            self._again[root] = again
        return self._again[root]


def _is_configured(module: nn.Module) -> bool:
    """Whether the module is a model of transformers, which its config alone makes."""
    return hasattr(type(module), "config_class") and hasattr(module, "config")


def _corresponds(rebuilt: Rebuilt, path: str, module: nn.Module) -> bool:
    try:
        return type(rebuilt.module.get_submodule(path)) is stock_class(module)
    except AttributeError:
        return False


class Protection(NamedTuple):
    """What is to be done for one module, and what of it the report has to name."""

    module: nn.Module
    patch: RopePatch | None = None
    state: RotaryState | None = None
    pins: dict[str, tuple[torch.Tensor, bool]] | None = None
    notes: dict[str, str] = {}
    reference: Reference | None = None

    @property
    def untold(self) -> str:
        """Why nobody can say whether it is right as it is; empty where that is known."""
        return _reasons({name: reason for name, reason in self.notes.items() if reason == UNTOLD})

    def carry_out(self) -> None:
        """Protect the module."""
        if self.state is not None and self.patch is not None:
            protect_module(self.module, self.patch, self.state)
        elif self.pins is not None:
            if self.patch is not None and self.patch.adjust is not None:
                self.patch.adjust(self.module)
            pin_module(self.module, self.pins, self.patch)
        kept = state_of(self.module)
        kept.notes.update(self.notes)
        kept.replays = self.reference.replays if self.reference is not None else None


class Unprotectable(NamedTuple):
    """A module that holds positions and cannot be protected, and why."""

    module: nn.Module
    reason: str


def concerns(module: nn.Module) -> bool:
    """Whether ``module`` may hold positions and nothing has been done for it yet."""
    if type(module).__module__.startswith("torch.") or is_protected(module) or is_pinned(module):
        return False
    cls = type(module)
    if find(module) is not None or may_hold_positions(module) or _only_makes_positions(module):
        return True
    if not module._buffers and bytecode.makes_waves(cls):
        return True
    frozen = (p for p in module._parameters.values() if p is not None and not p.requires_grad)
    return any(p.is_floating_point() for p in frozen) and not module._modules


def _only_makes_positions(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None and bytecode.counts_in_forward(type(module))


def prepare(
    module: nn.Module, reference: Reference, namespaces: tuple[str, ...], options: Options
) -> Protection | Unprotectable | None:
    """Work out how to protect ``module``; None where it holds no positions.

    Args:
        module: what `concerns` says yes to.
        reference: what its constructor makes.
        namespaces: names of the Python modules whose functions may apply what the module returns, besides
            its own.
        options: what `safe_rope.guard` was asked for.

    Raises:
        ConfigError: a patch covers the module, and its configuration contradicts itself.

    """
    patch = find(module)
    if patch is not None and patch.source == "spec":
        for layer_type in layer_types(module):
            _check_spec(module, patch, layer_type)
    if patch is not None and patch.source == "spec" and reference.rebuilt is None:
        full = _by_spec(module, patch, namespaces, options)
        if full is not None:
            return full
    round_once(module, reference)
    truths, finished = _truths(module, reference, patch)
    notes = {name: truth.reason for name, truth in truths.items() if truth.is_named}
    if reference.rebuilt is not None and reference.rebuilt.elsewhere and not reference.plain:
        notes["tables outside of it"] = (
            "they are kept on a class, in a closure or by a function that remembers, and nobody can say what "
            "they hold"
        )
    true = {
        name: truth.values
        for name, truth in truths.items()
        if truth.values is not None and not (truth.is_named and truth.values.dtype in LOW)
    }
    if _is_understood(module, reference, truths):
        state = _full_state(module, patch, reference, true, namespaces, options)
        if state is not None:
            return Protection(module, state.patch, state, notes=notes, reference=reference)
    if patch is not None and patch.source == "spec":
        patch = None
    pins = {name: (shared(values), finished[name]) for name, values in true.items()}
    if not pins and not _only_makes_positions(module):
        if notes:
            return Unprotectable(module, _reasons(notes))
        if patch is not None and patch.source not in ("states", "results"):
            return None
        if reference.rebuilt is None and (patch is not None or is_position_module(module)):
            return Unprotectable(module, UNTOLD)
        if patch is None:
            return None
    if options.apply == "stock":
        patch = None
    elif patch is None and reference.module is not None:
        patch = applied_by(reference.module, patch_for(stock_class(module), namespaces))
    return Protection(module, patch, pins=pins, notes=notes, reference=reference)


def _check_spec(module: nn.Module, patch: RopePatch, layer_type: str | None) -> None:
    """Raise ConfigError where the configuration contradicts itself."""
    with contextlib.suppress(UnsupportedModelError):
        read_spec(module, patch, layer_type)


def _reasons(notes: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in notes.items())


# ---- what the tables should hold -----------------------------------------------------------------------


def _truths(
    module: nn.Module, reference: Reference, patch: RopePatch | None
) -> tuple[dict[str, Truth], dict[str, bool]]:
    """Return for each position table what it should hold, and whether it is ready for use."""
    if reference.rebuilt is None or reference.module is None:
        named = _tables_by_name(module)
        return {name: _truth(module, name, None, reference) for name in named}, named
    if patch is not None and patch.adjust is not None:
        patch.adjust(reference.module)
    truths, finished = {}, {}
    for name, (values, is_finished) in reference.rebuilt.tables(reference.path).items():
        current = get_table(module, name)
        # A patch may make a buffer of a parameter, and zero.Init leaves no shape of that.
        if name in module._parameters:
            truths[name] = Truth(values, "constructor")
        elif isinstance(current, torch.Tensor):
            truths[name] = _truth(module, name, values, reference)
        else:
            now = type(current).__name__
            reason = f"it is {now}, and its constructor makes {tuple(values.shape)}; left as it is"
            truths[name] = Truth(None, "unknown", reason)
        finished[name] = is_finished
    for name, is_finished in _tables_by_name(module).items():
        made = get_table(reference.module, name)
        if name not in truths and (
            made is None or made.is_meta or made.shape != get_table(module, name).shape
        ):
            # Filled by somebody else than the constructor.
            truths[name], finished[name] = _truth(module, name, None, reference), is_finished
    for name, values in made_in_first_forward(reference.module, made_later(reference.module)).items():
        if get_table(module, name) is None:
            truths[name], finished[name] = Truth(values, "constructor"), False
    return truths, finished


def _truth(module: nn.Module, name: str, rebuilt: torch.Tensor | None, reference: Reference) -> Truth:
    current = get_table(module, name)
    if isinstance(current, torch.Tensor) and not current.is_meta:
        current = current.detach().cpu()
    truth = find_truth(
        current,
        rebuilt,
        plain=reference.plain,
        certain=reference.again is not None and reference.again.certain,
        replays=lambda: reference.replays(name),
    )
    if truth.values is current and current is not None:
        return truth._replace(values=current.clone())  # nobody else's memory
    return truth


def _tables_by_name(module: nn.Module) -> dict[str, bool]:
    """Names of the tables of a module that cannot be built again, and whether they are ready for use."""
    return {
        name: not is_frequency(name)
        for name, tensor in own_tensors(module)
        if is_position_table(name, tensor, Origin.NONE) or is_empty_table(name, tensor)
    }


# ---- full protection -----------------------------------------------------------------------------------


def _is_understood(module: nn.Module, reference: Reference, truths: dict[str, Truth]) -> bool:
    """Whether the module is what its constructor makes, but for frequencies that somebody has put there."""
    rebuilt = reference.module
    if rebuilt is None or any(truth.values is None for truth in truths.values()):
        return False
    others = {
        n for n, truth in truths.items() if truth.verdict != "constructor" and not _may_differ(n, truth)
    }
    own = _plain_attributes(module)
    # What a forward counts up, such as the length of a cache, says nothing of what was meant.
    meant = {name: value for name, value in _plain_attributes(rebuilt).items() if "cached" not in name}
    return not others and all(own.get(name, value) == value for name, value in meant.items())


def _may_differ(name: str, truth: Truth) -> bool:
    values = truth.values
    return (
        name.endswith("inv_freq")
        and values is not None
        and values.dim() == 1
        and values.dtype == torch.float32
    )


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in (int, float, bool, str) and name != "training" and not name.startswith("_")
    }


def _full_state(
    module: nn.Module,
    patch: RopePatch | None,
    reference: Reference,
    true: dict[str, torch.Tensor],
    namespaces: tuple[str, ...],
    options: Options,
) -> RotaryState | None:
    assert reference.module is not None
    if patch is not None and patch.source == "spec":
        state = plan(module, patch, true=true, **options._asdict())
        state.patch = _with_namespaces(patch, module, namespaces)
        settle_application(state, namespaces)
    elif patch is None or patch.source == "results":  # own tables are better, where a release allows them
        generic = generic_state(module, reference.module, namespaces, true, **options._asdict())
        if generic is None:
            return None
        state = generic
    else:
        return None
    own = any(
        not any(torch.equal(f.inv_freq, s.inv_freq(bits=state.bits)) for s in (f.spec, f.spec.unscaled()))
        for f in state.sets.values()
    )
    depends = any(f.spec.depends_on_length for f in state.sets.values())
    differs = any(
        (rebuilt := get_table(reference.module, name)) is None or not torch.equal(values, rebuilt)
        for name, values in true.items()
        if name.endswith("inv_freq")
    )
    if own and state.convention == "length" and patch is not None:
        return None  # its cache may have been made before its frequencies became what they are
    # Other frequencies follow the length by a rule that nobody has told.
    return None if own and differs and (depends or state.convention == "length") else state


def _with_namespaces(patch: RopePatch, module: nn.Module, namespaces: tuple[str, ...]) -> RopePatch:
    around = patch_for(stock_class(module), namespaces)
    modules = tuple(dict.fromkeys((*patch.modules, *around.modules)))
    applications = tuple(dict.fromkeys((*patch.applications, *around.applications)))
    if (modules, applications) == (patch.modules, patch.applications):
        return patch
    return dataclasses.replace(patch, modules=modules, applications=applications)


def _by_spec(
    module: nn.Module, patch: RopePatch, namespaces: tuple[str, ...], options: Options
) -> Protection | None:
    """Return full protection by what the config says, for a module that cannot be built again.

    None where it holds anything else than that, or that rounded.
    """
    if calling_convention(stock_class(module)) is None:
        return None
    for layer_type in layer_types(module):
        spec = read_spec(module, patch, layer_type)
        prefix = "" if layer_type is None else f"{layer_type}_"
        current = get_table(module, f"{prefix}inv_freq")
        if not isinstance(current, torch.Tensor):
            return None
        known = [spec.inv_freq(bits="checkpoint"), spec.inv_freq(bits="machine")]
        certain = patch.covers(stock_class(module))  # a subclass may make others
        truths = [
            find_truth(
                current if current.is_meta else current.detach().cpu(),
                values,
                plain=False,
                certain=certain,
                replays=lambda: (),
            )
            for values in known
        ]
        if all(truth.verdict != "constructor" for truth in truths):
            return None
    state = plan(module, patch, **options._asdict())
    state.patch = _with_namespaces(patch, module, namespaces)
    settle_application(state, namespaces)
    return Protection(module, patch=state.patch, state=state)
