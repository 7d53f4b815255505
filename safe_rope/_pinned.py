"""Position tables of modules that are not rewritten: rebuilt as their authors meant them, and kept so.

The module keeps computing as it does; its tables are put back, in the precision that its constructor gives
them on CPU in FP32, whenever they have been cast, moved, lost or overwritten. What the rest of the model
sees keeps its dtypes: a table that is ready for use (sin and cos, coordinates) enters a computation in the
dtype that it would have had, rounded once; a frequency enters in FP32, and what is computed from it through
sin and cos is rounded once at the end.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from safe_rope import _shadow
from safe_rope._applied import run_in_fp32, tables_marked
from safe_rope._dtypes import LOW
from safe_rope._holdings import get_table, is_inside, set_table, twin
from safe_rope._provenance import Origin, Provenance
from safe_rope.errors import PrecisionWarning
from safe_rope.registry import RopePatch
from safe_rope.rotation import CosSin

logger = logging.getLogger(__name__)

_values: weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor] = weakref.WeakValueDictionary()


def shared(values: torch.Tensor) -> torch.Tensor:
    """Return the tensor that stands for all pins with these values: layers often have the same table each."""
    digest = hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).digest()
    return _values.setdefault((tuple(values.shape), values.dtype, digest), values)


@dataclasses.dataclass
class Pin:
    """One table: its true values, whether they are ready for use, and the dtype that it would have had."""

    values: torch.Tensor
    finished: bool
    nominal: torch.dtype

    @property
    def is_low(self) -> bool:
        """Whether the table would have been rounded."""
        return self.nominal in LOW and self.values.dtype not in LOW


class PinnedState:
    """What a pinned module knows; it is kept by the module and copied with it."""

    def __init__(
        self,
        module: nn.Module,
        tables: dict[str, tuple[torch.Tensor, bool]],
        patch: RopePatch | None = None,
    ) -> None:
        self.patch = patch  # how cos and sin are applied in FP32, where they are
        self.pins = {
            name: Pin(values, finished, _dtype_of(module, name, values))
            for name, (values, finished) in tables.items()
        }
        self._placed: dict[str, tuple[torch.Tensor, int, int]] = {}
        self._rounded: dict[str, torch.Tensor] = {}
        self._marked: dict[str, CosSin] = {}
        self.lowered: tuple[torch.dtype | None, ...] | None = None

    # ------------------------------------------------------------------ the tables

    def restore(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Put back every table that is not, untouched, the one that was put there before."""
        for name, pin in self.pins.items():
            current = get_table(module, name)
            if device is None and self._is_untouched(name, current):
                continue
            if self._is_made_anew(name, current):
                self._keep(module, name, current)
            target = device if device is not None and name in module._buffers else _device_of(current)
            if target.type == "meta" and name not in module._buffers:
                target = torch.device("cpu")  # nobody would ever fill a plain attribute
            with torch.inference_mode(False):
                value = pin.values.to(target, copy=True)
            set_table(module, name, value)
            self._placed[name] = (value, value._version, _address(value))
            if self.patch is not None and self.patch.source == "tables" and value.dtype == torch.float32:
                self._marked[name] = CosSin(value)

    def _keep(self, module: nn.Module, name: str, table: torch.Tensor) -> None:
        pin = self.pins[name]
        if table.dtype in LOW and pin.values.dtype not in LOW:
            warnings.warn(
                f"{type(module).__name__} has made {name} anew in {table.dtype}, in a forward that cannot be "
                "run again in FP32: from here on it is as rounded as without safe_rope. Build the model with "
                "tables that are long enough, or protect the class by a RopePatch",
                PrecisionWarning,
                stacklevel=2,
            )
        # A copy that nobody else writes to, where the table is: a copy to the CPU would stop a device.
        with torch.inference_mode(False), torch.no_grad():
            pin.values = table.detach().clone()

    def _is_made_anew(self, name: str, current: Any) -> bool:
        """Whether the module's own code has put another table there: no cast or load changes a shape."""
        known = self._placed.get(name)
        if known is None or type(current) is not torch.Tensor or current.is_meta:
            return False
        return current.shape != known[0].shape or (is_inside(name) and current is not known[0])

    def _is_untouched(self, name: str, current: Any) -> bool:
        known = self._placed.get(name)
        return (
            known is not None
            and known[0] is current
            and known[1] == current._version
            and known[2] == _address(current)
        )

    @contextlib.contextmanager
    def buffers_aside(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Take the tables out while ``fn`` is applied to the rest; note what it would have made of them."""
        aside = {name: module._buffers[name] for name in self.pins if name in module._buffers}
        for name in aside:
            module._buffers[name] = None
        try:
            yield
            device = None
            for name, buffer in aside.items():
                witness = torch.empty(1, dtype=self.pins[name].nominal, device=_device_of(buffer))
                sent = sent_by(fn, witness)
                device = sent.device
                if not self.pins[name].values.is_complex():
                    self.pins[name].nominal = sent.dtype
        finally:
            module._buffers.update(aside)
        self.restore(module, device)

    def follow(self, module: nn.Module) -> None:
        """Put the tables back where the module's own ``_apply`` has moved or cast them; note the dtypes."""
        device = None
        for name, pin in self.pins.items():
            buffer = module._buffers.get(name)
            if buffer is not None:
                device = buffer.device
                if not pin.values.is_complex():
                    pin.nominal = buffer.dtype
        self.restore(module, device)

    def settle(self, module: nn.Module, prefix: str, loaded: Any) -> None:
        """After a load: keep the rebuilt values, unless a checkpoint brought others in full precision."""
        for name, pin in self.pins.items():
            value = module._buffers.get(name) if prefix + name in loaded else None
            if value is None or value.is_meta or value.shape != pin.values.shape:
                continue
            if value.dtype in LOW or pin.values.dtype != value.dtype:
                continue
            values, known = value.detach().cpu(), pin.values.cpu()
            if not bool(((values - known).abs() <= 2.0**-7 * known.abs() + 1e-6).all()):
                logger.info("%s.%s: the checkpoint's values are kept", type(module).__name__, name)
                pin.values = values.clone()
        self.restore(module)

    # ------------------------------------------------------------------ forward

    @contextlib.contextmanager
    def tables_for_use(self, module: nn.Module) -> Iterator[None]:
        """Show tables that are ready for use in the dtype that they would have had, while forward runs."""
        swapped = []
        for name, pin in self.pins.items():
            if pin.is_low and pin.finished:
                table = get_table(module, name)
                if table is None:
                    continue
                rounded = self._rounded.get(name)
                if rounded is None or (rounded.dtype, rounded.device) != (pin.nominal, table.device):
                    rounded = self._rounded[name] = table.to(pin.nominal)
                set_table(module, name, rounded)
                swapped.append((name, table, rounded))
        try:
            yield
        finally:
            for name, table, rounded in swapped:
                if get_table(module, name) is rounded:
                    set_table(module, name, table)
                else:
                    self._rounded.pop(name, None)

    def adopt(
        self,
        module: nn.Module,
        before: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Keep a table that ``forward`` has made anew, for a longer sequence say, in full precision.

        What was made of tables that were shown rounded, or for low inputs, is made again without that.

        Args:
            module: after ``forward``.
            before: its `twin` from before it.
            forward: the stock forward, which has just been run.
            args: its arguments.
            kwargs: its keyword arguments.

        """
        remade = {}
        for name in self.pins:
            current = get_table(module, name)
            if (
                type(current) is torch.Tensor
                and not current.is_meta
                and current is not get_table(before, name)
            ):
                remade[name] = current
        if not remade:
            return
        shown_low = any(pin.is_low and pin.finished for pin in self.pins.values())
        rounded = shown_low or any(t.dtype != self.pins[name].values.dtype for name, t in remade.items())
        if rounded and (module._modules or module._parameters):
            # A forward that does more than make tables, which may write to a cache, say, is not run twice.
            remade = {name: t for name, t in remade.items() if self._is_longer(name, t)}
        elif rounded:
            try:
                run_in_fp32(before, forward, args, kwargs, rotates=False)
                remade = {name: get_table(before, name) for name in remade}
            except Exception:
                logger.info("%s cannot be run in FP32", type(module).__name__, exc_info=True)
        for name, table in remade.items():
            if isinstance(table, torch.Tensor) and not table.is_meta:
                self._keep(module, name, table)
            self._placed.pop(name, None)
            self._rounded.pop(name, None)
        self.restore(module)

    def _is_longer(self, name: str, table: torch.Tensor) -> bool:
        pin = self.pins[name]
        return table.shape != pin.values.shape and table.dtype == pin.values.dtype

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the stock ``forward`` on the true tables, with the dtypes that the stock model has."""
        before = None
        if not torch.compiler.is_compiling():
            self.restore(module)
            before = twin(module, type(module)._safe_rope_stock)  # type: ignore[attr-defined]
        if self.patch is not None and self.patch.source == "results":
            result = run_in_fp32(module, forward, args, kwargs, rotates=False)
        elif self.rotates("forward"):
            result = run_in_fp32(module, forward, args, kwargs, rotates=True)
        elif self._marked:
            with tables_marked(module, self._marked):
                result = forward(module, *args, **kwargs)
        elif not any(pin.is_low for pin in self.pins.values()):
            result = forward(module, *args, **kwargs)
        else:
            with self.tables_for_use(module):
                if any(pin.is_low and not pin.finished for pin in self.pins.values()):
                    result = self._run_frequencies(module, forward, args, kwargs)
                else:
                    result = forward(module, *args, **kwargs)
        if before is not None and torch._C._len_torch_dispatch_stack() == 0:
            self.adopt(module, before, forward, args, kwargs)
        return result

    def rotates(self, method: str) -> bool:
        """Whether ``method`` of the module takes q and k and is to return them rotated in FP32."""
        patch = self.patch
        return patch is not None and patch.source == "states" and method in patch.applications

    def _run_frequencies(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.lowered is None and not torch.compiler.is_compiling():
            result, self.lowered = self._learn(module, forward, args, kwargs)
        else:
            result = forward(module, *args, **kwargs)
        leaves, structure = torch.utils._pytree.tree_flatten(result)
        if self.lowered and len(self.lowered) == len(leaves):
            leaves = [
                leaf if dtype is None else leaf.to(dtype)
                for leaf, dtype in zip(leaves, self.lowered, strict=True)
            ]
        return torch.utils._pytree.tree_unflatten(leaves, structure)

    def _learn(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` once, following what dtype each result would have had with the stock tables."""
        shadow, provenance = _shadow.start(), Provenance()
        try:
            for name, pin in self.pins.items():
                table = get_table(module, name)
                if pin.is_low and not pin.finished and table is not None:
                    _shadow.mark(table, pin.nominal)
            with provenance:
                result = forward(module, *args, **kwargs)
            leaves = torch.utils._pytree.tree_leaves(result)
            lowered = tuple(_lowered_dtype(leaf, provenance) for leaf in leaves)
        finally:
            for name in self.pins:
                table = get_table(module, name)
                if table is not None:
                    _shadow.mark(table, None)
            _shadow.stop(shadow)
        return result, lowered

    # ------------------------------------------------------------------ copies

    def portable(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's attributes without its tables, which the state carries once."""
        attributes = {name: value for name, value in module.__dict__.items() if name not in self.pins}
        buffers = module._buffers
        attributes["_buffers"] = {name: None if name in self.pins else v for name, v in buffers.items()}
        attributes.update({name: None for name in self.pins if name in vars(module)})
        witness = next((b for name in self.pins if (b := buffers.get(name)) is not None), torch.empty(0))
        attributes["_safe_rope_device"] = witness.reshape(-1)[:0].clone()
        return attributes

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedState:
        duplicate = copy.copy(self)
        duplicate.pins = {name: dataclasses.replace(pin) for name, pin in self.pins.items()}
        duplicate._placed, duplicate._rounded, duplicate._marked = {}, {}, {}
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_placed": {}, "_rounded": {}, "_marked": {}}


def sent_by(fn: Callable[[torch.Tensor], torch.Tensor], witness: torch.Tensor) -> torch.Tensor:
    """Apply ``fn`` to a witness of a table. A table is known even where its buffer stands on meta."""
    try:
        return fn(witness)
    except NotImplementedError:  # nothing can be copied from meta
        if not witness.is_meta:
            raise
        return fn(torch.empty(witness.shape, dtype=witness.dtype, device="cpu"))


def pinned_forward(stock: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a pinned ``stock``: its own, on the true tables."""
    inner = stock.forward

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._safe_rope.run(self, inner, args, kwargs)

    return forward


def rotating_method(stock: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return the method ``name`` of a pinned ``stock``, which rotates in FP32 where a patch says so."""
    inner = getattr(stock, name)

    @functools.wraps(inner)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._safe_rope
        if not state.rotates(name):
            return inner(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            state.restore(self)
        return run_in_fp32(self, inner, args, kwargs, rotates=True)

    return method


def _lowered_dtype(leaf: Any, provenance: Provenance) -> torch.dtype | None:
    if not isinstance(leaf, torch.Tensor) or not provenance.origin(leaf) & Origin.FINISHED:
        return None  # a phase is never rounded: what is computed from it is
    return _shadow.shadow_dtype(leaf)


def _dtype_of(module: nn.Module, name: str, values: torch.Tensor) -> torch.dtype:
    current = get_table(module, name)
    return current.dtype if isinstance(current, torch.Tensor) else values.dtype


def _device_of(current: Any) -> torch.device:
    return current.device if isinstance(current, torch.Tensor) else torch.device("cpu")


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if type(tensor) is torch.Tensor else 0
