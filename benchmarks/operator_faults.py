"""Is every operator that is 1 % wrong in a bf16, autocast or fp16 candidate found, beside fp32 and with tensors?

Each operator of five trainings (forward, backward and optimizer) is made 1 % wrong, one call at a time: all of its
elements times 1.01, all of them 1 % of their root mean square too large, or every eighth one times 1.01. The fp32
training is the reference. A fault is found where one of its call's results is a culprit, and first where it is the
first. The same pairs without a fault are held to no culprit at all.

A third of the operators (by a checksum of the name) are kept apart, so that rules are not made for them: ``--apart``
measures these alone, ``--known`` the others.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from common import progress, table, verdict
from operator_nets import NETS, Net
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import roundoff as ro
from roundoff.record import site_name

BAR = 0.95
#: Results with fewer elements may have none of every eighth.
LEAST = 2
FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "autocast": torch.float32,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="OPERATOR", nargs="+")
    parser.add_argument("--net", choices=[net.name for net in NETS])
    parser.add_argument("--format", choices=FORMATS)
    parser.add_argument("--known", action="store_true", help="two thirds of them")
    parser.add_argument("--apart", action="store_true", help="the other third")
    parser.add_argument(
        "--every", type=int, default=1, help="each n-th fault alone, for a quick look"
    )
    parser.add_argument("--quick", action="store_true", help="does it run?")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    alarms = []
    for net in NETS[:1] if args.quick else NETS:
        if args.net not in (None, net.name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(net, Path(folder))
            for kind in [args.format] if args.format else list(FORMATS):
                alarms += bench.false_alarms(kind)
                faults = bench.faults(kind, args)
                results += [bench.judge(fault) for fault in faults]
    show(results, alarms)


def show(results: Sequence[Result], alarms: Sequence[tuple[str, ...]]) -> None:
    missed = [
        (
            r.fault.net,
            r.fault.format,
            r.fault.phase,
            r.fault.operator,
            r.fault.harm,
            r.rank or "–",
            r.first,
        )
        for r in results
        if r.rank != 1
    ]
    header = ("net", "candidate", "phase", "operator", "1 % wrong", "rank", "first")
    table("Faults that were not named first", header, missed)
    rows: list[tuple[object, ...]] = []
    for label, key in (
        ("candidate", lambda r: r.fault.format),
        ("phase", lambda r: r.fault.phase),
        ("1 % wrong", lambda r: r.fault.harm),
        ("net", lambda r: r.fault.net),
        ("all", lambda _: ""),
    ):
        rows += _shares(results, label, key)
    table(
        "Faults of 1 % found",
        ("", "", "operators", "faults", "found", "named first"),
        rows,
    )
    found = sum(r.rank is not None for r in results)
    if results:
        share = found / len(results)
        print(f"found {found}/{len(results)}, bar {BAR:.0%}: {verdict(share, BAR)}")
    table("False alarms", ("net", "candidate", "blamed"), alarms)
    print(f"false alarms: {len(alarms)}, bar 0: {verdict(-len(alarms), 0)}")


def _shares(
    results: Sequence[Result], label: str, key: Callable[[Result], str]
) -> Iterator[tuple[Any, ...]]:
    for name in dict.fromkeys(map(key, results)):
        group = [r for r in results if key(r) == name]
        operators = {r.fault.operator for r in group}
        found = sum(r.rank is not None for r in group)
        first = sum(r.rank == 1 for r in group)
        yield (
            label,
            name,
            len(operators),
            len(group),
            f"{found} ({found / len(group):.1%})",
            f"{first} ({first / len(group):.1%})",
        )


# -- one wrong call --------------------------------------------------------------------


@dataclass(frozen=True)
class WrongCall:
    """One call that is 1 % wrong.

    Attributes:
        net: name of the training.
        format: of the candidate.
        operator: its name in torch, without namespace.
        number: of the call among those of the operator.
        phase: forward, backward or optimizer.
        place: which tensor of those that the call makes.
        harm: what is wrong.
    """

    net: str
    format: str
    operator: str
    number: int
    phase: str
    place: int
    harm: str


@dataclass(frozen=True)
class Result:
    """The rank of the true call among the culprits, and the first of these."""

    fault: WrongCall
    rank: int | None
    first: str


def scaled(x: Tensor) -> None:
    """All elements 1 % too large."""
    x.copy_(x.double() * 1.01)


def shifted(x: Tensor) -> None:
    """All elements too large by 1 % of their root mean square."""
    wide = x.double()
    x.copy_(wide + 0.01 * wide.square().mean().sqrt())


def in_part(x: Tensor) -> None:
    """Every eighth element 1 % too large."""
    factor = torch.ones(x.numel(), dtype=torch.float64)
    factor[::8] = 1.01
    x.copy_(x.double() * factor.view(x.shape))


HARMS: dict[str, Callable[[Tensor], None]] = {
    "scale": scaled,
    "offset": shifted,
    "elements": in_part,
}


class Calls(TorchDispatchMode):
    """Notes the calls that make floating-point tensors, and harms one of them."""

    def __init__(self, wrong: WrongCall | None = None) -> None:
        super().__init__()
        self.wrong = wrong
        self.counts: Counter[str] = Counter()
        #: operator, number, and the places whose values a factor would change
        self.seen: list[tuple[str, int, tuple[int, ...]]] = []
        self.changed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_recorded():
            return result
        name = func.overloadpacket.__name__
        number = self.counts[name]
        self.counts[name] += 1
        made = made_by(func, args, result)
        wrong = self.wrong
        if wrong is None:
            self.seen.append((name, number, _places(made)))
        elif (name, number) == (wrong.operator, wrong.number):
            target = made[wrong.place]
            before = target.clone()
            HARMS[wrong.harm](target)
            self.changed = not torch.equal(before, target)
        return result


def is_recorded() -> bool:
    """Return True for a call of the training, False for one of the recording's own."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/roundoff/" in file:
            return bool(frame.f_code.co_name in ("__torch_dispatch__", "run"))
        frame = frame.f_back
    return False


