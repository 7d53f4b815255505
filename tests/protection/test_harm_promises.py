"""The dtypes of what leaves a module, and of what files hold, are those of the stock model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import no_harm
import pytest
import torch
import transformers
from no_harm import BF16, DIM, FP32, LENGTH, Holder, Saved
from torch import nn

import safe_rope

# ---- what a module returns -----------------------------------------------------------------------------


class Phases(nn.Module):
    """Returns the angles themselves, as x-transformers and timm's rotary modules do."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", no_harm.frequencies(dim), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        t = torch.arange(length, device=self.inv_freq.device).type_as(self.inv_freq)
        return torch.outer(t, self.inv_freq)


class TakesCosine(nn.Module):
    """The parent makes cos and sin of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Phases()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = self.rope(x.shape[-2]).repeat(1, 2)
        return self.layer(x * phase.cos() + x * phase.sin())


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16, torch.float64], ids=str)
def test_phases_have_the_dtype_that_they_have_without_the_guard(dtype: torch.dtype) -> None:
    model, _ = no_harm.guarded(lambda: Holder(Phases()))
    stock = Holder(Phases()).to(dtype)
    got, expected = model.to(dtype).rope(LENGTH), stock.rope(LENGTH)
    assert got.dtype == expected.dtype
    true = Phases()(LENGTH)
    assert (no_harm.plain(got) - true).abs().max() <= (expected - true).abs().max() + 1e-6


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_what_a_parent_makes_of_phases_is_right_or_named(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    truth = TakesCosine().to(dtype).float()
    with no_harm.watched() as said:
        with safe_rope.guard(tables="fp32") as session:
            model = TakesCosine()
        said.report = session.report
        model.load_state_dict(truth.state_dict())
        model = model.to(dtype)
        x = torch.randn(1, LENGTH, DIM).to(dtype)
        got = model(x)
    stock = TakesCosine().to(dtype)
    stock.load_state_dict(truth.state_dict())
    assert got.dtype == stock(x).dtype
    truth.rope.inv_freq.copy_(no_harm.frequencies())
    worst = (got.float() - truth(x.float())).abs().max()
    assert worst < 0.03 or said.names("rope", "Phases")


# ---- what a file holds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["guard", "protect"])
def test_a_saved_table_is_stocks_true_value_rounded_once(
    how: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if how == "guard":
        model, _ = no_harm.guarded(lambda: Holder(Saved()))
    else:
        model = Holder(Saved())
        no_harm.protected(model)
    model.to(dtype)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)["rope.inv_freq"]
    assert type(saved) is torch.Tensor
    assert saved.dtype == dtype
    assert torch.equal(saved, no_harm.frequencies().to(dtype))
    assert torch.equal(no_harm.in_full_precision(model.rope), no_harm.frequencies())


class SavedConfig(transformers.PretrainedConfig):
    model_type = "harm_saved"
    num_hidden_layers = 1
    hidden_size = DIM


class SavedModel(transformers.PreTrainedModel):
    config_class = SavedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rope = Saved()
        self.layer = nn.Linear(DIM, DIM)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_save_pretrained_writes_what_stock_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for name in ("stock", "guarded"):
        if name == "stock":
            model = SavedModel(SavedConfig())
        else:
            with safe_rope.guard():
                model = SavedModel(SavedConfig())
        model.to(dtype).save_pretrained(tmp_path / name, safe_serialization=True)
    stock, guarded = (load_file(tmp_path / name / "model.safetensors") for name in ("stock", "guarded"))
    assert {k: v.dtype for k, v in guarded.items()} == {k: v.dtype for k, v in stock.items()}
    assert torch.equal(guarded["rope.inv_freq"], stock["rope.inv_freq"])


class Decay(nn.Module):
    """A table in the dtype that the model is built in, in every checkpoint, and a product of one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("decay", torch.exp(-(0.1**0.5) * (torch.arange(LENGTH) + 1)[:, None]))
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mT @ self.decay


class DecayModel(SavedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.decays = Decay()
        self.post_init()


@pytest.mark.contract
@pytest.mark.parametrize("saved", [FP32, BF16], ids=str)
def test_a_loaded_table_has_the_dtype_that_the_stock_loader_gives(saved: torch.dtype, tmp_path: Path) -> None:
    DecayModel(SavedConfig()).to(saved).save_pretrained(tmp_path)
    stock = DecayModel.from_pretrained(tmp_path, torch_dtype=BF16)
    with safe_rope.guard():
        model = DecayModel.from_pretrained(tmp_path, torch_dtype=BF16)
    dtypes = {name: value.dtype for name, value in stock.state_dict().items()}
    assert {name: value.dtype for name, value in model.state_dict().items()} == dtypes
    x = torch.ones(1, LENGTH, DIM, dtype=BF16)
    if dtypes["decays.decay"] == BF16:
        assert model.decays(x).dtype == stock.decays(x).dtype == BF16


WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "safe_rope":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(type(model).__name__)
"""


@pytest.mark.slow
def test_a_whole_model_in_a_file_loads_without_the_library_or_the_page_says_so(tmp_path: Path) -> None:
    with safe_rope.guard():
        model = transformers.GPTNeoXModel(
            transformers.GPTNeoXConfig(
                hidden_size=64,
                num_attention_heads=2,
                num_hidden_layers=1,
                intermediate_size=32,
                vocab_size=97,
            )
        )
    torch.save(model, tmp_path / "model.pt")
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, str(tmp_path / "model.pt")]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if child.returncode:
        assert "safe_rope" in child.stderr, child.stderr
        pages = Path(__file__).parents[2].joinpath("docs").glob("*.md")
        lines = [line for page in pages for line in page.read_text().split("\n\n")]
        assert any("torch.save(model" in line and "safe_rope" in line for line in lines)
    else:
        assert child.stdout.split() == ["GPTNeoXModel"]
