"""What one file's source means: its names, the values of its expressions, and what is said about them."""

from safe_rope.scan.engine import indices, prefilter, reading, tensors
from safe_rope.scan.engine.file import File, Report
from safe_rope.scan.engine.finding import (
    Diagnostic,
    Edit,
    FileResult,
    Finding,
    Fix,
    Hit,
    Severity,
    Suppression,
    apply_edits,
    decode,
    encode,
)
from safe_rope.scan.engine.flow import Step
from safe_rope.scan.engine.names import Argument, Call
from safe_rope.scan.engine.places import is_import, kind
from safe_rope.scan.engine.reading import UnreadableError, is_notebook, limited, read, reader
from safe_rope.scan.engine.scopes import ASKED, Binding, Place, Scope, Site
from safe_rope.scan.engine.source import Source
from safe_rope.scan.engine.values import FLOATING, LOW, PINNED, Value
from safe_rope.scan.engine.vocabulary import INVERSE_FREQUENCIES
from safe_rope.scan.engine.walk import Walk

__all__ = [
    "ASKED", "FLOATING", "INVERSE_FREQUENCIES", "LOW", "PINNED", "Argument", "Binding", "Call", "Diagnostic",
    "Edit", "File", "FileResult", "Finding", "Fix", "Hit", "Place", "Report", "Scope", "Severity", "Site",
    "Source", "Step", "Suppression", "UnreadableError", "Value", "Walk", "apply_edits", "decode", "encode",
    "indices", "is_import", "is_notebook", "kind", "limited", "prefilter", "read", "reader", "reading",
    "tensors",
]  # fmt: skip
