"""A CUDA device gives the bits of the CPU, which the stock tables do not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from support import golden

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", golden.SPECS)
def test_cuda_reproduces_the_golden_bits(name: str) -> None:
    assert golden.digests(name, "cuda") == json.loads(golden.FILE.read_text())[name]


def test_the_exact_tables_of_both_devices_are_equal_and_the_stock_ones_are_not(
    record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """What differs goes into the test report (--junit-xml) and onto the terminal."""
    length = 8192
    table = golden.table_of("theta 1e6, 128")
    on_cpu, on_cuda = table.lookup(torch.arange(length)), table.lookup(torch.arange(length, device="cuda"))
    for one, other in zip(on_cpu, on_cuda, strict=True):
        assert torch.equal(one, other.cpu())

    lines = []
    for name, one, other in zip(
        ("inv_freq", "cos", "sin"),
        golden.stock_tables("cpu", length),
        golden.stock_tables("cuda", length),
        strict=True,
    ):
        differing, largest = int((one != other).sum()), float((one - other).abs().max())
        record_property(f"stock {name}: entries that differ", differing)
        record_property(f"stock {name}: largest difference", largest)
        lines.append(f"stock {name}: {differing} of {one.numel()} differ, by {largest:.2e} at most")
    with capsys.disabled():
        print("\nCPU against CUDA, rope_theta 1e6, rotary_dim 128, 8,192 positions; exact tables: 0 differ")
        print("\n".join(lines))


def test_a_lookup_on_cuda_waits_for_nothing() -> None:
    table = golden.table_of("theta 1e4, 128")
    positions = torch.randint(0, 10_000_000, (3, 5000), device="cuda")
    table.lookup(positions)  # copies the levels to the device
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cos, _ = table.lookup(positions)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert cos.is_cuda


def test_a_cuda_graph_holds_a_lookup() -> None:
    table = golden.table_of("theta 1e4, 128")
    positions = torch.arange(4096, device="cuda")
    table.lookup(positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cos, sin = table.lookup(positions)
    positions.copy_(torch.arange(9_000_000, 9_004_096))
    graph.replay()
    expected = table.lookup(torch.arange(9_000_000, 9_004_096))
    assert torch.equal(cos.cpu(), expected[0])
    assert torch.equal(sin.cpu(), expected[1])
