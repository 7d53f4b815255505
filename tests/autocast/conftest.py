from __future__ import annotations

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture
def has_autocast() -> bool:
    """Whether the installed DeepSpeed has the section torch_autocast; where not, it must be refused."""
    from safe_rope.autocast import _deepspeed

    return _deepspeed.has_autocast()