def made_by(func: Any, args: Any, result: Any) -> list[Tensor]:
    """The tensors that a call writes or makes anew; none for views."""
    made: list[Tensor] = []
    held = {x.untyped_storage().data_ptr() for a in args for x in _tensors(a)}
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            made += _tensors(value)
    values = [result] if len(func._schema.returns) == 1 else list(result or ())
    for declared, value in zip(func._schema.returns, values, strict=True):
        if declared.alias_info is None:
            fresh = [
                x.untyped_storage().data_ptr() not in held for x in _tensors(value)
            ]
            made += [x for x, new in zip(_tensors(value), fresh, strict=True) if new]
    return made


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value if isinstance(value, list | tuple) else ()
    return [x for x in values if isinstance(x, Tensor)]


def _places(made: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(
        place
        for place, x in enumerate(made)
        if x.is_floating_point() and x.numel() >= LEAST and bool(x.any())
    )


# -- one training ----------------------------------------------------------------------


class Bench:
    """A training in fp32, and its candidates."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.net = net
        self.folder = folder
        self.reference = folder / "reference"
        self.run(self.reference, "fp32", Calls())

    def run(self, path: Path, format_name: str, calls: Calls) -> None:
        """Record one step."""
        torch.manual_seed(0)
        model = self.net.build()
        x, target = self.net.batch()
        dtype = FORMATS.get(format_name, torch.float32)
        model.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        target = target.to(dtype) if target.is_floating_point() else target
        optimizer = self.net.optimizer(model.parameters())
        autocast: Any = contextlib.nullcontext()
        if format_name == "autocast":
            autocast = torch.autocast("cpu", torch.bfloat16)
        with calls, ro.capture(path, model, keep="tensors", overwrite=True):
            with autocast:
                loss = self.net.loss(model(x), target)
            loss.backward()
            optimizer.step()

    def faults(self, kind: str, args: argparse.Namespace) -> list[WrongCall]:
        """One call of each operator and phase, another harm for each."""
        calls = Calls()
        path = self.folder / "calls"
        self.run(path, kind, calls)
        rows = ro.load(path).ops.collect().filter(pl.col("call") >= 0).sort("record")
        by_operator: dict[tuple[str, str], list[WrongCall]] = {}
        phases = phases_of(rows)
        harms = list(HARMS)
        for name, number, places in calls.seen:
            phase = phases.get((name, number))
            if name.startswith("empty"):
                continue  # memory that nothing was written to yet
            if not places or phase is None or not wanted(name, args):
                continue
            group = by_operator.setdefault((name, phase), [])
            place = places[number % len(places)]
            harm = harms[(zlib.crc32(name.encode()) + len(by_operator)) % 3]
            group.append(
                WrongCall(self.net.name, kind, name, number, phase, place, harm)
            )
        chosen = [group[len(group) // 2] for group in by_operator.values()]
        return chosen[:: args.every][: 3 if args.quick else None]

    def judge(self, fault: WrongCall) -> Result:
        """Record it and compare."""
        path = self.folder / "candidate"
        calls = Calls(fault)
        self.run(path, fault.format, calls)
        comparison = ro.compare(reference=self.reference, candidate=path)
        rows = ro.load(path).ops.collect().filter(pl.col("call") >= 0).sort("record")
        records = records_of(rows, fault)
        rank = None
        culprits = comparison.culprits()
        sites = set(
            rows.filter(pl.col("record").is_in(records)).select(site_name()).to_series()
        )
        for place, culprit in enumerate(culprits, 1):
            named = culprit.site in sites and culprit.phase == fault.phase
            if (culprit.record in records or named) and rank is None:
                rank = place
        first = culprits[0].site or "" if culprits else "agrees"
        shown = "–" if rank is None else rank
        progress(
            f"{fault.net} {fault.format} {fault.phase} {fault.operator} "
            f"{fault.harm}: {shown} of {len(culprits)}"
        )
        return Result(fault, rank, first)

    def false_alarms(self, kind: str) -> list[tuple[str, ...]]:
        """What is blamed where nothing is wrong."""
        path = self.folder / "candidate"
        self.run(path, kind, Calls())
        comparison = ro.compare(reference=self.reference, candidate=path)
        return [
            (self.net.name, kind, f"{c.phase} {c.site}: {c.looks_like} {c.evidence}")
            for c in comparison.culprits()
        ]


def wanted(operator: str, args: argparse.Namespace) -> bool:
    """Return True for an operator that is asked for."""
    if args.only is not None:
        return operator in args.only
    is_apart = zlib.crc32(operator.encode()) % 3 == 0
    if args.apart:
        return is_apart
    return not (args.known and is_apart)


def phases_of(rows: pl.DataFrame) -> dict[tuple[str, int], str]:
    """The phase of each recorded call, by operator and number."""
    phases: dict[tuple[str, int], str] = {}
    counts: Counter[str] = Counter()
    calls = rows.unique("call", keep="first", maintain_order=True)
    for overload, phase in calls.select("overload", "phase").iter_rows():
        name = str(overload).split(".")[1]
        phases[name, counts[name]] = phase
        counts[name] += 1
    return phases


def records_of(rows: pl.DataFrame, fault: WrongCall) -> set[int]:
    """The records of all results of the wrong call."""
    is_operator = pl.col("overload").str.split(".").list.get(1) == fault.operator
    calls = rows.filter(is_operator)
    number = calls["call"].unique(maintain_order=True)[fault.number]
    return set(calls.filter(pl.col("call") == number)["record"])


if __name__ == "__main__":
    main()
