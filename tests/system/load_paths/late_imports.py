"""Run by `test_imports`: nothing is imported before the guard opens; says what was seen as JSON on stdout."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path


def is_ours(value: object) -> bool:
    import safe_rope

    value = getattr(value, "__func__", value)  # a staticmethod's
    code = getattr(value, "__code__", None)
    return code is not None and Path(safe_rope.__file__).parent in Path(code.co_filename).parents


def main() -> None:
    import safe_rope

    guard = safe_rope.guard().start()
    assert "transformers" not in sys.modules
    assert "deepspeed" not in sys.modules

    import deepspeed
    from support import families

    deepspeed.init_distributed("gloo")
    models = {}
    from support.load_paths import zero_init

    for family in families.FAMILIES:
        families.model_class(family)  # torch._dynamo, which this imports, cannot be imported inside zero.Init
    with zero_init():
        for family in families.FAMILIES:
            models[family] = families.build(family)
    guard.stop()
    from namespaces import replaced, snapshot

    errors = {
        family: max(
            families.ulps(families.read_tables(module), families.reference(family))
            for module in families.rotary_modules(model).values()
        )
        for family, model in models.items()
    }
    models.clear()
    gc.collect()
    after = snapshot()
    left = [name for name, value in after.items() if is_ours(value)]
    with safe_rope.guard(), zero_init():
        families.build("llama")
    gc.collect()
    print(json.dumps({"errors": errors, "left": left, "replaced": replaced(after)}))


if __name__ == "__main__":
    main()
