"""`guard` and `protect`: the two ways to make a model's position tables correct and keep them so.

`guard` is a context manager around the lines that build or load a model. While it is open, zero.Init's
constructors tell the truth (`safe_rope.constructors`), and every module that holds positions is protected as
soon as it is built. `protect` does the same for a model that exists already.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, NoReturn

from torch import nn

from safe_rope._base.uninterrupted import uninterrupted
from safe_rope._protection.frozen import frozen_positions, unseen_positions
from safe_rope._protection.plan import Options, Protection, Unprotectable, concerns, prepare
from safe_rope._protection.rebound import lead_to_its_class
from safe_rope._protection.report import ProtectionReport, is_main_rank, warn_unprotected
from safe_rope._protection.rewrite import is_kept
from safe_rope._protection.watch import ConstructionWatch
from safe_rope._recognition.integers import may_be_moved
from safe_rope._recognition.reference import References, stock_class
from safe_rope._recognition.walk import parts
from safe_rope.constructors import ConstructorGuard
from safe_rope.errors import ConfigError, PrecisionWarning, UnsupportedModelError

Tables = Literal["exact", "fp32"]
Apply = Literal["fp32", "stock"]
InvFreq = Literal["checkpoint", "exact"]


class _Class(type):
    """The class of `Guard`: what a ``with`` statement finds that got the class and no guard."""

    def __enter__(cls) -> NoReturn:
        raise TypeError("the parentheses are missing: write with safe_rope.guard(): ...")

    def __exit__(cls, *error: object) -> None:
        """Never called; ``with`` looks for it before it calls `__enter__`."""


class Guard(contextlib.ContextDecorator, metaclass=_Class):
    """Keep the position tables of every model that is built or loaded inside correct, for its whole life.

        with safe_rope.guard() as session:
            model = AutoModelForCausalLM.from_pretrained(...)
        print(session.report)

    Works around, inside or between ``deepspeed.zero.Init`` contexts, as a decorator, and as
    ``session = guard().start()`` … ``session.stop()``. What it cannot protect is in ``session.report`` and
    is warned about once. A guard that saw no module being built warns, too.

    Args:
        tables: ``"exact"``: cos and sin within 1 ulp of FP32 at every position, the same bits on every
            device. ``"fp32"``: bit-identical to what the stock model computes in FP32 on CPU.
        apply: ``"fp32"``: q and k are rotated in FP32 and rounded once to their own dtype. ``"stock"``: cos
            and sin are rounded to the activations' dtype, as the stock model does.
        strict: raise UnsupportedModelError instead of a warning.
        inv_freq: ``"checkpoint"``: the frequencies that the stock code computes in FP32, which the model was
            trained with, the same bits on every machine. ``"exact"``: the config's formula in float64,
            rounded once; up to two units in the last place from the checkpoint's, and only with exact
            tables.
        built: called with every position module, just before it is protected.

    Raises:
        ConfigError: an option is not one of the above.
        IncompatibleVersionError: the installed DeepSpeed has none of the hook points that the guard knows.
    """

    _depth = 0
    _is_entered = False

    def __init__(
        self,
        tables: Tables = "exact",
        apply: Apply = "fp32",
        strict: bool = False,
        inv_freq: InvFreq = "checkpoint",
        *,
        built: Callable[[nn.Module], None] | None = None,
    ) -> None:
        _check_options(tables, apply, strict, inv_freq)
        self.tables = tables
        self.apply = apply
        self.strict = strict
        self.inv_freq = inv_freq
        self._report = ProtectionReport(tables=tables, apply=apply)
        self._built = built
        self._depth = 0
        self._lock = threading.RLock()
        self._constructors = ConstructorGuard()
        self._watch: ConstructionWatch | None = None

    def __repr__(self) -> str:
        options = f"tables={self.tables!r}, apply={self.apply!r}, strict={self.strict}"
        return f"<safe_rope.guard({options}), {'open' if self._depth else 'closed'}>"

    @property
    def report(self) -> ProtectionReport:
        """What was built inside and still exists, how it is protected, and what is not; open or closed."""
        with self._lock:
            if self._watch is None:
                return self._report
            self._watch.catch_up()
            report = copy.deepcopy(self._report)
            self._watch.complete(report)
            return report

    def start(self) -> Guard:
        """Open the guard without a ``with`` statement, until `stop`.

        Raises:
            ConfigError: this guard is open already.
        """
        if self._depth:
            raise ConfigError(
                "start() of a guard that is open already; call stop() first, or open another with "
                "safe_rope.guard()"
            )
        self._is_entered = False
        return self._open()

    def _open(self) -> Guard:
        before = self._depth
        try:
            with uninterrupted(), self._lock:
                if self._depth == 0:
                    self._constructors.open()
                    try:
                        options = Options(self.tables, self.apply, self.inv_freq)
                        self._watch = ConstructionWatch(options, self._built)
                        self._watch.open()
                    except BaseException:
                        self._constructors.close()
                        raise
                self._depth += 1
            return self
        except BaseException:
            if self._depth > before:  # a signal has waited until here
                self._close(is_checked=False)
            raise

    def stop(self) -> None:
        """Close the guard that `start` opened; put back everything that it replaced.

        Raises:
            UnsupportedModelError: the guard is strict, and cannot protect a position module that was built,
                or saw no module being built.
        """
        self._close(is_checked=True)

    def __enter__(self) -> Guard:
        self._is_entered = True
        return self._open()

    def __del__(self) -> None:
        # A signal that comes as a ``with`` statement ends can keep `__exit__` from being run at all.
        while self._is_entered and self._depth and not sys.is_finalizing():
            self._close(is_checked=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(is_checked=error is None)

    def _recreate_cm(self) -> Guard:
        # As a decorator, every call gets a guard of its own.
        return Guard(self.tables, self.apply, self.strict, self.inv_freq, built=self._built)

    def _close(self, *, is_checked: bool) -> None:
        with uninterrupted(), self._lock:
            if self._depth == 0:
                raise ConfigError("stop() without start(): this guard is not open; call start() first")
            self._depth -= 1
            if self._depth:
                return
            watch, self._watch = self._watch, None
            assert watch is not None
            try:
                watch.close()
            finally:
                self._constructors.close()
            watch.complete(self._report)
        if is_checked:
            _settle(self._report, self.strict, stacklevel=5)
            if not watch.has_seen_a_model():
                _settle_nothing(self.strict, stacklevel=5)


guard = Guard


def protect(
    model: nn.Module,
    *,
    tables: Tables = "exact",
    apply: Apply = "fp32",
    strict: bool = False,
    inv_freq: InvFreq = "checkpoint",
) -> ProtectionReport:
    """Repair, rewrite and pin the position modules of a model that already exists; return what was done.

    Damaged tables are rebuilt from the model's config. Nothing is changed if an error is raised.

    Args:
        model: any `torch.nn.Module` that holds position modules: a model, a DeepSpeed engine, a
            wrapped model.
        tables: as for `guard`.
        apply: as for `guard`.
        strict: as for `guard`.
        inv_freq: as for `guard`.

    Raises:
        UnsupportedModelError: ``model`` is no module; or ``strict`` and a position module in it cannot be
            protected.
        ConfigError: an option is not one of those.
    """
    _check_options(tables, apply, strict, inv_freq)
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"protect() needs a torch.nn.Module, got {type(model).__name__}; "
            "pass the model, not its name or config"
        )
    report = ProtectionReport(tables=tables, apply=apply)
    options, everything = Options(tables, apply, inv_freq), list(parts(model))
    references = {id(part.root): References(part.root) for part in everything if not part.within}
    results = []
    for path, module, parent, root, within in everything:
        if concerns(module) or may_be_moved(module):
            around = (stock_class(parent).__module__,)
            results.append((path, prepare(module, references[id(root)].find(within), around, options)))
    for path, result in results:
        if isinstance(result, Unprotectable):
            report.add_unprotected(path, result.module, result.reason)
    if strict:
        # What would be kept though nobody can say whether it is right: raise before anything is changed.
        refused = ProtectionReport(tables=tables, apply=apply, unprotected=list(report.unprotected))
        for path, result in results:
            if isinstance(result, Protection) and result.untold:
                refused.add_unprotected(path, result.module, result.untold)
        _settle(refused, strict, stacklevel=4)
    with uninterrupted():
        for path, result in results:
            if isinstance(result, Protection):
                try:
                    result._replace(reference=None).carry_out()
                except UnsupportedModelError as error:
                    report.add_unprotected(path, result.module, str(error))
    for path, module, parent, *_ in everything:
        if is_kept(module):
            lead_to_its_class(module, stock_class(module), parent)
            report.add(path, module)
        for found in (*frozen_positions((module,)), *unseen_positions((module,))):
            report.add_frozen(path, found)
    _settle(report, strict, stacklevel=4)
    return report


def _settle(report: ProtectionReport, strict: bool, stacklevel: int) -> None:
    if not report.unprotected:
        return
    if strict:
        raise UnsupportedModelError(report.describe_unprotected())
    warn_unprotected(report, stacklevel)


def _settle_nothing(strict: bool, stacklevel: int) -> None:
    said = (
        "no module was built inside safe_rope.guard(), and nothing is protected; build or load the model "
        "inside it, or call safe_rope.protect(model) on one that exists"
    )
    if strict:
        raise UnsupportedModelError(said)
    if is_main_rank():
        warnings.warn(said, PrecisionWarning, stacklevel=stacklevel - 1)


def _check_options(tables: Any, apply: Any, strict: Any, inv_freq: Any) -> None:
    if not isinstance(strict, bool):
        raise ConfigError(f"strict must be True or False, got {strict!r}")
    if tables not in ("exact", "fp32"):
        raise ConfigError(f'tables must be "exact" or "fp32", got {tables!r}')
    if apply not in ("fp32", "stock"):
        raise ConfigError(f'apply must be "fp32" or "stock", got {apply!r}')
    if inv_freq not in ("checkpoint", "exact"):
        raise ConfigError(f'inv_freq must be "checkpoint" or "exact", got {inv_freq!r}')
    if inv_freq == "exact" and tables == "fp32":
        raise ConfigError(
            'inv_freq="exact" needs tables="exact", got tables="fp32", which are the stock model\'s bits; '
            "leave one of the two out"
        )
