"""`safe-rope compare`: devices, dtypes, models and dumps, against differences that the formula gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CONFIGS, run
from safetensors.torch import save_file

from safe_rope._audit.command.compare import compare_sides
from safe_rope._audit.command.dump import FORMAT, load, save
from safe_rope._audit.command.job import read_side
from safe_rope.cli.compare import _text
from safe_rope.cli.main import main
from safe_rope.errors import ConfigError

MISTRAL, NEOX = str(CONFIGS / "mistral-7b.json"), str(CONFIGS / "gpt-neox-20b.json")


def compared(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status, out, err = run(tmp_path / "tmp", "compare", *arguments, "--format", "json", "--max", "2048")
    assert status in (0, 1), err
    return status, json.loads(out)


@pytest.mark.slow
def test_a_device_equals_itself_and_a_dtype_differs_by_its_rounding(tmp_path: Path) -> None:
    status, same = compared(tmp_path, "cpu", "cpu")
    assert status == 0
    (module,) = same["modules"]
    assert (module["max_ulp"], module["max_radians"], module["first_difference"]) == (0, 0, None)
    assert module["positions"] == 2048

    status, cast = compared(tmp_path, "float32", "bf16", "--model", MISTRAL)
    assert status == 1
    (module,) = cast["modules"]
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    slope = float((inv_freq.float().bfloat16().double() - inv_freq).abs().max())
    assert module["first_difference"] in (0, 1)
    if not cast_rounds_tables(module):
        assert module["max_radians"] == pytest.approx(slope * 2047, rel=0.01)
    assert module["first_beyond"] == 1


def cast_rounds_tables(module: dict[str, Any]) -> bool:
    """Before transformers 4.38 a cast reaches ready tables, whose rounding is all there is to see."""
    return float(module["max_radians"]) < 0.01


@pytest.mark.slow
def test_a_tolerance_decides_over_the_status(tmp_path: Path) -> None:
    assert compared(tmp_path, "float32", "bf16", "--ulp", "1e9", "--tolerance", "7")[0] == 0
    assert compared(tmp_path, "float32", "bf16", "--ulp", "0")[0] == 1


def test_exact_tables_do_not_follow_a_cast(tmp_path: Path) -> None:
    status, found = compared(tmp_path, "float32", "fp16", "--tables", "exact", "--ulp", "0")
    assert status == 0
    assert found["modules"][0]["max_ulp"] == 0


@pytest.mark.slow
def test_a_model_and_its_dump_agree_and_two_models_do_not(tmp_path: Path) -> None:
    dump, altered = tmp_path / "tables.safetensors", tmp_path / "config.json"
    arguments = ["--max", "2048", "--dump", str(dump), "--dtype", "fp32"]
    assert run(tmp_path / "tmp", "audit", MISTRAL, *arguments)[0] == 0
    status, found = compared(tmp_path, MISTRAL, str(dump))
    assert status == 0
    assert {module["max_ulp"] for module in found["modules"] if "stock" in module["name"]} == {0}
    assert all(module["max_radians"] < 1e-4 for module in found["modules"])

    altered.write_text(json.dumps(json.loads(Path(MISTRAL).read_text()) | {"rope_theta": 10001.0}))
    status, found = compared(tmp_path, MISTRAL, str(altered))
    assert status == 1
    (module,) = found["modules"]
    inv_freq = [theta ** -(torch.arange(0, 128, 2).double() / 128) for theta in (1e4, 1e4 + 1)]
    off = float((inv_freq[0] - inv_freq[1]).abs().max()) * 2047
    assert module["max_radians"] == pytest.approx(off, rel=0.01)
    assert module["at"] > 2000, "up to FP32 noise, at the end"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cpu", "nowhere"], "'nowhere' is no device (cpu, cuda:0), no dtype"),
        (["cpu", "no.safetensors"], "no.safetensors does not exist; expected a dump"),
        (["cpu", "cpu", "--model", "no.json"], "no.json does not exist"),
    ],
)
def test_sides_that_are_none(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sides", "said"),
    [
        ([MISTRAL, NEOX], "rotary_dim 128 on one side, 24 on the other"),
        (["cpu", "mps:7"], "the device mps:7 cannot be used here"),
    ],
)
def test_sides_that_cannot_be_compared(sides: list[str], said: str, tmp_path: Path) -> None:
    status, out, err = run(tmp_path / "tmp", "compare", *sides)
    assert (status, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert said in line


def test_a_file_that_is_no_dump(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"nothing of the kind")
    status, _, err = run(tmp_path / "tmp", "compare", "cpu", str(file))
    assert status == 2
    assert "cannot be read as safetensors" in err


TABLE = {"positions": torch.arange(4), "cos": torch.ones(4, 2), "sin": torch.zeros(4, 2)}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({}, "holds no tables"),
        ({"rope": {"positions": TABLE["positions"], "cos": TABLE["cos"]}}, "holds no whole table for rope"),
        ({"rope": TABLE | {"cos": torch.ones(3, 2)}}, "cos [3, 2], positions [4], sin [4, 2]"),
        ({"rope": TABLE | {"cos": torch.ones(1, 4, 2)}}, "holds no whole table for rope"),
    ],
)
def test_a_dump_that_is_not_whole_is_refused(tables: Any, said: str, tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", {"": tables}, "a model")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(tmp_path / "a.safetensors")


def test_a_dump_whose_environment_is_no_object_is_refused(tmp_path: Path) -> None:
    tensors = {f"/rope/{part}": value for part, value in TABLE.items()}
    save_file(tensors, tmp_path / "a.safetensors", {"format": FORMAT, "environment": "[1]"})
    with pytest.raises(ConfigError, match="as a JSON object"):
        load(tmp_path / "a.safetensors")


def test_positions_are_compared_in_whichever_order_a_dump_has_them(tmp_path: Path) -> None:
    phases = torch.outer(torch.arange(8).float(), torch.tensor([1.0, 0.1]))
    table = {"positions": torch.arange(8), "cos": phases.cos(), "sin": phases.sin()}
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    save(tmp_path / "a.safetensors", {"": {"rope": table}}, "a model")
    save(tmp_path / "b", {"": {"rope": {part: one[order] for part, one in table.items()}}}, "a model")
    sides = [read_side(str(tmp_path / name), None) for name in ("a.safetensors", "b")]
    usual = {"positions": (), "longest": None, "tables": "stock", "tolerance": None, "ulp": None}
    assert compare_sides({"sides": sides, **usual})["modules"][0]["max_radians"] == 0


def test_what_only_one_dump_has_is_named_and_does_not_pass(tmp_path: Path) -> None:
    table = {"positions": torch.arange(4), "cos": torch.ones(4, 2), "sin": torch.zeros(4, 2)}
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    groups = [("load", "cast"), ("load", "cast", "zero.Init")]
    for file, names, model in zip(files, groups, ("a llama", "another"), strict=True):
        save(file, {name: {"rope": table} for name in names}, model)
    sides = [{"name": file.name, "dump": str(file)} for file in files]
    asked = {"sides": sides, "positions": (), "longest": None, "tolerance": None, "ulp": None}
    found = compare_sides(asked | {"tables": "stock"})
    assert [module["name"] for module in found["modules"]] == ["cast rope", "load rope"]
    assert found["not_compared"] == ["zero.Init is in other.safetensors only"]
    lines = _text(*(file.name for file in files), found, 0).splitlines()
    assert lines[0] == "one.safetensors (a llama) and other.safetensors (another)"
    assert lines[-2] == "not compared: zero.Init is in other.safetensors only"
    assert lines[-1] == "SAME: 2 of 2 tables within the tolerance; 1 not compared"
    assert max(map(len, lines)) < 100


@pytest.mark.parametrize(("factor", "differs"), [(1.0, None), (1.0 + 2.0**-22, None), (1.001, 0), (2.0, 0)])
def test_tables_that_differ_by_a_factor_are_different(
    factor: float, differs: int | None, tmp_path: Path
) -> None:
    phases = torch.outer(torch.arange(64).float(), 10000.0 ** -(torch.arange(8) / 8))
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    for file, scale in zip(files, (1.0, factor), strict=True):
        table = {"positions": torch.arange(64), "cos": phases.cos() * scale, "sin": phases.sin() * scale}
        save(file, {"": {"rope": table}}, file.name)
    sides = [{"name": file.name, "dump": str(file)} for file in files]
    asked = {"sides": sides, "positions": (), "longest": None, "tolerance": None, "ulp": None}
    (module,) = compare_sides(asked | {"tables": "stock"})["modules"]
    assert module["first_beyond"] == differs


def difference(tmp_path: Path, *tables: dict[str, torch.Tensor], **asked: Any) -> dict[str, Any]:
    sides = []
    for number, table in enumerate(tables):
        file = tmp_path / f"{number}.safetensors"
        save(file, {"": {"rope": table}}, "a model")
        sides.append({"name": file.name, "dump": str(file)})
    usual = {"positions": (), "longest": None, "tables": "stock", "tolerance": None, "ulp": None}
    (module,) = compare_sides({"sides": sides, **usual, **asked})["modules"]
    return module


def test_phases_of_rounded_frequencies_are_different(tmp_path: Path) -> None:
    positions, inv_freq = torch.arange(4096), 10000.0 ** -(torch.arange(8) / 8)
    right, rounded, computed = (
        {"positions": positions, "cos": phases, "sin": phases}
        for phases in (
            torch.outer(positions.float(), inv_freq),
            torch.outer(positions.float(), inv_freq.bfloat16().float()),
            torch.outer(positions.double(), inv_freq.double()).float(),
        )
    )
    assert float((right["cos"] - rounded["cos"]).abs().max()) > 0.5, "radians"
    assert difference(tmp_path, right, rounded)["first_beyond"] == 1
    assert difference(tmp_path, right, computed)["first_beyond"] is None


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("off", [1.0 + 1e-5, 1.001])
def test_slow_frequencies_may_differ_by_what_their_own_phases_explain(
    base: float, off: float, tmp_path: Path
) -> None:
    positions, inv_freq = torch.arange(4096), base ** -(torch.arange(32, dtype=torch.float64) / 32)
    other = inv_freq.clone()
    other[20:] *= off
    one, two, computed = (
        {"positions": positions, "cos": phases.cos().float(), "sin": phases.sin().float()}
        for phases in (
            torch.outer(positions.double(), inv_freq),
            torch.outer(positions.double(), other),
            torch.outer(positions.float(), inv_freq.float()),
        )
    )
    assert difference(tmp_path, one, two)["first_beyond"] is not None
    assert difference(tmp_path, one, computed)["first_beyond"] is None


@pytest.mark.parametrize(
    ("asked", "count", "first"),
    [({}, 64, 40), ({"positions": (3, 50, 99)}, 2, 50), ({"longest": 40}, 40, None)],
)
def test_two_dumps_are_compared_where_it_was_asked(
    asked: dict[str, Any], count: int, first: int | None, tmp_path: Path
) -> None:
    phases = torch.outer(torch.arange(64).float(), 10000.0 ** -(torch.arange(8) / 8))
    other = phases.clone()
    other[40:] += 0.1
    one, two = (
        {"positions": torch.arange(64), "cos": each.cos(), "sin": each.sin()} for each in (phases, other)
    )
    module = difference(tmp_path, one, two, **asked)
    assert (module["positions"], module["first_beyond"]) == (count, first)


def test_dumps_without_a_position_that_was_asked_for(tmp_path: Path) -> None:
    table = {"positions": torch.arange(4), "cos": torch.ones(4, 2), "sin": torch.zeros(4, 2)}
    with pytest.raises(ConfigError, match="none of the positions asked for"):
        difference(tmp_path, table, table, positions=(9,))


def between(tmp_path: Path, one: list[str], other: list[str]) -> dict[str, Any]:
    """Compare two dumps, each of whose tables turns as fast as the last letter of its name says."""
    sides = []
    for number, names in enumerate((one, other)):
        tables = {}
        for name in names:
            phases = torch.outer(torch.arange(8).float(), torch.full((4,), 1.0 / (1 + ord(name[-1]) % 16)))
            tables[name] = {"positions": torch.arange(8), "cos": phases.cos(), "sin": phases.sin()}
        sides.append({"name": f"{number}", "dump": str(tmp_path / f"{number}.safetensors")})
        save(tmp_path / f"{number}.safetensors", {"": tables}, "a model")
    usual = {"positions": (), "longest": None, "tables": "stock", "tolerance": None, "ulp": None}
    return compare_sides({"sides": sides, **usual})


@pytest.mark.parametrize("other", [["m.rope_b", "m.a_rope_c"], ["m.rope_b", "m.rope_c"]])
def test_tables_of_the_same_name_are_compared_whatever_the_others_are_called(
    other: list[str], tmp_path: Path
) -> None:
    found = between(tmp_path, ["m.rope_b", "m.z_rope_c"], other)
    assert [module["first_beyond"] for module in found["modules"]] == [None, None]


def test_layers_of_other_names_are_compared_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    one = [f"h.{layer}.rope" for layer in range(12)]
    other = [f"layers.{layer}.rope" for layer in range(1, 13)]
    found = between(tmp_path, one, other)
    assert [module["name"] for module in found["modules"]] == [
        f"{a} / {b}" for a, b in zip(one, other, strict=True)
    ]


UNTOLD: dict[str, list[int]] = {"rope:full_attention": [], "rope:sliding_attention": []}
TRAINER = {"rope:full_attention": [2, 5], "rope:sliding_attention": [0, 1, 3, 4]}


def with_layers(
    tmp_path: Path, engine: dict[str, float], layers: dict[str, list[int]] = TRAINER
) -> tuple[dict[str, bool], list[str]]:
    """Compare the two layer types of a trainer, which turn by 1 and by 0.5, with modules that turn so fast.

    Returns whether the tables of each pair are the same, and what is not compared.
    """

    def turning(speed: float) -> dict[str, torch.Tensor]:
        phases = torch.outer(torch.arange(8).float(), torch.full((4,), speed))
        return {"positions": torch.arange(8), "cos": phases.cos(), "sin": phases.sin()}

    trainer = {name: turning(speed) for name, speed in zip(layers, (1.0, 0.5), strict=True)}
    for name, numbers in layers.items():
        trainer[name] |= {"layers": torch.tensor(numbers)} if numbers else {}
    sides = [{"name": name, "dump": str(tmp_path / name)} for name in ("trainer", "engine")]
    save(tmp_path / "trainer", {"": trainer}, "a model")
    save(tmp_path / "engine", {"": {name: turning(speed) for name, speed in engine.items()}}, "a model")
    usual = {"positions": (), "longest": None, "tables": "stock", "tolerance": None, "ulp": None}
    found = compare_sides({"sides": sides, **usual})
    assert compare_sides({"sides": sides[::-1], **usual})["not_compared"] == found["not_compared"]
    return {one["name"]: one["first_beyond"] is None for one in found["modules"]}, found["not_compared"]


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("numbers", [(0, 2), (0, 1, 2, 3, 4, 5)])
def test_modules_of_layers_are_compared_with_the_table_of_their_layer_type(
    numbers: tuple[int, ...], is_swapped: bool, tmp_path: Path
) -> None:
    fast = TRAINER[f"rope:{'sliding' if is_swapped else 'full'}_attention"]
    engine = {f"layers.{layer}.attn.rope": 1.0 if layer in fast else 0.5 for layer in numbers}
    same, left = with_layers(tmp_path, engine)
    assert same == {
        f"{name} / layers.{layer}.attn.rope": not is_swapped
        for layer in numbers
        for name, layers in TRAINER.items()
        if layer in layers
    }
    assert left == []


@pytest.mark.parametrize(
    "names", [("rope", "rope_local"), ("a_global_rope", "rope"), ("b_full", "a_sliding")]
)
def test_modules_that_say_what_their_layers_see_are_compared_with_that_layer_type(
    names: tuple[str, str], tmp_path: Path
) -> None:
    for layers in (TRAINER, UNTOLD):
        same, left = with_layers(tmp_path, dict(zip(names, (1.0, 0.5), strict=True)), layers)
        assert same == {f"{kind} / {name}": True for kind, name in zip(TRAINER, names, strict=True)}
        assert left == []


def test_what_no_layer_tells_is_named_and_not_compared(tmp_path: Path) -> None:
    same, left = with_layers(tmp_path, {"layers.0.rope": 0.5})
    assert same == {"rope:sliding_attention / layers.0.rope": True}
    assert left == ["nothing tells which tables belong to rope:full_attention of trainer"]
    with pytest.raises(ConfigError, match=r"belong to layers\.0\.rope, layers\.2\.rope of engine"):
        with_layers(tmp_path, {"layers.0.rope": 0.5, "layers.2.rope": 1.0}, UNTOLD)


def test_a_table_without_a_position_that_others_have_is_named(tmp_path: Path) -> None:
    long, short = (
        {"positions": torch.arange(n), "cos": torch.ones(n, 2), "sin": torch.zeros(n, 2)} for n in (64, 8)
    )
    save(tmp_path / "a.safetensors", {"": {"long": long, "short": short}}, "a model")
    side = {"name": "a", "dump": str(tmp_path / "a.safetensors")}
    asked = {"longest": None, "tables": "stock", "tolerance": None, "ulp": None, "sides": [side, side]}
    found = compare_sides({**asked, "positions": (50,)})
    assert [(module["name"], module["positions"]) for module in found["modules"]] == [("long", 1)]
    assert found["not_compared"] == ["short: the two sides have none of the positions asked for in common"]


@pytest.mark.parametrize("option", ["--tolerance", "--ulp"])
def test_a_tolerance_that_is_no_number(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "cpu", "cpu", option, "nan"])
    assert ended.value.code == 2
    assert "expected a number, got nan" in capsys.readouterr().err
