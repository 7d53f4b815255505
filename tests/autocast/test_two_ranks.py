"""What two ranks show: training equals DDP with torch.autocast at every ZeRO stage, and nothing is hidden.

Two pairs of processes do all of it (ranks_worker.py). A wrong cast shows in the first step, so every day
three steps are trained of the models that differ in kind. ``--all`` trains ten steps of every model and
whatever people combine with the section, and with SAFE_ROPE_FULL_GRID=1 every combination of the settings.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import transformers
from _process import free_port
from support import two_ranks

from safe_rope.autocast import _deepspeed, releases

STAGES_AGREE = 1e-5  # ZeRO 2 with ZeRO 3, relative, in the first step

MODELS = {"dense": ("llama", "llama tied", "gpt2"), "experts": ("mixtral eager", "mixtral batched")}
WHOLE_GRID = bool(os.environ.get("SAFE_ROPE_FULL_GRID"))
LIMIT = 3600 if WHOLE_GRID else 1200  # seconds

# The bytes of DeepSpeed's default that are saved at ZeRO 2, and the share that stays FP32 at ZeRO 3.
# Before transformers 5 an expert is made of Linear layers, which DeepSpeed sends in low precision by default.
RAW_EXPERTS = int(transformers.__version__.split(".")[0]) >= 5
SAVED = {"llama": 0.25, "gpt2": 0.35, "mixtral eager": 0.40 if RAW_EXPERTS else 0.29}
# The embedding and the norms of this Mixtral are 15.03 %.
FP32_SHARE = {"gpt2": 0.34, "mixtral eager": 0.1503}
STAGING = {"ZeRO 1": 4, "ZeRO 2": 4, "ZeRO 2, overlap": 8, "ZeRO 3": 4}  # bytes an element that was asked for


EVERY_DAY: dict[str, Any] = {
    "parity": {
        "which": "every_day",
        "steps": 3,
        "pairs": [
            *(("llama", "bfloat16"), ("llama tied", "bfloat16"), ("mixtral eager", "bfloat16")),
            ("llama", "float16"),
        ],
    },
    "features": {
        "parts": [
            *("merged", "checkpoints", "experts", "ulysses", "pipeline", "tensor_parallel", "all_replaced")
        ],
        "names": [
            *("offloaded optimizer and parameters, ZeRO 3", "uneven last batch, ZeRO 2"),
            *("edited under GatheredParameters", "adapters on a low base, ZeRO 2", "low weights, ZeRO 1"),
            *("adapters on a low base, ZeRO 3", "built again, ZeRO 2", "built again, ZeRO 3"),
        ],
        "stages": [2, 3],
    },
}
EVERYTHING = {"features": {"parts": ["checkpoints", "universal"]}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 100)]


def run(parts: dict[str, Any], folder: Path) -> list[Any]:
    """Return what each rank measured of ``parts``."""
    from safe_rope.autocast import _deepspeed

    if not _deepspeed.has_autocast():
        pytest.skip("this DeepSpeed has no torch_autocast")
    for name in parts.keys() & {"collectives", "overflow", "features"}:
        parts[name] = {**parts[name], "folder": str(folder / name)}
    return two_ranks.run("autocast/ranks_worker.py", [json.dumps(parts)], folder, LIMIT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank of every day measured of training; a release can change it."""
    # A pipeline leaves groups behind for good, so that the features come last.
    return run(dict(EVERY_DAY), tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What else each rank of every day measured."""
    return run({"disagreeing": {}, "collectives": {}, "overflow": {}}, tmp_path_factory.mktemp("ranks"))


# ---- training equals DDP with torch.autocast -----------------------------------------------------------


@pytest.mark.contract
def test_three_steps_equal_ddp_with_autocast(trained: list[Any]) -> None:
    assert_training_equals_ddp([rank["parity"] for rank in trained])


@pytest.mark.contract
def test_what_people_combine_with_the_section_trains_as_ddp_does(trained: list[Any]) -> None:
    assert_features_equal_ddp([rank["features"] for rank in trained])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ten_steps_equal_ddp_with_autocast(kind: str, dtype: str, tmp_path: Path) -> None:
    which = "grid" if WHOLE_GRID else "covering"
    pairs = [(model, dtype) for model in MODELS[kind]]
    seen = run({"parity": {"which": which, "steps": 10, "pairs": pairs}}, tmp_path)
    assert_training_equals_ddp([rank["parity"] for rank in seen])


@pytest.mark.exhaustive
def test_all_that_people_combine_trains_as_ddp_does(tmp_path: Path) -> None:
    seen = run(dict(EVERYTHING), tmp_path)
    assert_features_equal_ddp([rank["features"] for rank in seen])


def assert_training_equals_ddp(both: list[Any]) -> None:
    seen, other = both
    wrong = [f"{one['case']}: {said}" for one in seen for said in one["deviations"]]
    assert not wrong, "\n".join(wrong)
    trained = [one for one in seen if "refused" not in one]
    stages = {3} if releases.faults(_deepspeed.release(), 2, 1) else {2, 3}  # the others are refused there
    for dtype in {one["dtype"] for one in seen}:
        assert {one["stage"] for one in trained if one["dtype"] == dtype} >= stages
    assert [one.get("scales") for one in seen] == [one.get("scales") for one in other]
    assert not (wrong := disagreements(trained)), wrong


def disagreements(seen: list[dict[str, Any]]) -> list[str]:
    """Where ZeRO 2 and ZeRO 3 differ in the first step of the same training."""
    said = []
    for two in (one for one in seen if one["stage"] == 2 and not one["reduce"]):
        for three in (one for one in seen if one["stage"] == 3 and not one["reduce"]):
            if signature(two) == signature(three):
                for a, b in zip(two["first"], three["first"], strict=True):
                    if not abs(a / b - 1) <= STAGES_AGREE:
                        said.append(f"{two['case']} {a}, {three['case']} {b}")
    return said


def signature(one: dict[str, Any]) -> list[str]:
    """Model, dtype and accumulation: clipping and buffers do not change the first loss and norm."""
    words: list[str] = one["case"].split(", ")
    return [*words[:2], words[3]]


def assert_features_equal_ddp(both: list[Any]) -> None:
    for seen in both:
        wrong = {name: one["deviations"] for name, one in seen["cases"].items() if one["deviations"]}
        assert not wrong
        # A pipeline beside the whole model in one process, the others beside the engine without the section.
        for name, bound in (("pipeline", 5e-4), ("ulysses", 5e-4), ("experts", 1e-3)):
            if name in seen:
                for value, truth in zip(*seen[name][:2], strict=True):
                    assert abs(value - truth) <= bound, (name, seen[name])
        if "tensor_parallel" in seen:
            safe, ours, plain = seen["tensor_parallel"]
            assert not safe
            assert ours == plain
        if "all_replaced" in seen:
            zero_2, newest, plain = seen["all_replaced"]
            assert zero_2 == newest == plain
        assert "bfloat16" not in seen.get("ulysses", [[], [], []])[2], seen["ulysses"]
        for stage, one in seen.get("checkpoints", {}).items():
            assert all(one.values()), (stage, one)
        if "merged" in seen:
            merged = seen["merged"]
            assert merged["saved"], merged
            assert merged["moved"], merged
            assert merged["dtypes"] == ["torch.float32"]
            assert merged["merged"] <= 2**-8  # one rounding to the base's dtype
        assert seen.get("universal", True)


# ---- what is sent, kept and read -----------------------------------------------------------------------


@pytest.mark.parametrize("model", SAVED)
def test_zero_2_sends_less_than_deepspeeds_default(model: str, ranks: list[Any]) -> None:
    one = ranks[0]["collectives"]["sent"][f"{model}, ZeRO 2"]
    ours, default = (sum(one[who].values()) for who in ("safe_rope", "deepspeed"))
    assert 1 - ours / default >= SAVED[model], one


@pytest.mark.parametrize("model", FP32_SHARE)
def test_zero_3_sends_little_in_fp32(model: str, ranks: list[Any]) -> None:
    one = ranks[0]["collectives"]["sent"][f"{model}, ZeRO 3"]
    shares = {who: sent["float32"] / sum(sent.values()) for who, sent in one.items()}
    assert shares["safe_rope"] <= FP32_SHARE[model], shares
    if RAW_EXPERTS or model != "mixtral eager":
        assert shares["deepspeed"] > 2 * FP32_SHARE[model], shares


@pytest.mark.parametrize("case", STAGING)
def test_staging_memory_is_what_fp32_would_take(case: str, ranks: list[Any]) -> None:
    assert 0 < ranks[0]["collectives"]["sent"][f"staging, {case}"] <= STAGING[case]


@pytest.mark.parametrize("stage", ["1", "2"])
def test_training_does_not_notice_the_low_precision_gather(stage: str, ranks: list[Any]) -> None:
    for rank in ranks:
        seen = rank["collectives"]["rounded"][stage]
        assert seen["losses"][0] == seen["losses"][1]
        assert seen["parameters are rounded"]
        assert 0 < seen["largest error"] <= 2**-8
        assert seen["same logits"]


@pytest.mark.parametrize("stage", ["1", "2"])
def test_rounded_weights_are_refused_or_restored_wherever_they_would_be_read(
    stage: str, ranks: list[Any]
) -> None:
    for rank in ranks:
        seen = rank["collectives"]["rounded"][stage]
        assert "full_precision(engine) on every rank" in seen["export"]
        assert seen["export of a part"] == seen["export"]
        assert "without autocast" in seen["outside"]
        assert seen["a part outside"] == seen["outside"]
        assert seen["outside after an interrupt"] == seen["outside"]
        assert seen["restored"]
        assert seen["exported"]
        assert seen["rounded again"]
        assert seen["evaluated outside"] == ""
        assert seen["saved"]


@pytest.mark.parametrize("stage", ["1", "2"])
def test_programs_that_know_deepspeed_only_find_fp32_weights_after_a_step(
    stage: str, ranks: list[Any]
) -> None:
    for rank in ranks:
        seen = rank["collectives"]["rounded"][stage]
        assert seen["in place, outside"] == ""
        assert seen["in place, exported"]


def test_zero_3_gathers_fp32_weights_outside_of_autocast(ranks: list[Any]) -> None:
    for rank in ranks:
        seen = rank["collectives"]["outside"]
        assert seen["error of a part"] < 1e-5
        assert seen["error"] < 1e-5
        assert seen["error again"] < 1e-5
        assert seen["error after an interrupt"] < 1e-5
        assert seen["autocast"] > 1e-4


def test_training_does_not_notice_how_persistent_parameters_are_gathered(ranks: list[Any]) -> None:
    for rank in ranks:
        seen = rank["collectives"]["persistent"]
        assert seen["losses"][0] == seen["losses"][1]
        assert seen["parameters are rounded"]
        full, low = seen["bytes"]
        saved = full["float32"] - low["float32"]
        assert saved > 0
        assert low["bfloat16"] - full["bfloat16"] == saved / 2


def test_persistent_parameters_are_fp32_wherever_they_are_read(ranks: list[Any]) -> None:
    for rank in ranks:
        seen = rank["collectives"]["persistent"]
        assert "full_precision(engine) on every rank" in seen["export"]
        assert seen["outside"] < 1e-5
        assert seen["outside after autocast"] < 1e-5
        for where in ("restored", "rounded again", "gathered", "written back", "saved", "evaluated"):
            assert seen[where], where


# ---- ranks with inputs of their own --------------------------------------------------------------------


def test_what_one_ranks_inputs_read_in_fp32_is_unsafe_on_all(ranks: list[Any]) -> None:
    for how in ("inputs", "data", "inputs or none"):
        own, theirs = (rank["disagreeing"][how] for rank in ranks)
        assert own["safe"] == theirs["safe"]
        assert not any(name.startswith("varying") for name in own["safe"])
        assert any(name.startswith("steady") for name in own["safe"])
        assert "on rank" in own["warning"]
        assert own["warning"] == theirs["warning"]
        assert own["weights"] == theirs["weights"]


def test_a_rank_that_fails_keeps_none_waiting(ranks: list[Any]) -> None:
    seen, other = (rank["disagreeing"]["failing"] for rank in ranks)
    assert "rank 1 could not tell" in seen
    assert "ConfigError: expected example_inputs" in seen
    assert other.startswith("expected example_inputs")


# ---- float16 -------------------------------------------------------------------------------------------


def test_an_overflow_on_one_rank_is_skipped_by_all_and_training_goes_on(ranks: list[Any]) -> None:
    assert {"1", "2", "3"} <= ranks[0]["overflow"].keys()
    for stage, seen in ranks[0]["overflow"].items():
        other = ranks[1]["overflow"][stage]
        assert seen["scales"] == [65536.0] * 3 + [32768.0] * 3, stage
        assert other["scales"] == seen["scales"], stage
        assert seen["moved"] == other["moved"] == [True, True, False, True, True, True], stage
        assert seen["skipped"] == other["skipped"] == 1, stage
        assert seen["finite"], stage
        assert all(math.isfinite(loss) for loss in seen["losses"]), stage
        assert seen["loaded"] == other["loaded"] == seen["after"] == 32768.0, stage
        assert seen["same weights"], stage
        assert seen["goes on alike"], stage
        # One update a step, whatever the number of parameter groups: six steps double it twice.
        assert seen["growth"] == other["growth"], stage
        assert seen["growth"][0] == 32768.0, stage
        doublings = [b / a for a, b in zip(seen["growth"], seen["growth"][1:], strict=False)]
        assert sorted(set(doublings)) == [1.0, 2.0], (stage, doublings)
        assert doublings.count(2.0) == 2, (stage, doublings)


def test_a_checkpoint_holds_deepspeeds_own_loss_scale_and_the_one_that_the_next_loss_gets() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from safe_rope.autocast.loss_scale import StepLossScaler

    scaler = StepLossScaler()
    scaler.scale_window = 1
    for _ in range(2):
        scaler.update_scale(False)
    assert scaler.cur_scale == 65536.0
    saved = pickle.dumps(scaler, protocol=2)
    assert b"safe_rope" not in saved
    loaded = pickle.loads(saved)
    assert type(loaded) is DynamicLossScaler
    assert loaded.cur_scale == 2 * 65536.0
    assert (loaded.scale_window, loaded.cur_iter) == (1, 2)


def test_an_engine_is_built_where_the_process_group_of_the_last_one_is_destroyed(tmp_path: Path) -> None:
    if not _deepspeed.has_autocast():
        pytest.skip("this DeepSpeed has no torch_autocast")
    for seen in two_ranks.run("autocast/group_again.py", [str(free_port())], tmp_path, 300):
        assert seen["losses"][1] < seen["losses"][0]
        assert any("process group is destroyed" in text for text in seen["said"])


def test_each_rank_may_use_other_parameters_at_zero_1_and_where_it_reduces_once(tmp_path: Path) -> None:
    if not _deepspeed.has_autocast() or releases.faults(_deepspeed.release(), 1, 1):
        pytest.skip("this DeepSpeed has no torch_autocast at ZeRO 1")
    for errors in two_ranks.run("autocast/unused.py", [], tmp_path, 300):
        assert max(errors.values()) < 1e-6, errors


def test_a_step_is_refused_where_ranks_have_sent_gradients_of_other_parameters(tmp_path: Path) -> None:
    if not _deepspeed.has_autocast() or releases.faults(_deepspeed.release(), 2, 1):
        pytest.skip("this DeepSpeed has no torch_autocast at ZeRO 2")
    for seen in two_ranks.run("autocast/arrivals.py", [], tmp_path, 300):
        for case, right in seen["right"].items():
            assert not right["refused"], case
            assert right["error"] < 1e-6, (case, right)
        for case, wrong in seen["wrong"].items():
            assert "experts.0." in wrong["refused"], case
            assert "experts.1." in wrong["refused"], case
            assert not wrong["changed"], case
