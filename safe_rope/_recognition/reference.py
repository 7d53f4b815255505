"""What a module's constructor makes: the counterpart that a module is compared with."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import operator
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._base import bytecode
from safe_rope._base.torch_private import PARAMETRIZED, WRAPPED
from safe_rope._recognition.arguments import Arguments, infer_arguments
from safe_rope._recognition.conditions import Conditions
from safe_rope._recognition.holdings import get_table, has_no_shape, twin
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.rebuild import Rebuilt, rebuild
from safe_rope._recognition.tables import is_library_module
from safe_rope._recognition.untouched import Before

logger = logging.getLogger(__name__)


_derived_alike: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module would have if it had not been protected.

    That of a module which has been given a parametrization since is derived from the stock class as torch has
    derived its own: that is where the parametrized attributes are.
    """
    cls: Any = type(module)
    stock: type[nn.Module] = getattr(cls, "_safe_rope_stock", cls)
    if cls.__module__ != PARAMETRIZED or stock is cls or "_safe_rope_stock" in vars(cls):
        return stock
    if cls not in _derived_alike:
        namespace = {name: value for name, value in vars(cls).items() if not hasattr(value, "__objclass__")}
        _derived_alike[cls] = type(cls.__name__, (stock,), namespace)
    return _derived_alike[cls]


def own_class(cls: type) -> type:
    """The class that torch has derived ``cls`` from (``fully_shard``, a parametrization), or ``cls``."""
    if not cls.__module__.startswith("torch."):
        return cls
    is_torchs_own = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    bases = () if is_torchs_own else cls.__mro__
    own = (base for base in bases if issubclass(base, nn.Module) and not base.__module__.startswith("torch."))
    return next(own, cls)


class Again:
    """A constructor that can be run again: as its authors meant it, and as it ran."""

    def __init__(
        self,
        cls: type[nn.Module],
        arguments: Arguments,
        conditions: Iterable[Conditions],
        before: Before | None = None,
    ) -> None:
        self._before = before
        self.certain = arguments.certain
        self.complete = arguments.complete
        self._cls = cls
        self._arguments = arguments
        self._conditions = tuple(conditions)
        self._replays: dict[torch.device | None, list[Rebuilt]] = {}
        self._tables: dict[Hashable, dict[str, tuple[torch.Tensor, bool]]] = {}
        try:
            self.rebuilt: Rebuilt | None = rebuild(cls, arguments, before=before)
        except Exception:
            logger.info("%s cannot be built again", cls.__name__, exc_info=True)
            self.rebuilt = None

    def of_another(self, attributes: dict[str, Any]) -> Again:
        """Return it as for a module that differs from the one it makes in nothing but these attributes."""
        another = copy.copy(self)
        if another.rebuilt is not None:
            module = twin(another.rebuilt.module, type(another.rebuilt.module))
            vars(module).update(attributes)
            another.rebuilt = another.rebuilt._replace(module=module)
        return another

    @property
    def moves(self) -> bool:
        """Whether running it has changed what it depends on, so that two calls make two things."""
        return self.rebuilt is not None and self.rebuilt.moves

    def made(self, module: nn.Module) -> bool:
        """Whether it makes what ``module`` is: what has moved on between the two shows in its numbers."""
        if self.rebuilt is None or not self.rebuilt.moves:
            return True
        own, other = vars(module), vars(self.rebuilt.module) | {"training": None}  # which anybody sets
        return all(
            own[name] == value
            for name, value in other.items()
            if isinstance(value, bool | int | float | str) and isinstance(own.get(name), type(value))
        )

    def tables(self, path: str, above: type | None) -> dict[str, tuple[torch.Tensor, bool]]:
        """Return what `Rebuilt.tables` does: it looks at all values, and is asked for each equal module."""
        if self.rebuilt is None:
            return {}
        key = (path, above, *self.rebuilt.module.get_submodule(path)._buffers)
        if key not in self._tables:
            self._tables[key] = self.rebuilt.tables(path, above)
        return self._tables[key]

    def replays(self, device: torch.device | None = None) -> list[Rebuilt]:
        """Return what the constructor makes under each of the conditions that it may have run in.

        On the CPU; with ``device`` on that, also with nothing in the way.
        """
        if device not in self._replays:
            found = self._replays[device] = []
            for conditions in (*self._conditions, *((Conditions(),) if device is not None else ())):
                try:
                    again = rebuild(self._cls, self._arguments, conditions, self._before, device)
                    found.append(again)
                except Exception:
                    logger.info("%s cannot be replayed", self._cls.__name__, exc_info=True)
        return self._replays[device]

    @functools.cached_property
    def as_stock(self) -> Again:
        """It, to be replayed as it runs without a guard: a dtype that is asked for is lowered, too."""
        stock = copy.copy(self)
        stock._conditions = tuple(one._replace(truthful=False) for one in self._conditions)
        stock._replays = {}
        return stock

    @functools.cached_property
    def in_float64(self) -> Rebuilt | None:
        """What the constructor makes with float64 as the default dtype, None where it raises."""
        try:
            return rebuild(self._cls, self._arguments, Conditions(torch.float64), self._before)
        except Exception:
            logger.info("%s cannot be built in float64", self._cls.__name__, exc_info=True)
            return None


