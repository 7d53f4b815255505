"""``initialize``: deepspeed.initialize with its torch_autocast section checked, corrected and kept apart."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from safe_rope._base.functions import signature_of
from safe_rope._base.text import counted
from safe_rope.autocast import _deepspeed, arrival, gather3, gather12, losses, preflight, reads
from safe_rope.autocast.safety import SafetyReport, agreement, choose_parameters, full_shape, held_by
from safe_rope.autocast.settings import SECTION, AutocastSettings, find_config, read_config, without_config

logger = logging.getLogger(__name__)

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
_FP32_BYTES = 4
_FEW = 0.25
"""The share of elements up to which gradients are reduced in FP32, unless the config says otherwise."""
_REPLACED = "in a module that DeepSpeed has put in place of the one traced, as AutoTP does"
_REPLACING = ("tensor_parallel", "expert_parallel")
"""The sections of the config by which DeepSpeed replaces layers."""
_OWN = ("example_inputs", "low_precision_gather")  # arguments of `initialize` that are not DeepSpeed's

Built = tuple[Any, Any, Any, Any]
"""Engine, optimizer, training dataloader, learning rate scheduler."""


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    example_inputs: Any = None,
    low_precision_gather: bool = True,
) -> Built:
    """Build a DeepSpeed engine, with torch.autocast corrected if the config asks for it.

    Takes what ``deepspeed.initialize`` takes and returns what it returns. With the section ``torch_autocast``
    the parameters stay as they are, and the forward runs under torch.autocast. FP32 parameters that autocast
    only ever uses after a cast are gathered and reduced in its dtype. Without the section the engine is
    DeepSpeed's, with one addition: a forward under somebody else's torch.autocast warns, and raises
    ConfigError in float16.

    Args:
        args: as for ``deepspeed.initialize``, like all that have no other description.
        model: the module to train, its trained parameters in FP32 or in the autocast dtype.
        optimizer: an optimizer of the model's parameters, or what makes one.
        model_parameters: parameters, or groups of them.
        training_data: a dataset; its first sample also serves to find the safe parameters.
        lr_scheduler: a learning rate scheduler, or what makes one.
        distributed_port: the port of rank 0.
        mpu: a model parallelism unit.
        dist_init_required: whether to initialise torch.distributed; None where it is not yet.
        collate_fn: makes a batch of samples.
        config: a dict, the path of a JSON file, or base64.
        mesh_param: sizes of a device mesh.
        config_params: the old name of ``config``.
        example_inputs: what the model's forward takes (a mapping of keyword arguments, a tuple of
            positional ones, or the only argument), to find the safe parameters with. Ranks may pass
            different ones. Without it the first batch of ``training_data`` serves, else the model's
            ``dummy_inputs``.
        low_precision_gather: gather safe parameters in the autocast dtype after the step: all at ZeRO 1 and
            2, the persistent ones at ZeRO 3. The model's forward does not notice; code that reads weights
            itself outside of it does. Between steps it calls `full_precision` before. With a loss that
            reads them in FP32, such as a penalty, from the first step on, all gathers are FP32. One that
            begins later gives a PrecisionWarning, and needs False.

    Returns:
        engine, optimizer, training dataloader, learning rate scheduler.

    Raises:
        ConfigError: the config contradicts itself, or asks for what the installed DeepSpeed does wrong. A
            step at ZeRO 2, or with overlap_comm, raises it where ranks have sent different gradients.
        MissingDependencyError: DeepSpeed is not installed.

    """
    given = {**locals()}
    chosen = None
    joining = {"distributed_port": distributed_port, "dist_init_required": dist_init_required}
    with agreement(lambda join: _deepspeed.ranks(mpu, join, **joining)) as agree:
        known = signature_of(_deepspeed.stock_initialize()).parameters
        # Not every release knows mesh_param; one that does not refuses it where the caller gives it.
        arguments = {k: v for k, v in given.items() if k not in _OWN and (k in known or v is not None)}
        found = find_config(args, config, config_params)
        read = None if found is None else read_config(found)
        sequence = {"sequence_parallel_size": _deepspeed.sequence_parallel_size(read or {}, mpu, mesh_param)}
        settings = None if read is None else preflight.check_config({**read, **sequence})
        if model is not None and settings is not None:
            preflight.check_model(model, settings)
            sources = example_inputs, training_data, collate_fn
            chosen = choose_parameters(model, settings, *sources, agree=agree)
    if isinstance(model, nn.Module):
        reads.restore_earlier(model)
    if settings is None or chosen is None:
        return _plain(arguments)
    safe, report = chosen
    arguments |= {"args": without_config(args), "config": read, "config_params": None}
    return _with_autocast(arguments, settings, safe, report, low_precision_gather)


def in_place_of_deepspeeds(module: Any) -> None:
    """Let ``deepspeed.initialize`` of this process be `initialize` where the config has the section.

    Accelerate and transformers' Trainer call it; without the section they get DeepSpeed's own engine. They
    evaluate and export the model itself between steps, so that weights are gathered in FP32 after a step.
    """
    stock = module.initialize

    @functools.wraps(stock)
    def initialized(*args: Any, **kwargs: Any) -> Any:
        # Not bound: what a newer DeepSpeed takes besides, it gets.
        given = dict(zip(signature_of(initialize).parameters, args, strict=False)) | kwargs
        found = find_config(*(given.get(name) for name in ("args", "config", "config_params")))
        section = read_config(found).get(SECTION) if found is not None else None
        if not section:
            if isinstance(given.get("model"), nn.Module):
                reads.restore_earlier(given["model"])
            return stock(*args, **kwargs)
        return initialize(*args, **{"low_precision_gather": False, **kwargs})

    _deepspeed.replace_initialize(module, initialized)


def full_precision(engine: Any) -> None:
    """Give the parameters of ``engine`` their FP32 values back, until its next step.

    Every rank has to call it. Saving through the engine and ``engine.eval()`` do it themselves.
    """
    gather = getattr(engine, "low_precision_gather", None)
    if gather is not None:
        gather.restore()


def _build(arguments: dict[str, Any]) -> Built:
    with _deepspeed.own_globals():
        engine, optimizer, loader, scheduler = _deepspeed.stock_initialize()(**arguments)
    return engine, optimizer, loader, scheduler


def _plain(arguments: dict[str, Any]) -> Built:
    if isinstance(arguments["model"], nn.Module):
        _deepspeed.unmark(arguments["model"].parameters())
    built = _build(arguments)
    optimizer = built[0].optimizer
    _deepspeed.reduce_in(optimizer, lambda _: optimizer.communication_data_type)
    reads.watch_surroundings(built[0], None)
    return built


def _with_autocast(
    arguments: dict[str, Any],
    settings: AutocastSettings,
    safe: list[nn.Parameter],
    report: SafetyReport,
    low_precision_gather: bool,
) -> Built:
    model, dtype = arguments["model"], settings.dtype
    trained = [p for p in model.parameters() if p.requires_grad]
    if preflight.is_mixed(trained):
        text = "the trained parameters in %s become float32, as those beside them: DeepSpeed keeps one dtype"
        logger.warning(text, dtype)
        _deepspeed.widen(trained)
    if settings.stage == 3 and not _deepspeed.gathers_several_dtypes():
        held = {p.dtype for p in model.parameters()}
        safe = [p for p in safe if p.dtype == dtype or dtype not in held]
    low = {id(p) for p in trained if p.dtype == dtype} | {id(p) for p in safe}

    reduced = settings.reduce_dtype
    if reduced is None:  # adapters are few, and their sum may as well be exact
        few = _numel(trained) <= _FEW * _numel(model.parameters())
        reduced = torch.float32 if few else dtype

    def reduce_dtype(parameter: nn.Parameter) -> torch.dtype:
        return reduced if id(parameter) in low else parameter.dtype

    kinds = set(map(reduce_dtype, trained))
    if any(arguments["config"].get(section) for section in _REPLACING):
        kinds.add(torch.float32)
    bucket_size = _bucket_size(settings, kinds)
    arguments = {**arguments, "config": _for_deepspeed(arguments["config"], bucket_size)}
    _deepspeed.unmark(model.parameters())
    named, holders = dict(model.named_parameters(remove_duplicate=False)), held_by(model)
    try:
        # ZeRO builds a bucket for each dtype of the marks that it finds.
        _deepspeed.mark([p for p in trained if reduce_dtype(p) != p.dtype], reduced)
        with _deepspeed.own_backward_hooks(model):
            built = _build(arguments)
    except BaseException:
        _deepspeed.unmark(model.parameters())
        raise
    engine = built[0]
    now = held_by(engine.module)
    moved = {i for i in map(id, safe) if now.get(i, {}).keys() != holders.get(i, {}).keys()}
    moved -= {id(p) for p in safe if p.dtype == dtype}  # these travel as they are
    if moved:
        names = {name: _REPLACED for name, p in named.items() if id(p) in moved}
        told = f"what is {_REPLACED}, travels in its own dtype: {counted(len(names), 'parameter')}"
        report = report.without(names, told)
        logger.info("%s", told)
        safe, low = [p for p in safe if id(p) not in moved], low - moved
        _deepspeed.add_buckets(engine.optimizer, map(reduce_dtype, trained))
    engine.safety_report = report
    _deepspeed.unmark(trained)
    _deepspeed.mark(safe, dtype)  # ZeRO 3 reads the marks at each gather
    _deepspeed.reduce_in(engine.optimizer, reduce_dtype)
    if settings.stage == 1:
        arrival.send_all(engine.optimizer)
    if settings.stage in (1, 2):
        _deepspeed.detach_weights(engine.optimizer)
        arrival.send_all_coalesced(engine)
    _gather_low(engine, safe, settings, low_precision_gather)
    if dtype == torch.float16 and (settings.stage == 0 or hasattr(engine.optimizer, "loss_scaler")):
        from safe_rope.autocast import loss_scale  # of DeepSpeed's classes

        loss_scale.install(engine, settings.stage)
    _autocast_loss(model, dtype)
    _deepspeed.divide_once(engine)
    reads.watch_surroundings(engine, dtype)
    if settings.stage == 2 or (settings.stage == 1 and getattr(engine.optimizer, "overlap_comm", False)):
        arrival.compare_before_steps(engine.optimizer)
    logger.info("%d parameters are communicated in %s, gradients in %s", len(safe), dtype, reduced)
    if any(parameter.dtype == dtype for parameter in trained):
        masters = "float32 master weights" if settings.stage else f"no master weights, updated in {dtype}"
        logger.info("the trained parameters in %s have %s", dtype, masters)
    return built


def _autocast_loss(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the loss function of a pipeline run under autocast, too; its engine calls it after the forward."""
    loss = getattr(model, "loss_fn", None)
    if not isinstance(model, _deepspeed.deepspeed().PipelineModule) or loss is None:
        return

    def under_autocast(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_deepspeed.device_type(), dtype=dtype):
            return original(*args, **kwargs)

    owner, name = (loss, "forward") if isinstance(loss, nn.Module) else (model, "loss_fn")
    _deepspeed.around(owner, name, under_autocast)


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(math.prod(full_shape(parameter)) for parameter in parameters)


