"""Where the code of a scope runs: while a model is built, in its forward, or in a program."""

from __future__ import annotations

import ast
from pathlib import PurePath

from safe_rope.scan.engine.nodes import parameters_of
from safe_rope.scan.engine.scopes import Function, Kind, Run, Scope, Site
from safe_rope.scan.engine.vocabulary import (
    CONSTRUCTING,
    CONSTRUCTORS,
    FORWARD,
    POSITIONS,
    SCRIPT,
    SCRIPT_FOLDERS,
    words,
)
from safe_rope.scan.engine.walk import Walk

_DEPTH = 4  # of calls of calls


def kind(scope: Scope, path: str, walk: Walk, *, script: bool = False, main: bool = False) -> Kind:
    """Return where the code of a scope runs.

    Args:
        scope: the scope.
        path: of the file.
        walk: of the file: who calls a function decides, and its name only where nobody does.
        script: the file is a program with a command line.
        main: the file can be run, so that its statements outside of functions may be that program.
    """
    if script or is_script(path):
        return "script"
    functions = [around for around in scope.upward() if around.kind == "function"]
    run = _kind(functions, walk, _DEPTH, main=main)
    return "constructor" if run == "helper" else run


def _kind(functions: list[Scope], walk: Walk, depth: int, *, main: bool) -> Run:
    """Return where a function runs, given it and those around it; or, without one, the module's body."""
    if not functions:
        return "script" if main else "constructor"
    key = (id(functions[0]), depth)
    if key not in walk.kinds:
        walk.kinds[key] = "unknown"
        walk.kinds[key] = _kind_of(functions, walk, depth, main=main)
    return walk.kinds[key]


def _kind_of(functions: list[Scope], walk: Walk, depth: int, *, main: bool) -> Run:
    outermost = functions[-1]
    plain = outermost.name == "__init__" and _is_plain(outermost.owner)
    for function in functions:
        if function.name in CONSTRUCTORS and not plain:
            return "constructor"
        if FORWARD.fullmatch(function.name):
            return "forward"
    method = outermost.owner is not None and not plain
    name = outermost.owner.name if plain and outermost.owner else outermost.name
    places = [
        site.place
        for site in walk.calls.get(name, ())
        if isinstance(site.node, ast.Call) and isinstance(site.node.func, ast.Attribute) == method
    ]
    places += walk.mentions.get(name, ()) if method else ()
    callers = [[around for around in place.scope.upward() if around.kind == "function"] for place in places]
    if depth and callers:
        known = {_kind(some, walk, depth - 1, main=main) for some in callers if some != functions}
        if known:
            order: tuple[Run, ...] = ("constructor", "helper", "forward", "unknown", "script")
            run = next(kind for kind in order if kind in known)
            return "unknown" if run == "helper" and outermost.takes_tensors else run
    if outermost.takes_tensors:
        return "unknown"
    if not plain and any(CONSTRUCTING.match(function.name) for function in functions):
        return "constructor"
    return "helper" if _is_helper(outermost) else "unknown"


def _is_helper(function: Scope) -> bool:
    """Say whether nobody here calls what builds positions by its name, or a method that a base may call."""
    assert isinstance(function.node, Function)
    named = POSITIONS.search(words(function.name)) is not None
    if function.owner is None:
        return named
    parameters = [one.arg for one in parameters_of(function.node)]
    if "self" not in parameters:
        return named or POSITIONS.search(words(function.owner.name)) is not None
    return named and len(parameters) < 3


def _is_plain(owner: Scope | None) -> bool:
    """Say whether a class derives from nothing: it is no module, and runs when somebody makes it."""
    bases = getattr(owner.node, "bases", []) if owner is not None else [owner]
    return all(isinstance(base, ast.Name) and base.id == "object" for base in bases)


def is_import(site: Site) -> bool:
    """Say whether the import of a module runs a site: no function is around it, and no ``with`` statement."""
    around = any(scope.kind == "function" for scope in site.place.scope.upward())
    return not (around or site.place.contexts or any(isinstance(node, ast.Lambda) for node in site.ancestors))


def is_script(path: str) -> bool:
    """Say whether a file converts checkpoints or prepares data, by what such files are called."""
    file = PurePath(path)
    return SCRIPT.match(file.name) is not None or bool(SCRIPT_FOLDERS & set(file.parts[-4:-1]))
