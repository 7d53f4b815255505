"""Fixes: the edits that a rule proposes, and their application to a whole file."""

from safe_rope.scan.fixing.apply import Fixed, choose, diff, fix_source

__all__ = ["Fixed", "choose", "diff", "fix_source"]
