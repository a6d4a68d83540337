"""Runs at URLs: the same as in a folder, fetched no sooner than needed, and named by their URL when something is wrong.

``memory://`` stands for every protocol that is not a file of this machine: fsspec keeps it in this process.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
from pathlib import Path

import fsspec
import polars as pl
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from polars.testing import assert_frame_equal

from roundoff.errors import OutputError, RunError
from roundoff.files import is_url, local_path, masked, open_output, write_text
from roundoff.record.disk import tensors as stored
from roundoff.record.disk.loading import load
from roundoff.record.disk.schema import OPS
from roundoff.record.disk.writer import Writer

URL = "memory://runs/a"


@pytest.fixture
def memory():
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of two ranks and two steps, two files of tensors in each step."""
    monkeypatch.setattr(stored.Chunks.__init__, "__defaults__", (64,))
    for rank in (0, 1):
        with Writer(
            tmp_path / "a", rank=rank, about={"id": "x", "ranks": 2, "keep": "tensors"}
        ) as writer:
            for step in (0, 1):
                blobs = [
                    writer.add(step, str(i), value(rank, step, i)) for i in range(4)
                ]
                writer.write_step(
                    step,
                    {
                        "record": [0, 1, 2, 3],
                        "module": ["m"] * 4,
                        "operator": ["relu"] * 4,
                        "index": [0, 1, 2, 3],
                        "phase": ["forward"] * 4,
                        "blob": blobs,
                        "l2": [1.0, 2.0, 3.0, 4.0],
                    },
                )
                writer.scalar(step, "loss", 0.5 + rank)
    return tmp_path / "a"


def value(rank, step, i):
    return torch.arange(8, dtype=torch.float32) + 100 * rank + 10 * step + i


@pytest.fixture
def there(memory, folder):
    memory.put(str(folder), "/runs/a", recursive=True)
    return memory


@pytest.fixture
def asked(monkeypatch):
    """The names of files of which something was read from memory://."""
    names = []

    def noting(method, prefix):
        def asked(system, path, *args, **options):
            names.append(prefix + Path(path).name)
            return method(system, path, *args, **options)

        return asked

    monkeypatch.setattr(
        MemoryFileSystem, "get_file", noting(MemoryFileSystem.get_file, "")
    )
    monkeypatch.setattr(
        MemoryFileSystem, "cat_file", noting(MemoryFileSystem.cat_file, "head of ")
    )
    return names


def test_a_run_at_a_url_is_the_run_in_the_folder(folder, there):
    near, far = load(folder), load(URL)
    assert (far.about, far.ranks, far.steps) == (near.about, near.ranks, near.steps)
    assert_frame_equal(far.ops.collect(), near.ops.collect())
    assert_frame_equal(far.scalars.collect(), near.scalars.collect())
    for rank in (0, 1):
        for step in (0, 1):
            for i in range(4):
                assert torch.equal(
                    far.tensor(record=i, rank=rank, step=step), value(rank, step, i)
                )
    assert far.verify() == []
    assert far.location == URL
    assert repr(far) == repr(near).replace(str(folder), URL)


@pytest.mark.parametrize("rank", [None, 0, 1, 7])
@pytest.mark.parametrize("step", [None, 0, 1, 7])
def test_a_part_is_the_rows_of_its_rank_and_step(folder, there, rank, step):
    rows = load(folder).ops.collect().to_dicts()
    kept = [
        row
        for row in rows
        if rank in (None, row["rank"]) and step in (None, row["step"])
    ]
    expected = pl.DataFrame(kept, schema=OPS)
    for place in (folder, URL):
        assert_frame_equal(load(place).part(rank, step).collect(), expected)


def test_a_part_opens_no_other_file(folder):
    (folder / "rank1" / "step000001" / "ops.parquet").unlink()
    run = load(folder)
    assert run.part(rank=0).collect().height == run.part(step=0).collect().height == 8
    with pytest.raises(RunError, match="rank1/step000001/ops.parquet"):
        run.part(step=1)


def test_file_urls_are_read_in_place(folder):
    run = load(f"file://{folder}")
    assert run.path == folder
    assert torch.equal(run.tensor("m/relu#2"), value(0, 0, 2))


def test_tensors_come_when_they_are_asked_for(there, asked):
    run = load(URL)
    run.ops.collect()
    run.scalars.collect()
    assert sorted(set(asked)) == [
        "checksums.json",
        "loop.json",
        "mark.txt",
        "ops.parquet",
        "run.json",
        "scalars.txt",
    ]
    asked.clear()
    run.tensor(record=3, step=1)  # the headers of a step, and the one file that has it
    heads = ["head of tensors-000.safetensors", "head of tensors-001.safetensors"]
    assert sorted(asked) == sorted([*heads, *heads, "tensors-001.safetensors"])
    asked.clear()
    run.tensor(record=2, step=1)
    assert asked == []  # it is here already


