"""`Keeper`: keeps a module's position tables what they are, whatever casts, moves and loads do to them.

What a user, a parent or a checkpoint writes to a table on purpose is adopted; what casts, moves and loads
leave there is undone. The two are told apart by the values (`safe_rope._recognition.explained`). What a
derivative may be taken by is nobody's table: it stays where it is, and the module computes from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.torch_private import is_learned, is_wrapped, untransformed
from safe_rope._protection.shown import STATE
from safe_rope._recognition.applications import Applications
from safe_rope._recognition.explained import is_blank, is_cast, is_damage
from safe_rope._recognition.holdings import get_table, set_table
from safe_rope._recognition.provenance import Origin
from safe_rope.constructors._shadow import shadow_dtype
from safe_rope.rotation._cos_sin import CosSin

logger = logging.getLogger(__name__)

_LAST = 512
"""Bytes at the end of a table that are looked at: all frequencies, or the last row of cos and sin."""
_LOADED = "_is_hf_initialized"
"""How transformers marks what came from a checkpoint."""


class Placed(NamedTuple):
    """A table as it was put into the module, to know it by."""

    tensor: torch.Tensor
    version: int
    address: int
    memory: Any
    last: bytes
    dtype: torch.dtype

    @staticmethod
    def of(table: torch.Tensor) -> Placed:
        """Note a table that holds the true values, in separate memory."""
        address = address_of(table)
        can_be_read = address and table.is_cpu and table.is_contiguous()
        count = min(table.nbytes, _LAST) if can_be_read else 0
        # Past torch: one operator costs more than everything else that a call asks of its tables.
        memory = (ctypes.c_char * count).from_address(address + table.nbytes - count) if count else None
        last = memory.raw if memory is not None else b""
        return Placed(table, table._version, address, memory, last, table.dtype)

    def is_untouched(self, current: Any) -> bool:
        """Whether ``current`` is this tensor, and nothing has written to it that left a trace."""
        # `_version` detects in-place writes; the address detects `.data = ...`, which bumps no counter.
        return (
            self.tensor is current
            and self.version == current._version
            and self.address == address_of(current)
        )

    def is_right(self, current: Any) -> bool:
        """Whether ``current`` is this tensor with the values that it had."""
        tensor, version, address, memory, last, _ = self
        # `is_untouched`; and a write through `.data` leaves no other trace than the values, which to read
        # stops an accelerator.
        return (
            tensor is current
            and version == tensor._version
            and address == (tensor.data_ptr() if type(tensor) is torch.Tensor else 0)
            and not tensor.requires_grad
            and (memory is None or memory.raw == last)
        )

    def is_elsewhere(self, current: Any) -> bool:
        """Whether ``current`` is this tensor, to whose ``data`` another was assigned."""
        same = self.tensor is current and self.version == current._version
        return same and not self.is_untouched(current)


class Keeper:
    """What a protected module knows of its tables; kept by the module and copied with it."""

    is_shown = False  # whether each of its tables is a property of its class
    applied: Applications | None = None  # how its positions are applied in FP32, where they are
    # Tables that its own forward writes to, as a clock does: whatever else is written there is meant.
    states: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.nominal: dict[str, torch.dtype] = {}  # the dtype that each table has in the stock model
        self.notes: dict[str, str] = {}  # what the report has to say of a table
        # What its forward has made in FP32 and keeps: the stock model's dtype, and where it comes from.
        self.caches: dict[str, tuple[torch.dtype, Origin]] = {}
        # What a constructor gives under the conditions of the open guard: initialisation may write it again.
        self.replays: Callable[[str, torch.device], Iterable[torch.Tensor | None]] | None = None
        # What the module's own attributes hold of tables, for graphs that do not read those themselves.
        self.attributes: dict[str, Any] = {}
        # Tables that its own forward makes, and has not yet: only a call says on which device.
        self.awaited: set[str] = set()
        # Tables that somebody has set since it was protected; a set of its own after each change.
        self.adopted: frozenset[str] = frozenset()
        # What each table held before somebody set it: it may be written there again.
        self.before: dict[str, torch.Tensor] = {}
        self._placed: dict[str, Placed] = {}
        self._count = -1  # how many tables there were when all of them were right

    # ------------------------------------------------------------------ what the values are

    def names(self, module: nn.Module) -> Iterable[str]:
        """Names of the tables, as `safe_rope._recognition.holdings` has them."""
        raise NotImplementedError

    def make(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        """Return a tensor in new memory that holds the true values, on ``device``."""
        raise NotImplementedError

    def made(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        """Return what `make` does, no tensor of a transform of ``torch.func`` that runs now."""
        with untransformed():
            return self.make(module, name, device)

    def stock(self, name: str) -> Iterable[torch.Tensor]:
        """Return, on CPU, what else the stock model may put into a table when it initialises itself."""
        return ()

    def adopt(self, module: nn.Module, name: str, values: torch.Tensor) -> None:
        """Take ``values`` for the true ones from here on."""
        raise NotImplementedError

    def lose(self, module: nn.Module, name: str) -> None:
        """Give a table up: somebody has written to it on meta, and nobody can say what."""
        raise NotImplementedError

    def drop(self, module: nn.Module, name: str) -> None:
        """Follow somebody who has taken a table away."""

    def yield_to(self, module: nn.Module, name: str, learned: torch.Tensor) -> None:
        """Leave ``learned``, by which a derivative may be taken, in the place of a table."""
        if name not in self._placed:  # what comes there next is judged by what was there before
            self._placed[name] = Placed.of(self.made(module, name, learned.device))

    def keep_come(self, module: nn.Module) -> None:
        """Keep what has come into the module since it was protected, where that may be positions."""

    # ------------------------------------------------------------------ keeping

    def restore(self, module: nn.Module, device: torch.device | None = None) -> bool:
        """Put back every table that is not, untouched, the one that was put there before.

        Args:
            module: the module that this keeper belongs to.
            device: where buffers go; None for where they are.

        Returns:
            Whether any was not, or may not have been.

        """
        placed = self._placed
        if device is None and len(placed) == self._count and not (self.awaited and self._comes_to(module)):
            buffers = module._buffers
            for name, right in placed.copy().items():  # another thread may put a table there meanwhile
                if not right.is_right(buffers[name] if name in buffers else get_table(module, name)):
                    break
            else:
                return False
        for name in tuple(self.names(module)):
            current, known = get_table(module, name), placed.get(name)
            if device is None and known is not None and known.is_right(current):
                continue
            if is_learned(current):
                self.yield_to(module, name, current)
                continue
            if name in self.awaited:
                if current is None:
                    if name not in module._buffers:
                        self.attributes.setdefault(name, None)
                    continue
                # Somebody else has put it there, or the forward where nothing was kept.
                known = placed[name] = Placed.of(self.made(module, name, device_of(current)))
            if current is None and known is not None:
                self.drop(module, name)
            else:
                self._judge(module, name, current)
            if name not in self.names(module):
                continue
            target = device if device is not None and name in module._buffers else device_of(current)
            if target.type == "meta" and name not in module._buffers:
                target = torch.device("cpu")  # nobody would ever fill a plain attribute
            table = self.made(module, name, target)
            may_ask = target.type == "cpu" or known is not None or self._count < 0
            stays = device is None and may_ask and _holds_the_same(current, table)
            # Somebody else may hold it and write to it: a parent, another module, an array of NumPy.
            self.put(module, name, current if stays else table)
        self._count = len(placed)
        return True

    def _comes_to(self, module: nn.Module) -> bool:
        """Whether any awaited table is there."""
        return any(get_table(module, name) is not None for name in tuple(self.awaited))

    def put(self, module: nn.Module, name: str, table: torch.Tensor) -> None:
        """Put ``table`` into the module, and know it from here on."""
        self.set(module, name, table)
        self._placed[name] = Placed.of(table)
        self.awaited.discard(name)

    def set(self, module: nn.Module, name: str, table: Any) -> None:
        """Put ``table`` into the module."""
        set_table(module, name, table)
        if name not in module._buffers:
            self.attributes[name] = table

    def _judge(self, module: nn.Module, name: str, current: Any) -> None:
        """Adopt what stands in the place of a table, if somebody has put it there on purpose."""
        known = self._placed.get(name)
        if known is not None and isinstance(current, CosSin) and current.is_meta:
            self.lose(module, name)
            return
        if known is not None and isinstance(current, CosSin):
            # Made from what the module showed, in the stock model's dtype.
            self.nominal[name] = current.nominal or current.dtype
            self._placed.pop(name, None)
            self.adopt(module, name, current.table)
            return
        if known is None or type(current) is not torch.Tensor:
            return
        if current.is_meta:
            if known.tensor.is_meta and not known.is_untouched(current):
                self.lose(module, name)
            return
        values, before = current, self.before.get(name)
        if current.shape == known.tensor.shape:
            true = self.made(module, name, torch.device("cpu"))
            is_written = current is known.tensor and current._version != known.version
            here = current.detach().cpu()
            if self._is_damaged(name, here, true, is_written):
                if current.dtype != true.dtype and not true.is_complex():
                    self.nominal[name] = current.dtype  # cast by another way than the module's own
                return
            again = self.replays(name, current.device) if self.replays is not None else ()
            others = () if name in self.states else (before, *self.stock(name), *again)
            if any(other is not None and self._is_damaged(name, here, other) for other in others):
                if before is None:
                    return
                values = before
            elif known.tensor.is_meta and not _is_filled(module, name, current):
                return
            self.before.setdefault(name, true)
        elif name not in self.states and is_blank(current):
            return
        else:
            self.before.pop(name, None)
        if current is not known.tensor or known.dtype != current.dtype:
            # Inside of zero.Init the stock model has its dtype.
            self.nominal[name] = shadow_dtype(current) or current.dtype
        logger.info("%s.%s: values that were put there on purpose are kept", type(module).__name__, name)
        self._placed.pop(name, None)
        self.adopt(module, name, values)

    def _is_damaged(
        self, name: str, here: torch.Tensor, true: torch.Tensor, is_written: bool = False
    ) -> bool:
        """Whether `is_damage` explains values; nothing but a cast does where tables change anyway."""
        is_set = name in self.adopted and is_blank(here) and bool(here.isfinite().all())
        if is_set or name in self.states:
            return is_cast(here, true)
        return is_damage(here, true, is_written=is_written)

    def is_in_place(self, name: str, current: torch.Tensor) -> bool:
        """Whether ``current`` is, untouched, what was put in the place of a table, if anything was."""
        known = self._placed.get(name)
        return known is None or known.is_right(current)

    def has_other_memory(self, name: str, current: torch.Tensor) -> bool:
        """Whether ``current`` is what was put in the place of a table, and somebody has assigned its data."""
        known = self._placed.get(name)
        return known is not None and known.is_elsewhere(current)

    def is_settled(self, module: nn.Module) -> bool:
        """Whether every table has been put there since its true values were last changed."""
        return all(name in self._placed or name in self.awaited for name in self.names(module))

    def replace_placed(self, name: str) -> None:
        """Have a table put back at the next `restore`, without a look at what stands there."""
        self._placed.pop(name, None)

    @contextlib.contextmanager
    def buffers_aside(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Take the tables out while ``fn`` is applied to the rest; note what it would have made of them."""
        self.restore(module)  # what was written to them before is judged before
        names = [name for name in self.names(module) if not is_learned(get_table(module, name))]
        here = module._buffers.keys() - self.awaited
        aside = {name: module._buffers[name] for name in names if name in here}
        for name in aside:
            module._buffers[name] = None
        try:
            yield
            device = None
            for name, buffer in aside.items():
                dtype = self.nominal.get(name) or (torch.float32 if buffer is None else buffer.dtype)
                witness = torch.empty(1, dtype=dtype, device=device_of(buffer))
                sent = sent_by(fn, witness)
                device = device if sent is witness else sent.device
                # `nn.Module.share_memory` works in place.
                if buffer is not None and sent is witness and witness.is_shared():  # type: ignore[no-untyped-call]
                    buffer.share_memory_()  # type: ignore[no-untyped-call]
                if not dtype.is_complex:
                    self.nominal[name] = sent.dtype
        finally:
            module._buffers.update(aside)
            self._placed.update({name: Placed.of(b) for name, b in aside.items() if b is not None})
        self._place_anew(module, device)

    @contextlib.contextmanager
    def caches_sent(
        self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Note of what its forward has made which dtype ``fn`` gives it in the stock model.

        Yields ``fn``, to be applied meanwhile.
        """
        before = {name: get_table(module, name) for name in self.caches}
        applied = set[int]()

        def noticed(tensor: torch.Tensor) -> torch.Tensor:
            applied.add(id(tensor))
            return fn(tensor)

        yield noticed if before else fn
        for name, cache in before.items():
            if id(cache) in applied:
                dtype, origin = self.caches[name]
                sent = sent_by(fn, torch.empty(1, dtype=dtype, device=device_of(cache))).dtype
                self.caches[name] = sent, origin
                if sent not in LOW:
                    del self.caches[name]  # the stock model's is in full precision, too

    def _place_anew(self, module: nn.Module, device: torch.device | None = None) -> None:
        placed, self._placed = self._placed, {}
        try:
            self.restore(module, device)
        except BaseException:
            self._placed = placed
            raise

    def show(self, module: nn.Module) -> None:
        """Let the module's own ``_apply`` see its tables in the dtypes that they have in the stock model."""
        self.restore(module)  # what was written to them before is judged before
        for name in self.names(module):
            table = get_table(module, name)
            if isinstance(table, torch.Tensor) and not is_learned(table):
                self.set(module, name, self.saved(name, table))

    def follow(self, module: nn.Module) -> None:
        """Put the tables back where the module's own ``_apply`` has moved or cast them; note the dtypes."""
        for name in self.names(module):
            current = get_table(module, name)
            if not isinstance(current, torch.Tensor) or is_learned(current):
                continue
            if not self.made(module, name, torch.device("cpu")).is_complex():
                self.nominal[name] = current.dtype
        self._place_anew(module)

    def settle(self, module: nn.Module, prefix: str, loaded: Any) -> None:
        """After a load: a checkpoint's own values are kept, unless they are the known ones rounded."""
        alone = not prefix and len(loaded) == 1  # transformers 4.50 to 4.57, which casts it to what it finds
        for name in tuple(self.names(module)):
            value = module._buffers.get(name) if prefix + name in loaded else None
            known = self._placed.get(name)
            if value is None or value.is_meta or is_learned(value):
                continue
            cast = alone and known is not None and value.dtype == known.tensor.dtype
            if known is not None and value is not known.tensor and not (cast or value.is_complex()):
                self.nominal[name] = value.dtype  # assigned: the stock model has the checkpoint's tensor now
            true = self.made(module, name, torch.device("cpu"))
            if value.shape == true.shape and not self._is_damaged(name, value.detach().cpu(), true, True):
                logger.info("%s.%s: the checkpoint's values are kept", type(module).__name__, name)
                self._placed.pop(name, None)
                self.adopt(module, name, value)
            self._placed.pop(name, None)
        self.restore(module)

    def saved(self, name: str, table: torch.Tensor) -> torch.Tensor:
        """Return ``table`` in the dtype in which the stock model would save it."""
        nominal = self.caches[name][0] if name in self.caches else self.nominal.get(name, table.dtype)
        return table if table.is_complex() or nominal == table.dtype else table.to(nominal)

    # ------------------------------------------------------------------ copies

    def portable(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's attributes without its tables, which the keeper carries."""
        names = {name for name in self.names(module) if not is_learned(get_table(module, name))}
        state = vars(module)
        if getattr(type(module), "__getstate__", None) is not getattr(object, "__getstate__", None):
            own = module.__getstate__()  # type: ignore[no-untyped-call]
            state = {**own, STATE: self} if isinstance(own, dict) else state
        attributes = {name: _place(v) if name in names else v for name, v in state.items()}
        buffers = module._buffers
        attributes["_buffers"] = {name: _place(v) if name in names else v for name, v in buffers.items()}
        return attributes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_placed": {}, "attributes": self._attributes_of_copy(), "replays": None}

    def _attributes_of_copy(self) -> dict[str, Any]:
        """Return ``attributes`` of a copy, which has no tables yet: the awaited ones are None there, too."""
        return dict.fromkeys(self.awaited & self.attributes.keys())


def _place(table: Any) -> Any:
    """Return a tensor without values where a table is: torch.load's map_location moves it with the rest."""
    return table.reshape(-1)[:0].clone() if isinstance(table, torch.Tensor) else None


def _holds_the_same(current: Any, table: torch.Tensor) -> bool:
    """Whether a plain tensor holds what ``table`` does, where and as it does."""
    if type(current) is not torch.Tensor or current.is_meta or current.is_inference() or is_wrapped(current):
        return False
    is_alike = (current.device, current.dtype, current.shape) == (table.device, table.dtype, table.shape)
    return is_alike and torch.equal(current, table)


def _is_filled(module: nn.Module, name: str, current: torch.Tensor) -> bool:
    """Whether a buffer that stood on meta holds values that somebody computed or loaded."""
    if current._version > 0 or getattr(current, _LOADED, False):
        return bool(current.isfinite().all())
    # A new tensor that nobody has written to: memory as it came, unless a loader put it there.
    return False


def sent_by(fn: Callable[[torch.Tensor], torch.Tensor], witness: torch.Tensor) -> torch.Tensor:
    """Apply ``fn`` to a witness of a table. A table is known even where its buffer stands on meta."""
    try:
        return fn(witness)
    except NotImplementedError:  # nothing can be copied from meta
        if not witness.is_meta:
            raise
        return fn(torch.empty(witness.shape, dtype=witness.dtype, device="cpu"))


def device_of(current: Any) -> torch.device:
    """The device of a table, the CPU where it is none."""
    return current.device if isinstance(current, torch.Tensor) else torch.device("cpu")


def address_of(tensor: torch.Tensor) -> int:
    """Where a plain tensor's memory is; 0 for any other."""
    return tensor.data_ptr() if type(tensor) is torch.Tensor else 0
