"""A migrated script for people: the difference, the reasons, what was left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roundoff.foreign import visible
from roundoff.report.figures import count

if TYPE_CHECKING:
    from roundoff.migrate import Migration, Remark


def migration_lines(migration: Migration) -> Iterator[str]:
    """Yield a unified diff, why each line was changed, what was left and what to know."""
    for line in migration.diff():
        yield visible(line, lines=False)
    if migration.is_changed:
        yield ""
        yield f"{count(len(migration.changes), 'change')}:"
        yield from _remarks(migration.path, migration.changes)
    if migration.left:
        yield "Left as it is:"
        yield from _remarks(migration.path, migration.left)
    if migration.notes:
        yield "Note:"
        yield from _remarks(migration.path, migration.notes)
    if not migration.is_changed:
        yield visible(f"{migration.path}: nothing is changed.", lines=False)


def _remarks(path: str, remarks: tuple[Remark, ...]) -> Iterator[str]:
    for remark in remarks:
        place = f"{path}:{remark.line}" if remark.line else path
        yield visible(f"  {place}: {remark.reason}", lines=False)
