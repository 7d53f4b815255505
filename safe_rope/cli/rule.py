"""`safe-rope rule`: what a rule finds, why it matters, and an example of each side."""

from __future__ import annotations

import textwrap

import click

from safe_rope._base.text import nearest
from safe_rope.scan import RULES, Rule


@click.command("rule")
@click.argument("name", required=False, metavar="[RULE]")
@click.option("--all", "everything", is_flag=True, help="Explain every rule.")
def command(name: str | None, everything: bool) -> None:
    """Explain a rule of `safe-rope scan`, or list them all."""
    if everything:
        click.echo("\n".join(_explain(rule) for rule in RULES.values()), nl=False)
        return
    if name is None:
        for rule in RULES.values():
            click.echo(f"{rule.id}  {rule.severity:7}  {rule.summary}")
        return
    rule_id = name.strip().upper()
    if rule_id not in RULES:
        by_name = [rule.id for rule in RULES.values() if rule.name.lower() == name.strip().lower()]
        near = by_name[0] if by_name else nearest(rule_id, RULES)
        hint = f"did you mean {near}?" if near else "`safe-rope rule` lists them"
        raise click.UsageError(f"there is no rule {name!r}; {hint}")
    click.echo(_explain(RULES[rule_id]), nl=False)


def _explain(rule: Rule) -> str:
    parts = [
        f"{rule.id} {rule.name} ({rule.severity})",
        rule.summary,
        textwrap.dedent(rule.explanation).strip(),
    ]
    if rule.INVALID:
        parts.append("Found:\n\n" + _example(rule.INVALID[0]))
    if rule.VALID:
        parts.append("Not found:\n\n" + _example(rule.VALID[0]))
    parts.append(
        f"To keep one on purpose: `# noqa: {rule.id} reason`, or `# safe-rope: ignore[{rule.id}] reason`."
    )
    return "\n\n".join(parts) + "\n"


def _example(code: str) -> str:
    return textwrap.indent(textwrap.dedent(code).strip(), "    ")
