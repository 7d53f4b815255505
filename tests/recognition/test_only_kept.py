"""Arguments that a constructor only keeps, such as a layer's index: equal layers are built again once.

The truth of the tables is what the same code makes in FP32 without the library.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.default_dtype import default_dtype
from torch import nn
from transformers import GPTJConfig, GPTJModel
from transformers.models.gptj import modeling_gptj

import safe_rope
from safe_rope._recognition import only_kept

pytestmark = pytest.mark.contract

LAYERS = 3
SOURCE = """
import functools
import operator
import torch
from torch import nn

def speeds(dim, scale):
    return scale * 10000.0 ** -(torch.arange(0, dim, 2) / dim)

def index_of(module):
    return module.layer_idx

class Lazy:
    def __init__(self, made):
        self.made = made

    def __get__(self, module, owner):
        return self.made(module)

def by_index(made):
    @functools.wraps(made)
    def scaled(module):
        return made(module) / (1 + module.layer_idx)
    return scaled

def fill(name, module):
    module.register_buffer("inv_freq", speeds(16, 1.0 / (1 + getattr(module, name))), persistent=False)

class Layer(nn.Module):
    def forward(self, x, positions):
        phases = positions[:, None].float() * self.inv_freq
        return self.weight * (x + torch.cat((phases.cos(), phases.sin()), -1).to(x.dtype))

class OnlyKept(Layer):
    def __init__(self, dim, layer_idx=None):
        super().__init__()
        self.layer_idx = layer_idx
        if layer_idx is None:
            print("no index")
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("inv_freq", speeds(dim, 1.0), persistent=False)

