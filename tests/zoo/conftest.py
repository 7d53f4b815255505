from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
ROOT = Path(__file__).resolve().parents[2]

# What the survey of each release has measured so far, one of each known shape first.
ARCHITECTURES = {
    "5": "llama,gptj,m2m_100,swinv2,deepseek_v3,bros,qwen2_vl,qwen3_vl,gpt_oss,cohere,glm4,modernbert,phi3,"
    "dinov3_vit,mixtral,qwen3_moe,parakeet_ctc,nemotron3_diarization_audio,jina_embeddings_v3,"
    "canary_decoder,doge,qwen3_5_moe_text,gpt_neox_japanese",
    "4.57": "colpali,glm,granitevision,kosmos-2,kyutai_speech_to_text,llava_next,mega,mistral,persimmon,"
    "qwen3_next,starcoder2",
    "4": "gpt_neox_japanese,idefics,phi,trajectory_transformer",
}


def _architectures() -> str:
    import transformers

    version = transformers.__version__
    return next(names for start, names in ARCHITECTURES.items() if version.startswith(start))


@pytest.fixture(scope="session")
def survey(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The survey's line of each architecture."""
    output = tmp_path_factory.mktemp("zoo") / "rows.jsonl"
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / "zoo_survey", "--output", output]
    command += ["--only", _architectures()]
    subprocess.run(command, check=False, capture_output=True, timeout=900)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["model_type"]: row for row in rows}
