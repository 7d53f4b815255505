"""The guard and zero.Init in every order; what was replaced is the original again afterwards."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from zero_init import assert_unchanged, replaceable, zero_init

from safe_rope.constructors import ConstructorGuard, interception_active, pristine
from safe_rope.errors import IncompatibleVersionError

pytestmark = pytest.mark.usefixtures("deepspeed_group")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _everything_is_put_back() -> Iterator[None]:
    with zero_init():
        pass  # DeepSpeed itself leaves an attribute behind on the first use
    before = replaceable()
    yield
    assert_unchanged(before)


def assert_truthful() -> None:
    assert interception_active()
    assert torch.arange(5, dtype=FP32).dtype == FP32
    assert torch.ones(3, dtype=torch.float64).dtype == torch.float64
    assert torch.tensor([0.1], dtype=FP32).item() == pytest.approx(0.1, abs=1e-8)
    assert torch.ones(3).dtype == BF16
    assert torch.nn.Parameter(torch.ones(3, dtype=FP32)).dtype == BF16


def assert_stock() -> None:
    assert not interception_active()
    assert torch.arange(5, dtype=FP32).dtype == BF16
    assert torch.nn.Parameter(torch.linspace(0, 1, 3)).dtype == FP32


def assert_plain() -> None:
    assert not interception_active()
    for name in ("arange", "ones", "tensor"):
        assert getattr(torch, name) is getattr(torch._C._VariableFunctions, name)
    assert torch.ones(3).dtype == FP32


def test_guard_outside_init() -> None:
    with ConstructorGuard():
        assert_plain()
        with zero_init():
            assert_truthful()
        assert_plain()
        with zero_init():
            assert_truthful()


def test_guard_inside_init() -> None:
    with zero_init():
        stock = replaceable()
        assert_stock()
        for _ in range(2):
            with ConstructorGuard():
                assert_truthful()
            assert_stock()
            assert_unchanged(stock)


def test_guard_closed_before_an_init_that_opened_under_it() -> None:
    guard = ConstructorGuard()
    guard.open()
    with zero_init():
        assert_truthful()
        guard.close()
        assert_stock()


def test_guard_opened_in_init_and_closed_after_it() -> None:
    guard = ConstructorGuard()
    with zero_init():
        guard.open()
        assert_truthful()
    assert_plain()
    guard.close()


def test_nested_inits() -> None:
    with zero_init(), ConstructorGuard(), zero_init():
        assert_truthful()


def test_nested_and_repeated_opens_count() -> None:
    first, second = ConstructorGuard(), ConstructorGuard()
    with zero_init():
        first.open()
        first.open()
        second.open()
        first.close()
        assert_truthful()
        second.close()
        assert_truthful()
        first.close()
        assert_stock()
    with pytest.raises(RuntimeError, match="open"):
        first.close()


@pytest.mark.parametrize("inside", [True, False], ids=["guard inside", "guard outside"])
def test_an_exception_puts_everything_back(inside: bool) -> None:
    order: list[Callable[[], Any]] = [zero_init, ConstructorGuard]

    def fail() -> None:
        with ExitStack() as stack:
            for enter in order if inside else order[::-1]:
                stack.enter_context(enter())
            stack.enter_context(pristine())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_constructor_that_raises_still_leaves_the_next_one_right() -> None:
    with ConstructorGuard(), zero_init():
        with pytest.raises(TypeError):
            torch.zeros("three", dtype=FP32)  # type: ignore[call-overload]
        with pytest.raises(ZeroDivisionError), pristine():
            raise ZeroDivisionError
        assert_truthful()


def test_shutdown_and_restore_init_context() -> None:
    from deepspeed.runtime.zero import partition_parameters as pp

    with ConstructorGuard(), zero_init():
        for _ in range(2):
            pp.shutdown_init_context()
            assert_plain()
            pp.restore_init_context()
            assert_truthful()


def test_guard_opened_while_the_init_context_is_shut_down() -> None:
    from deepspeed.runtime.zero import partition_parameters as pp

    with zero_init():
        pp.shutdown_init_context()
        with ConstructorGuard():
            assert_plain()
            pp.restore_init_context()
            assert_truthful()
        assert_stock()


def in_threads(work: Callable[[], None], count: int) -> None:
    """Run ``work`` in ``count`` threads at once; raise what one of them raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def in_thread(work: Callable[[], None]) -> None:
    in_threads(work, 1)


def test_another_thread_gets_truthful_constructors() -> None:
    with ConstructorGuard(), zero_init():
        in_thread(assert_truthful)
        with pristine():
            assert torch.ones(3).dtype == FP32
            in_thread(assert_truthful)


def test_guard_of_another_thread() -> None:
    guard = ConstructorGuard()
    in_thread(guard.open)
    with zero_init():
        assert_truthful()
        in_thread(guard.close)
        assert_stock()
    with pristine():
        pass  # another thread cannot take a mode off this one's stack; what it left is without effect


def test_a_guard_opened_in_another_thread_leaves_no_mode_there() -> None:
    def work() -> None:
        with ConstructorGuard():
            assert_truthful()
            assert torch.overrides._get_current_function_mode_stack()
        assert not torch.overrides._get_current_function_mode_stack()

    with zero_init():
        in_thread(work)


