"""How long does a comparison of 64 ranks × 20 steps × 1,000 operators take, and how much memory?

One step of a real GPT-2-like training (four blocks, AdamW) is captured with statistics alone and written for every rank and
step, each with other values. The candidate differs everywhere by 1e-7 to 1e-6, as another order of sums would make it,
and at one site of one rank and step by 5 %: what is computed from it in that step by up to 1 %, the rank's later steps by
1e-4. Bars: 20 s, 2 GB, and the first culprit is that site. In a process of its own, start-up included, on two cores.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from common import options, progress, table, verdict
from torch import nn
from torch.nn import functional as F  # noqa: N812

import roundoff as ro
from roundoff.record import (
    ABOUT,
    CHECKSUMS,
    OPERATORS,
    OPS,
    checksum,
    rank_name,
    site_name,
    step_name,
)

SECONDS, GIGABYTES = 20.0, 2.0
STATISTICS = ("min", "max", "mean", "l2", "std")
FAULT = {"rank": 37, "step": 11, "site": "blocks.2/gelu"}
QUICK_FAULT = {"rank": 2, "step": 1, "site": "blocks.2/gelu"}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.ln_1(x)).split(width, dim=2)
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in parts)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (
            (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5)
            .masked_fill(future, -torch.inf)
            .softmax(-1)
        )
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        output: torch.Tensor = x + self.down(
            F.gelu(self.up(self.ln_2(x)), approximate="tanh")
        )
        return output


class Decoder(nn.Module):
    def __init__(
        self, blocks: int = 4, width: int = 32, heads: int = 4, vocabulary: int = 64
    ) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(16, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = (
            nn.LayerNorm(width),
            nn.Linear(width, vocabulary, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            y = block(y)
        output: torch.Tensor = self.head(self.norm(y))
        return output


def captured(folder: Path) -> tuple[pl.DataFrame, dict[str, object]]:
    """The rows of a step of training after the first, in which the optimizer makes its state, and ``run.json``."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with ro.capture(folder, model) as run:
        for _ in range(2):
            x = torch.randint(0, 64, (2, 16))
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()).backward()
            optimizer.step()
            run.step()
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    del about["checksum"]  # that of other content than will be written
    return ro.load(folder).ops.filter(step=1).collect().sort("record"), about


#: Their results have nothing of their input's values.
WRITES = {"ones_like", "zeros_like", "empty_like", "full_like"}


def reached(rows: pl.DataFrame, record: int) -> np.ndarray:
    """Which rows are computed from a record, itself left out; what is updated in place is computed from what it was."""
    found = {record}
    for each, operator, inputs, view_of in rows.select(
        "record", "operator", "inputs", "view_of"
    ).iter_rows():
        if (
            operator not in WRITES
            and found.intersection(inputs or ())
            or view_of in found
        ):
            found.add(each)
    return rows["record"].is_in(list(found - {record})).to_numpy()


