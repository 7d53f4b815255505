"""Code that comes with a checkpoint and rebinds its arguments, through from_pretrained."""

from __future__ import annotations

import json
from pathlib import Path

import no_harm
import pytest
import torch
import transformers
from no_harm import BF16, FP32

import safe_rope

REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class HarmConfig(PretrainedConfig):
    model_type = "harm_remote"

    def __init__(self, hidden_size=64, **kwargs):
        self.hidden_size = hidden_size
        super().__init__(**kwargs)


class Rope(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent={persistent})

    def forward(self, x, position_ids):
        phase = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((phase, phase), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class Ntk(Rope):
    def __init__(self, dim=64, base=10000.0, a=4.0):
        base = base * a ** (dim / (dim - 2))
        super().__init__(dim, base)


class HarmModel(PreTrainedModel):
    config_class = HarmConfig

    def __init__(self, config):
        super().__init__(config)
        self.rope = Ntk(config.hidden_size)
        self.layer = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def _init_weights(self, module):
        pass
"""


BASE = 10000.0 * 4.0 ** (64 / 62)
TRUTH = 1.0 / BASE ** (torch.arange(0, 64, 2, dtype=torch.int64).float() / 64)


@pytest.mark.parametrize("persistent", [False, True], ids=["not saved", "saved"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_remote_code_that_rebinds_its_arguments(
    dtype: torch.dtype, persistent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "modeling_harm.py").write_text(REMOTE.format(persistent=persistent))
    classes = {"AutoConfig": "modeling_harm.HarmConfig", "AutoModel": "modeling_harm.HarmModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "harm_remote", "auto_map": classes}))
    weights = {"layer.weight": torch.ones(64, 64), "layer.bias": torch.zeros(64)}
    torch.save(weights | ({"rope.inv_freq": TRUTH} if persistent else {}), folder / "pytorch_model.bin")
    with no_harm.watched() as said:
        with safe_rope.guard(tables="fp32") as session:
            model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True, torch_dtype=dtype)
        said.report = session.report
    phase = no_harm.POSITIONS[..., None].float() * TRUTH
    cos = no_harm.plain(model.rope(torch.zeros(1), no_harm.POSITIONS)[0])
    right = torch.equal(no_harm.in_full_precision(model.rope), TRUTH)
    right = right and torch.equal(cos[..., :32], phase.cos())
    # transformers 5 builds every model on meta; values that no file holds are never filled in there.
    assert right or (said.names("rope", "Ntk") and not (persistent and dtype == FP32))
