"""Decoding, prefill and a training step, with the guard and without: a model for every body that rotates.

The models share their weights and take turns in one process: one with the guard, one without, and another
one without, as a control of how much the figures mean. A turn of decoding is several steps, as a model that
is alone takes them. Operators are counted by torch's profiler: those that the model calls, and those that
call no other.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _process import say
from rich.table import Table

from laboratory.bench.timing import clock, wait
from laboratory.report import read_rows, wide_console

SURVEY = Path(__file__).resolve().parents[3] / "docs" / "data"
KNOWN = (
    "llama",
    "gpt_neox",
    "gemma3_text",
    "gptj",
    "cohere",
    "deepseek_v3",
    "olmo2",
    "phi3",
    "modernbert-decoder",
)
"""Taken where there is a choice, and besides what covers the bodies."""
ALSO = ("esm", "codegen", "qwen2_vl_text", "gpt_oss", "deepseek_v2", "roformer", "falcon")
SETTINGS: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 8, "rotary_dim": 32},
    "esm": {"position_embedding_type": "rotary", "pad_token_id": 1, "token_dropout": False},
    "gpt_oss": {"_experts_implementation": "eager"},
    "roformer": {"is_decoder": True},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy", "_experts_implementation": "eager"},
}
"""What a config that has only been shrunk lacks to run, or to decode."""
PROMPT = 128
LARGEST = 24_000_000
VOCABULARY = 1024
FULLY, PINNED = 1.0, 1.05
WARM_UP = 10
"""Calls that are not timed: the first few look up positions without building tables for them."""
STEPS = 8
"""Of decoding in a turn, after one that is not timed: the other model has left its own in the caches."""
RECORD = SURVEY / "decode.json"
LIMIT = 600.0
MEMORY = 12 << 30


class Case(NamedTuple):
    """What is timed of a model: ``make`` prepares one turn of it and returns the call."""

    what: str
    batch: int
    make: Callable[[Any], Callable[[], Any]]
    many: bool = False
    """Whether a turn is of several calls."""


def run(options: argparse.Namespace) -> int:
    """Measure every subject in a fork of its own; write what came out, and say what missed its target."""
    from laboratory.forked import in_child, one_rank

    if options.page:
        from laboratory.bench.decode_page import page

        print(page(json.loads(RECORD.read_text(encoding="utf-8"))), end="")
        return 0
    one_rank()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for name in options.only.split(",") if options.only else subjects():
        began = time.monotonic()
        if options.device == "cpu":
            found = in_child(functools.partial(measure, name, options), LIMIT, MEMORY, distributed=False)
            both = [functools.partial(memory, name, is_guarded, options) for is_guarded in (False, True)]
            found["memory"] = [in_child(one, LIMIT, MEMORY, distributed=False) for one in both]
        else:
            found = measure(name, options)
        rows.append({"model_type": name, **found, "here": here(options)})
        say(f"{name}: {found.get('reason', '')} {time.monotonic() - began:.0f} s")
        if options.json:
            record = json.loads(options.json.read_text(encoding="utf-8")) if options.add else {}
            record[options.add or "rows"] = rows
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return show(rows)


def here(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the times depend on, besides the code."""
    import transformers

    gpu = {"gpu": torch.cuda.get_device_name()} if options.device.startswith("cuda") else {}
    return {
        **gpu,
        "processor": f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load": [round(value, 1) for value in os.getloadavg()],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "layers": options.layers,
        "width": options.width,
        "prompt": PROMPT,
    }


def subjects() -> list[str]:
    """Return a model type for each body of the survey, and a few whose bodies it could not measure."""
    import transformers

    by_body: dict[str, list[str]] = {}
    for row in read_rows(SURVEY / f"zoo-{transformers.__version__}.jsonl"):
        for body in row.get("rotation") or () if isinstance(row.get("rotation"), dict) else ():
            by_body.setdefault(body, []).append(row["model_type"])
    chosen = [next((k for k in KNOWN if k in names), min(names, key=len)) for names in by_body.values()]
    return list(dict.fromkeys([*KNOWN, *chosen, *ALSO]))


