"""Every private name of torch that safe_rope relies on, once.

A torch that lacks a name of the first block is refused with its version; beside each of the others stands
what happens without it. Attributes with an underscore that torch's own notes tell authors of modules, tensors
and operators to use (``Module._buffers``, ``Tensor._version``, ``OpOverload._schema``) are not listed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import wrapt
from torch.autograd import forward_ad

from safe_rope.errors import IncompatibleVersionError

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef as CustomOpDef

try:
    from torch._compile import _disable_dynamo
    from torch._subclasses import FakeTensor as FakeTensor
    from torch._subclasses import FakeTensorMode as FakeTensorMode
    from torch.utils import _pytree
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._device import _device_constructors
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

    pytree = _pytree
    """Nested containers as leaves and a structure."""
    TRUE_CONSTRUCTORS: Any = torch._C._VariableFunctions
    """Holds the C++ bindings behind ``torch.empty`` and its siblings, which nobody replaces."""
    TRUE_NEW: Any = torch._C.TensorBase.__new__
    """The binding behind ``torch.Tensor.__new__``."""
    SET_DATA: Any = inspect.getattr_static(torch.Tensor, "data").__set__
    """What a torch function mode is told of ``tensor.data = value``."""
    DISABLED_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
    """What a subclass of Tensor has for ``__torch_function__`` if it needs none."""
    WithoutTorchFunction = torch._C.DisableTorchFunction
    """A context without torch function modes, such as that of ``torch.device``."""
    make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
    SPLIT: Any = torch._C.TensorBase.split
    """The binding behind ``torch.Tensor.split``, which looks at its arguments in Python."""
    _FAKE: Any = torch._C._TorchDispatchModeKey.FAKE
    _PROXY: Any = torch._C._TorchDispatchModeKey.PROXY
    _dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
    count_dispatch_modes = torch._C._len_torch_dispatch_stack
    _count_function_modes = torch._C._len_torch_function_stack
    _function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
    _pop_function_mode = torch._C._pop_torch_function_stack
    _push_function_mode = torch._C._push_on_torch_function_stack
    tracing_state = torch._C._get_tracing_state
    innermost_transform = torch._C._functorch.peek_interpreter_stack
    _pop_transform = torch._C._functorch.pop_dynamic_layer_stack
    _push_transform = torch._C._functorch.push_dynamic_layer_stack
    is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    _unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped
    _has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    ASSERT_METADATA: Any = torch.ops.aten._assert_tensor_metadata.default
    """By which an exported program asserts the dtype of a tensor that it casts."""
    MODULE_HOOKS, PARAMETER_HOOKS, BUFFER_HOOKS = (
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
        "_global_buffer_registration_hooks",
    )
    for _name in (MODULE_HOOKS, PARAMETER_HOOKS, BUFFER_HOOKS):
        getattr(torch.nn.modules.module, _name)
    _LEVEL = "_current_level"
    getattr(forward_ad, _LEVEL)  # it changes, and is read each time
    _CALL = "_wrapped_call_impl"
    getattr(torch.nn.Module, _CALL)
    # Public, and younger than the others: what tells a torch that is too old.
    _youngest = torch.library.custom_op, torch.compiler.is_dynamo_compiling
except (ImportError, AttributeError) as error:
    raise IncompatibleVersionError(
        f"safe_rope uses names of torch that torch {torch.__version__} lacks ({error}); "
        "install torch 2.4 or newer, or a newer safe_rope"
    ) from None


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees each operator, and whose first one does not import the whole of torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# ---- who watches ---------------------------------------------------------------------------------------


def is_dispatched() -> bool:
    """Whether a torch dispatch mode (fake tensors, a trace) sees what this thread does."""
    return count_dispatch_modes() > 0


def is_only_faked() -> bool:
    """Whether a fake tensor mode sees what this thread does, and nobody makes a graph of it."""
    kinds = {getattr(mode, "_mode_key", None) for mode in _dispatch_modes()}
    return _FAKE in kinds <= {_FAKE, None} and not _count_function_modes()


def is_forward_mode() -> bool:
    """Whether forward-mode derivatives may be taken: inside ``torch.autograd.forward_ad.dual_level``."""
    level: int = getattr(forward_ad, _LEVEL)
    return level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a forward-mode derivative is taken by a tensor."""
    is_taken = getattr(forward_ad, _LEVEL) >= 0  # not `is_forward_mode`: each call of a module asks
    return is_taken and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def is_learned(tensor: Any) -> bool:
    """Whether a derivative may be taken by a tensor, in either direction."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return tensor.requires_grad or (not torch.compiler.is_dynamo_compiling() and has_tangent(tensor))


def is_transformed() -> bool:
    """Whether this runs inside a transform of ``torch.func``."""
    return innermost_transform() is not None


@contextlib.contextmanager
def untransformed() -> Iterator[None]:
    """Leave the transforms of ``torch.func`` for what runs inside: a tensor that it makes outlives them."""
    left: list[Any] = []
    try:
        while innermost_transform() is not None:
            left.append(_pop_transform())
        yield
    finally:
        while left:
            _push_transform(left.pop())


def version_of(tensor: torch.Tensor) -> int:
    """How often somebody has written to a tensor; vmap counts that of what it wraps alone."""
    while is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor._version


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do what ``torch.compiler.assume_constant_result`` does, which takes a second: it imports Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    # torch 2.4 puts what it returns into the globals of the code that it compiles, under this name.
    name = f"_{function.__module__}.{function.__name__}".replace(".", "_")
    function.__code__ = function.__code__.replace(co_name=name)
    return function


def set_compiler(callback: Any) -> Any:
    """Have Dynamo give each frame of this thread to ``callback``, None for none; return the one before."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    try:
        return None if frames is None else frames.set_eval_frame(callback)
    except AttributeError:  # it is being imported
        return None