def _gather_low(
    engine: Any, safe: list[nn.Parameter], settings: AutocastSettings, low_precision_gather: bool
) -> None:
    """Gather in the autocast dtype after the step, and keep FP32 readers away from the result."""
    gather: reads.Gather | None = None
    # A call of a scripted part alone runs no hook that would refuse it.
    scripted = (m for m in engine.module.modules() if isinstance(m, torch.jit.ScriptModule))
    exact = {id(parameter) for module in scripted for parameter in module.parameters()}
    rounded = [p for p in safe if p.dtype != settings.dtype and id(p) not in exact]
    if settings.stage in (1, 2) and low_precision_gather and _deepspeed.can_replace_gather(engine.optimizer):
        gather = gather12.LowPrecisionGather(engine.optimizer, rounded, settings.dtype)
        reads.refuse_outside(engine, gather, settings.dtype)
        losses.look_at_losses(engine, gather, settings.dtype)
    elif settings.stage == 3:
        gather = gather3.LowPrecisionFetches(engine, rounded, after_step=low_precision_gather)
        reads.gather_in_fp32_outside(engine, safe, settings.dtype, gather)
        _deepspeed.add_gradients_as_without_hooks(engine)
        _deepspeed.forget_gradients(engine.optimizer)
    if gather is not None:
        reads.restore_first(engine, gather)