def test_the_copy_goes_with_the_run(there):
    run = load(URL)
    path = run.path
    assert path.is_dir()
    del run
    gc.collect()
    assert not path.exists()


def test_a_lazy_frame_may_outlive_its_run(there):
    frame = load(URL).ops
    gc.collect()
    assert frame.select(pl.col("l2").sum()).collect().item() == 4 * (1 + 2 + 3 + 4)


@pytest.mark.parametrize(
    "name", ["ops.parquet", "checksums.json", "tensors-001.safetensors"]
)
@pytest.mark.parametrize("how", ["cut", "changed", "missing"])
def test_a_damaged_file_is_named_by_its_url(there, name, how):
    path = f"/runs/a/rank1/step000001/{name}"
    content = there.cat_file(path)
    if how == "missing":
        there.rm_file(path)
    else:
        # the last byte: of the values in a file of tensors, the magic number of a table, the brace of JSON
        there.pipe_file(
            path,
            content[:-1] if how == "cut" else content[:-1] + bytes([content[-1] ^ 1]),
        )
    run = load(URL)
    url = f"memory:/{path}"
    with pytest.raises(RunError) as error:
        run.tensor(record=3, rank=1, step=1)
    assert error.value.where == url
    assert "/tmp" not in str(error.value)
    assert run.verify() == [url]
    assert torch.equal(run.tensor(record=3, rank=0, step=1), value(0, 1, 3))
    if name != "tensors-001.safetensors":
        with pytest.raises(RunError, match="ops.parquet|checksums.json"):
            _ = load(URL).ops


def test_headers_that_lie(there):
    path = "/runs/a/rank0/step000000/tensors-000.safetensors"
    content = there.cat_file(path)
    for head in (b"\xff" * 8, content[:8] + b"[" * 10, content[:8] + b"12" + b" " * 8):
        there.pipe_file(path, head + content[len(head) :])
        with pytest.raises(
            RunError, match="the file is missing, damaged or cannot be read"
        ) as error:
            load(URL).tensor(record=0)
        assert error.value.where == f"memory:/{path}"


def test_what_is_no_run(there):
    there.pipe_file("/other/notes.txt", b"")
    there.pipe_file("/later/run.json", b'{"schema": 99, "version": "9.9"}')
    there.pipe_file("/began/run.json", b'{"schema": 1}')
    there.pipe_file("/broken/run.json", b"{")
    for name, text in {
        "other": "no run here",
        "later": "recorded by a later version",
        "began": "the run is empty",
        "broken": "damaged",
        "nothing": "no such folder",
    }.items():
        with pytest.raises(RunError, match=text) as error:
            load(f"memory://{name}")
        assert error.value.where.startswith(f"memory://{name}")
        assert "/tmp" not in str(error.value)


def test_other_files_are_not_fetched(there, asked):
    step = "rank0/.step000002.partial/ops.parquet"
    for name in (
        "big.bin",
        "rank0/notes.parquet",
        "deep/er/rank0/step000000/ops.parquet",
        step,
    ):
        there.pipe_file(f"/runs/a/{name}", b"x")
    assert load(URL).steps == [0, 1]
    assert asked.count("ops.parquet") == 4
    assert not {"big.bin", "notes.parquet"} & set(asked)


def refused():
    with socket.socket() as closed:  # bound and not listening
        closed.bind(("127.0.0.1", 0))
        return closed.getsockname()[1]


def test_a_server_that_refuses():
    with pytest.raises(RunError, match="this URL cannot be read") as error:
        load(f"ftp://me:secret@127.0.0.1:{(port := refused())}/runs/a")
    assert error.value.where == f"ftp://***@127.0.0.1:{port}/runs/a"
    assert "ConnectionRefusedError" in error.value.got
    assert "secret" not in str(error.value)
    assert error.value.__suppress_context__


def test_an_unknown_protocol():
    with pytest.raises(
        RunError, match="nosuch://runs/a: this URL cannot be read"
    ) as error:
        load("nosuch://runs/a")
    assert "Protocol not known: nosuch" in error.value.got


def test_a_protocol_without_its_library():
    class Lacking(fsspec.AbstractFileSystem):
        def __init__(self, **options):
            raise ImportError("Install thingfs to access Thing")

    fsspec.register_implementation("thing", Lacking, clobber=True)
    with pytest.raises(
        RunError, match="a library for this protocol is not installed"
    ) as error:
        load("thing://b/a?token=secret")
    assert error.value.where == "thing://b/a?token=***"
    assert "Install thingfs" in error.value.got
    assert "pip install s3fs" in error.value.do