def test_many_threads_open_and_close() -> None:
    def work() -> None:
        for _ in range(30):
            with ConstructorGuard():
                assert torch.ones(2, dtype=FP32).dtype == FP32
                with pristine():
                    assert torch.ones(2).dtype == FP32

    with zero_init():
        stock = replaceable()
        in_threads(work, 6)
        assert_unchanged(stock)


def test_the_default_dtype_of_pristine_sections_in_two_threads() -> None:
    torch.set_default_dtype(BF16)
    try:

        def work() -> None:
            for _ in range(200):
                with pristine(), pristine():
                    time.sleep(1e-5)
                    assert (torch.arange(3) / 2).dtype == FP32

        in_threads(work, 4)
        assert torch.get_default_dtype() == BF16
    finally:
        torch.set_default_dtype(FP32)


def test_a_pristine_section_makes_plain_fp32_cpu_tensors_without_autocast() -> None:
    torch.set_default_dtype(BF16)
    try:
        for context in (zero_init, ConstructorGuard, lambda: torch.device("meta")):
            with context(), torch.autocast("cpu", dtype=BF16):  # type: ignore[attr-defined]
                with pristine():
                    assert not torch.is_autocast_enabled("cpu")
                    assert torch.is_grad_enabled()
                    for made in (torch.ones(2), torch.linspace(0, 1, 2), torch.arange(2) / 3):
                        assert (made.dtype, made.device.type) == (FP32, "cpu")
                    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FP32
                    assert torch.ones(2, dtype=BF16).dtype == BF16
                    assert torch.Tensor([1.5]).tolist() == [1.5]
                    assert not interception_active()
                assert torch.is_autocast_enabled("cpu")
                assert torch.get_default_dtype() == BF16
    finally:
        torch.set_default_dtype(FP32)


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


def test_mode_contexts_may_overlap_in_any_order() -> None:
    guard = ConstructorGuard()
    with zero_init():
        with torch.device("cpu"):
            guard.open()
        assert_truthful()
        device = torch.device("cpu")
        device.__enter__()
        guard.close()
        device.__exit__(None, None, None)
        with torch.overrides.BaseTorchFunctionMode():
            guard.open()
        assert_truthful()
        guard.close()


def test_a_default_device_may_come_and_go() -> None:
    with zero_init():
        torch.set_default_device("cpu")
        with ConstructorGuard():
            assert_truthful()
            torch.set_default_device(None)
            assert_truthful()
            torch.set_default_device("cpu")
        torch.set_default_device(None)


def test_the_mode_is_only_there_inside_an_open_init() -> None:
    def modes() -> int:
        return len(torch.overrides._get_current_function_mode_stack())

    with ConstructorGuard():
        assert modes() == 0
        with zero_init():
            assert modes() == 1
        assert modes() == 0
        with pristine():
            assert modes() == 1  # torch.device


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


CHILD = """
import sys, torch
from safe_rope.constructors import ConstructorGuard, pristine
with pristine():
    assert torch.ones(1).dtype == torch.float32
assert not any(name.partition(".")[0] in ("deepspeed", "transformers") for name in sys.modules)
guard = ConstructorGuard()
{before}
guard.open()
{after}
deepspeed.init_distributed("gloo")
from zero_init import zero_init
with zero_init():
    assert torch.ones(2, dtype=torch.float32).dtype == torch.float32
    assert torch.ones(2).dtype == torch.bfloat16
guard.close()
with zero_init():
    assert torch.ones(2, dtype=torch.float32).dtype == torch.bfloat16
assert torch.ones is torch._C._VariableFunctions.ones
"""

NO_IMPORT = """
import sys, torch, deepspeed
from safe_rope.constructors import ConstructorGuard, pristine
from zero_init import zero_init
deepspeed.init_distributed("gloo")
state = torch.get_rng_state()
with zero_init(), torch.device("meta"):
    before = set(sys.modules)
    with ConstructorGuard(), torch.device("cpu"):
        table = torch.arange(1, 9, dtype=torch.float32)
        assert torch.nn.Parameter(torch.log(2 * table)).dtype == torch.bfloat16
        with pristine():
            assert torch.nn.Parameter(torch.log(2 * torch.arange(1.0, 9.0))).dtype == torch.bfloat16
    new = sorted(name for name in set(sys.modules) - before if name.startswith("torch"))
    assert not new, new
assert torch.equal(torch.get_rng_state(), state)
"""


def test_the_guard_makes_torch_import_nothing_inside_zero_init(tmp_path: Path) -> None:
    # With Tensor.__new__ replaced, the import of torch._dynamo fails half way: torch.compile is then broken.
    run_child(NO_IMPORT, tmp_path)


@pytest.mark.parametrize("after", [True, False], ids=["guard first", "deepspeed first"])
def test_deepspeed_may_be_imported_before_or_after_the_guard_opens(after: bool, tmp_path: Path) -> None:
    halves = {"before": "", "after": ""} | {"after" if after else "before": "import deepspeed"}
    run_child(CHILD.format(**halves), tmp_path)


def run_child(script: str, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"MASTER_PORT": port, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
