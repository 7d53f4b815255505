"""Who rotates q and k: functions that are imported, inherited, shared by two families, or not known."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import no_harm
import pytest
import torch
import transformers
from no_harm import BF16
from support import written_modules
from torch import nn
from transformers.models.llama import modeling_llama

import safe_rope

pytestmark = pytest.mark.fresh

HEADS, HEAD, LENGTH = 2, 32, 300

ATTENTION = f"""
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width={HEADS * HEAD}, heads={HEADS}):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, cos, sin):
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.rotary = Rotary(*args)
        self.attention = Attention()

    def forward(self, x):
        cos, sin = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.attention(x, cos, sin)
"""

OWN = """
import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim={head}, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, position_ids):
        phase = position_ids[..., None].float() * self.inv_freq.float()
        both = torch.cat((phase, phase), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def {application}(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
"""
STOCK = inspect.unwrap(modeling_llama.apply_rotary_pos_emb)
LLAMA = "from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb\n"
SOURCES = {
    "imported": LLAMA + "Rotary = LlamaRotaryEmbedding\n" + ATTENTION,
    "subclassed": LLAMA + "class Rotary(LlamaRotaryEmbedding):\n    pass\n" + ATTENTION,
    "subclassed under its name": LLAMA
    + "class LlamaRotaryEmbedding(LlamaRotaryEmbedding):\n    pass\nRotary = LlamaRotaryEmbedding\n"
    + ATTENTION,
    "with a function of its own": LLAMA
    + OWN.format(head=HEAD, application="apply_rotary_pos_emb")
    + "Rotary = LlamaRotaryEmbedding\n"
    + ATTENTION,
    "with a function of another name": LLAMA
    + OWN.format(head=HEAD, application="mix")
    + "Rotary, apply_rotary_pos_emb = LlamaRotaryEmbedding, mix\n"
    + ATTENTION,
}


def arguments() -> tuple[Any, ...]:
    config = transformers.LlamaConfig(hidden_size=HEADS * HEAD, num_attention_heads=HEADS)
    parameters = inspect.signature(modeling_llama.LlamaRotaryEmbedding).parameters
    if "config" not in parameters:
        pytest.skip("this transformers calls its rotary modules with a length")
    return (config,)


def fill(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.2).to(BF16))
    return model


def inputs() -> torch.Tensor:
    return torch.randn(1, LENGTH, HEADS * HEAD, generator=torch.Generator().manual_seed(1)).to(BF16)


def error(model: nn.Module, truth: nn.Module) -> float:
    with torch.no_grad():
        got, true = model(inputs().to(next(model.parameters()).dtype)), truth(inputs().float())
    assert got.dtype == next(model.parameters()).dtype
    return float((got.float() - true).abs().max())


# ---- the application function comes from elsewhere -----------------------------------------------------


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_a_model_that_borrows_llamas_rotary_runs(
    source: str, dtype: torch.dtype, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    with monkeypatch.context() as patch:
        # What is imported is the stock function, whatever other tests have left alive.
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", STOCK)
        (module,) = written_modules.write(tmp_path, monkeypatch, modeling_borrowing=SOURCES[source])
    truth, stock = fill(module.Model(*args)), fill(module.Model(*args)).to(dtype)
    if how == "guard":
        with safe_rope.guard(tables="fp32"):
            model = module.Model(*args)
    else:
        model = module.Model(*args)
        safe_rope.protect(model, tables="fp32")
    model = fill(model).to(dtype)
    assert error(model, truth) <= error(stock, truth) * 1.1 + 1e-6
    if dtype == torch.float32:
        assert torch.equal(model(inputs().float()), stock(inputs().float()))


# ---- what is learned beside a table --------------------------------------------------------------------

LEARNED = "        self.temperature = nn.Parameter(torch.tensor(1.25))\n"
PLAIN = OWN.format(head=HEAD, application="apply_rotary_pos_emb") + ATTENTION
COUNTS = PLAIN.replace("[..., None].float() * self.inv_freq.float()", "[..., None] * self.inv_freq")
TEMPERED = {
    "in it": COUNTS.replace("        self.dim,", LEARNED + "        self.dim,")
    .replace("both.cos()", "(both.cos() * self.temperature)")
    .replace("both.sin()", "(both.sin() * self.temperature)"),
    "in its parent": PLAIN.replace("        self.rotary =", LEARNED + "        self.rotary =").replace(
        "(x, cos, sin)\n", "(x, cos * self.temperature, sin * self.temperature)\n"
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("place", TEMPERED)
def test_a_number_that_scales_cos_and_sin_gets_its_gradient(
    place: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient(model: nn.Module) -> torch.Tensor:
        fill(model)(inputs().to(next(model.parameters()).dtype)).float().square().sum().backward()
        found = next(p.grad for name, p in model.named_parameters() if name.endswith("temperature"))
        assert found is not None
        return found

    (module,) = written_modules.write(tmp_path, monkeypatch, modeling_tempered=TEMPERED[place])
    with safe_rope.guard(tables="fp32"):
        model = module.Model()
    true, got = gradient(module.Model()), gradient(model.to(dtype))
    assert got.dtype == dtype
    assert abs(got.float() - true) <= (0.02 if dtype == BF16 else 1e-5) * abs(true)


# ---- one function, two families ------------------------------------------------------------------------

SHARED = OWN.format(head=HEAD, application="apply_rotary_pos_emb")


@pytest.fixture
def families_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ...]:
    """Two model files, whose attention is a third one's that holds the application function."""
    shared = SHARED + "\n" + ATTENTION
    one = "from modeling_shared import Model as _Model\nclass Model(_Model):\n    pass\n"
    return written_modules.write(
        tmp_path, monkeypatch, modeling_shared=shared, modeling_one=one, modeling_other=one
    )


@pytest.mark.parametrize("first", [0, 1], ids=["the first dies", "the second dies"])
def test_a_family_keeps_its_function_when_another_that_shares_it_dies(
    first: int, families_of_one: tuple[ModuleType, ...]
) -> None:
    shared, *owners = families_of_one
    function = shared.apply_rotary_pos_emb
    stock = function.__code__
    truth = fill(shared.Model())
    models: list[Any] = []
    for owner in owners:
        with safe_rope.guard(tables="fp32"):
            models.append(fill(owner.Model()).to(BF16))
    wrapped = function.__code__
    assert wrapped is not stock, "q and k are rotated in FP32"
    assert shared.apply_rotary_pos_emb is function
    survivor = models[1 - first]
    expected = survivor(inputs())
    models[first] = None
    gc.collect()
    assert function.__code__ is wrapped
    assert torch.equal(survivor(inputs()), expected)
    assert error(survivor, truth) < 0.1, "0.35 with cos and sin rounded before q and k are rotated"
    models.clear()
    del survivor
    gc.collect()
    assert function.__code__ is stock


def guarded(make: Callable[[], nn.Module]) -> nn.Module:
    with safe_rope.guard():
        return nn.Sequential(make())


def test_two_patches_that_name_one_function_count_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SHARED + "\nclass Second(Rotary):\n    pass\n\n" + ATTENTION
    (module,) = written_modules.write(tmp_path, monkeypatch, modeling_twice=source)
    monkeypatch.setattr(safe_rope.registry, "_registry", safe_rope.registry._Registry())  # of this test alone
    for family, name in (("harm one", "Rotary"), ("harm two", "Second")):
        safe_rope.registry.register(
            safe_rope.registry.RopePatch(family, ("modeling_twice",), rotary_classes=(name,))
        )
    function = module.apply_rotary_pos_emb
    stock = function.__code__
    models = [guarded(module.Rotary), guarded(module.Second)]
    wrapped = function.__code__
    assert wrapped is not stock
    del models[0]
    gc.collect()
    assert function.__code__ is wrapped
    models.clear()
    gc.collect()
    assert function.__code__ is stock


# ---- what the report says of it ------------------------------------------------------------------------

UNKNOWN = OWN.format(head=HEAD, application="mix") + "apply_rotary_pos_emb = mix\n" + ATTENTION
KNOWN = OWN.format(head=HEAD, application="apply_rotary_pos_emb") + ATTENTION
BY_HAND = UNKNOWN.replace("apply_rotary_pos_emb = mix", "del mix").replace(
    "apply_rotary_pos_emb(q, k, cos, sin)", "(p * cos + p.flip(-1) * sin for p in (q, k))"
)


def reported(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    (module,) = written_modules.write(tmp_path, monkeypatch, modeling_reported=source)
    with no_harm.watched(), safe_rope.guard(**options) as session:
        model = module.Model()
    del model
    return session.report


def test_the_report_says_that_cos_and_sin_are_applied_as_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reported(BY_HAND, tmp_path, monkeypatch)
    (entry,) = report.protected
    assert "applied as stock" in str(entry)
    assert "applied as stock" in " ".join(str(report).split())
    assert [fields["apply"] for fields in report.to_dict()["protected"]] == ["stock"]


def test_a_strict_guard_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        said = str(reported(BY_HAND, tmp_path, monkeypatch, strict=True))
    except safe_rope.UnsupportedModelError as refusal:
        said = str(refusal)
    assert "applied as stock" in said


def test_the_report_says_that_cos_and_sin_are_applied_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reported(KNOWN, tmp_path, monkeypatch)
    (entry,) = report.protected
    assert "applied as stock" not in str(entry)
    assert [fields["apply"] for fields in report.to_dict()["protected"]] == ["fp32"]


def test_the_report_says_stock_where_stock_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reported(KNOWN, tmp_path, monkeypatch, apply="stock")
    assert [fields["apply"] for fields in report.to_dict()["protected"]] == ["stock"]


def test_the_report_tells_models_of_transformers_apart() -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32, vocab_size=97
    )
    with safe_rope.guard() as session:
        model = transformers.LlamaModel(config)
    assert {fields["apply"] for fields in session.report.to_dict()["protected"]} == {"fp32"}
    assert "applied as stock" not in " ".join(str(session.report).split())
    del model


def test_protect_reports_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = written_modules.write(tmp_path, monkeypatch, modeling_reported=BY_HAND)
    report = safe_rope.protect(copy.deepcopy(module.Model()))
    assert [fields["apply"] for fields in report.to_dict()["protected"]] == ["stock"]


def with_helper(said: str) -> str:
    """A file whose function that rotates is called as the text says."""
    return KNOWN.replace("class Attention(", f"{said}\n\n\nclass Attention(")


TELLS = with_helper(
    "HEARD = []\nstock = apply_rotary_pos_emb\n"
    "def apply_rotary_pos_emb(q, k, cos, sin):\n    HEARD.append(q.shape)\n    return stock(q, k, cos, sin)\n"
)
BESIDE = with_helper(
    "HEARD = []\ndef rotates_and_tells(q, k, cos, sin):\n    HEARD.append(q.shape)\n"
    "    return apply_rotary_pos_emb(q, k, cos, sin)\n"
)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("source", "applies", "named"), [(TELLS, "stock", True), (BESIDE, "fp32", True), (KNOWN, "fp32", False)]
)
def test_the_report_names_functions_that_run_as_in_stock(
    source: str, applies: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reported(source, tmp_path, monkeypatch)
    assert [fields["apply"] for fields in report.to_dict()["protected"]] == [applies]
    names = "apply_rotary_pos_emb may" if applies == "stock" else "rotates_and_tells as in stock"
    assert (names in " ".join(str(report).split())) == named
