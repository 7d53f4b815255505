"""One rank of DeepSpeed's tests: every combination of the parameters of every test, one after the other.

Usage: python -m laboratory.deepspeed_tests.worker WHO TESTS ONLY RESULT.json, as a rank.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch

import safe_rope
from laboratory.deepspeed_tests import FILES

LIMIT_OF_A_TEST = 120.0  # seconds, after which the log says where it hangs


def combinations(marks: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments that parametrize marks stand for; those of this project have one name each."""
    columns = [[(mark.args[0], value) for value in mark.args[1]] for mark in marks]
    yield from (dict(row) for row in itertools.product(*columns))


def cases(module: Any) -> Iterator[tuple[str, Any]]:
    own = [cls for cls in vars(module).values() if getattr(cls, "__module__", "") == module.__name__]
    for cls in (cls for cls in own if getattr(cls, "is_dist_test", False)):
        for name, method in vars(cls).items():
            if name.startswith("test"):
                marks = [*getattr(cls, "pytestmark", ()), *getattr(method, "pytestmark", ())]
                for values in combinations([mark for mark in marks if mark.name == "parametrize"]):
                    shown = ", ".join(str(value) for value in values.values())
                    yield f"{cls.__name__}.{name}[{shown}]", functools.partial(method, cls(), **values)


class Facade:
    """What the tests see as the module deepspeed, or as its accelerator: ``other`` with changes."""

    def __init__(self, other: Any, **changes: Any) -> None:
        self.__dict__ = {"other": other, **changes}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)


def agreed(flag: bool, op: Any = all) -> bool:
    """Stands for a gather of scalars, which gloo does not do."""
    flags: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(flags, flag)
    return bool(op(flags))


def adapt(module: Any, initialize: Any) -> None:
    """Let a module of tests run on CPU over the process group that is there."""
    cpu = Facade(module.get_accelerator(), current_device=lambda: "cpu")
    ddp = torch.nn.parallel.DistributedDataParallel
    module.get_accelerator = lambda: cpu
    common: Any = importlib.import_module("unit.common")
    common.reduce_boolean_flags = agreed
    module.bf16_required_version_check = lambda: True  # it asks for NCCL
    scaler = functools.partial(torch.amp.GradScaler, "cpu")  # of CUDA it would be disabled
    module.torch = Facade(torch, amp=Facade(torch.amp, GradScaler=scaler))
    module.DDP = lambda model, device_ids=None, output_device=None: ddp(model)
    module.deepspeed = Facade(
        module.deepspeed, initialize=initialize, init_distributed=lambda *args, **kwargs: None
    )


def main(who: str, tests: str, only: str, result: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    deepspeed.logger.setLevel("ERROR")
    # The tests ask for determinism, which also fills what is empty: 2 GB of DeepSpeed's buffers in each step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", verbose=False)
    sys.path.insert(0, tests)
    seen = {}
    for file in (file for file in FILES if Path(tests, file).exists()):
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        adapt(module, {"deepspeed": deepspeed, "safe_rope": safe_rope}[who].initialize)
        for name, run in cases(module):
            if only not in name:
                continue
            print(name, flush=True)
            faulthandler.dump_traceback_later(LIMIT_OF_A_TEST, exit=True)
            try:
                run()
            except BaseException as error:  # pytest's skip is one
                first = str(error).partition("\n")[0]
                seen[name] = f"{type(error).__name__}: {first}"
            else:
                seen[name] = ""
            gc.collect()
    faulthandler.cancel_dump_traceback_later()
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
