"""Writes the table of rules into docs/lint.md: ``python docs/lint_rules.py``."""

from __future__ import annotations

from pathlib import Path

from roundoff.lint import RULES, THEMES

PAGE = Path(__file__).parent / "lint.md"
BEGIN = "<!-- rules, written by docs/lint_rules.py -->"
END = "<!-- end of rules -->"


def rules_text() -> str:
    """All rules: a table for each theme, then why and both examples of each."""
    parts = []
    for prefix, theme in THEMES.items():
        rules = [rule for rule in RULES if rule.code.startswith(prefix)]
        if not rules:
            continue
        parts.append(f"## {prefix}: {theme}\n")
        rows = [f"| {r.code} | `{r.name}` | {r.message} |" for r in rules]
        parts.append("\n".join(["| code | name | |", "|---|---|---|", *rows]) + "\n")
        for rule in rules:
            parts.append(f"### {rule.code} {rule.name}\n\n{rule.why}\n")
            parts.append(f"Wrong:\n\n```py\n{rule.wrong}```\n")
            parts.append(f"Right:\n\n```py\n{rule.right}```\n")
    return "\n".join(parts)


def with_rules(page: str) -> str:
    """The page with the rules as they are now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rules_text()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_rules(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
