"""The guard beside what others replace: constructors, DeepSpeed's hooks, transformers' own fix."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support.zero_init import assert_stock, assert_truthful, assert_unchanged, replaceable, zero_init

from safe_rope.constructors import ConstructorGuard
from safe_rope.errors import IncompatibleVersionError

pytestmark = [pytest.mark.usefixtures("deepspeed_group", "everything_is_put_back"), pytest.mark.contract]
FP32, BF16 = torch.float32, torch.bfloat16


def test_a_foreign_replacement_is_left_alone() -> None:
    with zero_init():
        guard = ConstructorGuard()
        guard.open()
        ours = torch.ones

        def foreign(*args: Any, **kwargs: Any) -> torch.Tensor:
            return ours(*args, **kwargs)

        torch.ones = foreign
        assert torch.ones(2, dtype=FP32).dtype == FP32
        guard.close()
        assert torch.ones is foreign
        assert torch.ones(2, dtype=FP32).dtype == BF16
        assert torch.zeros(2, dtype=FP32).dtype == BF16


def test_a_foreign_replacement_under_ours_comes_back() -> None:
    with zero_init():
        inner = torch.ones
        called = []

        def foreign(*args: Any, **kwargs: Any) -> torch.Tensor:
            called.append(args)
            return inner(*args, **kwargs)

        torch.ones = foreign
        with ConstructorGuard():
            assert torch.ones(2, dtype=FP32).dtype == FP32
            assert torch.ones(2).dtype == BF16
        assert torch.ones is foreign
        assert ((2,) in called) is True


def test_a_foreign_hook_on_deepspeed_is_left_alone() -> None:
    from deepspeed.runtime.zero import partition_parameters as pp

    cls, name = pp.InsertPostInitMethodToModuleSubClasses, "_add_tensor_creation_wrappers"
    original = vars(cls)[name]
    guard = ConstructorGuard()
    guard.open()
    ours = vars(cls)[name]

    def foreign(self: Any) -> None:
        ours.__get__(self, cls)()

    try:
        setattr(cls, name, foreign)
        with zero_init():
            assert_truthful()
        guard.close()
        assert vars(cls)[name] is foreign
        with zero_init():
            assert_stock()
    finally:
        setattr(cls, name, original)


def test_a_tensor_override_without_dtype_is_respected() -> None:
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters as pp

    if not hasattr(pp, "DeepSpeedTensorOverride"):
        assert deepspeed.__version__.startswith("0.1")
        return
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    for overrides in ([], [pp.DeepSpeedTensorOverride.device]):
        with ConstructorGuard(), deepspeed.zero.Init(config_dict_or_path=config, tensor_overrides=overrides):
            assert torch.ones(2).dtype == FP32
            assert torch.ones(2, dtype=torch.float64).dtype == torch.float64
            assert torch.nn.Parameter(torch.ones(2, dtype=FP32)).dtype == FP32


@contextmanager
def transformers_arange_fix() -> Iterator[None]:
    from transformers.integrations.deepspeed import prevent_arange_dtype_change

    with prevent_arange_dtype_change():
        yield


def has_arange_fix() -> bool:
    if importlib.util.find_spec("transformers") is None:
        return False
    from transformers.integrations import deepspeed as integration

    return hasattr(integration, "prevent_arange_dtype_change")


@pytest.mark.skipif(not has_arange_fix(), reason="this transformers has no prevent_arange_dtype_change")
@pytest.mark.parametrize("guard_first", [True, False])
def test_around_and_inside_the_arange_fix_of_transformers(guard_first: bool) -> None:
    order: list[Callable[[], Any]] = [ConstructorGuard, transformers_arange_fix]
    with ExitStack() as stack:
        for enter in order if guard_first else order[::-1]:
            stack.enter_context(enter())
        stack.enter_context(zero_init())
        assert torch.ones(2, dtype=FP32).dtype == FP32
        assert torch.arange(2, dtype=FP32).dtype == FP32
        assert torch.arange(2.0).dtype == FP32  # as this fix has it
        assert torch.nn.Parameter(torch.arange(2, dtype=FP32)).dtype == FP32
        assert torch.nn.Parameter(torch.ones(2, dtype=FP32)).dtype == BF16


def test_a_deepspeed_without_the_hooked_names_is_refused_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters as pp

    before = replaceable()
    with monkeypatch.context() as patch:
        patch.delattr(pp, "_orig_torch_eye")
        with pytest.raises(IncompatibleVersionError, match="_orig_torch_eye") as caught:
            ConstructorGuard().open()
    assert deepspeed.__version__ in str(caught.value)
    assert_unchanged(before)