class Reference(NamedTuple):
    """A module's counterpart in what its constructor makes, or the constructor of a parent.

    ``plain`` says that nothing was in the way when the module itself was built; ``early``, that its
    parent may still fill it. ``above`` is the class of the module in which it is, where that is known.
    """

    again: Again | None
    path: str = ""
    plain: bool = False
    early: bool = False
    above: type | None = None

    @property
    def rebuilt(self) -> Rebuilt | None:
        """What was rebuilt, None where that was not possible."""
        return self.again.rebuilt if self.again is not None else None

    @property
    def module(self) -> nn.Module | None:
        """The rebuilt module itself."""
        return self.rebuilt.module.get_submodule(self.path) if self.rebuilt is not None else None

    def origin(self, name: str) -> Origin:
        """Where the values of the tensor ``name`` come from, which may be of a module inside."""
        if self.rebuilt is None:
            return Origin.NONE
        origins = self.rebuilt.origins
        owner, _, inner = f"{self.path}.{name}".removeprefix(".").rpartition(".")
        return origins.get((self.path, name), origins.get((owner, inner), Origin.NONE))

    def replayed_modules(self, device: torch.device | None = None) -> Iterator[nn.Module]:
        """Yield the module's counterpart in each replay."""
        for replay in self.again.replays(device) if self.again is not None else ():
            with contextlib.suppress(AttributeError):
                yield replay.module.get_submodule(self.path)

    def replays(self, name: str, device: torch.device | None = None) -> Iterator[torch.Tensor | None]:
        """Yield what each replay has in place of the table ``name``, which may be of a module inside.

        On CPU, whichever device it stands on now; made on the CPU first, then there.
        """
        owner, _, inner = name.rpartition(".")
        for module in self._replayed_on(device):
            value = get_table(module, name)
            if value is None and owner:
                with contextlib.suppress(AttributeError):
                    value = get_table(module.get_submodule(owner), inner)
            yield value.cpu() if _is_made(value) else None

    def in_float64(self, name: str) -> torch.Tensor | None:
        """Return what the constructor makes of a table or parameter with float64 as the default dtype."""
        wide = None if self.again is None else self.again.in_float64
        value: Any = None
        with contextlib.suppress(AttributeError):
            module = None if wide is None else wide.module.get_submodule(self.path)
            value = None if module is None else get_table(module, name)
            value = operator.attrgetter(name)(module) if value is None else value
        return value.detach() if _is_made(value) else None

    def replayed_parameters(self, name: str, device: torch.device | None = None) -> Iterator[torch.Tensor]:
        """Yield the values of the parameter ``name`` (dotted, of a child) in each replay that has some.

        As `replays` does.
        """
        for module in self._replayed_on(device):
            with contextlib.suppress(AttributeError):
                parameter = module.get_parameter(name)
                if not parameter.is_meta:
                    yield parameter.detach().cpu()

    def _replayed_on(self, device: torch.device | None) -> Iterator[nn.Module]:
        elsewhere = () if device is None or device.type in ("cpu", "meta") else (device,)
        return itertools.chain.from_iterable(map(self.replayed_modules, (None, *elsewhere)))


def _is_made(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (has_no_shape(value) or value.is_meta)


class References:
    """Rebuilds the parts of a model that exists already, each when it is first asked for.

    A model that has a config is rebuilt as a whole, any other module from what its attributes say. Where
    those do not tell, the module that holds it is, if that counts positions.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._again: dict[str, Again | None] = {}

    def find(self, path: str) -> Reference:
        """Return the counterpart of the module at ``path``."""
        module = self._model.get_submodule(path)
        names = path.split(".") if path else []
        for depth in self._depths(names):
            root = ".".join(names[:depth])
            part = self._model.get_submodule(root)
            again = self._of(root, part)
            rest = ".".join(name for name in names[depth:] if name not in WRAPPED)
            if again is not None and again.rebuilt is not None and corresponds(again.rebuilt, rest, module):
                return Reference(again, rest, above=self._above(names))
        return Reference(None, above=self._above(names))

    def _above(self, names: list[str]) -> type | None:
        """The class of the next module above the end of a path that is not torch's."""
        parts = (self._model.get_submodule(".".join(names[:depth])) for depth in reversed(range(len(names))))
        return next((stock_class(part) for part in parts if not is_library_module(part)), None)

    def _depths(self, names: list[str]) -> Iterator[int]:
        """Yield the depths on a path of what may be rebuilt to tell what stands at its end."""
        parts = [self._model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
        yield from (depth for depth, part in enumerate(parts) if _is_configured(part))
        yield len(names)
        for depth, part in reversed(list(enumerate(parts))):
            if not is_library_module(part):
                if not _is_configured(part) and bytecode.counts_positions(own_class(stock_class(part))):
                    yield depth
                return

    def _of(self, root: str, part: nn.Module) -> Again | None:
        if root not in self._again:
            stock = own_class(stock_class(part))
            arguments = (
                Arguments((_in_no_dtype(copy.deepcopy(part.config)),), {})
                if _is_configured(part)
                else infer_arguments(part, stock)
            )
            again = None if arguments is None else Again(stock, arguments, Conditions.usual())
            self._again[root] = again
        return self._again[root]


def _is_configured(module: nn.Module) -> bool:
    """Whether the module is a model of transformers, which its config alone makes."""
    return hasattr(type(module), "config_class") and hasattr(module, "config")


def _in_no_dtype(config: Any) -> Any:
    """A model's own config, which says what dtype parts are to be built in that are built by theirs."""
    attributes = vars(config)
    attributes.update(dict.fromkeys(attributes.keys() & {"dtype", "torch_dtype"}))
    for value in attributes.values():
        if hasattr(type(value), "model_type"):
            _in_no_dtype(value)
    return config


def corresponds(rebuilt: Rebuilt, path: str, module: nn.Module) -> bool:
    """Whether a module of the class of ``module`` stands at ``path`` of what was rebuilt."""
    try:
        return own_class(type(rebuilt.module.get_submodule(path))) is own_class(stock_class(module))
    except AttributeError:
        return False
