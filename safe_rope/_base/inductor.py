"""What inductor is told, and its names, once: loops in place of an operator, its settings, what it may keep.

An inductor that lacks a name calls the operator itself. Nothing here imports inductor before it is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import wrapt

from safe_rope._base.functions import signature_of
from safe_rope._base.torch_private import pytree
from safe_rope._base.version import VERSION

if TYPE_CHECKING:
    from safe_rope._base.torch_private import CustomOpDef


def cacheable(cls: type) -> type:
    """Let inductor keep compiled graphs that make a ``cls``; those before torch 2.6 are compiled anew."""

    def mark(config: Any) -> None:
        known = getattr(config, "unsafe_marked_cacheable_functions", None)
        if known is not None:
            known[f"{cls.__module__}.{cls.__qualname__}"] = VERSION

    wrapt.register_post_import_hook(mark, "torch._inductor.config")
    return cls


def inductor_cpp() -> Any:
    """Return inductor's settings for C++. Imported late: half a second that only those pay who compile."""
    return importlib.import_module("torch._inductor.config").cpp


class Inductor:
    """Calls operators of torch with the tensors of a graph that inductor makes loops of."""

    def __init__(self, lowering: Any) -> None:
        self._lowering = lowering

    def __call__(self, operator: Any, *arguments: Any) -> Any:
        """Return what ``operator`` gives."""
        return self._lowering.lowerings[operator](*arguments)

    def joined(self, parts: list[Any]) -> Any:
        """Return `torch.cat` of ``parts`` along their last dimension."""
        if not _is_on_cpu(parts[0]):  # no kernel of its own, whose layout nobody asked for
            return self._lowering.pointwise_cat(parts, len(parts[0].get_size()) - 1)
        # Inductor lays what it joins out as "channels last" where the operator that it makes loops of takes
        # any tensor of one head. Those that follow then read with a stride. One channel has one layout.
        view, (first, *between, _) = torch.ops.aten.view.default, self.shape(parts[0])
        ahead = (first, 1, *between[:1], math.prod(between[1:]))
        parts = [self(view, part, [*ahead, self.shape(part)[-1]]) for part in parts]
        whole = self._lowering.TensorBox(self._lowering.ir.ConcatKernel.create(parts, len(ahead)))
        return self(view, whole, [first, *between, self.shape(whole)[-1]])

    def product(self, x: Any, other: Any) -> Any:
        """Return the product of two FP32 tensors, rounded before anything is added to it."""
        if _is_on_cpu(x):
            return self(torch.ops.aten.mul.Tensor, x, other)
        multiply = functools.partial(
            self._lowering.ops.inline_asm_elementwise,
            asm="mul.rn.f32 $0, $1, $2;",
            constraints="=f,f,f",
            dtype=torch.float32,
        )
        return self._lowering.make_pointwise(multiply)(*self._lowering.broadcast_tensors(x, other))

    def to(self, x: Any, dtype: torch.dtype) -> Any:
        """Return ``x`` in another dtype, rounded as memory rounds it on the way in and on the way out."""
        if _is_on_cpu(x):
            return (
                self(torch.ops.prims.convert_element_type.default, x, dtype) if x.get_dtype() != dtype else x
            )
        ops, kinds = self._lowering.ops, {x.get_dtype(): None, dtype: None}

        def convert(value: Any) -> Any:
            for kind in kinds:  # Triton computes in FP32, and a fused loop passes on what it has computed
                if kind != torch.float32:
                    value = ops.to_dtype(ops.to_dtype(value, kind, use_compute_types=False), kind)
            return value

        return self._lowering.make_pointwise(convert, override_return_dtype=dtype)(x)

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of a tensor whose sizes are all known."""
        return tuple(int(size) for size in x.get_size())

    def numel(self, x: Any) -> int:
        """Return how many elements a tensor has whose sizes are all known."""
        return math.prod(self.shape(x))

    def dtype(self, x: Any) -> torch.dtype:
        """Return the dtype of a tensor."""
        return x.get_dtype()  # type: ignore[no-any-return]


def lower(operator: CustomOpDef, loops: Callable[..., Any]) -> None:
    """Let inductor make loops of an operator where they keep each product and each sum apart.

    Args:
        operator: what is called everywhere else, and by an inductor that has not what it takes.
        loops: called with an `Inductor` and the operator's arguments, whose values are those that memory
            holds. Returns what the operator gives, or None where that is to be called.
    """

    def register(lowering: Any) -> None:
        overload = operator._opoverload
        try:
            called = lowering.fallback_handler(overload, add_to_fallback_set=False)
            taken = lowering.register_lowering(overload, type_promotion_kind=None)
        except (AttributeError, TypeError):
            return

        def lowered(*arguments: Any) -> Any:
            made = None
            with contextlib.suppress(Exception):
                made = _loops_of(arguments)
            return called(*arguments) if made is None else made

        def _loops_of(arguments: tuple[Any, ...]) -> Any:
            tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, lowering.TensorBox)]
            devices = {tensor.get_device().type for tensor in tensors}
            if len(devices) != 1 or not (all(map(_is_known, tensors)) and _keeps_operations_apart(*devices)):
                return None
            for tensor in tensors:
                tensor.realize()  # what is rounded on its way to memory would not be in a loop
            return loops(Inductor(lowering), *arguments)

        taken(lowered)

    wrapt.register_post_import_hook(register, "torch._inductor.lowering")


def _keeps_operations_apart(device_type: str) -> bool:
    """Whether inductor's code for a kind of device can round each product by itself.

    On a CPU that is so unless it is told otherwise; on CUDA PTX has a multiplication that is never fused.
    """
    config = importlib.import_module("torch._inductor.config")
    if device_type == "cuda":
        triton = importlib.import_module("torch._inductor.codegen.triton")
        return (
            torch.version.hip is None
            and getattr(config, "cuda_backend", "triton") == "triton"
            and hasattr(triton.TritonOverrides, "inline_asm_elementwise")
            and "use_compute_types" in signature_of(triton.TritonOverrides.to_dtype).parameters
        )
    contract = config.cpp.enable_floating_point_contract_flag
    return (
        device_type == "cpu"
        and contract in (False, "off")
        and not config.cpp.enable_unsafe_math_opt_flag
        and getattr(config, "cpu_backend", "cpp") == "cpp"
    )


def _is_on_cpu(x: Any) -> bool:
    return x.get_device().type == "cpu"  # type: ignore[no-any-return]


def _is_known(x: Any) -> bool:
    """Whether no size of a tensor of inductor's is left open."""
    return not any(getattr(size, "free_symbols", ()) for size in x.get_size())