class PythonOfCompiled:
    """While open, what is compiled runs as Python, so that a mode sees each operation; Dynamo traces no mode.

    torch keeps one stance for all threads: the last one that leaves puts it back. Before torch 2.6, which has
    none, and where Dynamo itself runs the code around, nothing is changed.
    """

    _lock = threading.RLock()
    _open = 0
    _stance: Any = None

    def __enter__(self) -> None:
        set_stance: Any = getattr(torch.compiler, "set_stance", None)
        with self._lock:
            PythonOfCompiled._open += 1
            if self._stance is None and set_stance is not None and "torch._dynamo.eval_frame" in sys.modules:
                with contextlib.suppress(RuntimeError):
                    PythonOfCompiled._stance = set_stance("force_eager")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            PythonOfCompiled._open -= 1
            if not self._open and self._stance is not None:
                self._stance.__exit__(*error)
                PythonOfCompiled._stance = None


def forget_compiled(function: Callable[..., Any]) -> None:
    """Take away from a wrapper what tells Dynamo to compile, or to leave alone, what it wraps instead."""
    for name in [name for name in vars(function) if name.startswith("_torchdynamo")]:
        delattr(function, name)


def is_recorded_by_a_mode() -> bool:
    """Whether make_fx records plain tensors."""
    return any(getattr(mode, "_mode_key", None) == _PROXY for mode in _dispatch_modes())


def is_exporting() -> bool:
    """Whether torch.export is at work; whether any tracer is, before torch 2.7."""
    asked: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    return asked()


@constant_in_graphs
def is_exporting_to_onnx() -> bool:
    """Whether torch.onnx.export is at work, which takes torch's own operators alone."""
    onnx = sys.modules.get("torch.onnx")  # to import it takes a tenth of a second
    return onnx is not None and bool(onnx.is_in_onnx_export())


