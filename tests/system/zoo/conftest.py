from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
ROOT = Path(__file__).resolve().parents[3]

# A fixed choice of what the survey of each whole release has measured (docs/coverage.md): one of each way of
# holding positions, the quick ones of their kind; with ``--all`` more of the newest release.
ARCHITECTURES = {
    "5": "llama,gptj,codegen,m2m_100,swinv2,deepseek_v2,deepseek_v3,pixtral,qwen2_vl,gpt_oss,modernbert,phi3,"
    "dinov3_vit,llama4_vision_model,parakeet_ctc,wav2vec2-conformer,vjepa2,mlcd,gemma3n_audio,whisper",
    "4.57": "colpali,glm,granitevision,kosmos-2,kyutai_speech_to_text,llava_next,mega,mistral,persimmon,"
    "qwen3_next,starcoder2",
    "4": "gpt_neox_japanese,idefics,phi,trajectory_transformer",
}
MORE = (
    "ctrl,bros,qwen3_vl,cohere,cohere2,glm4v_text,mixtral,jina_embeddings_v3,canary_decoder,kosmos-2.5,"
    "gpt_neox_japanese,xglm,qwen3_5_moe_vision,molmo2_text,gemma4_text,embedding_gemma2,"
    "videoprism_text_model,musicflamingo,minimax,qwen3_asr"
)


def _architectures(everything: bool) -> str:
    """The choice for the installed release, and one architecture of every patch."""
    import transformers

    from safe_rope.registry import supported

    version = transformers.__version__
    chosen = next(names for start, names in ARCHITECTURES.items() if version.startswith(start)).split(",")
    if everything and version.startswith("5"):
        chosen += MORE.split(",")
    folders = (module.split(".") for patch in supported() for module in patch.modules[:1])
    patched = (parts[2] for parts in folders if parts[:2] == ["transformers", "models"])
    names = [*chosen, *patched]  # what the release does not have is left out; some folders spell it otherwise
    return ",".join(dict.fromkeys([*names, *(name.replace("_", "-") for name in names)]))


@pytest.fixture(scope="session")
def survey(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The survey's line of each architecture."""
    output = tmp_path_factory.mktemp("zoo") / "rows.jsonl"
    command = [
        ROOT / "tools" / "lab",
        "zoo",
        "--here",
        "--python",
        sys.executable,
        "--audit",
        "--output",
        output,
    ]
    command += ["--only", _architectures(everything=request.config.getoption("--all"))]
    subprocess.run(command, check=False, capture_output=True, timeout=900)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["model_type"]: row for row in rows}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many cells of each kind the tests have seen; those of harm go to the file ZOO_CELLS."""
    for name, title in (
        ("test_audit_mutations", "damages by hand: what the audit says"),
        ("test_audit_styles", "styles of position modules: their tables, and what the audit says"),
    ):
        seen = getattr(sys.modules.get(name), "SEEN", {})
        if seen:
            terminalreporter.section(title)
        for said, count in sorted(seen.items()):
            terminalreporter.write_line(f"{count:6d}  {said}")
    harm_cells = sys.modules.get("harm_cells")
    if harm_cells is None or not harm_cells.COLLECTED:
        return
    terminalreporter.section("styles of position modules: cells of each kind")
    terminalreporter.write_line(harm_cells.summary(harm_cells.COLLECTED))
    output = os.environ.get("ZOO_CELLS")
    if output:
        Path(output).write_text(json.dumps(harm_cells.as_data(harm_cells.COLLECTED), indent=1))
