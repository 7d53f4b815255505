"""Where the code of a scope runs: while a model is built, in its forward, or in a program."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from safe_rope.scan.engine.scopes import Scope
from safe_rope.scan.engine.vocabulary import (
    CONSTRUCTING,
    CONSTRUCTORS,
    FORWARD,
    ROTARY,
    SCRIPT,
    SCRIPT_FOLDERS,
)

Kind = Literal["constructor", "forward", "script"]


def kind(scope: Scope, path: str, *, script: bool = False, main: bool = False) -> Kind:
    """Return where the code of a scope runs.

    Args:
        scope: the scope.
        path: of the file.
        script: the file is a program with a command line.
        main: the file can be run, so that its statements outside of functions may be that program.
    """
    if script or is_script(path):
        return "script"
    functions = [around for around in scope.upward() if around.kind == "function"]
    for function in functions:
        if function.name in CONSTRUCTORS or CONSTRUCTING.match(function.name):
            return "constructor"
        if FORWARD.fullmatch(function.name):
            return "forward"
    if not functions:
        return "script" if main else "constructor"
    owner = functions[-1].owner
    rotary = ROTARY.search(functions[-1].name) or (owner is not None and ROTARY.search(owner.name))
    return "constructor" if rotary else "forward"


def is_script(path: str) -> bool:
    """Say whether a file converts checkpoints or prepares data, by what such files are called."""
    file = PurePath(path)
    return SCRIPT.match(file.name) is not None or bool(SCRIPT_FOLDERS & set(file.parts[-4:-1]))
