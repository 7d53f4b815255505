"""The one place for what is private in DeepSpeed, found by capability; its absence is an error that says so.

Releases 0.17.6 to 0.19.8 differ in names, not in structure. A parameter that carries an attribute is gathered
and reduced in the dtype that the attribute holds. A module-global flag says whether any engine has autocast
on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safe_rope.autocast.releases import FIRST_RELEASE, NEWEST_TESTED
from safe_rope.errors import IncompatibleVersionError, MissingDependencyError

_STATE = {"TORCH_AUTOCAST_INITIALIZED": False, "TORCH_AUTOCAST_DTYPE": None}
"""Globals that all engines share, as they are before any engine has autocast on."""
_MARK = "comm_dtype"
_MARK_NAME = "PARAM_COMM_DTYPE_ATTR_NAME"


def deepspeed() -> Any:
    """The installed DeepSpeed.

    Raises:
        MissingDependencyError: none is installed.

    """
    try:
        return importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise MissingDependencyError(
            "safe_rope.initialize needs deepspeed, which is not installed; install the training extra: "
            'pip install "safe-rope[train]"'
        ) from error


_OWN_INITIALIZE = "_safe_rope_stock_initialize"


def stock_initialize() -> Callable[..., Any]:
    """``deepspeed.initialize`` itself, whatever stands in its place."""
    module = deepspeed()
    return getattr(module, _OWN_INITIALIZE, None) or module.initialize  # type: ignore[no-any-return]


def replace_initialize(module: Any, initialize: Callable[..., Any]) -> None:
    """Let ``deepspeed.initialize`` be ``initialize`` for the rest of the process."""
    if not hasattr(module, _OWN_INITIALIZE):
        setattr(module, _OWN_INITIALIZE, module.initialize)
    module.initialize = initialize


def release() -> str:
    """The version of the installed DeepSpeed."""
    return str(deepspeed().__version__)


def require(owner: Any, *names: str) -> None:
    """Raise IncompatibleVersionError, with the installed version, unless ``owner`` has these attributes."""
    lacking = [name for name in names if not hasattr(owner, name)]
    if lacking:
        raise IncompatibleVersionError(
            f"DeepSpeed {release()} has none of the hook points {', '.join(lacking)} that torch_autocast "
            f"needs; releases {FIRST_RELEASE} to {NEWEST_TESTED} do"
        )


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let ``owner.name(...)`` be ``call(original, ...)`` from now on.

    Raises:
        IncompatibleVersionError: the installed DeepSpeed has nothing of this name there.

    """
    require(owner, name)
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, replaced)


