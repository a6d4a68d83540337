"""A recording names operators that do harm: what is tried to repair it runs none.

Between two programs by different hands the candidate's calls run again, edited and as
they are, and on made-up values; all of that obeys what any recorded call has to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import roundoff
from roundoff.ops import from_recording
from roundoff.record.disk.mark import write_mark
from roundoff.record.disk.schema import CHECKSUMS, MARK, OPERATORS
from roundoff.record.disk.tensors import checksum

WEIGHT = torch.linspace(-1, 1, 24).reshape(6, 4)


class Program(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.w = torch.nn.Parameter(WEIGHT.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def reference(m: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.linear(x, m.w).tanh()
    hidden = torch.nn.functional.layer_norm(hidden, [6], eps=1e-3)
    return torch.sigmoid(hidden.tanh())


def port(m: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.einsum("bi,hi->bh", x, m.w).erf()
    hidden = torch.native_layer_norm(hidden, [6], None, None, 1e-3)[0]
    return 1 / (1 + torch.exp(-torch.tanh(hidden)))


def pair(folder: Path, keep: str) -> tuple[Path, Path]:
    ours = recorded(folder / "ref", reference, keep)
    return ours, recorded(folder / "cand", port, keep)


def recorded(folder: Path, function: Callable[..., torch.Tensor], keep: str) -> Path:
    model = Program(function)
    with torch.no_grad(), roundoff.capture(folder, model, keep=keep) as run:
        model(torch.linspace(-2, 2, 32).reshape(8, 4).sin())
        run.step()
    return folder


def crafted(folder: Path, operator: str, overload: str, arguments: str) -> None:
    """Make the calls of one operator name another call, checksums and mark included."""
    [table] = folder.rglob(OPERATORS)
    metadata = pl.read_parquet_metadata(table)
    own = {k: v for k, v in metadata.items() if not k.startswith("ARROW")}
    rows = pl.read_parquet(table.read_bytes())
    overloads = rows["overload"].to_list()
    texts = rows["arguments"].to_list()
    places = [
        i for i, o in enumerate(overloads) if (o or "").startswith(f"aten.{operator}.")
    ]
    assert places
    for place in places:
        overloads[place] = overload
        texts[place] = arguments.replace("R}", f"{rows['inputs'][place][0]}}}")
    columns = {"overload": overloads, "arguments": texts}
    changed = rows.with_columns(pl.Series(k, v) for k, v in columns.items())
    changed.write_parquet(table, metadata=own)
    sums = table.parent / CHECKSUMS
    content = json.loads(sums.read_text())
    if table.name in content:
        content[table.name] = checksum(table)
        sums.write_text(json.dumps(content))


#: An operator of the candidate, and what its calls are made to name.
CALLS = (
    ("exp", "aten.from_file.default", '[["FILE",true,64],{}]'),
    (
        "tanh",
        "aten.native_layer_norm.default",
        '[[{"record":R},[4000],null,null,0.1],{}]',
    ),
    (
        "native_layer_norm",
        "aten.native_group_norm.default",
        '[[{"record":R},null,null,4,3,2000,0,0.1],{}]',
    ),
)


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize(("operator", "overload", "arguments"), CALLS)
def test_no_trial_runs_what_an_own_recording_names(
    tmp_path: Path, operator: str, overload: str, arguments: str, keep: str
) -> None:
    ours, theirs = pair(tmp_path, keep)
    arguments = arguments.replace("FILE", str(tmp_path / "written"))
    crafted(theirs, operator, overload, arguments)
    write_mark(next(theirs.rglob(OPERATORS)).parent)
    comparison = roundoff.compare(reference=ours, candidate=theirs)
    assert comparison.table.height
    assert not (tmp_path / "written").exists()


def test_trials_of_anothers_recording_run_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repair is named as it is for an own one, and no kernel has run in this process."""
    ours, theirs = pair(tmp_path, "tensors")
    expected = roundoff.compare(reference=ours, candidate=theirs).divergence
    next(theirs.rglob(MARK)).unlink()
    monkeypatch.setattr(from_recording, "tensors_made", None)  # which the child has
    named = roundoff.compare(reference=ours, candidate=theirs).divergence
    assert expected is not None
    assert named == expected
