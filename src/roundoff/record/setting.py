"""A setting that changes numbers, as recordings, budgets and reports hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that changes numbers; ``note`` says how, where it is not usual."""

    name: str
    value: str
    note: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Setting:
        """Read what a file says of a setting; other keys are left out.

        >>> Setting.from_dict({"name": "threads", "value": 2})
        Setting(name='threads', value='2', note='')
        """
        name = str(data.get("name", ""))
        value = str(data.get("value", ""))
        return cls(name, value, str(data.get("note") or ""))


def settings_of(rows: Any) -> tuple[Setting, ...]:
    """Read the settings of a file; none from what is no list of objects.

    >>> settings_of([{"name": "threads", "value": "2"}, 3])
    (Setting(name='threads', value='2', note=''),)
    >>> settings_of(None)
    ()
    """
    if not isinstance(rows, Iterable):
        return ()
    return tuple(Setting.from_dict(row) for row in rows if isinstance(row, Mapping))
