"""Where a call stands, and how severe a hazard is there."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from safe_rope.scan.engine.finding import Severity
from safe_rope.scan.engine.scopes import Scope, Walk
from safe_rope.scan.engine.vocabulary import (
    CONSTRUCTING,
    CONSTRUCTORS,
    FORWARD,
    ROTARY,
    SCRIPT,
    SCRIPT_FOLDERS,
)

Kind = Literal["constructor", "forward", "script"]


def kind(scope: Scope, path: str, walk: Walk, *, script: bool = False, main: bool = False) -> Kind:
    """Return where the code of a scope runs.

    Args:
        scope: the scope.
        path: of the file.
        walk: of the file.
        script: the file is a program with a command line.
        main: the file can be run, so that its statements outside of functions may be that program.
    """
    if script or is_script(path):
        return "script"
    function: Scope | None = scope
    while function is not None and function.kind != "function":
        function = function.parent
    if function is None:
        return "script" if main else "constructor"
    return _function_kind(function, walk)


def _function_kind(function: Scope, walk: Walk) -> Kind:
    name = function.name
    if name in CONSTRUCTORS or CONSTRUCTING.match(name):
        return "constructor"
    if FORWARD.fullmatch(name):
        return "forward"
    outer = function.parent
    while outer is not None and outer.kind != "function":
        outer = outer.parent
    if outer is not None:
        return _function_kind(outer, walk)
    owner = function.owner
    if ROTARY.search(name) or (owner is not None and ROTARY.search(owner.name)):
        return "constructor"
    return "forward"


def is_script(path: str) -> bool:
    """Say whether a file converts checkpoints or prepares data, by what such files are called."""
    file = PurePath(path)
    return SCRIPT.match(file.name) is not None or bool(SCRIPT_FOLDERS & set(file.parts[-4:-1]))


def severity(base: Severity, where: Kind, *, follows_activations: bool) -> Severity:
    """Return a hazard's severity at a place.

    Args:
        base: what it is in a constructor or rotary helper.
        where: the place.
        follows_activations: its dtype is that of other tensors, so that forward lowers it as well.
    """
    if where == "script":
        return "note"
    if where == "forward" and not follows_activations:
        return "note"
    return base
