"""What "the tables are true" means, as one assertion."""

from __future__ import annotations

import torch
from torch import nn

from support import families


def assert_true(model: nn.Module, family: str, tables: str) -> None:
    """Every rotary module of ``model`` hands out true tables, whatever the dtype of the activations.

    ``"exact"``: within 1 ulp of FP32 of the float64 reference. ``"fp32"``: the bits of stock FP32.
    """
    for path, module in families.rotary_modules(model).items():
        for dtype in (torch.float32, torch.bfloat16):
            values = families.read_tables(module, dtype=dtype)
            assert values.cos.dtype == values.sin.dtype == torch.float32, path
            if tables == "exact":
                truth = families.reference(family)
                assert families.ulps(values, truth) <= 1.0, path
                assert families.phase_error(values, truth) <= 2.0**-23, path
            else:
                stock = families.stock_tables(family)
                assert torch.equal(values.cos, stock.cos), path
                assert torch.equal(values.sin, stock.sin), path
        assert module.inv_freq.dtype == torch.float32, path
