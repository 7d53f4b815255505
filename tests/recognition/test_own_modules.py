"""Models that are none of transformers': remote code, and plain modules with rotary classes of their own."""

from __future__ import annotations

import copy
import json
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from support.zero_init import default_zero_init as zero_init
from torch import nn

import safe_rope
from safe_rope._protection.rewrite import is_pinned, is_protected


class PlainRotary(nn.Module):
    """What many a repository has: complex phases for every position, a count in the default dtype."""

    def __init__(self, dim: int, length: int = 512, theta: float = 10000.0) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
        phase = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        self.register_buffer("phases", torch.polar(torch.ones_like(phase), phase), persistent=False)
        self.register_buffer("table", phase.sin(), persistent=False)
        self.slopes = torch.tensor([2.0**-i for i in range(dim)]) * torch.arange(1.0, dim + 1)
        exponents = -torch.arange(0, dim, 2).float() / dim
        self.steps = torch.pow(theta, exponents, out=torch.empty(dim // 2, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[-2], : x.shape[-1]]


class PlainModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rotary = PlainRotary(2 * width)
        self.projection = nn.Linear(width, width)
        self.register_buffer("features", torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(self.rotary(x))


NAMES = ("phases", "table", "slopes", "steps")


def tables(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(model.rotary, name) for name in NAMES}


def assert_true(model: nn.Module, truth: dict[str, torch.Tensor]) -> None:
    for name, table in tables(model).items():
        assert table.dtype == truth[name].dtype, name
        assert torch.equal(table.cpu(), truth[name]), name


@pytest.fixture
def truth() -> dict[str, torch.Tensor]:
    return {name: table.clone() for name, table in tables(PlainModel()).items()}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    import deepspeed

    with pytest.MonkeyPatch.context() as patch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        for name, value in {**values, "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setenv(name, value)
        patch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        probe.close()
        deepspeed.init_distributed("gloo")
        yield


@pytest.mark.usefixtures("group")
def test_a_plain_module_is_true_under_direct_zero_init(truth: dict[str, torch.Tensor]) -> None:
    with zero_init():
        damaged = PlainModel()
    assert not torch.equal(damaged.rotary.table.float(), truth["table"]), "zero.Init does damage it"
    with safe_rope.guard() as session, zero_init():
        model = PlainModel()
    assert_true(model, truth)
    assert [(entry.path, entry.level) for entry in session.report.protected] == [("rotary", "pinned")]
    assert model.features.dtype == torch.bfloat16, "what is no position is none of the guard's business"


CHANGES = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double and back": lambda model: model.double().float(),
    "meta and back": lambda model: model.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "half, then deepcopy": lambda model: copy.deepcopy(model.half()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["guard", "protect"])
def test_a_plain_module_stays_true_through(change: str, how: str, truth: dict[str, torch.Tensor]) -> None:
    if how == "guard":
        with safe_rope.guard():
            model = PlainModel()
    else:
        model = PlainModel()
        model.rotary.dim = 64  # what a module says of itself is all that protect() has
        model.rotary.length, model.rotary.theta = 512, 10000.0
        model.rotary.table.copy_(model.rotary.table.to(torch.bfloat16))
        safe_rope.protect(model)
    assert_true(CHANGES[change](model), truth)
    assert type(model.rotary).__name__ == "PlainRotary"
    assert isinstance(model.rotary, PlainRotary)


def test_a_table_that_is_ready_for_use_enters_in_the_dtype_of_the_model() -> None:
    with safe_rope.guard():
        model = PlainModel().to(torch.bfloat16)
    x = torch.zeros(1, 4, 32, dtype=torch.bfloat16)
    assert model(x).dtype == torch.bfloat16
    rotated = model.rotary(x)
    assert torch.equal(rotated[0], model.rotary.table[:4, :32].to(torch.bfloat16))
    assert model.rotary.table.dtype == torch.float32


def test_a_checkpoint_with_other_values_in_full_precision_wins() -> None:
    class Persistent(PlainRotary):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.register_buffer("table", self.table, persistent=True)

    with safe_rope.guard():
        model = nn.Sequential(Persistent(8))
    true = model[0].table.clone()
    model.load_state_dict({"0.table": true.to(torch.bfloat16)})
    assert torch.equal(model[0].table, true), "rounded values are the same table"
    model.load_state_dict({"0.table": true * 3})
    assert torch.equal(model[0].table, true * 3)
    assert torch.equal(model.half()[0].table, true * 3)


REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class ZooConfig(PretrainedConfig):
    model_type = "zoo_remote"

    def __init__(self, hidden_size=64, max_position_embeddings=128, rope_theta=10000.0, **kwargs):
        self.hidden_size = hidden_size
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        super().__init__(**kwargs)


class ZooRotary(nn.Module):
    def __init__(self, dim, base, length):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.cos = torch.outer(torch.arange(length) * 1.0, inv_freq).cos()

    def forward(self, length):
        phase = torch.outer(torch.arange(length, device=self.inv_freq.device).float(), self.inv_freq)
        return phase.cos(), phase.sin()


class ZooModel(PreTrainedModel):
    config_class = ZooConfig

    def __init__(self, config):
        super().__init__(config)
        self.rotary = ZooRotary(config.hidden_size, config.rope_theta, config.max_position_embeddings)
        self.layer = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, x):
        cos, sin = self.rotary(x.shape[-2])
        return self.layer(torch.cat((cos, sin), -1).to(x.dtype) * x)
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint folder whose model code comes with it."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "modeling_zoo.py").write_text(REMOTE)
    classes = {"AutoConfig": "modeling_zoo.ZooConfig", "AutoModel": "modeling_zoo.ZooModel"}
    config = {"model_type": "zoo_remote", "auto_map": classes, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"layer.weight": torch.ones(64, 64), "layer.bias": torch.zeros(64)}
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def test_remote_code_that_is_defined_while_the_guard_is_open(remote: Path) -> None:
    with safe_rope.guard() as session:
        model = transformers.AutoModel.from_pretrained(
            remote, trust_remote_code=True, torch_dtype=torch.bfloat16
        )
    assert type(model).__module__.startswith("transformers_modules.")
    true = 1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.int64).float() / 64)
    for _ in range(2):
        assert torch.equal(model.rotary.inv_freq, true)
        assert torch.equal(model.rotary.cos, torch.outer(torch.arange(128).float(), true).cos())
        model = model.to(torch.bfloat16)
    assert model(torch.ones(1, 8, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert not session.report.unprotected
    assert is_pinned(model.rotary) or is_protected(model.rotary)
