"""What cannot be protected is refused with a remedy, or warned about; and nothing is changed."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import families, survival
from torch import nn

import safe_rope
from safe_rope import ConfigError, PrecisionWarning, UnsupportedModelError
from safe_rope._protection.rewrite import is_protected


class Snapshot:
    """Everything about a model and the functions around it that protecting could change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.classes = {name: type(module) for name, module in model.named_modules()}
        self.attributes = {name: _attributes(module) for name, module in model.named_modules()}
        self.values = {name: tensor.clone() for name, tensor in _tensors(model)}
        self.functions = _functions()

    def assert_same(self) -> None:
        assert {name: type(module) for name, module in self.model.named_modules()} == self.classes
        assert {name: _attributes(module) for name, module in self.model.named_modules()} == self.attributes
        now = dict(_tensors(self.model))
        assert now.keys() == self.values.keys()
        for name, value in self.values.items():
            assert now[name].dtype == value.dtype
            assert torch.equal(now[name], value), name
        assert _functions() == self.functions


def _attributes(module: nn.Module) -> dict[str, int]:
    inner = {
        f"{kind}.{name}": id(v)
        for kind in ("_buffers", "_parameters")
        for name, v in vars(module)[kind].items()
    }
    return {**{name: id(value) for name, value in vars(module).items()}, **inner}


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _functions() -> dict[str, int]:
    named = {
        f"{name}.{key}": value
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
        for key, value in list(vars(module).items())
        if key == "apply_rotary_pos_emb" or key.endswith("RotaryEmbedding")
    }
    return {key: id(value) for key, value in named.items()} | {
        f"{key}.__init__": id(vars(value).get("__init__"))
        for key, value in named.items()
        if isinstance(value, type)
    }


TICKETS = (number for number in itertools.count())


class ImpatientRotaryEmbedding(nn.Module):
    """A rotary module whose constructor takes what nobody can put back, and is not to be run again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.number = next(TICKETS)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = position_ids[..., None] * self.inv_freq
        return phase.cos(), phase.sin()


def _build_unsupported() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Sequential(nn.ModuleDict({"rotary": ImpatientRotaryEmbedding(64)}))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "bad", ["text", 7, None, {"a": 1}, families.config("llama"), families.model_class("llama")]
)
def test_protect_refuses_what_is_no_module(bad: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"needs a torch\.nn\.Module, got \w+; pass the model"):
        safe_rope.protect(bad)


@pytest.mark.parametrize("option", [{"tables": "fast"}, {"tables": None}, {"apply": "bf16"}, {"apply": True}])
def test_unknown_options_are_refused(option: dict[str, Any]) -> None:
    model = families.build("llama")
    before = Snapshot(model)
    (name,) = option
    with pytest.raises(ConfigError, match=f'{name} must be "'):
        safe_rope.protect(model, **option)
    with pytest.raises(ConfigError, match=f'{name} must be "'):
        safe_rope.guard(**option)
    before.assert_same()


def test_stop_without_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="call start"):
        safe_rope.guard().stop()


def test_strict_protect_refuses_what_cannot_be_built_again_and_changes_nothing() -> None:
    model = _build_unsupported()
    before = Snapshot(model)
    with pytest.raises(UnsupportedModelError, match="RotaryEmbedding"):
        safe_rope.protect(model, strict=True)
    before.assert_same()


def test_strict_protect_changes_nothing_in_the_part_that_it_could_protect() -> None:
    model = nn.ModuleDict({"known": families.build("llama"), "unknown": _build_unsupported()})
    before = Snapshot(model)
    with pytest.raises(UnsupportedModelError, match="unknown"):
        safe_rope.protect(model, strict=True)
    before.assert_same()


def _the_one_warning(record: list[warnings.WarningMessage]) -> warnings.WarningMessage:
    (warning,) = (w for w in record if issubclass(w.category, PrecisionWarning))
    return warning


@pytest.mark.parametrize("how", ["guard", "protect"])
def test_without_strict_one_warning_names_path_class_and_reason(how: str) -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        if how == "guard":
            with safe_rope.guard() as session:
                model = _build_unsupported()
            report = session.report
        else:
            model = _build_unsupported()
            report = safe_rope.protect(model)
    warning = _the_one_warning(record)
    rotary = [(n, m) for n, m in model.named_modules() if type(m).__name__.endswith("RotaryEmbedding")]
    assert rotary
    for path, module in rotary:
        assert path in str(warning.message)
        assert type(module).__name__ in str(warning.message)
    assert "its constructor cannot be run again" in str(warning.message)
    assert warning.filename == __file__, "the warning points at the line that asked"
    assert [entry.path for entry in report.unprotected] == [path for path, _ in rotary]
    assert not report.protected


def test_strict_guard_raises_on_exit_and_puts_everything_back() -> None:
    _build_unsupported()  # so that every module that gets imported is
    before = Snapshot(families.build("llama"))
    constructors = {name: getattr(torch, name) for name in ("empty", "zeros", "arange", "tensor")}
    guard = safe_rope.guard(strict=True)
    with pytest.raises(UnsupportedModelError, match="RotaryEmbedding"), guard:
        model = _build_unsupported()
    before.assert_same()
    assert constructors == {name: getattr(torch, name) for name in constructors}
    assert not any(is_protected(module) for module in model.modules())
    assert not any(is_protected(module) for module in families.build("llama").modules())


@safe_rope.guard(strict=True)
def _build_and_fail() -> None:
    _build_unsupported()
    raise KeyError("mine")


def test_strict_guard_lets_an_exception_of_the_block_through() -> None:
    with pytest.raises(KeyError, match="mine"):
        _build_and_fail()


def test_strict_guard_accepts_what_it_can_protect() -> None:
    with safe_rope.guard(strict=True) as session:
        model = families.build("llama")
    assert len(session.report.protected) == len(families.rotary_modules(model))


def test_a_guard_around_nothing_warns_and_is_refused_when_strict() -> None:
    build = functools.partial(families.build, "llama")
    with pytest.warns(PrecisionWarning, match="no module was built inside") as record, safe_rope.guard():
        pass
    assert _the_one_warning(list(record)).filename == __file__
    with pytest.raises(UnsupportedModelError, match="no module was built inside"):
        safe_rope.guard(strict=True).start().stop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        safe_rope.guard(strict=True)(lambda: build() and None)()  # built, used, and gone
        with safe_rope.guard(strict=True), safe_rope.guard(strict=True):
            nn.Linear(2, 2)


class Wrapper(nn.Module):
    """As DeepSpeedEngine: holds a model that was built before, which nobody hears of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        nn.Module()
        self._modules["module"] = model


