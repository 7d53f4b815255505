"""What a name says where nothing else does: that it holds integers or a device, and where its code runs."""

from __future__ import annotations

import re

# Tensors of these names hold indices or counts whatever their dtype is called elsewhere.
INTEGER_TENSORS = re.compile(
    r"(?:\w+_)?(?:ids?|idxs?|indices|index(?:es)?|[a-z]?labels?|lengths?|lens|seqlens|tokens|positions|input_pos|top_?ks?"
    r"|perm|permutation|indptr|cu_\w+)"
    r"|(?:\w+_)?(?:idxs?|indices)_\w{1,4}|(?:\w+_)?ids_(?:rm_?pad|unpad|padded|packed|flat|flattened|rolled|shifted)"
    r"|(?:\w+_)?(?:row|chunk|block|page|token|seq)_(?:offsets|starts|ends|slots|ptrs?)"
)
# Tensors of these names hold zeros and ones, in whatever dtype.
MASKS = re.compile(r"(?:\w+_)?masks?")
# Functions and methods that return such tensors of indices.
RETURNS_INTEGERS = re.compile(r"\w*_(?:ids|idxs?|indices|index)")
# Variables and parameters.
DEVICES = re.compile(r"(?:\w+_)?(?:devices?|dev|cuda|gpu|rank|device_type)\d?")
SHAPES = re.compile(r"(?:\w+_)?(?:shape|size|sizes|dims)")
# Fields of configurations (and attributes copied from them) that are counts or sizes.
KNOWN_INTEGERS = re.compile(
    r"(?:num|n)_\w+|(?:\w+_)?(?:size|dim|dims|d_model|d_head|d_ff|ndim|width|height|depth|length|len|stride)"
    r"|dim_\w+|(?:\w+_)?max_(?:position_embeddings|positions|seq_len|len|seqlen)\w*"
    r"|(?:\w+_)?(?:layers|heads|tokens|channels|patches|positions|codebooks|classes|labels|timescales)"
    r"|rotary_ndims|demb"
)
# What an expression that gives a device holds somewhere.
DEVICE_WORDS = ("device", "cuda", "gpu", "rank", "cpu", "accelerator")
# What ``from torch import *`` binds, builtins among it, of what the rules ask for.
STARRED = {
    "arange", "linspace", "logspace", "range", "cumsum", "tensor", "as_tensor", "full", "zeros", "ones",
    "empty", "eye", "rand", "randn", "Tensor", "FloatTensor", "LongTensor", "IntTensor", "zeros_like",
    "ones_like", "full_like", "where", "cat", "stack", "concat", "hstack", "vstack", "meshgrid", "outer",
    "ger", "einsum", "matmul", "bmm", "mm", "exp", "exp2", "log", "log2", "log10", "sqrt", "rsqrt", "sin",
    "cos", "tan", "pow", "div", "mul", "add", "sub", "floor_divide", "remainder", "reciprocal", "polar",
    "abs", "max", "min", "sum", "round", "clamp", "device", "get_default_dtype", "argsort", "bucketize",
    "searchsorted", "randperm", "float", "float16", "float32", "float64", "double", "half", "bfloat16",
    "bool", "int", "int8", "int16", "int32", "int64", "long", "short", "uint8", "complex64", "complex128",
    "cfloat", "cdouble", "float8_e4m3fn", "float8_e5m2",
}  # fmt: skip

# Files and folders of programs: they convert checkpoints or prepare data.
SCRIPT = re.compile(
    r"convert_|export_|.*_to_(?:hf|pytorch|pt)\b|.*conversion|(?:image|video|audio)_process|(?:pre)?process(?:ing|or)_"
    r"|feature_extraction|tokeniz|prepare_|download_"
)
SCRIPT_FOLDERS = {"scripts", "tools", "examples", "benchmarks", "tests", "test"}
# Functions that run while a model is built, by their whole name and by its beginning.
CONSTRUCTORS = {
    "__init__", "__new__", "__post_init__", "reset_parameters", "setup", "build", "__init_subclass__",
    "rope_init",
}  # fmt: skip
CONSTRUCTING = re.compile(r"_*(?:init|build|create|make|precompute|register|setup|set_cos_sin)(?:_|$)")
# Helpers of position embeddings, which constructors call: in the words of a name.
POSITIONS = re.compile(
    r"_(?:\w*ro_?pe|\w*rotary|yarn|a_?li_?bi|sinusoidal|sin_?cos|cos_?sin|inv_?freqs?|inverse_freq(?:s|uency|uencies)?(?!_transform)|freqs?_cis"
    r"|timescales?|rel(?:ative)?_?(?:pos|coord|dist)\w*|abs(?:olute)?_?pos\w*"
    r"|pos(?:ition)?s?(?:al)?_?(?:(?:emb|enc|bias|table)\w*|ids?))\d*d?_"
)
INVERSE_FREQUENCIES = re.compile(r"(?:\w+_)?inv_?freqs?(?:_\w+)?|inverse_freq\w*", re.IGNORECASE)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
FORWARD = re.compile(r"_*forward\w*|__call__|call")


def words(name: str) -> str:
    """Return the words of a name in lower case, an underscore before and after each."""
    return f"_{_HUMP.sub('_', name).lower()}_"
