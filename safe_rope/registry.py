"""Which classes hold positions, and how each architecture applies them: `RopePatch` and its discovery.

A patch is data. It is found through the entry-point group ``safe_rope.patches``, so another
package can add an architecture:

    [project.entry-points."safe_rope.patches"]
    my_model = "my_package.my_model:PATCH"

Nothing here imports the modelling code that a patch names; it is matched by name when it shows up.
"""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from safe_rope.errors import ConfigError, PrecisionWarning

if TYPE_CHECKING:
    from torch import nn

    from safe_rope.frequencies import RopeSpec

ENTRY_POINT_GROUP = "safe_rope.patches"

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class RopePatch:
    """How one family of architectures holds and applies its rotary position embedding.

    Args:
        family: the family's name, unique among all patches, e.g. ``"llama"``.
        modules: importable names of the Python modules that define the classes and functions below.
        rotary_classes: names of the `torch.nn.Module` classes that hold or make the positions.
        layout: ``"half"`` pairs element i with i + rotary_dim / 2 (GPT-NeoX, Llama);
            ``"interleaved"`` pairs element 2i with 2i + 1 (GPT-J, the original paper).
        applications: names of the functions in ``modules`` that rotate q and k with cos and sin, or
            ``"Class.method"``.
        methods: names of the methods of ``rotary_classes`` that take q and k and return them rotated
            (``"forward"``, for one); they run in FP32.
        adjust: what is to be changed in a module, once, before its tables are kept: a cache in the model's
            dtype that has to be switched off, a table that is a parameter.
        read_spec: ``(module, layer_type) -> RopeSpec`` where the usual attributes do not say it.
    """

    family: str
    modules: tuple[str, ...]
    rotary_classes: tuple[str, ...]
    layout: Layout = "half"
    applications: tuple[str, ...] = ("apply_rotary_pos_emb",)
    read_spec: Callable[[nn.Module, str | None], RopeSpec] | None = None
    methods: tuple[str, ...] = ()
    adjust: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        if not self.family or not self.modules or not self.rotary_classes:
            raise ConfigError(
                "a RopePatch needs a family, at least one module and at least one rotary class; "
                f"got {self.family!r}, {self.modules!r} and {self.rotary_classes!r}"
            )
        for field in ("modules", "rotary_classes", "applications", "methods"):
            value = getattr(self, field)
            if isinstance(value, str) or not all(isinstance(name, str) for name in value):
                remedy = f"write ({value!r},)" if isinstance(value, str) else "give each name as a string"
                raise ConfigError(f"RopePatch.{field} must be a tuple of names, got {value!r}; {remedy}")
        if self.layout not in ("half", "interleaved"):
            raise ConfigError(f'RopePatch.layout must be "half" or "interleaved", got {self.layout!r}')

    def covers(self, cls: type) -> bool:
        """Whether ``cls`` is one of this patch's rotary classes (its own name, not a base's)."""
        return cls.__name__ in self.rotary_classes and cls.__module__ in self.modules


class _Registry:
    def __init__(self) -> None:
        self._patches: dict[str, RopePatch] = {}
        self._by_class: dict[tuple[str, str], RopePatch] = {}
        self._by_type: weakref.WeakKeyDictionary[type, list[RopePatch]] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()
        self._discovered = False
        self._complete = False  # read without the lock: every module of a model is looked up

    def register(self, patch: RopePatch) -> RopePatch:
        if not isinstance(patch, RopePatch):
            raise ConfigError(
                f"expected a RopePatch, got {type(patch).__name__}; build one with RopePatch(...)"
            )
        with self._lock:
            self.discover()
            self._add(patch)
        return patch

    def _add(self, patch: RopePatch) -> None:
        if self._patches.get(patch.family) == patch:
            return
        if patch.family in self._patches:
            raise ConfigError(
                f"a patch for family {patch.family!r} is registered already, for "
                f"{', '.join(self._patches[patch.family].modules)}; choose another family name"
            )
        keys = [(module, name) for module in patch.modules for name in patch.rotary_classes]
        for key in keys:
            if key in self._by_class:
                raise ConfigError(
                    f"{key[0]}.{key[1]} is covered by the patch {self._by_class[key].family!r} already; "
                    f"take it out of the patch {patch.family!r}"
                )
        self._patches[patch.family] = patch
        self._by_class.update(dict.fromkeys(keys, patch))
        self._by_type.clear()

    def discover(self) -> None:
        with self._lock:
            if self._discovered:
                return
            self._discovered = True
            for point in _entry_points():
                try:
                    loaded = point.load()
                    for patch in loaded if isinstance(loaded, tuple | list) else (loaded,):
                        if not isinstance(patch, RopePatch):
                            raise ConfigError(f"expected a RopePatch, got {type(patch).__name__}")
                        self._add(patch)
                except Exception as error:  # a broken plugin must not take the others with it
                    warnings.warn(
                        f"safe_rope patch {point.name!r} ({point.value}) cannot be loaded and is left out: "
                        f"{type(error).__name__}: {error}",
                        PrecisionWarning,
                        stacklevel=2,
                    )
            self._complete = True

    def find_class(self, cls: type) -> RopePatch | None:
        if not self._complete:
            self.discover()
        known = self._by_type.get(cls)
        if known is None:
            keys = ((base.__module__, base.__name__) for base in cls.__mro__)
            known = self._by_type[cls] = [self._by_class[key] for key in keys if key in self._by_class][:1]
        return known[0] if known else None

    def all(self) -> tuple[RopePatch, ...]:
        self.discover()
        return tuple(self._patches[name] for name in sorted(self._patches))


def _entry_points() -> Iterable[Any]:
    # The same distribution can be seen twice (an editable install and a build folder): one load each.
    points = {(p.name, p.value): p for p in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return [points[key] for key in sorted(points)]


_registry = _Registry()


def register(patch: RopePatch) -> RopePatch:
    """Add ``patch`` to the registry and return it. Registering an equal patch again does nothing.

    Raises:
        ConfigError: another patch has this family name or covers one of these classes.
    """
    return _registry.register(patch)


def find(module: nn.Module | type) -> RopePatch | None:
    """Return the patch that covers ``module`` (an instance or a class) or a class that it derives from."""
    return _registry.find_class(module if isinstance(module, type) else type(module))


def supported() -> tuple[RopePatch, ...]:
    """Return every known patch, ordered by family name."""
    return _registry.all()
