"""`safe-rope env`: what a bug report needs."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import click

import safe_rope
from safe_rope._base.version import LIBRARIES, installed

_OTHERS = ("lightning", "trl", "peft", "flash-attn", "liger-kernel", "triton", "numpy")
_VARIABLES = ("SAFE_ROPE", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "WORLD_SIZE")


@click.command("env")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True)
def command(form: str) -> None:
    """Print versions, devices and settings: the first thing to paste into a bug report."""
    told = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "safe_rope": str(Path(safe_rope.__file__).parent),
        **{f"{name} version": version for name, version in installed((*LIBRARIES, *_OTHERS)).items()},
        "torch build": _torch(),
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }
    width = max(map(len, told))
    lines = [f"{name.ljust(width)}  {value}" for name, value in told.items()]
    click.echo(json.dumps(told, indent=2) if form == "json" else "\n".join(lines))


def _torch() -> str:
    try:
        import torch
    except ImportError as error:
        return f"none: {error}"
    cuda: Any = torch.cuda
    devices = [cuda.get_device_name(index) for index in range(cuda.device_count())]
    return f"CUDA {torch.version.cuda or 'none'}; devices: {', '.join(devices) or 'CPU only'}"