def undispatched() -> AbstractContextManager[Any]:
    """Return a context without the thread's dispatch modes."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def is_compiler_at_work() -> bool:
    """Whether Dynamo traces or makes guards now; a context that torch does not have is not asked."""
    # The compile context also spans the making of guards, after the tracing context has closed.
    guards = sys.modules.get("torch._guards")
    contexts = (getattr(guards, name, None) for name in ("CompileContext", "TracingContext"))
    return any(context is not None and context.try_get() is not None for context in contexts)


@contextlib.contextmanager
def between_compilations(wait: float = 0.0) -> Iterator[bool]:
    """Keep other threads from compiling; yield False, and keep nobody from it, where any compiles already.

    Args:
        wait: seconds that another thread's compilation is waited for; the caller holds no lock meanwhile.

    """
    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    is_free = not is_compiler_at_work()
    if is_free and lock is not None:
        is_free = lock.acquire(timeout=wait)  # to wait for it could be to wait for ever
    try:
        yield is_free
    finally:
        if is_free and lock is not None:
            lock.release()


# ---- torch function modes ------------------------------------------------------------------------------


def take_function_modes() -> list[Any]:
    """Take every torch function mode off this thread's stack; return them from the bottom up."""
    return [_pop_function_mode() for _ in range(_count_function_modes())][::-1]


def put_function_modes(modes: list[Any]) -> None:
    """Put modes on this thread's stack, the last on top."""
    for mode in modes:
        _push_function_mode(mode)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Leave nothing of what runs inside in a graph that torch.export makes; without the names, it stays."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    recorder: Any = getattr(proxies, "PreDispatchTorchFunctionMode", None)
    untraced: Any = getattr(proxies, "disable_proxy_modes_tracing", None)
    is_known = recorder is not None and untraced is not None
    if not is_known or not any(isinstance(one, recorder) for one in _function_modes()):
        yield
        return
    modes = take_function_modes()
    put_function_modes([one for one in modes if not isinstance(one, recorder)])
    try:
        with untraced():
            yield
    finally:
        take_function_modes()
        put_function_modes(modes)


def default_device_type() -> str:
    """The type of the device that constructors use, which only a mode makes another one than the CPU.

    ``torch.get_default_device()`` makes a tensor to know the index, and raises in torch 2.6 where
    ``set_default_device(None)`` has been called.
    """
    for mode in reversed(_function_modes()):  # each module that is built asks
        if isinstance(mode, DeviceContext):
            return str(mode.device.type)
    return "cpu"


def is_device_section(mode: Any) -> bool:
    """Whether a mode is that of ``with torch.device(...)``, which alone is never entered."""
    return type(mode) is DeviceContext and not hasattr(mode, "old_device")


def stays_at_bottom(mode: Any) -> bool:
    """Whether a mode is that of torch.set_default_device, which from torch 2.5 on ends at the stack's bottom.

    ``with torch.device(...)`` puts one on the stack that was never entered, and takes the top one off.
    """
    leave: Any = DeviceContext.__exit__
    return (
        isinstance(mode, DeviceContext)
        and hasattr(mode, "old_device")
        and "_pop_mode" in leave.__code__.co_names
    )


def device_constructors() -> set[Any]:
    """The functions that a ``torch.device`` context redirects: the set that torch itself keeps and asks."""
    known: set[Any] = _device_constructors()
    return known


# ---- tensors and operators -----------------------------------------------------------------------------


