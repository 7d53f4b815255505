"""`safe-rope audit`: a wrong call is one clear line and exit 2, before anything is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import CONFIGS

from safe_rope._audit.command.job import load_model_config
from safe_rope.cli.main import main
from safe_rope.errors import SafeRopeError

LLAMA = str(CONFIGS / "llama-3.1-8b.json")


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["audit", *arguments])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist; expected a checkpoint folder or a config.json"),
        ("{ not json", "is not JSON: Expecting property name"),
        ("[1, 2]", "must hold a JSON object, got list"),
        ("{}", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        ("[" * 100_000, "is not JSON"),
        (b"\xff\xfe\x00", "expected a checkpoint folder or a config.json"),
    ],
)
def test_a_config_that_is_none(
    content: str | bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in fails(capsys, str(file))


def test_a_folder_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no config.json; give a checkpoint folder" in fails(capsys, str(tmp_path))
    weights = tmp_path / "checkpoint-10" / "global_step10"  # as Trainer and DeepSpeed write them
    weights.mkdir(parents=True)
    (weights.parent / "config.json").write_text("{}")
    for folder in (tmp_path, weights):
        assert f"holds no config.json; give {weights.parent}" in fails(capsys, str(folder))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-2-7b"}')
    said = fails(capsys, str(tmp_path))
    assert said.endswith("holds no config.json; give the model that it adapts: meta-llama/Llama-2-7b")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist; expected a DeepSpeed config"),
        ("nonsense", "is not JSON"),
        ({"zero_optimization": {"stage": 4}}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"stage": "three"}}, "stage must be 0, 1, 2 or 3, got 'three'"),
        ({"zero_optimization": 3}, 'json: zero_optimization must be an object such as {"stage": 3}, got 3'),
        ({"bf16": True}, 'ds.json: bf16 must be an object such as {"enabled": true}, got True'),
        ({"bfloat16": True}, 'ds.json: bfloat16 must be an object such as {"enabled": true}, got True'),
        ({"zero_optimisation": {"stage": 3}}, "'zero_optimisation', which DeepSpeed ignores; did you mean"),
        ({"BF16": {"enabled": True}}, "did you mean 'bf16'?"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled; keep one"),
    ],
)
def test_a_deepspeed_config_that_is_none(
    content: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert said in fails(capsys, LLAMA, "--deepspeed", str(file))


def test_an_output_never_replaces_an_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, zero = tmp_path / "config.json", tmp_path / "ds.png"
    model.write_text('{"model_type": "llama"}')
    zero.write_text("{}")
    (tmp_path / "same.json").symlink_to(model)
    for arguments in (
        [str(model), "--dump", str(model)],
        [str(tmp_path), "--dump", str(model)],
        [str(model), "--dump", str(tmp_path / "same.json")],
        [str(model), "--deepspeed", str(zero), "--plot", str(zero)],
    ):
        assert "that is a config to read; name another file" in fails(capsys, *arguments)
    assert model.read_text() == '{"model_type": "llama"}'
    both = str(tmp_path / "out.png")
    assert "the plot goes there" in fails(capsys, LLAMA, "--plot", both, "--dump", both)


def test_a_name_on_the_hub_is_looked_up_in_the_local_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file_download = pytest.importorskip("huggingface_hub.file_download")
    for place in (file_download, file_download.constants):
        monkeypatch.setattr(place, "HF_HUB_CACHE", str(tmp_path), raising=False)
    said = fails(capsys, "mistralai/Mistral-7B-v0.3")
    assert "get it with: hf download mistralai/Mistral-7B-v0.3 config.json" in said
    repository = tmp_path / "models--mistralai--Mistral-7B-v0.3"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text('{"model_type": "mistral"}')
    assert load_model_config("mistralai/Mistral-7B-v0.3") == {"model_type": "mistral"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 on, got 0"),
        ({"num_attention_heads": 0}, ""),
        ({"num_attention_heads": "many"}, ""),
        ({"max_position_embeddings": -4}, "max_position_embeddings must be an integer from 1 on, got -4"),
        ({"rope_scaling": {"type": "weird", "factor": 2.0}}, ""),
        ({"rope_theta": "big"}, ""),
    ],
)
def test_values_that_make_no_model_are_one_error_of_ours(values: dict[str, Any], said: str) -> None:
    from safe_rope._audit.command.skeleton import Skeleton

    with pytest.raises(SafeRopeError, match=said):
        Skeleton(load_model_config(LLAMA) | values).build()


@pytest.mark.skipif(not hasattr(transformers, "Llama4TextConfig"), reason="this release has no Llama 4")
def test_a_skeleton_has_one_layer_of_each_kind_where_a_config_numbers_its_layers() -> None:
    from safe_rope._audit.command.skeleton import Skeleton

    small = Skeleton(load_model_config(str(CONFIGS / "llama-4-scout.json"))).config
    assert small.num_hidden_layers == len(small.layer_types) == 2
    assert small.moe_layers == [0, 1]
    whole = load_model_config(str(CONFIGS / "llama-4-scout.json"))
    whole["text_config"] |= {"interleave_moe_layer_step": 2}
    small = Skeleton(whole).config
    kinds = {(kind, i in small.moe_layers) for i, kind in enumerate(small.layer_types)}
    assert len(kinds) == small.num_hidden_layers == 3


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this release has no Gemma 4")
def test_a_skeleton_keeps_what_a_config_says_of_single_layers() -> None:
    from safe_rope._audit.command.skeleton import Skeleton

    values = {"head_dim": 64, "global_head_dim": 128, "num_hidden_layers": 12, "num_attention_heads": 8}
    whole = transformers.Gemma4TextConfig(**values, num_kv_shared_layers=0).to_dict()
    small = Skeleton(whole)
    assert small.config.layer_types == ["sliding_attention", "full_attention"]
    assert [layer.head_dim for layer in small.config.per_layer_config] == [64, 128]
    rotary = next(m for m in small.build().modules() if type(m).__name__.endswith("RotaryEmbedding"))
    # proportional RoPE has a frequency for each pair of the head, most of them 0
    assert rotary.sliding_attention_inv_freq.shape == (32,)
    assert rotary.full_attention_inv_freq.shape == (64,)
    whole["per_layer_config"]["1"] = {"head_dim": 32}
    assert [layer.head_dim for layer in Skeleton(whole).config.per_layer_config] == [64, 32, 128]


@pytest.mark.parametrize(
    ("model_type", "says"),
    [("modernbert-decoder", ""), ("convnext", "expected a text model's config.*'convnext'")],
)
def test_a_config_of_another_kind_is_made_small_or_refused_in_a_sentence(model_type: str, says: str) -> None:
    from safe_rope._audit.command.skeleton import Skeleton

    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in known:
        pytest.skip("this release does not have it")
    content = json.loads(json.dumps(known[model_type]().to_dict(), default=str))
    if not says:
        assert Skeleton(content).build()
        return
    with pytest.raises(SafeRopeError, match=says):
        Skeleton(content)


def skeleton_of(model_type: str, **values: Any) -> Any:
    from safe_rope._audit.command.skeleton import Skeleton

    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in known:
        pytest.skip("this release does not have it")
    return Skeleton(json.loads(json.dumps(known[model_type](**values).to_dict(), default=str)))


def frequencies(model: torch.nn.Module) -> set[tuple[float, ...]]:
    return {tuple(buffer.tolist()) for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def test_a_skeleton_has_the_kinds_of_layers_that_a_config_computes_from_their_numbers() -> None:
    small = skeleton_of("recurrent_gemma", hidden_size=128, num_attention_heads=2, num_hidden_layers=6)
    assert small.config.num_hidden_layers == 3
    assert {len(row) for row in frequencies(small.build())} == {16}  # half of 64 is turned


def test_the_encoder_of_a_skeleton_has_the_frequencies_of_the_encoder() -> None:
    values = {"hidden_size": 72, "intermediate_size": 64, "encoder_num_hidden_layers": 1}
    small = skeleton_of("moonshine", **values, decoder_num_hidden_layers=1, vocab_size=64)
    config = transformers.MoonshineConfig(**values, decoder_num_hidden_layers=1, vocab_size=64)
    assert frequencies(small.build()) == frequencies(transformers.MoonshineModel(config))


def test_what_a_skeleton_does_not_have_is_told() -> None:
    assert skeleton_of("qwen2_vl").left_out == ["vision_config of qwen2_vl, beside its text model"]
    assert skeleton_of("mistral").left_out == []


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ({"AutoModelForCausalLM": "modeling_x.X"}, ["the checkpoint's own code (auto_map), which "]),
        ({"AutoTokenizer": ["tokenization_x.X", None]}, []),
    ],
)
def test_code_that_comes_with_a_checkpoint_is_not_measured_and_told(
    classes: dict[str, Any], said: list[str]
) -> None:
    from safe_rope._audit.command.skeleton import Skeleton

    left_out = Skeleton(load_model_config(LLAMA) | {"auto_map": classes}).left_out
    assert [told[:44] for told in left_out] == said


def test_a_kernel_that_is_not_installed_here_does_not_stop_an_audit() -> None:
    from safe_rope._audit.command.skeleton import Skeleton

    content = load_model_config(LLAMA) | {"_attn_implementation": "flash_attention_2"}
    assert Skeleton(content).build()


def test_a_plot_of_a_format_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, LLAMA, "--plot", str(tmp_path / "out.jpg"))
    assert "expected a name that ends in .png, .svg, .pdf" in said


@pytest.mark.parametrize("option", ["--plot", "--dump"])
def test_a_file_that_cannot_be_written(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "a folder that exists" in fails(capsys, LLAMA, option, str(tmp_path / "no" / "file"))
    assert "a folder that exists" in fails(capsys, LLAMA, option, str(tmp_path))


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python has it for a package that is not there
    assert 'pip install "safe-rope[plot]"' in fails(capsys, LLAMA, "--plot", str(tmp_path / "out.png"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--positions", "1,x"], "expected integers such as 0,4095,100000"),
        (["--positions", "-1"], "positions go from 0 to"),
        (["--positions", "1", "--max", "5"], "--positions or --max, not both"),
        (["--max", "0"], "0 is not in the range"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--format", "xml"], "'xml' is not one of"),
    ],
)
def test_options_that_make_no_sense(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", LLAMA, *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "said"), [("audti", "Did you mean 'audit'?"), ("zzz", "command 'zzz'.")])
def test_a_command_that_is_none_names_the_nearest(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([typed])
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().endswith(said)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("diffllama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
        ("mimi", {"num_attention_heads": 4, "num_key_value_heads": 4}),
        ("kyutai_speech_to_text", {"num_attention_heads": 4}),
    ],
)
def test_a_model_that_cannot_be_narrow_is_built_in_its_own_width(
    model_type: str, values: dict[str, Any]
) -> None:
    small = skeleton_of(model_type, **values)
    assert frequencies(small.build())
    assert frequencies(small.build())  # once more, as a side of a comparison


@pytest.mark.parametrize("width", [96, 16384])
def test_sinusoids_are_measured_at_the_width_of_the_model_or_are_said_not_to_be(width: int) -> None:
    small = skeleton_of("xglm", d_model=width, attention_heads=4, num_layers=2, ffn_dim=64)
    model = small.build()
    is_said = any("sinusoids" in said for said in small.left_out)
    assert is_said == (width > 96)
    assert small.config.hidden_size == (width // 4 if is_said else width)
    assert model.config.num_hidden_layers == 1


def test_a_config_that_counts_its_layers_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_rope._audit.command.skeleton import Skeleton

    def validate(config: Any) -> None:  # as Dory's of transformers 5.24, once a model is saved
        if config.num_hidden_layers != 32:
            raise ValueError("the parts must add up to num_hidden_layers")

    monkeypatch.setattr(transformers.LlamaConfig, "validate", validate, raising=False)
    skeleton = Skeleton(load_model_config(LLAMA))
    skeleton.build()
    assert skeleton.config.num_hidden_layers == 32