def written(
    rows: pl.DataFrame,
    about: dict[str, object],
    folder: Path,
    ranks: int,
    steps: int,
    fault: dict[str, Any] | None,
) -> None:
    """A run of these rows in the files that ``Writer`` makes, the columns without a value left out as it does."""
    folder.mkdir()
    (folder / ABOUT).write_text(
        json.dumps({**about, "ranks": ranks, "id": folder.name})
    )
    rows = rows.select(c.name for c in rows if c.null_count() < rows.height)
    floats = rows["dtype"].str.starts_with("float").fill_null(False).to_numpy()
    leaf, constant = (
        (rows["call"] == -1).to_numpy(),
        rows["operator"].is_in(list(WRITES)).to_numpy(),
    )
    (record,) = rows.filter(site_name() == FAULT["site"], phase="forward", place=0)[
        "record"
    ]
    after, at = reached(rows, record), (rows["record"] == record).to_numpy()

    def write(rank: int, step: int) -> None:
        shared = np.random.default_rng([rank, step])  # the same in both runs
        own = np.random.default_rng([rank, step, 1])
        factor = np.where(floats, 1 + 0.1 * shared.random(rows.height), 1)
        columns = {}
        for name in STATISTICS:
            tiny = own.uniform(1e-7, 1e-6, rows.height) * own.choice(
                [-1, 1], rows.height
            )
            tiny[constant] = 0
            if fault is None:
                tiny[:] = 0
            elif step == 0:
                tiny[leaf] = 0  # both begin with the same parameters
            if fault and rank == fault["rank"] and step == fault["step"]:
                tiny = np.where(after, own.uniform(1e-3, 1e-2, rows.height), tiny)
                tiny[at] = 0.05
            elif fault and rank == fault["rank"] and step > fault["step"]:
                tiny += 1e-4 * own.random(rows.height)
            columns[name] = rows[name] * pl.Series(
                np.where(floats, factor * (1 + tiny), 1)
            )
        changed = rows.with_columns(
            pl.lit(rank, OPS["rank"]).alias("rank"),
            pl.lit(step, OPS["step"]).alias("step"),
            **columns,
        )
        place = folder / rank_name(rank) / step_name(step)
        place.mkdir(parents=True)
        changed.write_parquet(place / OPERATORS, compression="zstd", statistics=False)
        (place / CHECKSUMS).write_text(
            json.dumps({OPERATORS: checksum(place / OPERATORS)}, indent=1)
        )

    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda at: write(*at),
                [(rank, step) for rank in range(ranks) for step in range(steps)],
            )
        )


def generate(
    folder: Path, ranks: int, steps: int, fault: dict[str, Any]
) -> tuple[Path, Path, int]:
    """Reference, candidate, and the number of operator calls in a step."""
    rows, about = captured(folder / "captured")
    for name, wrong in (("reference", None), ("candidate", fault)):
        progress(
            f"writing the {name}: {ranks} ranks, {steps} steps, {rows.height} rows in each"
        )
        written(rows, about, folder / name, ranks, steps, wrong)
    for name in ("reference", "candidate"):
        found = ro.load(folder / name)
        damage = found.verify()
        if damage or len(found.ranks) != ranks or len(found.steps) != steps:
            raise SystemExit(f"the generated run is not sound: {found}, {damage[:3]}")
    return (
        folder / "reference",
        folder / "candidate",
        rows.filter(pl.col("call") >= 0)["call"].n_unique(),
    )


def measured(reference: Path, candidate: Path) -> tuple[float, float, dict[str, Any]]:
    """Seconds, peak resident GB of the process, and what it printed."""
    command = [
        sys.executable,
        "-m",
        "roundoff",
        "compare",
        str(reference),
        str(candidate),
        "--json",
    ]
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"POLARS_MAX_THREADS": "2"},
    )
    seconds = time.perf_counter() - begin
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"roundoff compare ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    # ru_maxrss of all children so far is that of the largest: this one, the only one
    return (
        seconds,
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
        json.loads(done.stdout),
    )


def main() -> None:
    args = options(__doc__)
    ranks, steps, fault = (4, 3, QUICK_FAULT) if args.quick else (64, 20, FAULT)
    with tempfile.TemporaryDirectory() as folder:
        reference, candidate, calls = generate(Path(folder), ranks, steps, fault)
        seconds, gigabytes, found = measured(reference, candidate)
    first = (found.get("culprits") or [{}])[0]
    hit = all(first.get(name) == value for name, value in fault.items())
    table(
        f"roundoff compare, {ranks} ranks × {steps} steps × {calls} operators",
        ("what", "measured", "bar", ""),
        [
            (
                "seconds, start-up included",
                seconds,
                SECONDS,
                verdict(seconds, SECONDS, at_most=True),
            ),
            (
                "peak resident memory, GB",
                gigabytes,
                GIGABYTES,
                verdict(gigabytes, GIGABYTES, at_most=True),
            ),
            (
                "first culprit",
                ", ".join(str(first.get(k)) for k in fault),
                ", ".join(map(str, fault.values())),
                "met" if hit else "**missed**",
            ),
        ],
    )


if __name__ == "__main__":
    main()