def memory(name: str, is_guarded: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Return by how many MB a process grows that builds one model and calls it."""
    from laboratory.soak.memory import resident
    from laboratory.zoo.shrink import quick_weights

    warnings.simplefilter("ignore")
    before = resident()
    with quick_weights():
        found = sized(name, options.layers, options.width)
        model = None if found is None else built(*found[:2], is_guarded)[0]
    if model is None:
        return {"reason": "cannot be built small"}
    model.to(torch.bfloat16).eval()
    for case in itertools.islice(cases(model, 1, ["decode"], "cpu"), 1):
        call = case.make(model)
        for _ in range(WARM_UP):
            call()
    gc.collect()
    return {"MB": round((resident() - before) / 1e6, 1)}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the times and counts of one model type, or why there are none."""
    from laboratory.zoo.shrink import config_classes, quick_weights

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if name not in config_classes():
        return {"reason": "not in this transformers"}
    with quick_weights():
        stock, guarded, layers, protection = models(name, options.layers, options.width)
    if stock is None:
        return {"reason": "cannot be built small"}
    control = copy.deepcopy(stock)
    for model in (stock, guarded, control):
        model.to(options.device, torch.bfloat16).eval()
    for model in (guarded, control):
        for parameter, same in zip(stock.parameters(), model.parameters(), strict=True):
            same.data = parameter.data  # where weights lie in memory costs or saves some percent
    found: dict[str, Any] = {"layers": layers, **protection, "cases": []}
    wanted = options.cases.split(",")
    batches = [int(batch) for batch in options.batches.split(",")]
    for batch in batches:
        # A prefill and a training step have tokens enough in one sequence.
        some = [what for what in wanted if batch == min(batches) or what not in ("prefill", "training")]
        for case in cases(stock, batch, some, options.device):
            row: dict[str, Any] = {"what": case.what, "batch": batch}
            try:
                row |= compare(case, (stock, guarded, control), options)
            except Exception as error:  # one case says why, the others go on
                row["reason"] = f"{type(error).__name__}: {str(error)[:160]}"
            found["cases"].append(row)
    return found


def models(name: str, layers: int, width: str = "small") -> tuple[Any, Any, int, dict[str, Any]]:
    """Return the model without the guard and with it, how many layers they have, and how it is protected."""
    found = sized(name, layers, width)
    if found is None:
        return None, None, 0, {}
    cls, config, layers = found
    stock, _ = built(cls, config, is_guarded=False)
    guarded, report = built(cls, config, is_guarded=True)
    levels = [entry.level for entry in report.protected]
    shares = {"full": levels.count("full"), "pinned": levels.count("pinned")}
    return stock, guarded, layers, shares


def sized(name: str, layers: int, width: str) -> tuple[Any, Any, int] | None:
    """Return a model's class, a config that it can be built from here, and how many layers that has."""
    from laboratory.zoo.shrink import build, buildable, config_classes, model_class

    cls = model_class(config_classes()[name])
    if cls is not None and width == "own":
        return cls, of_own_width(config_classes()[name](), layers), layers
    config, _ = buildable(config_classes()[name], cls, LARGEST) if cls is not None else (None, "")
    if cls is None or config is None:
        return None
    deep = deepened(config, layers)
    for key, value in SETTINGS.get(name, {}).items():
        setattr(deep, key, value)
    try:
        build(cls, deep)
    except Exception:
        return cls, config, 2
    return cls, deep, layers


def of_own_width(config: Any, layers: int) -> Any:
    """Return a default config with few layers, and a small vocabulary, which no layer sees."""
    config.vocab_size = VOCABULARY
    for name in ("num_hidden_layers", "n_layer"):
        if config.attribute_map.get(name, name) in vars(config):
            setattr(config, name, layers)
    return config


@torch.no_grad()
def built(cls: Any, config: Any, is_guarded: bool) -> tuple[Any, Any]:
    """Return a model of ``config``, and the report of the guard around it."""
    import safe_rope
    from laboratory.zoo.shrink import build

    if not is_guarded:
        return build(cls, config), None
    with safe_rope.guard() as session:
        model = build(cls, config)
    return model, session.report


def deepened(config: Any, layers: int) -> Any:
    """Return a copy of a config of two layers that has more of them, of the same kinds."""
    config = copy.deepcopy(config)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if vars(config).get(config.attribute_map.get(name, name)) == 2:
            setattr(config, name, layers)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == 2 and name.endswith(("_types", "_rope_layers")):
            setattr(config, name, value * (layers // 2))
        elif name == "kv_source_layers" and value == [0, 1]:  # whose keys and values each layer reads
            setattr(config, name, list(range(layers)))
        elif hasattr(value, "attribute_map"):  # a model of several has a configuration for each
            setattr(config, name, deepened(value, layers))
    if getattr(config, "is_heterogeneous", False):
        config.per_layer_config = None  # it names layers of the config before it was shrunk
    return config


def cases(model: Any, batch: int, wanted: list[str], device: str) -> Iterator[Case]:
    """Yield what can be timed of a model: decoding where it keeps a cache, else its own forward."""
    inputs = _text(batch, device)
    step = _text(batch, device, 1)
    try:
        with torch.no_grad():
            name = _name_of_cache(model(**inputs, use_cache=True))
    except Exception:
        name = None
    if name is not None:
        decoding = functools.partial(_decoding, inputs=inputs, step=step, name=name)
        kinds = {
            "decode": decoding,
            "static": functools.partial(decoding, cache=_static),
            "compiled": functools.partial(decoding, cache=_static, compiled="default"),
            "graphed": functools.partial(decoding, cache=_static, compiled="reduce-overhead"),
        }
        yield from (Case(kind, batch, run, True) for kind, run in kinds.items() if kind in wanted)
    if name is None:
        found = own_inputs(model, device) if batch == 1 else None
        if found is not None:
            yield Case("forward", batch, lambda m: _forward(m, found))
        return
    if "prefill" in wanted:
        yield Case("prefill", batch, lambda m: _forward(m, inputs))
    if "training" in wanted:
        yield Case("training", batch, lambda m: _training(m, inputs))


def own_inputs(model: Any, device: str) -> dict[str, Any] | None:
    """Return an input that a model without a cache takes, floating tensors in bfloat16."""
    from laboratory.zoo.run import _candidates

    for inputs in _candidates(model):
        low = {
            name: v.to(device, torch.bfloat16) if v.is_floating_point() else v.to(device)
            for name, v in inputs.items()
        }
        try:
            with torch.no_grad():
                model(**low)
        except Exception:
            continue
        return low
    return None


def _text(batch: int, device: str, length: int = PROMPT) -> dict[str, Any]:
    return {"input_ids": torch.randint(5, 100, (batch, length), device=device)}


def _name_of_cache(output: Any) -> str | None:
    """Return the name of the cache in what a model returns and takes: "cache" since transformers 5.24."""
    names = ("cache", "past_key_values")
    return next((name for name in names if getattr(output, name, None) is not None), None)


def _static(model: Any, batch: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=4 * PROMPT)


def _decoding(
    model: Any, inputs: Any, step: Any, name: str, cache: Any = None, compiled: str = ""
) -> Callable[[], Any]:
    state: dict[str, Any] = {"left": 0, "position": PROMPT}
    run = torch.compile(model, dynamic=False, mode=compiled) if compiled else model

    def one() -> Any:
        position = torch.full_like(step["input_ids"], state["position"])  # as generate() gives them
        return run(**step, position_ids=position, **state["cache"], use_cache=True)

    def prepare() -> None:
        kept = {} if cache is None else {name: cache(model, len(step["input_ids"]))}
        state["cache"] = {name: getattr(model(**inputs, **kept, use_cache=True), name)}
        state["position"] = PROMPT

    @torch.no_grad()
    def call() -> Any:
        if state["left"] == 0:
            prepare()
            state["left"] = 64
        state["left"] -= 1
        result = one()
        state["position"] += 1
        return result

    call.before = prepare  # type: ignore[attr-defined]
    return call


def _forward(model: Any, inputs: Any) -> Callable[[], Any]:
    @torch.no_grad()
    def call() -> Any:
        return model(**inputs)

    return call


def _training(model: Any, inputs: Any) -> Callable[[], Any]:
    def call() -> None:
        model.zero_grad()
        model(**inputs, use_cache=False)[0].float().pow(2).mean().backward()

    return call


def compare(case: Case, three: tuple[Any, Any, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Time one case of the stock model, the guarded one and the control in turns; count its operators.

    Returns:
        the stock model's median in milliseconds; for the guarded model and the control the median of the
        ratios of each turn, and by how much that median may be off; operators per call.

    """
    calls = [case.make(model) for model in three]
    for which, call in enumerate(calls):
        with as_it_is_alone(which):
            for _ in range(WARM_UP):
                call()
    counts = []
    for which in (0, 1):
        with as_it_is_alone(which):
            counts.append(operators(calls[which]))
    now = clock(options.device)
    times: list[list[float]] = [[], [], []]
    orders = list(itertools.permutations(range(3)))
    gc.collect()
    gc.disable()
    for index in range(options.rounds if case.many else max(options.rounds // 4, 6)):
        for which in orders[index % len(orders)]:
            with as_it_is_alone(which):
                times[which].append(_turn(calls[which], STEPS if case.many else 1, now, options.device))
    gc.enable()
    ratio, off = _compared(times[1], times[0])
    control, control_off = _compared(times[2], times[0])
    return {
        "stock_ms": round(1e3 * statistics.median(times[0]), 4),
        "ratio": ratio,
        "off": off,
        "control": control,
        "control_off": control_off,
        "operators": [count[0] for count in counts],
        "leaves": [count[1] for count in counts],
    }


def _turn(call: Callable[[], Any], steps: int, now: Callable[[], float], device: str) -> float:
    call()
    taken = []
    for _ in range(steps):
        wait(device)
        began = now()
        call()
        wait(device)
        taken.append(now() - began)
    return statistics.median(taken)


def _compared(times: list[float], stock: list[float]) -> tuple[float, float]:
    """Return the median of the turns' ratios, and half of its 95 % interval (McGill et al. 1978)."""
    ratios = [one / other for one, other in zip(times, stock, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return round(middle, 4), round(1.57 * (high - low) / len(ratios) ** 0.5, 4)


def as_it_is_alone(which: int) -> contextlib.AbstractContextManager[None]:
    """Give a model the functions that it has where no other model is: the second one is guarded."""
    return contextlib.nullcontext() if which == 1 else stock_functions()


@contextlib.contextmanager
def stock_functions() -> Iterator[None]:
    """Let functions that are FP32-aware for the guarded model be what they are without it."""
    from safe_rope.rotation import _installed

    ours = [r for r in _installed._installed.values() if isinstance(r, _installed._OwnCode)]
    for one in ours:
        one.function.__code__ = one.code
    try:
        yield
    finally:
        for one in ours:
            one.function.__code__ = one.ours


def operators(call: Callable[[], Any]) -> tuple[int, int]:
    """Return how many operators a call runs from outside of any operator, and how many run no other."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
    events = [e for e in profiler.events() if e.name.startswith(("aten::", "safe_rope::"))]
    outer = [e for e in events if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::")]
    leaves = [e for e in events if not any(c.name.startswith("aten::") for c in e.cpu_children)]
    return len(outer), len(leaves)


def is_late(row: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether a case misses its target by more than what two equal models differ by, or may be off by."""
    noise = max(abs(case["control"] - 1), case["off"])
    return bool(case["ratio"] > (PINNED if row["pinned"] else FULLY) + noise)


def show(rows: list[dict[str, Any]]) -> int:
    """Print the comparison; return 1 if a target is missed."""
    columns = ("model", "level", "what", "batch", "stock ms", "ratio", "control", "operators", "leaves")
    table = Table(*columns)
    missed = False
    for row in rows:
        if "reason" in row:
            table.add_row(row["model_type"], "", row["reason"][:60])
        level = "pinned" if row.get("pinned") else "full"
        for case in row.get("cases", ()):
            if "reason" in case:
                table.add_row(row["model_type"], level, case["what"], str(case["batch"]), case["reason"][:60])
                continue
            missed |= (late := is_late(row, case))
            table.add_row(
                row["model_type"],
                level,
                case["what"],
                str(case["batch"]),
                f"{case['stock_ms']:.3f}",
                f"{case['ratio']:.3f} ± {case['off']:.3f}{' !' if late else ''}",
                f"{case['control']:.3f} ± {case['control_off']:.3f}",
                "{} / {}".format(*case["operators"]),
                "{} / {}".format(*case["leaves"]),
            )
    wide_console().print(table)
    sys.stdout.flush()
    return int(missed)
