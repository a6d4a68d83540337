"""What ``roundoff bench`` found, as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundoff.report.figures import NONE, count, finite, listing

Row = Mapping[str, Any]


def answer(data: Row) -> list[str]:
    """The answer first, then what is gained and what it costs; ``data`` is ``Bench.summary``."""
    first, *others = data["rows"]
    name, seeds = first["config"], count(len(data["seeds"]), "seed")
    failed = [row["config"] for row in data["rows"] if row["failed"]]
    broken = [
        row["config"]
        for row in others
        if row["loss"] and not finite(row["loss"]["mean"])
    ]
    worse = [
        row["config"] for row in others if row["worse"] and row["config"] not in broken
    ]
    better = [
        row["config"]
        for row in others
        if row["verdict"] == "different" and not row["worse"]
    ]
    alike = [row["config"] for row in others if row["verdict"] == "no difference seen"]
    open_ = [row["config"] for row in others if row["verdict"] == "undecided"]
    said = []
    if broken:
        said.append(
            f"{listing(broken)} {_ends(broken)} with a loss that is not finite."
        )
    if worse:
        said.append(
            f"{listing(worse)} {_ends(worse)} worse than {name}, by more than {seeds} explain."
        )
    if better:
        said.append(
            f"{listing(better)} {_ends(better)} better than {name}, by more than {seeds} explain."
        )
    if alike:
        said.append(
            f"No difference from {name} beyond the noise between seeds is seen in {listing(alike)}."
        )
    if open_:
        trains = "trains" if len(open_) == 1 else "train"
        said.append(
            f"Whether {listing(open_)} {trains} like {name} is undecided with {seeds}."
        )
    if failed:
        said.append(f"{listing(failed)} could not be trained.")
    ran = [
        row
        for row in others
        if not row["worse"] and row["speed"] and finite(row["speed"]["median"])
    ]
    said += _gains(first, ran) if ran else []
    for row in data["rows"]:
        if row["skips"]:
            steps = data["steps"] * len(data["seeds"])
            said.append(
                f"{row['config']} skipped {row['skips']:,} of {count(steps, 'step')} for overflow."
            )
        if row["nonfinite"]:
            said.append(f"{row['config']}: {row['nonfinite']}.")
    if not said:
        said.append(f"{name} was trained with {seeds}.")
    return [*said, *(f"{note[0].upper()}{note[1:]}." for note in data["notes"])]


def _gains(first: Row, ran: list[Row]) -> list[str]:
    """Which is the fastest, and which takes the least memory."""
    fastest = max(ran, key=lambda row: float(row["speed"]["median"]))
    speed, name = fastest["speed"], first["config"]
    if speed["low"] > 1:
        said = [
            f"Fastest is {fastest['config']}: {times(speed['median'])} the steps a second of {name}."
        ]
    else:
        said = [f"None is clearly faster than {name}."]
    weighed = [row for row in ran if row["memory"]]
    if first["memory"] and weighed:
        least = min(weighed, key=lambda row: int(row["memory"]["total"]))
        share = least["memory"]["total"] / first["memory"]["total"]
        if share < 0.99:
            said.append(
                f"{least['config']} takes the least memory, {share:.0%} of {name}'s."
            )
    return said


def _ends(names: list[str]) -> str:
    return "ends" if len(names) == 1 else "end"


def times(ratio: float | None) -> str:
    """A ratio of speeds.

    >>> times(1.348), times(0.0312), times(None)
    ('1.35×', '0.031×', '–')
    """
    if not finite(ratio):
        return NONE
    return f"{ratio:.2f}×" if ratio >= 0.1 else f"{ratio:.2g}×"


def spread(ratios: Row | None) -> str:
    """The quartiles of ratios.

    >>> spread({"low": 1.3, "high": 1.41})
    '1.30–1.41'
    """
    if ratios is None or not (finite(ratios["low"]) and finite(ratios["high"])):
        return ""
    low, high = (times(ratios[key])[:-1] for key in ("low", "high"))
    return f"{low}–{high}"


def mebibytes(value: int | None) -> str:
    """Bytes in MiB.

    >>> mebibytes(3 << 20), mebibytes(120000)
    ('3.0 MiB', '0.11 MiB')
    """
    if value is None:
        return NONE
    size = value / (1 << 20)
    return (
        f"{size:.0f} MiB"
        if size >= 100
        else f"{size:.1f} MiB"
        if size >= 1
        else f"{size:.2g} MiB"
    )


def value(judged: Row | None) -> str:
    """The mean over seeds, with the spread between them.

    >>> value({"mean": 1.23456, "spread": 0.0123}), value({"mean": 0.5, "spread": None})
    ('1.235 ± 0.012', '0.5000')
    """
    if judged is None:
        return NONE
    mean, noise = judged["mean"], judged["spread"]
    return f"{digits(mean)} ± {noise:.2g}" if finite(noise) else digits(mean)


def digits(number: float | None) -> str:
    """A loss or metric to four digits."""
    if number is None:
        return NONE
    return (
        f"{number:.4f}"
        if finite(number) and 0.1 <= abs(number) < 1
        else f"{number:.4g}"
    )


def difference(judged: Row | None) -> str:
    """The mean difference with its 95 % interval.

    >>> difference({"difference": 0.0021, "low": -0.004, "high": 0.0082})
    '+0.0021 [-0.004, +0.0082]'
    """
    if judged is None or judged["difference"] is None:
        return ""
    if judged["low"] is None:
        return f"{judged['difference']:+.2g}"
    if judged["low"] == judged["high"] == 0:
        return "±0"
    return f"{judged['difference']:+.2g} [{judged['low']:+.2g}, {judged['high']:+.2g}]"


def seen(judged: Row | None) -> str:
    """The verdict on one number with its reason, and what could have been seen."""
    if judged is None or judged["verdict"] is None:
        return ""
    size = difference(judged)
    text = f"{size}: " if size else ""
    text += f"{judged['verdict']}: {judged['reason']}"
    if judged["could_see"]:
        text += f" ({judged['could_see']:.2g} would have been seen)"
    return text


def formats(row: Row) -> str:
    """What the matrix work of one step ran in.

    >>> formats({"seen": {"matrix": {"forward": {"bf16": 20, "fp32": 1}, "backward": {"bf16": 40}}, "casts": 62}})
    'matrix work 60 bf16, 1 fp32; 62 casts'
    """
    if not row["seen"]:
        return ""
    total: dict[str, int] = {}
    for counts in row["seen"]["matrix"].values():
        for name, number in counts.items():
            total[name] = total.get(name, 0) + number
    work = ", ".join(
        f"{number} {name}"
        for name, number in sorted(total.items(), key=lambda item: -item[1])
    )
    return f"matrix work {work or 'none'}; {count(row['seen']['casts'], 'cast')}"
