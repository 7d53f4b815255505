"""Everything of a process that safe_rope may replace for a while, as what stands there now."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import signal
import sys
import threading
import time
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from safe_rope import constructors
from safe_rope._protection import wrapped_methods
from safe_rope.constructors import _default_dtype, _shadow, _surroundings
from safe_rope.rotation import _installed

CLASSES = (torch.nn.Module, torch.nn.Parameter, torch.nn.UninitializedParameter, torch.nn.Linear)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
GRACE = 5.0
"""Seconds in which the idle threads of a pool that was dropped end."""
HOOKS = "torch.nn.modules.module"


def everything() -> dict[str, Any]:
    """Return what is compared by identity, by name."""
    found: dict[str, Any] = {f"torch.{name}": value for name, value in vars(torch).items()}
    found["Tensor.__new__"] = torch.Tensor.__new__
    for cls in CLASSES:
        found |= {f"{cls.__name__}.{name}": value for name, value in vars(cls).items() if name[:4] != "_abc"}
    found |= {name: value for name, value in vars(sys.modules[HOOKS]).items() if name.startswith("_global")}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith("transformers.models.llama.modeling"):
            found |= {f"llama.{key}": value for key, value in vars(module).items()}
            found |= {
                f"llama.{key}.code": value.__code__
                for key, value in vars(module).items()
                if inspect.isfunction(value)
            }
    partition = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partition is not None:
        cls = partition.InsertPostInitMethodToModuleSubClasses
        found |= {f"zero.Init.{name}": value for name, value in vars(cls).items() if callable(value)}
    found |= {f"handler of {number.name}": signal.getsignal(number) for number in SIGNALS}
    return found


def settings() -> dict[str, Any]:
    """Return what is compared by value, by name."""
    overrides: Any = torch.overrides
    modes = overrides._get_current_function_mode_stack()
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "function modes": [type(mode).__name__ for mode in modes],
        "dispatch modes": [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()],
        "warning filters": len(warnings.filters),
        "hooks": [
            len(hooks)
            for name, hooks in sorted(vars(sys.modules[HOOKS]).items())
            if name[:7] == "_global" and hasattr(hooks, "__len__")
        ],
        "threads": threads(),
        "processes": len(multiprocessing.active_children()),
        "open guards": (
            constructors._state.opens,
            constructors._state.pristines,
            len(wrapped_methods.watches),
        ),
        "tracking": (_shadow._scopes, _shadow.tracking(), len(_shadow._marks)),
        "sections": (
            len(_default_dtype._sections),
            _surroundings.thread.depth,
            _surroundings.thread.outer_default,
        ),
        "session": constructors._state.session,
        "in use": wrapped_methods._this_thread.uses,
        "aware functions": sorted(map(str, _installed._installed)),
    }


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


class Unchanged:
    """What must be as it is now."""

    def __init__(self) -> None:
        self.objects, self.values = everything(), settings()

    def check(self) -> None:
        """Raise AssertionError with the names of what has changed."""
        gc.collect()
        deadline = time.monotonic() + GRACE
        while threads() != self.values["threads"] and time.monotonic() < deadline:
            time.sleep(0.01)
        objects, values = everything(), settings()
        changed = [name for name in self.objects if objects.get(name) is not self.objects[name]]
        changed += [name for name in objects.keys() - self.objects.keys() if not name.startswith("torch.")]
        changed += [
            f"{name}: {values[name]}, not {self.values[name]}"
            for name in values
            if values[name] != self.values[name]
        ]
        assert not changed, f"changed: {', '.join(changed[:8])}"
