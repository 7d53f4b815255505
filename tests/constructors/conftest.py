from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture
def everything_is_put_back(deepspeed_group: None) -> Iterator[None]:
    """Every global that a guard may replace is after the test the object that it was before."""
    import torch
    from support.zero_init import assert_unchanged, replaceable, zero_init

    with zero_init():
        pass  # DeepSpeed itself leaves an attribute behind on the first use
    before = replaceable()
    yield
    assert_unchanged(before)
    default = vars(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", SimpleNamespace()))
    if default.get("device_context", ...) is None:
        del default["device_context"]  # torch 2.6 leaves it, and raises where the default device is read
