"""On a rank: what is sent, what it costs, and who sees rounded weights."""

from __future__ import annotations

import contextlib
import types
from pathlib import Path
from typing import Any

import parity
import tiny_models
import torch

STEPS = 4
ELEMENTS = 10_000  # the reduce_bucket_size of the config
PERSISTENT = 5_000  # elements: the attention and the norms, but not the experts


def deepspeed_engine(case: parity.Case) -> Any:
    """The same by deepspeed.initialize, with DeepSpeed's own choice of safe modules."""
    import deepspeed

    from safe_rope.autocast import _deepspeed

    module = tiny_models.build(case.model)
    with _deepspeed.own_globals():
        engine = deepspeed.initialize(
            model=module, optimizer=parity.new_optimizer(module), config=case.config()
        )[0]
        # Its method reads a flag that all engines of the process share.
        own = type(engine.optimizer).get_param_comm_dtype
    dtypes = {id(p): getattr(p, _deepspeed.mark_name(), p.dtype) for p in module.parameters()}
    assert own is not None
    engine.optimizer.get_param_comm_dtype = lambda parameter: dtypes[id(parameter)]
    return engine


def bytes_of_a_step(engine: Any, case: parity.Case, first: int = 0) -> dict[str, int]:
    """Bytes of every dtype in a step, after one more with what happens once only."""
    from safe_rope.autocast import traffic

    parity.train_step(engine, case, first)
    engine.step()
    with traffic() as seen:
        parity.train_step(engine, case, first + 1)
        engine.step()
    return {str(dtype): seen.bytes(getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}


def staging(engine: Any, stage: int) -> int:
    """Bytes of the buffers in which gradients wait for their reduction."""
    optimizer = engine.optimizer
    if stage < 3:
        optimizer.setup_buckets()
    buffers = [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    flat = [tensor for buffer in buffers for tensor in (buffer if isinstance(buffer, list) else [buffer])]
    return sum(tensor.nbytes for tensor in flat)


def sent() -> dict[str, Any]:
    """Bytes of a step, by safe_rope and by DeepSpeed, and the staging memory of both."""
    seen: dict[str, Any] = {}
    for model in ("llama", "gpt2", "mixtral eager"):
        for stage in (2, 3):
            case = parity.Case(model, "bfloat16", stage, 1, clip=False)
            one: dict[str, Any] = {}
            for who, build in (("safe_rope", parity.new_engine), ("deepspeed", deepspeed_engine)):
                engine = build(case)
                one[who] = bytes_of_a_step(engine, case)
                engine.destroy()
            seen[f"{model}, ZeRO {stage}"] = one
    for stage, overlap in ((1, False), (2, False), (2, True), (3, False)):
        case = parity.Case("llama", "bfloat16", stage, 1, clip=False, overlap=overlap)
        zero = {**case.config()["zero_optimization"], "reduce_bucket_size": ELEMENTS}
        engine = parity.new_engine(case, zero_optimization=zero)
        seen[f"staging, ZeRO {stage}" + ", overlap" * overlap] = staging(engine, stage) / ELEMENTS
    return seen


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """The FP32 weights that the optimizer holds."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def equal(weights: dict[str, Any], truth: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weights[name], value) for name, value in truth.items())


def refusal(call: Any) -> str:
    from safe_rope.errors import PrecisionError

    try:
        call()
    except PrecisionError as error:
        return str(error)
    return ""


def interrupt(call: Any, module: Any) -> None:
    """End ``call`` in the forward of ``module`` as Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(stop)
    with contextlib.suppress(KeyboardInterrupt):
        call()
    handle.remove()


def rounded(stage: int, folder: Path) -> dict[str, Any]:
    """Train with and without the low-precision gather; read the weights in every way."""
    import safe_rope

    case = parity.Case("llama", "bfloat16", stage, 1, clip=True)
    seen: dict[str, Any] = {"losses": []}
    for low in (False, True):
        engine = parity.new_engine(case, low_precision_gather=low)
        losses = []
        for step in range(STEPS):
            losses.append(parity.train_step(engine, case, step))
            engine.step()
        seen["losses"].append(losses)
    module = engine.module
    truth = masters(engine)
    parameters = dict(module.named_parameters())
    seen["parameters are rounded"] = not equal(parameters, truth)
    seen["largest error"] = max(
        float(((parameters[n].detach() - t).abs() / t.abs().clamp(min=1e-30)).max()) for n, t in truth.items()
    )
    batch = tiny_models.batch(99, 0, 0)
    with torch.no_grad():
        under_autocast = engine(**batch).logits
        seen["export"] = refusal(module.state_dict)
        seen["export of a part"] = refusal(module.model.layers.state_dict)
        seen["outside"] = refusal(lambda: module(**batch))
        seen["a part outside"] = refusal(lambda: module.lm_head(torch.ones(1, module.lm_head.in_features)))
        interrupt(lambda: engine(**batch), module.model.layers[1].mlp)
        seen["outside after an interrupt"] = refusal(lambda: module(**batch))
        safe_rope.autocast.full_precision(engine)
        seen["restored"] = equal(parameters, truth)
        seen["exported"] = equal(module.state_dict(), truth)
        seen["same logits"] = bool(torch.equal(engine(**batch).logits, under_autocast))

        def one_step() -> None:
            with torch.enable_grad():
                parity.train_step(engine, case, STEPS)
            engine.step()

        one_step()
        seen["rounded again"] = bool(refusal(module.state_dict))
        engine.eval()
        seen["evaluated outside"] = refusal(lambda: module(**batch))
        engine.train()
        one_step()
        truth = masters(engine)
        engine.save_checkpoint(str(folder), tag=f"zero{stage}")
        torch.distributed.barrier()
        file = next((folder / f"zero{stage}").glob("mp_rank_*_model_states.pt"))
        seen["saved"] = equal(torch.load(file, weights_only=False)["module"], truth)
    engine.destroy()
    return seen | in_place(case)


def in_place(case: parity.Case) -> dict[str, Any]:
    """What a program that knows ``deepspeed.initialize`` only reads of the model after a step."""
    import deepspeed

    from safe_rope.autocast import in_place_of_deepspeeds

    known = types.SimpleNamespace(initialize=deepspeed.initialize)
    in_place_of_deepspeeds(known)
    module = case.build()
    engine = known.initialize(model=module, optimizer=parity.new_optimizer(module), config=case.config())[0]
    parity.train_step(engine, case, 0)
    engine.step()
    outside = refusal(lambda: module(**tiny_models.batch(99, 0, 0)))
    exported = refusal(module.state_dict) == "" and equal(module.state_dict(), masters(engine))
    return {"in place, outside": outside, "in place, exported": exported}


def persistent(folder: Path) -> dict[str, Any]:
    """ZeRO 3 with some parameters persistent, gathered low after the step and not; read them in every way."""
    import deepspeed

    case = parity.Case("mixtral eager", "bfloat16", 3, 1, clip=True)
    zero = case.config()["zero_optimization"]
    zero |= {
        "stage3_param_persistence_threshold": PERSISTENT,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    seen: dict[str, Any] = {"losses": [], "bytes": []}
    for low in (False, True):
        engine = parity.new_engine(case, low_precision_gather=low, zero_optimization=zero)
        losses = []
        for step in range(2):  # until DeepSpeed has seen the order of the modules, it keeps nothing
            losses.append(parity.train_step(engine, case, step))
            engine.step()
        seen["bytes"].append(bytes_of_a_step(engine, case, 2))
        losses += [parity.train_step(engine, case, STEPS)]
        engine.step()
        seen["losses"].append(losses)
    module = engine.module
    seen["parameters are rounded"] = not kept_equal(engine)
    seen["export"] = refusal(module.state_dict)
    batch = tiny_models.batch(99, 0, 0)
    truth = masters(engine)
    plain = tiny_models.build(case.model)
    plain.load_state_dict(truth)
    with torch.no_grad():
        seen["outside"] = float((module(**batch).logits - plain(**batch).logits).abs().max())
    seen["restored"] = kept_equal(engine)
    with torch.no_grad():
        engine(**batch)
        seen["outside after autocast"] = float((module(**batch).logits - plain(**batch).logits).abs().max())

    def step() -> None:
        parity.train_step(engine, case, STEPS + 1)
        engine.step()

    step()
    seen["rounded again"] = not kept_equal(engine)
    truth = masters(engine)
    parameters = dict(module.named_parameters())
    # One by one: DeepSpeed 0.18 waits for the last of several gathers only, which gloo does not end in order.
    for kind, modifier in (("gathered", 0), ("written back", None)):
        seen[kind] = True
        for name, parameter in parameters.items():
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=modifier):
                seen[kind] &= bool(torch.equal(parameter, truth[name]))
    step()
    truth = masters(engine)
    engine.save_16bit_model(str(folder), "zero3.bin")
    torch.distributed.barrier()
    seen["saved"] = equal(torch.load(folder / "zero3.bin"), truth)
    step()
    engine.eval()
    seen["evaluated"] = kept_equal(engine)
    engine.destroy()
    return seen


def kept_equal(engine: Any) -> bool:
    """Whether every parameter that is gathered now has the optimizer's FP32 values."""
    kept = {n: p for n, p in engine.module.named_parameters() if p.ds_status.name == "AVAILABLE"}
    truth = masters(engine)
    assert sum(p.ds_numel for p in kept.values()) > PERSISTENT
    return equal(kept, {name: truth[name] for name in kept})


def outside() -> dict[str, Any]:
    """ZeRO 3 under autocast, its model called without: against the master weights in a plain model."""
    case = parity.Case("llama", "bfloat16", 3, 1, clip=False)
    engine = parity.new_engine(case)
    for step in range(STEPS):
        parity.train_step(engine, case, step)
        engine.step()
    plain = tiny_models.build(case.model)
    plain.load_state_dict(masters(engine))
    batch = tiny_models.batch(99, 0, 0)
    hidden = torch.linspace(-1, 1, plain.lm_head.in_features)
    with torch.no_grad():
        part = engine.module.lm_head(hidden) - plain.lm_head(hidden)
        truth = plain(**batch).logits
        logits = engine.module(**batch).logits
        low = engine(**batch).logits
        again = engine.module(**batch).logits
        interrupt(lambda: engine(**batch), engine.module.model.layers[1].mlp)
        interrupted = engine.module(**batch).logits
    return {
        "error of a part": float(part.abs().max()),
        "error": float((logits - truth).abs().max()),
        "error again": float((again - truth).abs().max()),
        "error after an interrupt": float((interrupted - truth).abs().max()),
        "autocast": float((low - truth).abs().max()),
    }


def run(folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"rounded": {stage: rounded(stage, Path(folder)) for stage in (1, 2)}}
    return seen | {"outside": outside(), "persistent": persistent(Path(folder)), "sent": sent()}
