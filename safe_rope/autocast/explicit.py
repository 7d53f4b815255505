"""Check an explicit lower_precision_safe_modules against what a trace says about the model."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from safe_rope.autocast.defaults import of_classes
from safe_rope.autocast.safety import ParameterSafety, SafetyReport

_SHOWN = 3


@dataclass(frozen=True)
class SafeModulesCheck:
    """What is wrong with a list of safe module classes, and which parameters it leaves.

    Attributes:
        safe: names of the parameters of the listed classes that are safe.
        unsafe: the parameters of the listed classes that are not, with what reads them.
        unknown: one message for each listed class of which the model has no module.
    """

    safe: frozenset[str]
    unsafe: tuple[ParameterSafety, ...]
    unknown: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every class occurs and every parameter of them is safe."""
        return not (self.unsafe or self.unknown)

    def __str__(self) -> str:
        lines = list(self.unknown)
        if self.unsafe:
            shown = "; ".join(f"{entry.name} is {entry.reason}" for entry in self.unsafe[:_SHOWN])
            more = f"; and {len(self.unsafe) - _SHOWN} more" if len(self.unsafe) > _SHOWN else ""
            lines.append(
                f"{len(self.unsafe)} parameter(s) of the listed classes are not safe in low precision and "
                f"stay as they are: {shown}{more}"
            )
        return "\n".join(lines)


def check_safe_modules(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], report: SafetyReport
) -> SafeModulesCheck:
    """Compare the parameters of ``classes`` with what ``report`` says about them.

    Args:
        model: the model.
        classes: module classes, or their qualified names ("torch.nn.Linear"); a class stands for its
            subclasses too.
        report: from `derive_safe_parameters` or `default_safe_parameters`.

    """
    known: dict[str, type[nn.Module]] = {}
    for module in model.modules():
        for cls in type(module).__mro__:
            if issubclass(cls, nn.Module):
                known |= dict.fromkeys(_names(cls), cls)
    listed: list[type[nn.Module]] = []
    unknown = []
    for wanted in classes:
        found = known.get(wanted if isinstance(wanted, str) else _names(wanted)[0])
        if found is not None:
            listed.append(found)
        else:
            unknown.append(_unknown(model, wanted, known))
    held = of_classes(model, tuple(listed)) if listed else frozenset()
    entries = [entry for entry in report.parameters if entry.name in held]
    return SafeModulesCheck(
        frozenset(entry.name for entry in entries if entry.safe),
        tuple(entry for entry in entries if not entry.safe),
        tuple(unknown),
    )


def _names(cls: type[nn.Module]) -> list[str]:
    names = [f"{cls.__module__}.{cls.__qualname__}"]
    if cls.__module__.startswith("torch.nn.modules."):
        names.append(f"torch.nn.{cls.__qualname__}")
    return names


def _unknown(model: nn.Module, wanted: type[nn.Module] | str, known: dict[str, type[nn.Module]]) -> str:
    name = wanted if isinstance(wanted, str) else _names(wanted)[-1]
    candidates = [
        entry for entry in known if entry not in ("torch.nn.Module", "torch.nn.modules.module.Module")
    ]
    # The class's own name counts, wherever it lives.
    by_end = {entry.rpartition(".")[2]: entry for entry in candidates}
    near = difflib.get_close_matches(name.rpartition(".")[2], by_end, 1, 0.6)
    hint = f"; did you mean {by_end[near[0]]}?" if near else ""
    return f"{type(model).__name__} has no module of the class {name}{hint}"
