"""Of the sins planted in tests/advise/workloads/slow.py, how many does roundoff.advise name,
and how near does following it come to the speed of the same training tuned by hand?

    python benchmarks/advise_sins.py
    python benchmarks/advise_sins.py --quick
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import table

import roundoff
from roundoff.advise import AdviceRow, Runner, Setup, Speed, changed, measure_speed

WORKLOADS = Path(__file__).parents[1] / "tests" / "advise" / "workloads"
#: What the comments of the workload call the rules.
PLANTED = (
    "fragmentation",
    "fused_attention",
    "drop_bias_before_norm",
    "group_convolutions",
    "equal_channels",
    "elementwise_share",
    "value_to_python",
    "no_fp64",
    "packed_files",
    "ready_samples",
    "fused_optimizer",
    "no_anomaly_mode",
    "gradients_to_none",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="short turns, one image: does it run?"
    )
    args = parser.parse_args()
    seconds = 0.02 if args.quick else 2.0
    slow = roundoff.Workload.load(WORKLOADS / "slow.py")
    if args.quick:
        slow.batches = [(x[:1], y[:1]) for x, y in slow.batches[:1]]
    answer = roundoff.advise(slow, train=True, seconds=seconds)
    rows = {row.name: row for row in answer.rows}
    table(
        f"{sum(name in rows for name in PLANTED)} of {len(PLANTED)} planted sins named",
        ("sin", "speed", "on top", "verdict"),
        [_cells(name, rows.get(name)) for name in PLANTED],
    )
    tuned = roundoff.Workload.load(WORKLOADS / "tuned.py")
    unchanged = Setup(slow, train=True)
    advised = Runner(changed(unchanged, answer.tuning.changes))
    by_hand = Runner(Setup(tuned, train=True).copied())
    plain = Runner(unchanged.copied())
    device = torch.device("cpu")
    against_hand = measure_speed(
        by_hand.step, advised.step, seconds=seconds, device=device
    )
    against_slow = measure_speed(
        plain.step, advised.step, seconds=seconds, device=device
    )
    table(
        "Following the winners (CPU time of a step, median of pairs)",
        ("against", "speed", "quartiles"),
        [
            ("the slow training", *_speed(against_slow)),
            ("the same tuned by hand", *_speed(against_hand)),
        ],
    )


def _cells(name: str, row: AdviceRow | None) -> tuple[str, ...]:
    if row is None:
        return name, "", "", "not named"
    speeds = [
        "" if speed is None else f"{speed.median:.2f}"
        for speed in (row.speed, row.on_top)
    ]
    return name, *speeds, row.verdict


def _speed(speed: Speed) -> tuple[str, str]:
    return f"{speed.median:.2f}", f"{speed.low:.2f}–{speed.high:.2f}"


if __name__ == "__main__":
    main()