@contextlib.contextmanager
def meanwhile(owner: Any, **values: Any) -> Iterator[None]:
    """Let those of these attributes that ``owner`` has be ``values``, and put back what they were."""
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    for name in before:
        setattr(owner, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def device_type() -> str:
    """The kind of device that engines run on, as torch.autocast names it."""
    return str(deepspeed().accelerator.get_accelerator().device_name())


# ---- the marks of parameters, and the state that engines share ------------------------------------------


def _autocast_module() -> types.ModuleType | None:
    deepspeed()
    try:
        return importlib.import_module("deepspeed.runtime.torch_autocast")
    except ModuleNotFoundError:
        return None


def has_autocast() -> bool:
    """Whether the installed DeepSpeed has a section ``torch_autocast`` that trains, as from 0.17.6 on."""
    return hasattr(_autocast_module(), "TORCH_AUTOCAST_DTYPE")


def mark_name() -> str:
    """The attribute that a parameter of lower communication dtype carries.

    Raises:
        IncompatibleVersionError: the installed DeepSpeed marks no parameter, or keeps no state that is known.

    """
    module = _autocast_module()
    require(module, *_STATE, _MARK_NAME)
    return str(getattr(module, _MARK_NAME))


def mark(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Let DeepSpeed gather (ZeRO 3) and reduce these parameters in ``dtype``."""
    name = mark_name()
    for parameter in parameters:
        setattr(parameter, name, dtype)


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Let DeepSpeed communicate these parameters in their own dtype, whatever another engine left on them."""
    for parameter in parameters:
        vars(parameter).pop(_MARK, None)


def marks(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Those of these parameters that are marked, each with its mark."""
    return [(p, vars(p)[_MARK]) for p in parameters if _MARK in vars(p)]


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed would gather ``parameter`` in a lower dtype now."""
    return hasattr(parameter, mark_name())


def own_globals() -> contextlib.AbstractContextManager[None]:
    """Hide the autocast state of other engines, and leave none behind."""
    return meanwhile(_autocast_module(), **_STATE)


def widen(parameters: Iterable[Any]) -> None:
    """Make these parameters FP32, and their partitions where ZeRO 3 has taken them apart."""
    for parameter in parameters:
        for tensor in (parameter, getattr(parameter, "ds_tensor", parameter)):
            tensor.data = tensor.data.float()


def reduce_in(optimizer: Any, dtype_of: Callable[[nn.Parameter], torch.dtype]) -> None:
    """Let ``optimizer`` reduce each gradient in its ``dtype_of``; DeepSpeed reads what all engines share."""
    if hasattr(optimizer, "get_param_comm_dtype"):
        optimizer.get_param_comm_dtype = dtype_of


def add_buckets(optimizer: Any, dtypes: Iterable[torch.dtype]) -> None:
    """Give a ZeRO ``optimizer`` the buckets for gradients reduced in these dtypes that it lacks."""
    buckets: dict[torch.dtype, Any] = getattr(optimizer, "ipg_buckets", {})
    for like in list(buckets.values())[:1]:
        for dtype in set(dtypes) - buckets.keys():
            buckets[dtype] = type(like)()
            if isinstance(like.buffer, torch.Tensor):  # ZeRO 3 makes it once, ZeRO 1 and 2 in each backward
                buckets[dtype].buffer = torch.empty_like(like.buffer, dtype=dtype)


def divide_once(engine: Any) -> None:
    """Let the stages of a pipeline ``engine`` before its last take the gradients that come back as they are.

    The last stage divides by the accumulation steps. Releases 0.18.5 to 0.18.9 divide in each.
    """
    if hasattr(engine, "_scale_wrt_gas") and hasattr(engine, "is_last_stage") and not engine.is_last_stage():
        engine._scale_wrt_gas = False


# ---- what DeepSpeed takes and can do --------------------------------------------------------------------


@functools.cache
def known_config_keys() -> frozenset[str]:
    """Every word that DeepSpeed uses as a key of its config."""
    known = {"zero_optimization", "fp16", "bf16", "amp", "gradient_clipping", "activation_checkpointing"}
    for name in ("deepspeed.runtime.constants", "deepspeed.runtime.config", "deepspeed.runtime.zero.config"):
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, str) and value.isidentifier() and value.islower():
                known.add(value)
    return frozenset(known)


def data_parallel_size(config: Mapping[str, Any]) -> int:
    """How many ranks share a batch; 1 where no process group says otherwise yet."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    else:
        world = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, world // int(config.get("sequence_parallel_size", 1)))


def sequence_parallel_size(config: Mapping[str, Any], mpu: Any, mesh: Any) -> int:
    """How many ranks share a sequence (Ulysses), as DeepSpeed finds it."""
    if mesh:
        return int(mesh[1])
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        return int(mpu.get_sequence_parallel_world_size())
    return int(config.get("sequence_parallel_size", 1))


def ranks(mpu: Any, join: bool, **arguments: Any) -> tuple[int, list[int]]:
    """This rank, and all that sum their gradients with it; itself alone where there is no process group.

    If it is to ``join``, the group is formed with the ``arguments``, as ``deepspeed.initialize`` would.
    """
    if join:
        backend = deepspeed().accelerator.get_accelerator().communication_backend_name()
        deepspeed().comm.init_distributed(dist_backend=backend, **arguments)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, [0]
    own, group = torch.distributed.get_rank(), None
    for name in ("get_sequence_data_parallel_group", "get_data_parallel_group"):
        if group is None and hasattr(mpu, name):
            group = getattr(mpu, name)()
    if group is None:
        return own, list(range(torch.distributed.get_world_size()))
    return own, list(torch.distributed.get_process_group_ranks(group))


def has_group(group: Any) -> bool:
    """Whether a process group is there, and not destroyed."""
    try:
        torch.distributed.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def scales_without_zero() -> bool:
    """Whether engines at ZeRO 0 have a loss scale for autocast in float16."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    return "torch_autocast_z0_gradscaler" in DeepSpeedEngine.__init__.__code__.co_names


def reduces_without_buffer() -> bool:
    """Whether ZeRO 1 and 2 reduce gradients where contiguous_gradients is off, on the device in use.

    Releases up to 0.19.5 look for tensor types that a CPU does not have, find none, and reduce nothing.
    """
    split = getattr(_gather_module(), "split_half_float_double", None)
    device = deepspeed().accelerator.get_accelerator().current_device_name()
    return split is None or bool(split([torch.zeros(1, device=device)]))


# ---- the gather of ZeRO 1 and 2 ------------------------------------------------------------------------

_GATHER = "all_gather_dp_groups"
_LAYOUT = ("bit16_groups", "bit16_groups_flat", "parallel_partitioned_bit16_groups", "real_dp_process_group")


def _gather_module() -> types.ModuleType:
    return importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")


def can_replace_gather(optimizer: Any) -> bool:
    """Whether ``optimizer`` is of ZeRO 1 or 2, plainly, with the gather and the layout that are known."""
    return (
        type(optimizer).__module__ == _gather_module().__name__
        and hasattr(_gather_module(), _GATHER)
        and all(hasattr(optimizer, name) for name in _LAYOUT)
        and not getattr(optimizer, "has_moe_layers", False)
        and not getattr(optimizer, "cpu_offload", False)
    )


def replaced_gather(gather: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let the gather after a ZeRO 1 or 2 step be ``gather(original, **arguments)`` meanwhile."""
    module = _gather_module()
    return meanwhile(module, **{_GATHER: functools.partial(gather, getattr(module, _GATHER))})


def detach_weights(optimizer: Any) -> None:
    """Take the flat weights of a ZeRO 1 or 2 ``optimizer`` out of the graph that they were made in.

    Releases 0.18.7 to 0.18.9 flatten the parameters themselves where memory allows. A gather writes into the
    result, which autograd refuses.
    """
    flat = getattr(optimizer, "bit16_groups_flat", [])
    for tensors in (flat, *getattr(optimizer, "parallel_partitioned_bit16_groups", [])):
        tensors[:] = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def gather_groups(optimizer: Any) -> None:
    """Gather the weights of a ZeRO 1 or 2 optimizer as DeepSpeed does, in FP32."""
    getattr(_gather_module(), _GATHER)(
        groups_flat=optimizer.bit16_groups_flat,
        partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
        dp_process_group=optimizer.real_dp_process_group,
        start_alignment_factor=optimizer.nccl_start_alignment_factor,
        allgather_bucket_size=optimizer.allgather_bucket_size,
    )


def broadcast(tensor: torch.Tensor, group_rank: int, group: Any) -> None:
    """Broadcast through DeepSpeed's layer, so that its communication log sees it."""
    comm = deepspeed().comm
    comm.broadcast(tensor, comm.get_global_rank(group, group_rank), group=group)


def any_rank(flag: bool, device: torch.device, group: Any) -> bool:
    """Whether ``flag`` holds on any rank of ``group``; each has to call it."""
    comm = deepspeed().comm
    flags = torch.tensor([flag], dtype=torch.int32, device=device)
    comm.all_reduce(flags, op=comm.ReduceOp.MAX, group=group)
    return bool(flags.item())


# ---- the gathers of ZeRO 3 ------------------------------------------------------------------------------

_PARTITIONED = ("all_gather", "all_gather_coalesced", "ds_process_group", "ds_status", "ds_tensor")


def persistent_parameters(optimizer: Any) -> list[nn.Parameter]:
    """The parameters that a ZeRO 3 optimizer gathers after its step and keeps, where that can be replaced.

    None with a second partition within each node (hpZ).
    """
    if not hasattr(optimizer, "_post_step") or getattr(optimizer, "zero_hpz_partition_size", 1) != 1:
        return []
    return list(getattr(optimizer, "persistent_parameters", []))


def gathers_several_dtypes() -> bool:
    """Whether ZeRO 3 takes parameters of several dtypes in one message; before 0.19.3 it asserts that not."""
    from deepspeed.runtime.zero.partition_parameters import Init

    def constants(code: types.CodeType) -> Iterator[Any]:
        for value in code.co_consts:
            yield value
            if isinstance(value, types.CodeType):
                yield from constants(value)

    return "all params must have the same dtype" not in constants(Init._convert_to_deepspeed_param.__code__)


def can_gather_again(parameter: Any) -> bool:
    """Whether ZeRO 3 has partitioned ``parameter`` over several ranks, in memory."""
    return (
        all(hasattr(parameter, name) for name in _PARTITIONED)
        and getattr(parameter, "nvme_swapper", None) is None
        and torch.distributed.get_world_size(parameter.ds_process_group) > 1
    )


def is_gathered(parameter: Any) -> bool:
    """Whether a partitioned parameter is there in full."""
    return str(parameter.ds_status.name) == "AVAILABLE"


def before_gathers(parameter: Any, in_fp32: Callable[..., Any], as_marked: Callable[..., Any]) -> None:
    """Call these with the parameters that ``parameter`` is about to gather.

    ``in_fp32`` comes before ``all_gather``, for GatheredParameters say, which gathers what is partitioned in
    FP32; ``as_marked`` before the gather for a forward or backward, in the marks' dtypes.
    """

    def all_gather(original: Any, param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        params = [parameter] if param_list is None else list(param_list)
        in_fp32(params)
        kinds = dict.fromkeys(p.ds_tensor.dtype for p in params)
        if len(kinds) < 2 or args or kwargs:
            return original(param_list, *args, **kwargs)
        for kind in kinds:  # releases before 0.19.3 receive all in the dtype of the first
            original([p for p in params if p.ds_tensor.dtype == kind])
        return None

    def all_gather_coalesced(original: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        params = list(params)
        as_marked(params)
        return original(params, *args, **kwargs)

    for call in (all_gather, all_gather_coalesced):
        if hasattr(parameter, call.__name__):
            around(parameter, call.__name__, call)


def fetch(parameters: Iterable[nn.Parameter]) -> None:
    """Gather those of ``parameters`` that are partitioned, as for a forward."""
    wanted: list[Any] = [p for p in parameters if not is_gathered(p)]
    if wanted:
        wanted[0].all_gather_coalesced(wanted).wait()


def gather_in_place(parameters: Iterable[Any]) -> None:
    """Give gathered parameters the exact values of their partitions."""
    comm = deepspeed().comm
    for parameter in sorted(parameters, key=lambda one: one.ds_id):  # in the same order on all ranks
        own = parameter.ds_tensor.to(parameter.device).contiguous()
        group = parameter.ds_process_group
        whole = torch.empty(own.numel() * comm.get_world_size(group), dtype=own.dtype, device=own.device)
        comm.all_gather_into_tensor(whole, own, group=group)
        # The last partition is padded.
        parameter.data.copy_(whole[: parameter.ds_numel].view(parameter.ds_shape))


def forget_gradients(optimizer: Any) -> None:
    """Let a ZeRO 3 ``optimizer`` begin each step with gradients of zero.

    It copies those of a step over the last step's, and leaves the latter where a parameter is not used. They
    stay readable until the first gradient of the next step comes.
    """
    if not hasattr(optimizer, "partition_grads") or not hasattr(optimizer, "grad_partitions_flat_buffer"):
        return
    old: list[bool] = []

    def over(original: Any, *args: Any, **kwargs: Any) -> Any:
        old[:] = [True]
        return original(*args, **kwargs)

    def partition_grads(original: Any, *args: Any, **kwargs: Any) -> Any:
        if old:
            old.clear()
            offloaded = (group.grad for group in getattr(optimizer, "fp32_partitioned_groups_flat", ()))
            for gradients in (optimizer.grad_partitions_flat_buffer, *offloaded):
                if gradients is not None:
                    gradients.zero_()
        return original(*args, **kwargs)

    for name in ("step", "zero_grad"):
        around(optimizer, name, over)
    around(optimizer, "partition_grads", partition_grads)


@contextlib.contextmanager
def own_backward_hooks(model: nn.Module) -> Iterator[None]:
    """Take off what ZeRO 3 calls before and after a module's backward, where an earlier engine has left it.

    DeepSpeed keeps what it finds there, which fetches and releases through the earlier engine. That engine
    gets it back where the next one fails to be built.
    """
    names = ("pre_bwd_fn", "post_bwd_fn")
    earlier = [(m, {name: vars(m).pop(name) for name in names if name in vars(m)}) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, hooks in earlier:
            vars(module).update(hooks)
        raise


def _after_backward(module: Any, stock: Any, done: Callable[[Any], None]) -> Any:
    """Make what stands for the identity that ZeRO 3 puts on each input of ``module``, to know when to let go.

    A hook on the input itself knows it too, once all uses of that input are done. A leaf keeps the identity
    (``stock``, if there is one), since a hook would stay on it.
    """

    owner = weakref.ref(module)  # a copy of the module holds this, and not the module

    def one_less(_: torch.Tensor) -> None:
        if (module := owner()) is not None:
            module.ds_grads_remaining -= 1
            if module.ds_grads_remaining == 0:
                done(module)

    def apply(tensor: Any) -> Any:
        module = owner()
        if tensor.is_leaf or module is None or not torch.is_grad_enabled():
            return tensor if stock is None else stock.apply(tensor)
        module.ds_grads_remaining += 1
        tensor.register_hook(one_less)
        return tensor

    return types.SimpleNamespace(apply=apply)


def add_gradients_as_without_hooks(engine: Any) -> None:
    """Let a ZeRO 3 engine add the gradients of an activation in the order of the model without hooks.

    An identity on the input of a module (peft's around a projection, say) adds up the gradients within it
    first; in low precision, another order is another sum. A module that holds parameters keeps it. A
    wrapper that passes attributes on (peft's of ``modules_to_save``) gets none before 0.19.3, but that of the
    module within, which fails in the forward.
    """
    hooks: Any = getattr(engine.optimizer, "parameter_offload", None)
    if not hasattr(hooks, "post_sub_module_backward_function"):
        return
    is_leaf = deepspeed().utils.z3_leaf_module
    for module in engine.module.modules():
        owns = next(module.parameters(recurse=False), None) is not None
        if hasattr(module, "post_bwd_fn") and not owns and not is_leaf(module):
            stock = vars(module).get("post_bwd_fn")
            module.post_bwd_fn = _after_backward(module, stock, hooks.post_sub_module_backward_function)
