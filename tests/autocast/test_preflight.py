"""What is refused before anything is built, and what the refusal says."""

from __future__ import annotations

import base64
import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

import safe_rope
from safe_rope.autocast import _deepspeed, preflight, releases, settings
from safe_rope.errors import ConfigError, IncompatibleVersionError

pytestmark = pytest.mark.contract


def config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 2},
        **changes,
    }


def section(**changes: Any) -> dict[str, Any]:
    return config(torch_autocast={"enabled": True, "dtype": "bfloat16", **changes})


@pytest.fixture(autouse=True)
def a_release_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a release trains wrong is refused before the rest of a config is looked at."""
    if releases.faults(_deepspeed.release(), 2, 1):
        monkeypatch.setattr(_deepspeed, "release", lambda: releases.NEWEST_TESTED)


@pytest.fixture
def check(has_autocast: bool) -> Callable[[dict[str, Any]], Any]:
    """check_config, on a DeepSpeed that has the feature."""
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    return preflight.check_config


REFUSED = {
    "misspelled section": (config(torch_autocats={}), "did you mean 'torch_autocast'"),
    "misspelled key": (section(lower_precision_safe_module=[]), "'lower_precision_safe_modules'"),
    "unknown key": (section(level="O2"), "known are enabled, dtype, lower_precision_safe_modules"),
    "key beside": (config(gradient_acumulation_steps=2), "did you mean 'gradient_accumulation_steps'"),
    "section is a flag": (config(torch_autocast=True), "must be an object"),
    "enabled is a word": (section(enabled="yes"), "must be true or false, got 'yes'"),
    "no dtype": (config(torch_autocast={"enabled": True}), "dtype is missing"),
    "misspelled dtype": (section(dtype="bflaot16"), "did you mean 'bfloat16'"),
    "FP32": (section(dtype="float32"), "got 'float32'"),
    "amp beside": (config(amp={"enabled": True}), "torch_autocast and amp are both enabled"),
    "unknown class": (section(lower_precision_safe_modules=["torch.nn.Liner"]), "did you mean 'Linear'"),
    "no package": (section(lower_precision_safe_modules=["Linear"]), "torch.nn.Linear"),
    "no such package": (section(lower_precision_safe_modules=["torhc.nn.Linear"]), "cannot be imported"),
    "no module class": (section(lower_precision_safe_modules=["torch.Tensor"]), "no module class 'Tensor'"),
    "one class": (section(lower_precision_safe_modules="torch.nn.Linear"), "or a list of class names"),
    "quantised": (
        config(zero_optimization={"stage": 3, "zero_quantized_weights": True}),
        "remove zero_quantized_weights",
    ),
    "quantised gradients": (
        config(zero_optimization={"stage": 3, "zero_quantized_gradients": True}),
        "remove zero_quantized_gradients",
    ),
    "quantised frozen weights": (
        config(zero_optimization={"stage": 3, "zero_quantized_nontrainable_weights": True}),
        "remove zero_quantized_nontrainable_weights",
    ),
    "stage": (config(zero_optimization={"stage": 4}), "must be 0, 1, 2 or 3, got 4"),
    "left to the Trainer": (config(gradient_accumulation_steps="auto"), "only the HF Trainer"),
    "reduction dtype": (config(communication_data_type="fp64"), "one of fp32, fp16, bf16"),
    "another low dtype": (config(communication_data_type="fp16"), "neither fp32 nor"),
    "float16 offloaded": (
        config(
            torch_autocast={"enabled": True, "dtype": "float16"},
            zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
        ),
        "offload_optimizer is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_deepspeed_would_silently_misread_is_refused(name: str, check: Any) -> None:
    wrong, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        check(wrong)
    assert message in str(caught.value)


def test_what_is_asked_for_is_read(check: Any) -> None:
    found = check(
        config(
            torch_autocast={"enabled": True, "dtype": "fp16", "lower_precision_safe_modules": "auto"},
            communication_data_type="fp32",
            zero_optimization={"stage": 3, "reduce_bucket_size": 5e8},
            gradient_accumulation_steps=2,
            my_own_key=1,
        )
    )
    assert found == settings.AutocastSettings(
        dtype=torch.float16,
        safe_modules="auto",
        stage=3,
        accumulation_steps=2,
        reduce_dtype=torch.float32,
        reduce_bucket_size=500_000_000,
    )


@pytest.mark.parametrize("sizes", [{}, {"train_batch_size": 4}], ids=["one", "of sizes"])
def test_a_key_that_is_null_is_not_given(sizes: dict[str, int], check: Any) -> None:
    given = config(zero_optimization={"stage": 3}, gradient_accumulation_steps=None, **sizes)
    assert check(given).accumulation_steps == DeepSpeedConfig(given).gradient_accumulation_steps


def test_an_argument_of_a_newer_deepspeed_reaches_it() -> None:
    known = types.SimpleNamespace(initialize=lambda args=None, **given: given)
    safe_rope.autocast.in_place_of_deepspeeds(known)
    given = {"config": {"bf16": {"enabled": True}}, "something_new": 1}
    assert known.initialize(None, **given) == given


@pytest.mark.parametrize("off", [{}, {"torch_autocast": {"enabled": False}}, {"torch_autocast": {}}])
def test_a_config_without_autocast_is_not_touched(off: dict[str, Any]) -> None:
    assert preflight.check_config({"bf16": {"enabled": True}, **off}) is None


def test_a_deepspeed_without_the_feature_refuses_the_section(has_autocast: bool) -> None:
    if has_autocast:
        pytest.skip("this DeepSpeed has torch_autocast")
    with pytest.raises(ConfigError, match=r"needs DeepSpeed 0.17.6 or newer, .* is installed"):
        preflight.check_config(config())
    with pytest.raises(ConfigError, match="upgrade DeepSpeed"):
        safe_rope.initialize(model=nn.Linear(2, 2), config=config())


@pytest.mark.parametrize(
    ("release", "stage", "accumulation", "wrong"),
    [
        ("0.17.6", 2, 1, False),
        ("0.17.6", 2, 2, True),
        ("0.18.2", 2, 2, True),
        ("0.17.6", 1, 2, False),
        ("0.18.3", 0, 2, True),
        ("0.18.3", 3, 2, False),
        ("0.18.3", 2, 1, False),
        ("0.18.9", 2, 1, False),
        ("0.18.10", 2, 1, False),
        ("0.19.8+cpu", 2, 2, False),
    ],
)
def test_releases_that_are_known_wrong(release: str, stage: int, accumulation: int, wrong: bool) -> None:
    assert bool(releases.faults(release, stage, accumulation)) is wrong


def test_a_known_wrong_release_is_refused(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deepspeed, "release", lambda: "0.17.6")
    assert check(config()) is not None
    zero = {"stage": 1, "overlap_comm": True}
    with pytest.raises(ConfigError, match="set overlap_comm to false"):
        check(config(gradient_accumulation_steps=2, zero_optimization=zero))
    check(config(gradient_accumulation_steps=2, zero_optimization={"stage": 1}))
    with pytest.raises(ConfigError, match=r"overwrite the last one's: use DeepSpeed 0.19.3 or newer"):
        check(config(gradient_accumulation_steps=2))


def test_weights_that_were_flattened_within_a_graph_can_be_gathered_into() -> None:
    flat = torch.cat([p.view(-1) for p in nn.Linear(3, 3).parameters()])  # as DeepSpeed 0.18.7 to 0.18.9
    optimizer = types.SimpleNamespace(bit16_groups_flat=[flat])
    optimizer.parallel_partitioned_bit16_groups = [list(flat.chunk(2))]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        optimizer.parallel_partitioned_bit16_groups[0][1].copy_(torch.ones(6))
    _deepspeed.detach_weights(optimizer)
    optimizer.parallel_partitioned_bit16_groups[0][1].copy_(torch.ones(6))
    assert torch.equal(optimizer.bit16_groups_flat[0][6:], torch.ones(6))
    assert optimizer.bit16_groups_flat[0].data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("last", [True, False])
def test_of_a_pipelines_stages_the_last_alone_divides_by_the_accumulation_steps(last: bool) -> None:
    engine = types.SimpleNamespace(_scale_wrt_gas=True, is_last_stage=lambda: last)  # as in DeepSpeed 0.18.9
    _deepspeed.divide_once(engine)
    assert engine._scale_wrt_gas is last
    others = (types.SimpleNamespace(_scale_wrt_gas=True), types.SimpleNamespace(is_last_stage=lambda: last))
    for other in others:  # no pipeline, and one of DeepSpeed 0.19.8
        before = dict(vars(other))
        _deepspeed.divide_once(other)
        assert vars(other) == before


def test_a_hook_point_that_deepspeed_lacks_is_named_with_the_release() -> None:
    optimizer = types.SimpleNamespace(step=len)
    _deepspeed.around(optimizer, "step", lambda step, batch: step(batch) + 1)
    assert optimizer.step("ab") == 3
    with pytest.raises(IncompatibleVersionError, match=rf"{re.escape(_deepspeed.release())} .* _post_step"):
        _deepspeed.around(optimizer, "_post_step", len)


def test_float16_without_zero_needs_a_deepspeed_with_a_loss_scale_there(has_autocast: bool) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    from deepspeed.runtime import engine

    asked = config(torch_autocast={"enabled": True, "dtype": "float16"}, zero_optimization={"stage": 0})
    if "GradScaler" in Path(str(engine.__file__)).read_text(encoding="utf-8"):
        assert preflight.check_config(asked) is not None
    else:
        with pytest.raises(ConfigError, match="no loss scale for float16 at ZeRO 0"):
            preflight.check_config(asked)


@pytest.mark.parametrize("form", ["dict", "path", "Path", "hjson", "base64"])
def test_every_form_of_a_config_is_read(form: str, tmp_path: Path) -> None:
    text = json.dumps(config())
    path = tmp_path / "ds.json"
    path.write_text(text if form != "hjson" else "# a comment\n" + text, encoding="utf-8")
    given: Any = {
        "dict": config(),
        "path": str(path),
        "Path": path,
        "hjson": str(path),
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
    }[form]
    assert settings.read_config(given) == config()


def test_a_config_is_found_where_deepspeed_looks() -> None:
    args = types.SimpleNamespace(deepspeed_config="ds.json", local_rank=0)
    assert settings.find_config(args, None, None) == "ds.json"
    assert settings.find_config(None, None, {"a": 1}) == {"a": 1}
    assert settings.find_config(None, None, None) is None


def test_unreadable_configs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the path of a file that exists"):
        settings.read_config("nowhere.json")
    twice = tmp_path / "twice.json"
    twice.write_text('{"bf16": {}, "bf16": {}}', encoding="utf-8")
    with pytest.raises(ConfigError, match="names bf16 twice"):
        settings.read_config(twice)


def test_models_that_autocast_cannot_train_are_refused(check: Any) -> None:
    asked = check(config())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    preflight.check_model(model, asked)
    for other in (torch.float16, torch.float64):
        model[1].to(other).requires_grad_(True)
        with pytest.raises(ConfigError, match=rf"1.weight \({other}\), 1.bias"):
            preflight.check_model(model, asked)
        model[1].requires_grad_(False)  # a frozen base below trained adapters
        preflight.check_model(model, asked)
    model.is_quantized = True  # as transformers marks it
    with pytest.raises(ConfigError, match="without quantisation"):
        preflight.check_model(model, asked)


def test_without_zero_float16_parameters_are_refused(check: Any) -> None:
    low = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    if not _deepspeed.scales_without_zero():
        pytest.skip("this DeepSpeed has no loss scale at ZeRO 0")
    model = nn.Linear(2, 2).to(torch.float16)
    with pytest.raises(ConfigError, match="GradScaler"):
        preflight.check_model(model, check(config(**low, zero_optimization={"stage": 0})))
    preflight.check_model(model, check(config(**low)))
