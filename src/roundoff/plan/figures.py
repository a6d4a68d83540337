"""What the ``[about]`` table of a plan says in numbers, with a field for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from roundoff.errors import PlanError

_TEXTS = ("note", "cost_model", "unit", "lowest_format", "of")
_TABLES = ("targets_db", "outputs_db", "shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Target, prediction and cost of a plan; None for what it does not say.

    Attributes:
        target_db: SQNR that was asked for.
        targets_db: SQNR that was asked for of some outputs, by name.
        metric_drop: most that the metric may lose, where the plan was made for that.
        predicted_db: SQNR that its budget predicts; of several outputs the least.
        outputs_db: SQNR of each of several outputs, by name.
        of: the part of the output, or the site, that was measured; empty for the output.
        additive_db: the same without correlations between sites.
        shared: why sites stay in fp32 that alone could leave it: they share a weight.
        note: where the target comes from, or what it leaves out.
        cost_model: name of what was counted, in ``unit``.
        unit: of the costs.
        cost: of the plan.
        cost_fp32: with every site in fp32.
        cost_lowest: with every site in its cheapest format.
        lowest_format: what most sites then have.
        forwards: forward passes a batch that the numbers of calls count over.
    """

    target_db: float | None = None
    targets_db: Mapping[str, float] = field(default_factory=dict)
    metric_drop: float | None = None
    predicted_db: float | None = None
    outputs_db: Mapping[str, float] = field(default_factory=dict)
    of: str = ""
    additive_db: float | None = None
    shared: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    cost_model: str = ""
    unit: str = ""
    cost: float = 0.0
    cost_fp32: float = 0.0
    cost_lowest: float = 0.0
    lowest_format: str = "fp32"
    forwards: int = 1

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> PlanFigures:
        """Read the figures of a plan's ``about``; other keys are left out.

        Raises ``PlanError`` for one that is of another type, such as a text for dB.

        >>> PlanFigures.from_dict({"target_db": 40, "origin": {}}).target_db
        40
        """
        values: dict[str, Any] = {}
        for name in (each.name for each in fields(cls)):
            value = about.get(name)
            if value is None:
                continue
            if name in _TABLES:
                values[name] = _table(name, value)
            else:
                _check(name, value)
                values[name] = value
        return cls(**values)


def _table(name: str, table: Any) -> dict[str, Any]:
    """Return a table without what it does not say: texts of sites, or numbers."""
    if not isinstance(table, Mapping):
        raise PlanError(
            f"the plan's {name} is not a table",
            where=f"plan, [about], {name}",
            got=repr(table)[:60],
            do="mend the line of the plan file, or leave it out",
        )
    rows = {str(key): value for key, value in table.items() if value is not None}
    for key, value in rows.items():
        _check(f"{name}.{key}", value)
    return rows


def _check(name: str, value: Any) -> None:
    is_text = name in _TEXTS or name.startswith("shared.")
    if is_text and isinstance(value, str):
        return
    kinds = int if name == "forwards" else (int, float)
    if not is_text and isinstance(value, kinds) and not isinstance(value, bool):
        return
    raise PlanError(
        f"the plan's {name} is not a {'text' if is_text else 'number'}",
        where=f"plan, [about], {name}",
        got=repr(value)[:60],
        do="mend the line of the plan file, or leave it out",
    )
