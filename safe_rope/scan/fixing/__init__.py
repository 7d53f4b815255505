"""Fixes: the edits that a rule proposes, and their application to a whole file."""

from safe_rope.scan.fixing.apply import Fixed, choose, diff, fix_source
from safe_rope.scan.fixing.silence import add_noqa

__all__ = ["Fixed", "add_noqa", "choose", "diff", "fix_source"]
