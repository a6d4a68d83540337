"""FLOPs, MACs and bytes of twelve architectures: by hand, by roundoff.advise, and what
torch.utils.flop_counter says.

    python benchmarks/advise_counts.py

The tables by hand are in tests/advise/hand_tables.py. FLOPs of torch's counter are those of
products alone, so it stands beside the MACs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from common import table
from torch.utils.flop_counter import FlopCounterMode

from roundoff.advise import count

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.advise.hand_tables import CASES, Case


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same: it is quick")
    parser.parse_args()
    torch.manual_seed(0)
    table(
        "One forward pass: MACs by hand, and the part of them that each counter sees",
        ("architecture", "MACs", "roundoff", "torch", "FLOPs", "bytes"),
        [cells(case) for case in CASES],
    )


def cells(case: Case) -> tuple[str, ...]:
    sheet = case.sheet()
    model = case.model().eval()
    inputs = case.inputs()
    with torch.no_grad():
        ours = count(lambda: model(*inputs), model)
        with FlopCounterMode(display=False) as peer:
            model(*inputs)
    return (
        case.name,
        f"{sheet.macs:,.0f}",
        f"{ours.macs / sheet.macs:.2%}",
        f"{peer.get_total_flops() / 2 / sheet.macs:.2%}",
        f"{ours.flops / sheet.flops - 1:+.2%}",
        f"{ours.bytes_moved / sheet.bytes - 1:+.2%}",
    )


if __name__ == "__main__":
    main()
