"""Runs of two processes: each writes its part, and collectives are sites with their group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import polars as pl
import pytest
import torch
from tests.forked import command, side_by_side

from roundoff.record.disk.loading import load

SOURCE = Path(__file__).parents[2] / "src"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or sys.platform == "win32",
        reason="needs torch.distributed",
    ),
]

HEAD = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""
DDP = """
model = nn.parallel.DistributedDataParallel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
pair, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in (0, 1)][rank]
for step in range(3):
    loss = model(torch.full((3, 4), rank + 1.0)).square().mean()
    opt.zero_grad()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=pair)
    dist.all_reduce(total.clone(), group=alone)
    dist.broadcast(total, 0)
    parts = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(parts, loss.detach())
    opt.step()
"""
END = "\ndist.destroy_process_group()\n"


ARGUMENTS = ["capture", "-o", "run", "--steps"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def launch(tmp_path, text, *options, steps="0-1", head=HEAD, code=0):
    """Record two processes that torchrun starts."""
    (tmp_path / "train.py").write_text(head + textwrap.dedent(text) + END)
    done = subprocess.run(
        [
            sys.executable,
            *TORCHRUN,
            "-m",
            "roundoff",
            *ARGUMENTS,
            steps,
            *options,
            "--",
            "train.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=ENVIRONMENT,
    )
    assert (done.returncode == 0) == (code == 0), done.stderr
    return done


def start_both(tmp_path, text, *options, steps="0-1"):
    """Record two processes with the variables that torchrun sets: without its own, which takes seconds to start.

    What they print, one after the other, and their warnings and errors.
    """
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(text) + END)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    both = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    printed = side_by_side(
        command,
        [[*ARGUMENTS, steps, *options, "--", "train.py"]],
        [both | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")],
        folder=tmp_path,
    )
    return tuple("".join(texts) for texts in zip(*printed, strict=True))


def collectives(run, rank):
    rows = run.ops.filter(
        pl.col("phase") == "collective", pl.col("rank") == rank, pl.col("step") == 0
    )
    found = rows.sort("record").collect()
    return list(
        dict.fromkeys(
            zip(found["call"], found["operator"], found["group"], strict=True)
        )
    )


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Two steps of DDP: the folder in which they were recorded, and what was printed."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, launch(folder, DDP, "--keep", "tensors")


def test_ddp_and_collectives_with_groups(ddp):
    folder, done = ddp
    assert (
        done.stdout.count("Recorded steps 0 to 1 in run, ranks 0 to 1") == 1
    )  # one process speaks
    run = load(folder / "run")
    assert run.ranks == [0, 1]
    assert run.steps == [0, 1]
    assert run.verify() == []
    assert run.about.complete is True
    for rank in (0, 1):
        names = [(operator, group) for _, operator, group in collectives(run, rank)]
        assert ("c10d::allreduce_", "0,1") in names  # DDP's bucket, and the pair
        assert ("c10d::allreduce_", str(rank)) in names
        assert ("c10d::broadcast_", "0,1") in names
        assert ("c10d::allgather_", "0,1") in names
        module = set(
            run.ops.filter(
                pl.col("operator") == "addmm", pl.col("rank") == rank
            ).collect()["module"]
        )
        assert module == {"0", "2"}  # as without DDP
    # what the pair's all-reduce gave is the sum of both losses, on both
    losses = [run.tensor("/mean", rank=rank, step=0) for rank in (0, 1)]
    rows = run.ops.filter(
        pl.col("operator") == "c10d::broadcast_",
        pl.col("rank") == 0,
        pl.col("step") == 0,
    ).collect()
    value = run.tensor(record=rows["record"][-1], rank=0, step=0)
    assert torch.equal(value, losses[0] + losses[1])
    # the bucket as the optimizer sees it: the mean over ranks, the same everywhere
    weights = [run.tensor("0.weight", rank=rank, step=1) for rank in (0, 1)]
    assert torch.equal(*weights)


FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.full((3, 4), rank + 1.0)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    a = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    b = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    full = (a @ b).redistribute(mesh, [Replicate()])
    assert full.to_local().sum().item() == 96
print(f"done {rank}")
"""


