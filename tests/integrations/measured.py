"""Writes down what a model's tables are after training, by safe_rope's audit and without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def measure(model: Any, folder: str) -> None:
    from support import families

    before = os.environ.pop("SAFE_ROPE", None)
    import safe_rope

    if before is not None:
        os.environ["SAFE_ROPE"] = before
    truth = families.reference("llama")
    modules = families.rotary_modules(model).values()
    ulps = max(families.ulps(families.read_tables(module), truth) for module in modules)
    audit = safe_rope.audit(model)
    seen = {"ulps": ulps, "audit": audit.to_dict(), "argv": os.sys.argv}  # type: ignore[attr-defined]
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    seen["engine is corrected"] = any(
        str(getattr(hook, "__module__", "")).startswith("safe_rope.autocast.") for hook in hooks
    )
    rank = os.environ.get("RANK", "0")
    Path(folder, f"measured-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