def test_a_guard_in_which_a_finished_model_is_only_wrapped_warns() -> None:
    model = families.build("llama")
    with pytest.warns(PrecisionWarning, match="no module was built inside"):
        safe_rope.guard()(lambda: Wrapper(Wrapper(model)))()
    with pytest.raises(UnsupportedModelError, match="no module was built inside"):
        safe_rope.guard(strict=True)(Wrapper)(model)
    safe_rope.protect(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        safe_rope.guard()(Wrapper)(model)  # it is protected
        safe_rope.guard()(lambda: Wrapper(families.build("llama")))()


@pytest.mark.parametrize("strict", ["yes", 1, None])
def test_strict_is_a_boolean(strict: Any) -> None:
    said = re.escape(f"strict must be True or False, got {strict!r}")
    with pytest.raises(ConfigError, match=said):
        safe_rope.guard(strict=strict)
    with pytest.raises(ConfigError, match=said):
        safe_rope.protect(nn.Linear(2, 2), strict=strict)


def test_an_open_guard_is_not_started_again() -> None:
    session = safe_rope.guard().start()
    with pytest.raises(ConfigError, match=r"open already; call stop\(\) first"):
        session.start()
    nn.Linear(2, 2)
    session.stop()
    with pytest.raises(ConfigError, match="not open"):
        session.stop()


def test_a_kept_table_that_nobody_can_judge_is_listed_once() -> None:
    class Rotary(nn.Module):
        def __init__(self, base: float) -> None:  # base is not kept
            super().__init__()
            self.register_buffer("inv_freq", base ** -(torch.arange(4) / 4))

        def forward(self, x: Any, position_ids: Any) -> None: ...

    with pytest.warns(PrecisionWarning, match="with stock tables: rope .*: kept, cannot be judged"):
        report = safe_rope.protect(nn.ModuleDict({"rope": Rotary(1e4)}))
    assert not report.protected
    (entry,) = report.unprotected
    assert (entry.path, entry.level, entry.tables) == ("rope", "kept", ("inv_freq",))
    assert str(report).count("rope (") == 1


def test_a_guard_without_its_parentheses_says_so() -> None:
    with pytest.raises(TypeError, match=r"with safe_rope\.guard\(\)"), safe_rope.guard:
        pass


def test_the_report_prints_in_columns_and_has_a_schema() -> None:
    model = families.build(families.FAMILIES[0])
    text = str(report := safe_rope.protect(model))
    assert len(text.splitlines()) > len(report.protected)
    assert max(map(len, text.splitlines())) < 100
    assert repr(report).startswith("<ProtectionReport: ")
    assert len(repr(report)) < 100
    assert report._repr_html_().startswith("<pre>")
    assert report.to_dict()["schema"] == "safe_rope.protection/1"


def test_the_report_of_an_open_guard_says_what_is_protected_by_then() -> None:
    for session in (safe_rope.guard(), safe_rope.guard().start()):
        with session:
            assert not session.report.protected
            model = families.build("llama")
            expected = sorted(families.rotary_modules(model))
            assert sorted(entry.path for entry in session.report.protected) == expected
            assert repr(session).endswith(", open>")
        assert sorted(entry.path for entry in session.report.protected) == expected
    session.stop()
    assert sorted(entry.path for entry in session.report.protected) == expected
    assert repr(session).endswith(", closed>")


def _contradict(model: nn.Module, what: str) -> None:
    """Give ``model`` a configuration that contradicts itself, in the form of its transformers."""
    for module in families.rotary_modules(model).values():
        config = getattr(module, "config", None)
        if config is None:  # 4.36: the module's attributes are its configuration
            vars(module).update({"odd": {"dim": 127}, "theta": {"base": -1.0}}.get(what, {}))
            if what == "factor":
                vars(module).update(scaling_factor=0.5, rope_type="linear")
        elif what == "odd":
            config.head_dim = 127
        elif hasattr(config, "rope_parameters"):
            change = {"theta": {"rope_theta": -1.0}, "factor": {"rope_type": "linear", "factor": 0.5}}[what]
            config.rope_parameters = {**config.rope_parameters, **change}
        elif what == "theta":
            config.rope_theta = -1.0
        else:
            config.rope_scaling = {"rope_type": "linear", "factor": 0.5}


@pytest.mark.parametrize("what", ["odd", "theta", "factor"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_config_that_contradicts_itself_later_changes_nothing(family: str, what: str) -> None:
    model = nn.ModuleDict({"sound": families.build("gpt_neox"), "contradictory": families.build(family)})
    _contradict(model["contradictory"], what)
    with torch.no_grad():
        expected = model["contradictory"](survival.tokens()).logits
        report = safe_rope.protect(model)
        assert torch.equal(model["contradictory"](survival.tokens()).logits, expected)
    named = {entry.path for entry in (*report.protected, *report.unprotected)}
    assert {path for path, module in model.named_modules() if is_rotary(module)} <= named


def is_rotary(module: nn.Module) -> bool:
    return "RotaryEmbedding" in type(module).__name__


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "a factor below one": {"rope_type": "linear", "factor": 0.5},
    "a dynamic factor below one": {"rope_type": "dynamic", "factor": 0.5},
    "exchanged betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32},
    "exchanged factors": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 4.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
    "a negative base": {"rope_type": "default", "rope_theta": -1.0},
}


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_config_that_contradicts_itself_is_built_as_in_stock(what: str, how: str) -> None:
    config = families.config("llama")
    if not hasattr(config, "rope_parameters"):
        pytest.skip("this release refuses such values, or reads them from elsewhere")
    config.rope_parameters = {**config.rope_parameters, **CONTRADICTIONS[what]}
    cls = families.model_class("llama")
    stock = cls(config)
    if how == "guard":
        with safe_rope.guard():
            model = cls(config)
    else:
        safe_rope.protect(model := cls(config))
    model.to(torch.bfloat16)
    for length in (8, 2 * config.max_position_embeddings, 8):
        tables = (_tables_of(one, length) for one in (model, stock))
        for table, expected in zip(*tables, strict=True):
            assert torch.equal(table.nan_to_num(7), expected.nan_to_num(7))


def _tables_of(model: nn.Module, length: int) -> tuple[torch.Tensor, ...]:
    (rotary,) = (module for module in model.modules() if is_rotary(module))
    cos, sin = rotary(torch.zeros(1, 1, 2), torch.arange(length)[None])
    return cos, sin


@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_positions_between_counts_are_computed(family: str, tables: str) -> None:
    ids = survival.tokens(4, batch=1)
    stock = families.build(family, layers=2)
    model = survival.build(family, tables)
    model.load_state_dict(stock.state_dict())
    for positions in ([0.0, 1.0, 2.0, 3.5], [0, 1, -2, 3], [True, False, True, True]):
        position_ids = torch.tensor([positions])
        expected = outcome(lambda: stock(ids, position_ids=position_ids).logits)  # noqa: B023
        got = outcome(lambda: model(ids, position_ids=position_ids).logits)  # noqa: B023
        if isinstance(expected, torch.Tensor):
            assert torch.allclose(got, expected, atol=1e-5), positions
    survival.assert_runs(model)


def outcome(run: Callable[[], torch.Tensor]) -> torch.Tensor | type[Exception]:
    try:
        return run().detach().float()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_rotary_module_asked_for_no_length_says_what_it_needs(family: str) -> None:
    model = survival.build(family)
    for module in families.rotary_modules(model).values():
        with pytest.raises(TypeError, match=r"seq_len|position_ids"):
            module(torch.zeros(1, 1, 4, families.HEAD_DIM), None)
