"""``initialize``: deepspeed.initialize with its torch_autocast section checked, corrected and kept apart."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import torch
from torch import nn

from safe_rope.autocast import _deepspeed, gather3, gather12, loss_scale, preflight, reads
from safe_rope.autocast.safety import choose_parameters, parameters_named
from safe_rope.autocast.settings import SECTION, AutocastSettings, find_config, read_config

logger = logging.getLogger(__name__)

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
_FP32_BYTES = 4


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
) -> tuple[Any, Any, Any, Any]:
    """Build a DeepSpeed engine, with torch.autocast made right where the config asks for it.

    Takes what ``deepspeed.initialize`` takes and returns what it returns. With the section
    ``torch_autocast`` the parameters stay FP32, the forward runs under torch.autocast, and parameters of
    which autocast uses nothing but a cast are gathered and reduced in its dtype. Without the section the
    engine is DeepSpeed's, but for a forward under somebody else's torch.autocast, which raises.

    Args:
        args: as for ``deepspeed.initialize``, like all that have no other description.
        model: the module to train, its trained parameters in FP32.
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
            positional ones, or the only argument), to find the safe parameters with. Without it the first
            batch of ``training_data`` serves, else the model's ``dummy_inputs``.
        low_precision_gather: gather safe parameters in the autocast dtype after the step: all at ZeRO 1 and
            2, the persistent ones at ZeRO 3. Training does not notice; code that reads ``parameter.data``
            itself between steps does, and calls `full_precision` before, or sets this to False.

    Returns:
        engine, optimizer, training dataloader, learning rate scheduler.

    Raises:
        ConfigError: the config contradicts itself, or asks for what the installed DeepSpeed does wrong.
        MissingDependencyError: DeepSpeed is not installed.

    """
    ds = _deepspeed.deepspeed()
    arguments = {
        "args": args,
        "model": model,
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "training_data": training_data,
        "lr_scheduler": lr_scheduler,
        "distributed_port": distributed_port,
        "mpu": mpu,
        "dist_init_required": dist_init_required,
        "collate_fn": collate_fn,
        "config": config,
        "config_params": config_params,
    }
    if mesh_param is not None or "mesh_param" in inspect.signature(ds.initialize).parameters:
        arguments["mesh_param"] = mesh_param
    given = find_config(args, config, config_params)
    settings = None if given is None else preflight.check_config(read_config(given))
    if model is None or settings is None:
        return _plain(ds, arguments)
    preflight.check_model(model)
    names, report = choose_parameters(model, settings, example_inputs, training_data, collate_fn)
    return _with_autocast(ds, arguments, read_config(given), settings, names, report, low_precision_gather)


def full_precision(engine: Any) -> None:
    """Give the parameters of ``engine`` their FP32 values back, until its next step.

    Every rank has to call it. Saving through the engine and ``engine.eval()`` do it themselves.
    """
    gather = getattr(engine, "low_precision_gather", None)
    if gather is not None:
        gather.restore()


def _plain(ds: Any, arguments: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    if isinstance(arguments["model"], nn.Module):
        _deepspeed.unmark(arguments["model"].parameters())
    with _deepspeed.own_globals():
        built = ds.initialize(**arguments)
    engine = built[0]
    if hasattr(engine.optimizer, "get_param_comm_dtype"):
        communication = engine.optimizer.communication_data_type
        engine.optimizer.get_param_comm_dtype = lambda parameter: communication
    reads.refuse_autocast(engine)
    return built  # type: ignore[no-any-return]


def _with_autocast(
    ds: Any,
    arguments: dict[str, Any],
    config: dict[str, Any],
    settings: AutocastSettings,
    names: frozenset[str],
    report: Any,
    low_precision_gather: bool,
) -> tuple[Any, Any, Any, Any]:
    model = arguments["model"]
    safe = parameters_named(model, names)
    reduced = {id(p) for p in safe} if settings.reduce_dtype == settings.dtype else set()
    trained = [p for p in model.parameters() if p.requires_grad]
    dtypes = {settings.dtype if id(p) in reduced else p.dtype for p in trained}
    arguments |= {"args": _without_config(arguments["args"]), "config_params": None}
    arguments["config"] = _for_deepspeed(config, _bucket_size(settings, dtypes))
    _deepspeed.unmark(model.parameters())
    try:
        if reduced:
            _deepspeed.mark(safe, settings.dtype)
        with _deepspeed.own_globals():
            built = ds.initialize(**arguments)
    except BaseException:
        _deepspeed.unmark(model.parameters())
        raise
    engine = built[0]
    # ZeRO builds a bucket for each dtype of the marks that it finds; ZeRO 3 reads them at each gather.
    _deepspeed.mark(safe, settings.dtype)
    if hasattr(engine.optimizer, "get_param_comm_dtype"):
        engine.optimizer.get_param_comm_dtype = _reduce_dtypes(reduced, settings)
    _gather_low(engine, safe, settings, low_precision_gather)
    if settings.dtype == torch.float16 and (settings.stage == 0 or hasattr(engine.optimizer, "loss_scaler")):
        loss_scale.install(engine, settings.stage)
    reads.mention_autocast(engine, settings.dtype)
    engine.safety_report = report
    logger.info("%d of %d parameters are communicated in %s", len(safe), len(trained), settings.dtype)
    return built  # type: ignore[no-any-return]


def _gather_low(
    engine: Any, safe: list[nn.Parameter], settings: AutocastSettings, low_precision_gather: bool
) -> None:
    """Gather in the autocast dtype after the step, and keep FP32 readers away from the result."""
    gather: Any = None
    if settings.stage in (1, 2) and low_precision_gather and _deepspeed.can_replace_gather(engine.optimizer):
        gather = gather12.install(engine, {id(p) for p in safe}, settings.dtype)
        reads.refuse_outside(engine, gather, settings.dtype)
    elif settings.stage == 3:
        gather = gather3.install(engine, safe, settings.dtype, after_step=low_precision_gather)
        reads.gather_in_fp32_outside(engine, safe, settings.dtype, gather)
    if gather is not None:
        reads.restore_first(engine, gather)


def _reduce_dtypes(low: set[int], settings: AutocastSettings) -> Any:
    """What the optimizer asks for each gradient; its own method reads a flag that all engines share."""

    def get_param_comm_dtype(parameter: nn.Parameter) -> Any:
        return settings.dtype if id(parameter) in low else parameter.dtype

    return get_param_comm_dtype


def _for_deepspeed(config: dict[str, Any], reduce_bucket_size: int) -> dict[str, Any]:
    """The config with no classes to mark, since the parameters are, and with the bucket that fits."""
    config = {**config, SECTION: {**config[SECTION], "lower_precision_safe_modules": []}}
    if "zero_optimization" in config:
        config["zero_optimization"] = {
            **config["zero_optimization"],
            "reduce_bucket_size": reduce_bucket_size,
        }
        if _loses_gradients(config["zero_optimization"]):
            logger.warning(
                "DeepSpeed %s reduces no gradient on %s while zero_optimization.contiguous_gradients is off: "
                "it is turned on",
                _deepspeed.release(),
                _deepspeed.device_type(),
            )
            config["zero_optimization"]["contiguous_gradients"] = True
    return config


def _bucket_size(settings: AutocastSettings, dtypes: set[torch.dtype]) -> int:
    """Return the reduce_bucket_size, in elements, that costs no more memory than FP32 would.

    ZeRO keeps one buffer for each dtype of reduction: ZeRO 1 and 2 in FP32 whatever the dtype, ZeRO 3 in
    the dtype itself. One buffer of the size that the user asked for takes 4 bytes for each element, and
    this is what all of them get together (twice that where overlap_comm doubles them).

    Args:
        settings: with the size that the user asked for.
        dtypes: those in which gradients are reduced.

    """
    asked = settings.reduce_bucket_size
    if settings.stage == 3:
        together = sum(dtype.itemsize for dtype in dtypes)
        return max(1, asked * _FP32_BYTES // max(_FP32_BYTES, together))
    return max(1, asked // max(1, len(dtypes)))


def _loses_gradients(zero: dict[str, Any]) -> bool:
    buffered = zero.get("contiguous_gradients", True)
    return zero.get("stage", 0) in (1, 2) and not buffered and not _deepspeed.reduces_without_buffer()


def _without_config(args: Any) -> Any:
    if args is None:
        return None
    args = copy.copy(args)
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(args, name, None) is not None:
            setattr(args, name, None)
    return args
