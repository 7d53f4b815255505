"""What dtypes, integers and tensors ask about the parts of an expression; inference answers."""

from __future__ import annotations

import ast
from typing import Protocol

from safe_rope.scan.engine.names import Argument
from safe_rope.scan.engine.scopes import Place
from safe_rope.scan.engine.values import Value


class Evaluator(Protocol):
    """Says what is known of any expression of one file."""

    def value(self, node: ast.expr, place: Place) -> Value:
        """Return what is known of an expression at a place."""

    def of(self, argument: Argument) -> Value:
        """Return what is known of a call's argument."""

    def defines(self, name: str) -> bool:
        """Say whether a class of the file may have an attribute of this name that is not a tensor's."""
