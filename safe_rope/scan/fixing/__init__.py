"""Fixes: the edits that a rule proposes, and their application to a whole file."""

from safe_rope.scan.fixing.apply import diff, fix_source
from safe_rope.scan.fixing.silence import add_noqa

__all__ = ["add_noqa", "diff", "fix_source"]
