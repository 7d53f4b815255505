"""Makes a Python process guard itself: `safe-rope run` puts this file's folder first on PYTHONPATH.

Python imports the first `sitecustomize` that it finds when it starts. This one imports neither torch nor
anything that does. It takes its own folder off sys.path and hands on to the next `sitecustomize`, the one
that would have been found without it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def _hand_on() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _arm() -> None:
    if os.environ.setdefault("SAFE_ROPE", "1").lower() in ("", "0", "false", "no", "off"):
        return
    try:
        from safe_rope.integrations.autostart import arm
    except ImportError as error:
        _say_unguarded(error)
    else:
        arm()


def _say_unguarded(error: ImportError) -> None:
    # Another environment's Python than the one that safe_rope is installed for.
    if importlib.util.find_spec("torch") is None:
        return
    if sys.stderr is not None:
        print(
            f"safe-rope: {sys.executable} cannot import safe_rope ({error}), so what it runs is not guarded; "
            "install safe-rope there",
            file=sys.stderr,
        )
    if os.environ.get("SAFE_ROPE_STRICT", "").lower() in ("1", "true", "yes", "on"):
        os._exit(2)  # SystemExit would be a fatal error this early


try:
    _hand_on()
finally:
    _arm()