def storage_key(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """Return what tells one memory from another, for fake and meta tensors too.

    Raises:
        NotImplementedError, RuntimeError: the tensor is a wrapper without memory of its own.
    """
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    return int(storage._cdata)


def operator(
    name: str, schema: str, direct: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorate a function that is one operator to a compiler.

    Args:
        name: of the operator, with its namespace.
        schema: is given, for torch 2.4 cannot infer one from postponed annotations.
        direct: kinds of device on which torch calls the function itself. It has no gradient there, and sees
            to it that its results share no memory with each other or with an argument. Where torch keeps
            no library beside what it defines, it calls the function as on any other device.

    """

    def registered(function: Callable[..., Any]) -> CustomOpDef:
        # torch asks whose line this is; `inspect` looks through all modules for a file that it does not know.
        inspect.modulesbyfile[__file__] = __name__
        defined = torch.library.custom_op(name, mutates_args=(), schema=schema)(function)
        implement: Any = getattr(getattr(defined, "_lib", None), "impl", None)
        for device in direct if implement is not None else ():
            # Dynamo takes each frame below a call that it has left to Python, and would compile the function.
            implement(name.partition("::")[2], _disable_dynamo(function), device)
            implement(name.partition("::")[2], torch.library.fallthrough_kernel, f"Autograd{device}")
        return defined

    return registered


def is_composite(operator: Any) -> bool:
    """Whether an operator is made of others, which autograd sees in its place."""
    return bool(_has_kernel(operator.name(), "CompositeImplicitAutograd"))


# ---- the compiler --------------------------------------------------------------------------------------


def can_compile() -> bool:
    """Whether Dynamo runs on this Python and platform; not where it does not say so."""
    supported = getattr(torch._dynamo.eval_frame, "is_dynamo_supported", None)
    return supported is not None and bool(supported())


_graphs_take_attributes = True


def _look_at_builder(builder: Any) -> None:
    global _graphs_take_attributes
    _graphs_take_attributes = hasattr(builder, "AttributeMutationNew")


wrapt.register_post_import_hook(_look_at_builder, "torch._dynamo.variables.builder")


def graphs_take_attributes() -> bool:
    """Whether Dynamo lets a graph set an attribute on a tensor that it has made; those before 2.8 refuse."""
    return _graphs_take_attributes


GRAPHS_LOSE_GRADIENTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)
"""Whether a gradient to a subclass that a graph is given is lost in an own autograd function: torch 2.4."""


def leave_graph_that_loses_gradients() -> None:
    """End the graph before an own autograd function, where that would lose the gradient."""
    if GRAPHS_LOSE_GRADIENTS and torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()


_FINDS_PROPERTIES_AGAIN = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def graphs_find_properties_again() -> bool:
    """Whether Dynamo asks a property for what stands under its name in ``__dict__``: before torch 2.13."""
    return _FINDS_PROPERTIES_AGAIN


def mark_static(tensor: torch.Tensor, dim: int) -> None:
    """Let a kernel be compiled for this size of a dimension."""
    torch._dynamo.mark_static(tensor, dim)


# ---- wrappers and FSDP ---------------------------------------------------------------------------------


WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Children under which torch's own wrappers keep the module; a name that no wrapper has is never met."""


def is_compiled(module: Any) -> bool:
    """Whether ``torch.compile`` wraps a module, or its own ``compile`` has put a graph before its forward."""
    return WRAPPED[0] in module._modules or getattr(module, "_compiled_call_impl", None) is not None


PARAMETRIZED = "torch.nn.utils.parametrize"
"""The Python module of the classes that parametrizations give to modules: each has properties of its own."""


def fsdp_class(name: str) -> Any:
    """Return a class of FSDP; None where this torch has none of the name, or nobody has imported FSDP."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def fully_sharded_policy(module: torch.nn.Module) -> Any:
    """Return the mixed precision policy of a module after ``fully_shard``; None where it cannot be read."""
    state = getattr(module, "_get_fsdp_state", None)
    return getattr(state(), "_mp_policy", None) if callable(state) else None


def has_run(unit: Any) -> bool:
    """Whether a unit of FSDP 1 has been in a forward; where it does not say so, it has."""
    return getattr(unit, "_is_root", True) is not None


def ignored_modules(unit: Any) -> Any:
    """Return the modules that a unit of FSDP 1 leaves alone; none where it does not say so."""
    return getattr(unit, "_ignored_modules", ())


# ---- backwards and process groups ----------------------------------------------------------------------


def is_backward() -> bool:
    """Whether this thread runs a backward; without the name, never."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def next_node() -> int:
    """The number that the next node gets which this thread puts into a graph; without the name, 0."""
    count: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", int)
    return count()


def number_of_node(node: Any) -> int:
    """The number that a node of a graph got from the thread that made it; without the name, -1."""
    count: Callable[[], int] | None = getattr(node, "_sequence_nr", None)
    return -1 if count is None else count()


def gives_only(node: Any, dtype: torch.dtype) -> bool:
    """Whether all that the operator of a node gave has this dtype.

    Before torch 2.6, which has no such name on nodes, whether the operator is a cast to any.
    """
    results = getattr(node, "_input_metadata", None)
    if results is None:
        return type(node).__name__ == "ToCopyBackward0"
    return {result.dtype for result in results} == {dtype}


def give_memory(wrapper: torch.Tensor, values: torch.Tensor) -> None:
    """Have C++ find ``values`` in a wrapper, to whose own memory nobody has put anything.

    Without the names, it finds none there.
    """
    names = ("_DisableTorchDispatch", "_AutoDispatchBelowAutograd")
    contexts = [getattr(torch._C, name, contextlib.nullcontext) for name in names]
    if contextlib.nullcontext in contexts:
        return
    put: Any = torch.ops.aten.set_.source_Storage_storage_offset
    with torch.no_grad(), contexts[0](), contexts[1]():
        put(wrapper, values.untyped_storage(), values.storage_offset(), values.size(), values.stride())


def is_module_traced() -> bool:
    """Whether torch.jit.trace runs a module; inside of an operator torch says of no trace."""
    trace = sys.modules.get("torch.jit._trace")
    return getattr(trace, "_trace_module_map", None) is not None


def modules_being_scripted(frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """Yield the modules around the one that torch.jit.script asks for what it is to compile."""
    while frame is not None:
        if frame.f_code.co_name == "call_prepare_scriptable_func_impl":
            around = frame.f_locals.get("obj")
            if isinstance(around, torch.nn.Module):
                yield around
        frame = frame.f_back


def saved_by_torch(frame: FrameType | None) -> Any:
    """Return what torch.save is writing, if ``frame`` is called by it; else None."""
    while frame is not None:
        is_torchs = frame.f_globals.get("__name__") == "torch.serialization"
        if is_torchs and frame.f_code.co_name in ("_save", "_legacy_save"):
            return frame.f_locals.get("obj")
        frame = frame.f_back
    return None


def calls_of_modules(frame: FrameType | None) -> Iterator[Any]:
    """Yield the modules whose calls lead to ``frame``, the innermost first."""
    while frame is not None:
        if frame.f_code.co_name == _CALL:  # what Dynamo makes of it keeps the name
            yield frame.f_locals.get("self")
        frame = frame.f_back


@contextlib.contextmanager
def reentrant_checkpoints(weights: list[torch.nn.Parameter]) -> Iterator[None]:
    """Let checkpoints with ``use_reentrant=True`` run in a backward that is given ``weights``.

    They refuse, since they accumulate into each leaf that they reach. Here other parameters get no gradient,
    nor does what has one, and a leaf that gets one (the checkpoint's input) loses it at the end. Without the
    name, nothing.
    """
    asked, stock = getattr(torch.autograd, "_is_checkpoint_valid", None), torch.autograd.backward
    if asked is None:
        yield
        return
    known = {id(weight) for weight in weights}
    passing: list[torch.Tensor] = []

    @functools.wraps(stock)
    def backward(ends: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > 1 or kwargs.keys() - {"grad_tensors"}:
            return stock(ends, *args, **kwargs)
        leaves = _leaves([ends] if isinstance(ends, torch.Tensor) else ends)
        own = [leaf for leaf in leaves if not isinstance(leaf, torch.nn.Parameter) and leaf.grad is None]
        passing.extend(own)
        own += [leaf for leaf in leaves if id(leaf) in known]
        return stock(ends, *args, **{**kwargs, "inputs": own}) if own else None

    private: Any = torch.autograd
    private._is_checkpoint_valid, private.backward = (lambda: True), backward
    try:
        yield
    finally:
        private._is_checkpoint_valid, private.backward = asked, stock
        for leaf in passing:
            leaf.grad = None


def is_leaf_node(node: Any) -> bool:
    """Whether a node stands for a leaf, its ``variable``."""
    return type(node).__name__ == "AccumulateGrad"


def _leaves(ends: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that a backward from ``ends`` accumulates into."""
    ends = list(ends)
    found = [end for end in ends if end.is_leaf]
    waiting: list[Any] = [end.grad_fn for end in ends if end.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if is_leaf_node(node):
            found.append(node.variable)
        later = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= later
        waiting += later
    return found


def default_store() -> Any:
    """Return the store that the process group was formed with; without one (MPI) or the name, None."""
    store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if store is None else store()