def test_fsdp2_and_dtensor(tmp_path):
    said, warned = start_both(tmp_path, FSDP)
    assert "done 0" in said
    assert "RuntimeWarning" not in warned
    run = load(tmp_path / "run")
    assert run.ranks == [0, 1]
    assert run.steps == [0, 1]
    for rank in (0, 1):
        names = {
            (operator.partition("::")[2], group)
            for _, operator, group in collectives(run, rank)
        }
        gathered = {
            name for name, group in names if "all_gather" in name or "allgather" in name
        }
        reduced = {name for name, group in names if "reduce" in name}
        assert gathered
        assert reduced
        assert {group for _, group in names} >= {"0,1"}
        rows = run.ops.filter(pl.col("rank") == rank, pl.col("step") == 1)
        assert {"0", "2"} <= set(
            rows.filter(pl.col("operator") == "addmm").collect()["module"]
        )
        unread = rows.filter(
            pl.col("nan").is_null(), pl.col("dtype").is_not_null()
        ).collect()
        (scattered,) = (
            rows.filter(pl.col("operator") == "c10d::_reduce_scatter_base_")
            .collect()["reason"]
            .unique()
        )
        assert scattered is None
        # one that another process still writes to is not read; the wait for it gives a tensor of its own
        assert set(unread["reason"]) <= {
            "values inside AsyncCollectiveTensor cannot be read"
        }


PAIRS = """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4)).sum().backward()
groups = [dist.new_group([0, 1]) for _ in range(2)]
got = torch.zeros(4)
waiting = dist.irecv(got, 1 - rank)  # before anything was sent
dist.isend(torch.full((4,), rank + 1.0), 1 - rank).wait()
waiting.wait()
assert got.tolist() == [2.0 - rank] * 4
total = torch.ones(2)
dist.all_reduce(total, async_op=True).wait()
(total * 3).sum()
opt.step()
"""


def test_a_receive_before_its_send_does_not_hang(tmp_path):
    start_both(tmp_path, PAIRS, "--keep", "tensors", steps="0")
    run = load(tmp_path / "run")
    for rank in (0, 1):
        rows = run.ops.filter(pl.col("rank") == rank).sort("record").collect()
        (received,) = rows.filter(pl.col("operator") == "c10d::recv_").iter_rows(
            named=True
        )
        assert received["reason"] == "it had not finished when it was recorded"
        (product,) = rows.filter(
            pl.col("operator") == "mul", pl.col("phase") == "forward"
        ).iter_rows(named=True)
        reduced = rows.row(product["inputs"][0], named=True)
        assert reduced["operator"] == "c10d::allreduce_"
        assert (reduced["min"], reduced["max"], reduced["inplace"]) == (2.0, 2.0, True)


def test_one_rank_that_fails_leaves_the_steps_of_both(tmp_path):
    text = DDP.replace(
        "    total =", "    if step == 1: raise ValueError(rank)\n    total ="
    )
    done = launch(tmp_path, text, "--overwrite", steps="0", code=1)
    assert "ValueError" in done.stderr
    run = load(tmp_path / "run")
    assert run.steps == [0]
    assert run.ranks == [0, 1]
    assert run.about.complete is False


def test_a_second_launch_does_not_mix_with_the_first(ddp):
    folder, _ = ddp
    before = sorted((p, p.stat().st_mtime_ns) for p in (folder / "run").rglob("*"))
    done = launch(folder, DDP, steps="0", code=2)
    assert "there is a run here already" in done.stderr
    after = sorted((p, p.stat().st_mtime_ns) for p in (folder / "run").rglob("*"))
    assert after == before


LATE = """
import time
from roundoff.record import collectives
collectives._PATIENCE = 0.3
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4)).sum().backward()
total = torch.ones(2)
if rank == 1:
    time.sleep(2)
dist.all_reduce(total, async_op=True).wait()
assert total.tolist() == [2.0, 2.0]
dist.all_reduce(total)
assert total.tolist() == [4.0, 4.0]
opt.step()
"""


def test_a_collective_whose_peer_comes_late_is_not_read_and_goes_on(tmp_path):
    start_both(tmp_path, LATE, "--keep", "tensors", steps="0")
    run = load(tmp_path / "run")
    reasons = [
        run.ops.filter(pl.col("rank") == rank, pl.col("operator") == "c10d::allreduce_")
        .sort("record")
        .collect()["reason"]
        .to_list()
        for rank in (0, 1)
    ]
    assert "it had not finished when it was recorded" in reasons[0][:1]
    assert set(reasons[1]) == {None}
    assert reasons[0][-1] is None
