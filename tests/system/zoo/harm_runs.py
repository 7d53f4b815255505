"""Run one style under one load path, with or without safe_rope, and note what can be seen from outside."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from harm_paths import Held, LoadPath, functions_put_back, gathered, set_weights
from styles import LENGTHS, Style
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

How = Literal["guard", "open guard", "protect", "protect first"]


class Library(Protocol):
    """What is tested; another one with the same names shows what the harness makes of it."""

    def guard(self, *, tables: Any) -> Any:
        """Open a guard."""

    def protect(self, model: nn.Module, /, *, tables: Any) -> Any:
        """Protect a model."""


@dataclass
class Run:
    """What came out of one run.

    Attributes:
        error: what was raised, and where.
        leaves: every tensor that the forwards returned, in order.
        inv_freq: the frequencies that the module holds afterwards.
        dtypes: the dtype of each of ``leaves``, as it says itself.
        saved: the dtype of each entry of the state dict.
        said: what the report and the warnings say of the style's modules by the names of their classes.

    """

    error: str | None = None
    leaves: list[torch.Tensor] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    inv_freq: torch.Tensor | None = None
    saved: dict[str, torch.dtype] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def run(
    style: Style,
    path: LoadPath,
    how: How | None = None,
    tables: str = "exact",
    library: Library = safe_rope,  # type: ignore[assignment]
) -> Run:
    """Build, load and call ``style`` under ``path``.

    Args:
        style: what is built.
        path: how it is loaded.
        how: None for the stock model; ``"guard"``: a guard is open while it is built; ``"open guard"``: and
            to the end, as in a process of `safe-rope run`; ``"protect"``: after it was loaded;
            ``"protect first"``: after it was built and before it is loaded.
        tables: as for `safe_rope.guard`.
        library: what guards and protects.

    """
    result, reports, stage = Run(), [], "build"
    style.reset()
    model: nn.Module | None = None
    with (
        warnings.catch_warnings(record=True) as caught,
        functions_put_back(),
        contextlib.ExitStack() as to_the_end,
    ):
        warnings.simplefilter("always")
        try:
            with contextlib.ExitStack() as built:
                if how in ("guard", "open guard"):
                    scope = built if how == "guard" else to_the_end
                    reports.append(scope.enter_context(library.guard(tables=tables)))
                model = path.build(_factory(style, path))
            set_weights(model)
            if how == "protect first":
                stage = "protect"
                reports.append(library.protect(model, tables=tables))
            stage = "load"
            called = path.load(model)
            if how == "protect":
                stage = "protect"
                reports.append(library.protect(model, tables=tables))
            stage = "forward"
            _call(style, path, model, called, result)
        except Exception as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            result.error = f"{stage}: {type(error).__name__}: {text[:160]}"
    style.reset()
    if model is not None:
        messages = [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]
        entries = [text for report in reports for text in _entries(getattr(report, "report", report))]
        result.said = [text for text in (*messages, *entries) if _names(text, model)]
    return result


def _factory(style: Style, path: LoadPath) -> Callable[[], nn.Module]:
    return (lambda: Held(style.make)) if path.held else style.make


@torch.no_grad()
def _call(style: Style, path: LoadPath, model: nn.Module, called: Callable[..., Any], result: Run) -> None:
    own = model.held if path.held else model
    direct = gathered(model) if called is model else contextlib.nullcontext()
    with direct:
        for length in LENGTHS:
            outputs = called(*style.inputs(path.dtype, length))
            leaves = torch.utils._pytree.tree_leaves(outputs)
            result.leaves += [_plain(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            result.dtypes += [leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with gathered(model):
        held = style.inv_freq(own) if style.inv_freq is not None else None
        result.inv_freq = None if held is None else _plain(held)
        state = model.state_dict()
    result.saved = {name: value.dtype for name, value in state.items() if isinstance(value, torch.Tensor)}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that nothing can change; a tensor with a mark holds its memory in ``table``."""
    if tensor.is_meta:
        raise RuntimeError("a tensor on meta, which no later operation can use with others")
    return getattr(tensor, "table", tensor).detach().cpu().clone()


# ---- what is named ----------------------------------------------------------------------------------


def _entries(report: Any) -> list[str]:
    """The lines of a report that say of a module that something of it is not kept right.

    An entry that says of a module that it is protected, or how its tables are applied, names nothing: where
    the tables are wrong all the same, it is the opposite.
    """
    found = []
    for name, value in vars(report).items():
        for entry in value if isinstance(value, list | tuple) else ():
            reason = getattr(entry, "reason", None) or ""
            if name != "protected" or not _ONLY_APPLIED.fullmatch(reason):
                found.append(str(entry))
    return found


_ONLY_APPLIED = re.compile(r"(applied as stock[^;]*)?")


def _names(text: str, model: nn.Module) -> bool:
    classes = {cls for module in model.modules() for cls in _own_classes(type(module))}
    own = {cls for cls in classes if not cls.__module__.startswith("torch.")} - {Held}
    return any(re.search(rf"\b{re.escape(cls.__name__)}\b", text) for cls in own)


def _own_classes(cls: type) -> tuple[type, ...]:
    """A class, or the one that torch has derived a parametrized one from."""
    return cls.__mro__[1:2] if cls.__module__ == "torch.nn.utils.parametrize" else (cls,)