def test_dumps_of_msprobe(memory, tmp_path):
    fixtures = sorted((Path(__file__).parents[1] / "dumps").rglob("dump.json"))
    assert fixtures
    for index, dump in enumerate(fixtures):
        root = f"/dump{index}/step3/rank1"
        memory.put(str(dump.parent), root, recursive=True)
        near = tmp_path / f"dump{index}" / "step3" / "rank1"
        shutil.copytree(dump.parent, near)
        for url in (
            f"memory:/{root}",
            f"memory:/{root}/dump.json",
            f"memory://dump{index}",
        ):
            run = load(url)
            assert_frame_equal(run.ops.collect(), load(near).ops.collect())
            for part in (
                run.part(),
                run.part(rank=run.ranks[0]),
                run.part(step=run.steps[0]),
            ):
                assert_frame_equal(part.collect(), run.ops.collect())
            assert run.part(step=99).collect().is_empty()
            assert "/tmp" not in repr(run)


def test_tensors_of_msprobe(memory, asked):
    data = {
        "Functional.relu.0.forward": {
            "input_args": [],
            "input_kwargs": {},
            "output": [
                {
                    "type": "torch.Tensor",
                    "dtype": "torch.float32",
                    "shape": [3],
                    "Max": 2.0,
                    "Min": 0.0,
                    "Mean": 1.0,
                    "Norm": 5**0.5,
                    "requires_grad": False,
                    "data_name": "Functional.relu.0.forward.output.0.pt",
                }
            ],
        }
    }
    dump = {
        "task": "tensor",
        "level": "L1",
        "framework": "pytorch",
        "dump_data_dir": None,
        "data": data,
    }
    memory.pipe_file("/d/step0/rank0/dump.json", json.dumps(dump).encode())
    with memory.open(
        "/d/step0/rank0/dump_tensor_data/Functional.relu.0.forward.output.0.pt", "wb"
    ) as file:
        torch.save(torch.arange(3.0), file)
    run = load("memory://d")
    assert asked == ["dump.json"]
    assert torch.equal(run.tensor(record=0), torch.arange(3.0))
    assert run.verify() == []
    memory.rm_file(
        "/d/step0/rank0/dump_tensor_data/Functional.relu.0.forward.output.0.pt"
    )
    (damage,) = load("memory://d").verify()
    assert damage.startswith("memory://d/step0/rank0/dump_tensor_data/")


def test_reports_at_urls(memory, tmp_path):
    write_text("memory://reports/a.html", "é")
    assert memory.cat_file("/reports/a.html") == "é".encode()
    for place in (tmp_path / "a.html", f"file://{tmp_path}/b.html"):
        write_text(place, "é")
    assert (
        (tmp_path / "a.html").read_bytes()
        == (tmp_path / "b.html").read_bytes()
        == "é".encode()
    )
    with pytest.raises(KeyError), open_output("memory://reports/b.html") as temporary:
        temporary.write_text("half")
        raise KeyError
    assert not memory.exists("/reports/b.html")


def test_a_report_that_cannot_be_sent():
    port = refused()
    with pytest.raises(OutputError, match="cannot write here") as error:
        write_text(f"ftp://me:secret@127.0.0.1:{port}/a.html", "x")
    assert error.value.where == f"ftp://***@127.0.0.1:{port}/a.html"
    assert "ConnectionRefusedError" in error.value.got
    assert "secret" not in str(error.value)
    with pytest.raises(OutputError, match="Protocol not known"):
        write_text("nosuch://a/b", "x")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://b/k", True),
        ("simplecache::s3://b/k", True),
        ("file:///a", False),
        ("local:///a", False),
        ("a/b", False),
        ("C:\\runs", False),
        ("/a://b", False),
        ("", False),
    ],
)
def test_what_a_url_is(text, url):
    assert is_url(text) is url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://key:p@ss@host/run", "s3://***@host/run"),
        ("https://h/r?X-Sig=a/b%3D&n=2#top", "https://h/r?X-Sig=***&n=***"),
        (
            "cannot open ftp://u:p@h/a and http://h/b?t=1 now",
            "cannot open ftp://***@h/a and http://h/b?t=*** now",
        ),
        ("memory://runs/a", "memory://runs/a"),
        ("s3://b/user@example/run", "s3://b/user@example/run"),
    ],
)
def test_secrets_are_masked(url, expected):
    assert masked(url) == expected


def test_paths_stay_paths():
    assert local_path(Path("a://b")) == Path("a:/b")
    assert os.fspath(local_path("/runs/lr=0.1")) == "/runs/lr=0.1"
