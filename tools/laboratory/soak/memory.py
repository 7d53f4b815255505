"""Whether memory grows."""

from __future__ import annotations

import gc
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Growth:
    """Samples of memory and of objects over many tries; the first half of them is for warming up."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.objects: list[int] = []

    def sample(self) -> None:
        gc.collect()
        self.bytes.append(resident())
        self.objects.append(len(gc.get_objects()))

    def of_bytes(self) -> float:
        """Return the growth over the second half in MB, from a line through its samples."""
        return slope(self.bytes[len(self.bytes) // 2 :]) / 1e6

    def of_objects(self) -> int:
        """Return by how many objects that the garbage collector knows the second half has grown."""
        later = self.objects[len(self.objects) // 2 :]
        return later[-1] - later[0]


def slope(values: list[int]) -> float:
    """Return by how much a line of least squares through ``values`` rises from the first to the last."""
    count = len(values)
    if count < 2:
        return 0.0
    mean_x, mean_y = (count - 1) / 2, sum(values) / count
    above = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values))
    below = sum((x - mean_x) ** 2 for x in range(count))
    return above / below * (count - 1)