class Computed(Layer):
    def __init__(self, dim, layer_idx=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("inv_freq", speeds(dim, 1.0 / (1 + layer_idx)), persistent=False)

class ReadAgain(Layer):
    def __init__(self, dim, layer_idx=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("inv_freq", self.made(dim), persistent=False)

    def made(self, dim):
        return speeds(dim, 1.0 / (1 + self.layer_idx))

class ReadByAProperty(Layer):
    def __init__(self, dim, layer_idx=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("inv_freq", speeds(dim, self.scale), persistent=False)

    @property
    def scale(self):
        return 1.0 / (1 + index_of(self))

class HandsItselfOn(Layer):
    def __init__(self, dim, layer_idx=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.ones(dim))
        index = getattr(self, "layer_idx")
        self.register_buffer("inv_freq", speeds(dim, 1.0 / (1 + index)), persistent=False)

class ReadByName(Layer):
    def __init__(self, dim, layer_idx=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.ones(dim))
        index = self.__dict__["layer_idx"]
        self.register_buffer("inv_freq", speeds(dim, 1.0 / (1 + index)), persistent=False)

class Compared(Layer):
    def __init__(self, dim, layer_idx=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("inv_freq", speeds(dim, 0.5 if layer_idx == 1 else 1.0), persistent=False)

class ByItsBase(Computed):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim, layer_idx)
        self.layer_idx = layer_idx

class Read(Layer):
    factor = 1.0

    def __init__(self, dim, layer_idx=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("inv_freq", speeds(dim, self.scale), persistent=False)

    @property
    def scale(self):
        return self.factor

class BySetter(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.size = dim

    @property
    def size(self):
        return len(self.weight)

    @size.setter
    def size(self, dim):
        self.inv_freq = speeds(dim, 1.0 / (1 + self.layer_idx))

class BySetAttr(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.inv_freq = speeds(dim, self.factor)

    def __setattr__(self, name, value):
        if name == "layer_idx" and value is not None:
            self.factor = 1.0 / (1 + value)
        super().__setattr__(name, value)

class ByGetAttr(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.inv_freq = speeds(dim, self.of_index)

    def __getattr__(self, name):
        return 1.0 / (1 + self.layer_idx) if name == "of_index" else super().__getattr__(name)

class ByGetAttribute(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.inv_freq = speeds(dim, 1.0 / (1 + self.__getattribute__("layer_idx")))

class ByDescriptor(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.inv_freq = speeds(dim, self.of_index)

    of_index = Lazy(lambda module: 1.0 / (1 + module.layer_idx))

class ByGetter(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.inv_freq = speeds(dim, 1.0 / (1 + self.index))

    index = property(operator.attrgetter("layer_idx"))

class ByWrapper(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.inv_freq = speeds(dim, self.made())

    @by_index
    def made(self):
        return 1.0

class ByApply(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.apply(functools.partial(fill, "layer_idx"))

class ByModules(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        for module in self.modules():
            fill("layer_idx", module)

class ByMethod(Read):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        method = self.made
        self.inv_freq = speeds(dim, 1.0 / (1 + getattr(method.__self__, "layer_idx")))

    def made(self):
        return 1.0

class ByOverridden(Read):
    def made(self):
        return 1.0 / (1 + self.layer_idx)

class BySuper(ByOverridden):
    def __init__(self, dim, layer_idx=None):
        super().__init__(dim)
        self.layer_idx = layer_idx
        self.inv_freq = speeds(dim, super().made())

    def made(self):
        return 1.0

class ByLinear(nn.Linear):
    forward = Layer.forward

    def __init__(self, dim, layer_idx=None):
        self.layer_idx = layer_idx
        super().__init__(dim, dim)

    def reset_parameters(self):
        super().reset_parameters()
        fill("layer_idx", self)
"""
OTHERS = (
    *("Computed", "ReadAgain", "ReadByAProperty", "HandsItselfOn", "ReadByName", "Compared", "ByItsBase"),
    *("BySetter", "BySetAttr", "ByGetAttr", "ByGetAttribute", "ByDescriptor", "ByGetter", "ByWrapper"),
    *("ByApply", "ByModules", "ByMethod", "BySuper", "ByLinear"),
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of layers that counts as one of transformers' models."""
    name = "transformers.models.made_up_for_a_test"
    file = tmp_path / "made_up.py"
    file.write_text(SOURCE)
    module = ModuleType(name)
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(SOURCE, str(file), "exec"), vars(module))
    return module


def stack(cls: Any) -> nn.ModuleList:
    return nn.ModuleList(cls(16, layer_idx=index) for index in range(LAYERS))


@pytest.mark.parametrize("name", ["OnlyKept", *OTHERS])
def test_each_layer_has_the_frequencies_of_its_own_index(library: ModuleType, name: str) -> None:
    cls = getattr(library, name)
    true = [layer.inv_freq.clone() for layer in stack(cls)]
    with safe_rope.guard(), default_dtype(torch.bfloat16):
        layers = stack(cls)
    assert [layer.layer_idx for layer in layers] == [*range(LAYERS)]
    assert all(torch.equal(layer.inv_freq, values) for layer, values in zip(layers, true, strict=True))


@pytest.mark.parametrize("name", ["OnlyKept", *OTHERS])
def test_each_layer_from_meta_has_the_frequencies_of_its_own_index(library: ModuleType, name: str) -> None:
    cls = getattr(library, name)
    true = [layer.inv_freq.clone() for layer in stack(cls)]
    with safe_rope.guard():
        with torch.device("meta"):
            layers = stack(cls)
        layers.to_empty(device="cpu")
    assert all(torch.equal(layer.inv_freq, values) for layer, values in zip(layers, true, strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_an_argument_that_may_be_read_is_none_that_is_only_kept(library: ModuleType, name: str) -> None:
    assert not only_kept.only_kept(getattr(library, name))


def test_a_library_s_layer_that_only_keeps_its_index_is_known(library: ModuleType) -> None:
    assert only_kept.only_kept(library.OnlyKept) == {"layer_idx": "layer_idx"}


def test_a_class_of_somebody_s_own_has_no_such_arguments(library: ModuleType) -> None:
    class Own(library.OnlyKept):  # type: ignore[name-defined, misc]
        def __init__(self, layer_idx: int) -> None:
            super().__init__(16)
            self.layer_idx = layer_idx

    assert not only_kept.only_kept(Own)


def test_a_load_of_gpt_j_builds_neither_the_model_nor_each_layer_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GPTJConfig(
        n_embd=32, n_inner=32, vocab_size=64, n_layer=6, n_head=2, rotary_dim=8, n_positions=64
    )
    GPTJModel(config).save_pretrained(tmp_path)
    built: dict[str, int] = {}

    def counted(cls: Any) -> None:
        inner = cls.__init__

        @functools.wraps(inner)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            built[cls.__name__] = built.get(cls.__name__, 0) + 1
            inner(self, *args, **kwargs)

        monkeypatch.setattr(cls, "__init__", init)

    counted(GPTJModel)
    makes = modeling_gptj.create_sinusoidal_positions
    made: list[int] = []

    @functools.wraps(makes)
    def noted(*given: int) -> torch.Tensor:
        made.append(1)
        return makes(*given)

    monkeypatch.setattr(modeling_gptj, "create_sinusoidal_positions", noted)
    GPTJModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    stock = len(made)
    with safe_rope.guard():
        GPTJModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert built == {"GPTJModel": 2}
    assert len(made) - 2 * stock <= 2
