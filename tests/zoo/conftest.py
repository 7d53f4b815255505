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

# One architecture for each way of holding or applying positions that is known to differ.
FAMILIES = (
    "llama,mistral,gpt_neox,gptj,codegen,falcon,phi,persimmon,stablelm,qwen2_vl,qwen3_vl,gemma3,gemma3n,gemma4,"
    "deepseek_v2,deepseek_v3,glm4,glm4v,llama4,gpt_oss,esm,dinov3_vit,modernbert,cohere,mixtral,qwen3_moe,"
    "m2m_100,nllb-moe,xglm,swinv2,bros,wav2vec2-conformer,ctrl,mega"
)


@pytest.fixture(scope="session")
def survey(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The survey's line of each architecture: a fixed sample of 40, and one for each known shape."""
    output = tmp_path_factory.mktemp("zoo") / "rows.jsonl"
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / "zoo_survey", "--output", output]
    command += ["--sample", "40", "--seed", "0", "--also", FAMILIES]
    subprocess.run(command, check=False, capture_output=True, timeout=900)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["model_type"]: row for row in rows}