def _for_deepspeed(config: Mapping[str, Any], reduce_bucket_size: int) -> dict[str, Any]:
    """The config with no classes to mark, since the parameters are, and with the bucket that fits."""
    config = {key: value for key, value in config.items() if key not in preflight.LOW}
    config[SECTION] = {**config[SECTION], "lower_precision_safe_modules": []}
    if "zero_optimization" not in config:
        return config
    zero = config["zero_optimization"] = {
        **config["zero_optimization"],
        "reduce_bucket_size": reduce_bucket_size,
    }
    unbuffered = zero.get("stage", 0) in (1, 2) and not zero.get("contiguous_gradients", True)
    if unbuffered and not _deepspeed.reduces_without_buffer():
        logger.warning(
            "DeepSpeed %s reduces no gradient on %s while zero_optimization.contiguous_gradients is off: "
            "it is turned on",
            _deepspeed.release(),
            _deepspeed.device_type(),
        )
        zero["contiguous_gradients"] = True
    return config


def _bucket_size(settings: AutocastSettings, dtypes: set[torch.dtype]) -> int:
    """Return the reduce_bucket_size, in elements, that costs no more memory than FP32 would.

    ZeRO keeps one buffer for each dtype of reduction: ZeRO 1 and 2 in FP32 whatever the dtype, ZeRO 3 in the
    dtype itself. One buffer of the size that the user asked for takes 4 bytes for each element. All of them
    together get that, or twice that if overlap_comm doubles them.
    """
    asked = settings.reduce_bucket_size
    if settings.stage == 3:
        together = sum(dtype.itemsize for dtype in dtypes)
        return max(1, asked * _FP32_BYTES // max(_FP32_BYTES, together))
    return max(1, asked // max(1, len(dtypes)))
