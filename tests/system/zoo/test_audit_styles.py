"""The audit's verdict on every style, however it was loaded, is what has become of its tables."""

from __future__ import annotations

from collections import Counter

import pytest
from audit_cells import PATHS, UNFILLED, look
from styles import STYLES

pytestmark = pytest.mark.usefixtures("deepspeed_group")

THIRD = 3
SEEN: Counter[str] = Counter()
"""How many cells of each kind this process has seen."""

# Nobody who comes later can tell what these were built with or under: right tables stay unknown.
UNTOLD = {
    *("any_arguments", "keywords_popped", "SameKeywordsForEveryLayer", "positional_only", "from_a_config"),
    *("config_that_changes_afterwards", "tensor_given", "function_given", "UniqueName", "NumberedLayers"),
    *("HandsItselfOver", "copied_from_a_template", "unpickled", "loaded_from_a_state_dict"),
    *("RopesInAModuleList", "Baichuan", "SharedRope", "LlamaRotaryInterpolated", "class_from_a_factory"),
    *("class_from_type", "ParentCallsTheBuilder", "BaseReboundAndKept", "scale_given", "ParentDivides"),
    *("ParentDividesInPlace", "assigned_by_the_user", "registered_anew_by_the_user", "ConfigChanged"),
    *("config_given_and_changed", "BasesFromAnIterator", "dict_popped", "DimHalved", "base_not_kept"),
    *("global_while_building", "GlobalWhileTheParentBuilds", "context_variable"),
    *("environment_while_building", "class_attribute_while_building", "function_replaced_while_building"),
    *("ChildRegistersOnItsParent", "BuiltInThreads", "OnePerSize", "FromARegistry", "SecondLikeTheFirst"),
    *("FilledByApply", "HandsItsBufferOver", "CopiesItsTables", "FilledByInitWeights", "FromAClassMethod"),
    *("EsmRotary", "OneTableInTwoModules", "given_by_a_factory", "copied_and_filled"),
    *("RopeHiddenFromTheModule",),
    "FilledBeforeItIsRegistered",
    *("ZerosFilledLater", "OnesFilledLater"),
}
# Lost, and not told: what a checkpoint may hold as well, or a step in 16 bits that no replay repeats.
UNPROVEN = {
    "frozen parameters": {
        *("GridOfSinusoids", "AlibiFrozen", "NumpyIntoAWeight", "FrozenFrequencies", "FrozenSinusoids"),
        *(
            "FrozenEmbedding",
            "SinusoidalEmbedding",
            "FrozenParameterList",
            "FrozenAfterwards",
            "InAParameterDict",
        ),
        *("AddedFromAFrozenEmbedding", "PretrainedEmbedding", "RotateQueriesAndKeys", "FrozenParameterDict"),
        "SinesInAConvolution",
        "FrozenFrequenciesTwice",
        "FrequenciesAsAFrozenLayer",
    },
    "random frequencies": {"RandomGaussian", "RandomFeatureTimes"},
    "built from arguments that are not known": {
        *("EsmRotary", "NanoWithFreqsCis", "given_by_a_factory", "copied_and_filled"),
    },
    "complex exponentials of a low default dtype": {"ComplexExponential"},
    "made anew by a forward that cannot be asked, where they are not FP32": {"FlashRotary", "ChatGLM"},
    "put anew by a forward that cannot be asked, before it reads them": {"QwenOne", "NtkInForward"},
    "sines that a forward puts, and may have rounded last": {
        "ConformerRelative",
        "ExtendedByItsForward",
        "AddedFromAnAttribute",
    },
}
# Their tables are on meta, where no list of a module's tensors has them, or are one number.
HIDDEN = {
    "InADataclass",
    "ComplexPhasesOfAnObject",
    "FrequenciesInAnObjectThatIsCalled",
    "InSlotsOfAnObject",
    "TablesInAnObject",
    "TablesInANamespace",
    "BucketsInABuffer",
    "BaseInABuffer",
    "ThetaInATensor",
    "PhasesAsSmallIntegers",
    "T5BucketsInABuffer",
    "CacheObjectThatGrows",
    "FrequenciesInASlot",
    "InAClosure",
    "TablesByLayerType",
    "PhasorsByLength",
    "FrequenciesInAClosure",
    "KeywordsOfAPartial",
    "InAPartial",
    "InAReadOnlyMapping",
    "InADataclassWithAList",
    "InADictOfDicts",
}
# Their forwards cannot be asked in an engine of ZeRO 3: a dtype is given to them, or they seek themselves.
UNASKED = {"GivesADtype", "InAWeakDictionary"}
# Their tables stand outside of modules: nothing here sees what is lost, and no constructor tells of them.
OUTSIDE = {"CacheOnTheClass", "GlobalCache", "RememberingFunctionAlone", "RememberedByAFunction"}

# The audit looks into no module of torch's own or of TorchScript; the guard's report names such tables.
IN_A_MODULE_OF_TORCH = {"InABareModule", "Traced", "ScriptedRope", "EmbeddingOfABuffer"}
# No positions, but counted: the guard keeps them, and what a cast rounds is told.
COUNTED = {"ExpectedValue"}
# A table that code asks for its dtype alone, in a model whose weights are cast as well.
ASKED_FOR_ITS_DTYPE = {"ChatGLM"}


# Every sixth style: a sample for the older releases.
CASES = [
    pytest.param(name, index % THIRD, marks=[] if index % 6 else pytest.mark.contract)
    for index, name in enumerate(STYLES)
]


@pytest.mark.parametrize(("name", "turn"), CASES)
def test_a_style_gets_a_right_verdict_on_every_load_path(
    name: str, turn: int, request: pytest.FixtureRequest
) -> None:
    """Every load path with ``--all``; without, each style meets a third of them."""
    wrong = []
    for path in PATHS if request.config.getoption("--all") else PATHS[turn::THIRD]:
        if path.name in STYLES[name].not_on:
            continue
        seen = look(STYLES[name], path)
        if seen is None:
            continue
        lost = {text for text in seen.lost.values() if text != UNFILLED}
        state = "lost" if lost else "unfilled" if seen.lost else "right"
        SEEN[f"{state}: {seen.verdict}"] += 1
        if seen.problem is not None and name not in IN_A_MODULE_OF_TORCH | COUNTED | ASKED_FOR_ITS_DTYPE:
            wrong.append(seen.problem)
        elif seen.verdict == "unknown" and not _is_named(name, state):
            wrong.append(f"{name}, {path.name}: unknown, {seen.lost or 'right'}\n{seen.report}")
    assert not wrong, "\n".join(["", *wrong])


def _is_named(name: str, state: str) -> bool:
    if state == "lost":
        return any(name in names for names in UNPROVEN.values())
    return state == "unfilled" or name in UNTOLD | HIDDEN | UNASKED | OUTSIDE
