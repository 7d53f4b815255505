"""Count what goes through collectives, whoever calls them: torch.distributed, deepspeed.comm or DDP.

    with safe_rope.autocast.traffic() as seen:
        engine.step()
    print(seen)

Every collective of c10d is an operator that torch dispatches, below all its Python names. Each is therefore
seen once and in one place, and nothing is replaced that would have to be put back.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from safe_rope._base.dtypes import dtype_name
from safe_rope._base.tensors import tensors
from safe_rope.autocast._operators import Operator, Watch, named_arguments, packet
from safe_rope.autocast.safety.report import table

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_COLLECTIVES = re.compile(
    r"all_?(reduce|gather|to_?all)|reduce|broadcast|gather|scatter|barrier|send|recv|permute"
)
"""How the names of those operators begin that communicate; others wait for a result, or wrap it."""
_NAMES = {
    "all_gather_base": "all_gather_into_tensor",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "allgather": "all_gather",
    "allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_any_source": "recv",
    "reduce_scatter_base": "reduce_scatter_tensor",
}
"""c10d's operators, without underscores at the ends, by the names that they have in torch.distributed."""
_NOTHING = "-"
"""The dtype of a collective without payload: a barrier."""


@dataclass(frozen=True)
class TrafficRow:
    """All calls of one collective with one dtype.

    Attributes:
        op: its name in torch.distributed ("all_reduce").
        dtype: as text ("bfloat16").
        calls: how often this rank called it.
        bytes: see `traffic`.
    """

    op: str
    dtype: str
    calls: int
    bytes: int


class Traffic:
    """What `traffic` has counted; can be read while it goes on. ``str()`` is a table."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._lock = threading.RLock()

    @property
    def rows(self) -> tuple[TrafficRow, ...]:
        """One row for each collective and dtype, the largest first."""
        with self._lock:
            rows = [TrafficRow(op, dtype, *counts) for (op, dtype), counts in self._counts.items()]
        return tuple(sorted(rows, key=lambda row: (-row.bytes, row.op, row.dtype)))

    def bytes(self, dtype: torch.dtype | None = None, op: str | None = None) -> int:
        """Return the bytes in all, or of one dtype, one collective, or both."""
        return sum(
            row.bytes
            for row in self.rows
            if (dtype is None or row.dtype == dtype_name(dtype)) and (op is None or row.op == op)
        )

    def share(self, dtype: torch.dtype) -> float:
        """Return the share of the bytes that is of ``dtype``; 0 where nothing was sent."""
        total = self.bytes()
        return self.bytes(dtype) / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as plain data, for JSON."""
        return {"bytes": self.bytes(), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        rows = self.rows
        if not rows:
            return "no collective was called"
        total = self.bytes()
        cells = [
            (r.op, r.dtype, f"{r.calls:,}", f"{r.bytes:,}", f"{r.bytes / total:.1%}" if total else "-")
            for r in rows
        ]
        cells.append(("in all", "", f"{sum(r.calls for r in rows):,}", f"{total:,}", ""))
        names = ("collective", "dtype", "calls", "bytes", "share")
        return "\n".join(table(names, cells, numbers={"calls", "bytes", "share"}))

    def _run(self, operator: Operator, arguments: Any, keywords: Any) -> Any:
        """Count the operator if it is a collective, and run it."""
        if getattr(operator, "namespace", None) in _NAMESPACES:
            name = packet(operator).strip("_")
            if _COLLECTIVES.match(name):
                op = _NAMES.get(name, name)
                self._add(op, _payload(op, operator, arguments, keywords))
        return operator(*arguments, **keywords)

    def _add(self, op: str, payload: list[Tensor]) -> None:
        with self._lock:
            dtypes = list(dict.fromkeys(dtype_name(tensor.dtype) for tensor in payload)) or [_NOTHING]
            for place, dtype in enumerate(dtypes):
                counts = self._counts.setdefault((op, dtype), [0, 0])
                counts[0] += place == 0  # one call, even where it coalesces several dtypes
                counts[1] += sum(t.nbytes for t in payload if dtype_name(t.dtype) == dtype)


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Count every collective that this thread, and a backward that it starts, calls meanwhile.

    Bytes are those of the whole payload as one rank sees it, whatever the number of ranks. The payload is the
    tensor of an all-reduce or a broadcast, the output of an all-gather, or the input of a reduce-scatter. A
    ring moves (n - 1) / n of that through each rank, and an all-reduce twice as much. A call
    is counted when it is made, whether it is waited for or not; one that coalesces several tensors is one
    call.

    Can be nested: every open one counts everything. Collectives inside compiled graphs are counted where the
    compiler leaves them to torch.

    Yields:
        Traffic: the counts so far.

    """
    seen = Traffic()
    with Watch(seen._run, higher_order=True):
        yield seen


def _payload(op: str, operator: Operator, arguments: Any, keywords: Any) -> list[Tensor]:
    if op == "barrier":
        return []
    named = {argument.name: value for argument, value in named_arguments(operator, arguments, keywords)}
    received = list(tensors({name: value for name, value in named.items() if name.startswith("out")}))
    handed_in = list(tensors({name: value for name, value in named.items() if not name.startswith("out")}))
    if op.startswith("all_gather") and not received:  # functional: the output does not exist yet
        return [t for t in handed_in for _ in range(int(named["group_size"]))]
    return max(received, handed_in, key=lambda part: sum(t.nbytes for t in part))
