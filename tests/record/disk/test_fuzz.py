"""A run on disk of which one file is damaged: each way to read it gives what was written, or a RunError naming the file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundoff.errors import RunError
from roundoff.record.disk.loading import load
from roundoff.record.disk.reader import Run
from roundoff.record.disk.schema import OPS
from roundoff.record.disk.tensors import checksum
from roundoff.record.disk.writer import Writer

STEP = Path("rank0", "step000000")
FILES = {
    "about": Path("run.json"),
    "ops": STEP / "ops.parquet",
    "checksums": STEP / "checksums.json",
    "tensors": STEP / "tensors-000.safetensors",
    "scalars": Path("rank0", "scalars.txt"),
}
TENSORS = {
    "0": torch.arange(6.0).reshape(2, 3),
    "1": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "2": torch.tensor([1 + 2j, 0]),  # stored as bytes
    "3": torch.zeros(0, 2),
}
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
EACH = pytest.mark.parametrize("name", FILES)


def record(path: Path) -> None:
    with Writer(path, about={"level": "op", "keep": "tensors"}) as writer:
        for step in (0, 1):
            blobs = [writer.add(step, key, tensor) for key, tensor in TENSORS.items()]
            writer.write_step(
                step,
                {
                    "record": [0, 1, 2, 3, 4],
                    "call": [-1, 0, 1, 2, 3],
                    "phase": ["forward"] * 4 + ["backward"],
                    "module": ["", "a", "a", "a.b", ""],
                    "operator": ["input", "mm", "relu", "gelu", "t"],
                    "index": [0, 0, 0, 0, 0],
                    "place": [0, 0, 0, 0, 0],
                    "inputs": [None, [0], [1], [2], [0]],
                    "shape": [list(tensor.shape) for tensor in TENSORS.values()]
                    + [[3, 2]],
                    "stride": [None, None, None, None, [1, 3]],
                    "offset": [None, None, None, None, 0],
                    "l2": [1.0, float("nan"), None, 0.0, 1.0],
                    "blob": [*blobs, "0"],
                },
            )
            writer.scalar(step, "loss", 1.5)
    assert not writer.stopped


class Files(dict[Path, bytes]):
    """The bytes of each file of a run; hypothesis prints arguments, and these are long."""

    def __repr__(self) -> str:
        return "<files>"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[Path, bytes]:
    path = tmp_path_factory.mktemp("run")
    record(path)
    assert load(path).verify() == []
    return Files(
        {
            file.relative_to(path): file.read_bytes()
            for file in path.rglob("*")
            if file.is_file()
        }
    )


@contextmanager
def damaged(whole: dict[Path, bytes], name: str, data: bytes | None) -> Iterator[Path]:
    """The run with other bytes in one file, or without it."""
    with tempfile.TemporaryDirectory() as folder:
        for file, content in whole.items():
            path = Path(folder, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            new = data if file == FILES[name] else content
            if new is not None:
                path.write_bytes(new)
        yield Path(folder)


def bits(tensor: torch.Tensor) -> tuple:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.contiguous().reshape(-1).view(torch.uint8).tolist(),
    )


WAYS: dict[str, Callable[[Run], Any]] = {
    "ops": lambda run: run.ops.collect(),
    "scalars": lambda run: run.scalars.collect(),
    "repr": repr,
    "verify": lambda run: run.verify(),
    **{f"record {i}": lambda run, i=i: run.tensor(record=i, step=0) for i in range(5)},
    "site": lambda run: run.tensor("a/mm"),
    "no site": lambda run: run.tensor("a/mn", step=1),
}


def read(path: Path, file: Path) -> dict[str, Any]:
    """What each way gives; nothing where it raised a RunError, which must name the file or its folder."""
    found: dict[str, Any] = {}
    errors: list[str] = []
    try:
        run = load(path)
    except RunError as error:
        errors.append(str(error))
        ways = {}
    else:
        ways = WAYS
    for name, way in ways.items():
        try:
            found[name] = way(run)
        except RunError as error:
            if name != "no site":
                errors.append(str(error))
    # the file, its folder where the file has lost something, or "run: rank 0, step 0, record 1"
    known = [str(path / file), f"{(path / file).parent}: ", f"{path}: rank 0"]
    if (
        file == FILES["checksums"]
    ):  # a checksum with another digit looks as if its file had other bytes
        known.append(f"{(path / file).parent}")
    if file == FILES["tensors"]:
        # a step that is not as its mark says is another's: its table is checked whole
        known.append(str(path / FILES["ops"]))
    assert [text for text in errors if not any(place in text for place in known)] == []
    return found


def check(whole: dict[Path, bytes], name: str, data: bytes | None) -> None:
    file = FILES[name]
    if data == whole[file]:
        return
    with damaged(whole, name, data) as path:
        found = read(path, file)
    if not found:
        return
    assert "verify" in found
    bad = [str(each.relative_to(path)) for each in found["verify"]]
    if (
        name == "scalars" and "scalars" in found
    ):  # whole lines at most, the last ones may be missing
        assert (
            found["scalars"].rows()
            == [(0, 0, "loss", 1.5), (0, 1, "loss", 1.5)][: found["scalars"].height]
        )
    if name in ("ops", "tensors"):
        assert bad == [str(file)]  # by the checksum, whatever is wrong with it
    if name in (
        "ops",
        "tensors",
        "about",
    ):  # what comes back is what was written: never anything else
        for i, tensor in enumerate([*TENSORS.values(), TENSORS["0"].T]):
            back = found.get(f"record {i}")
            if back is not None:
                assert bits(back) == bits(tensor)
    if name != "scalars" and "scalars" in found:
        assert found["scalars"]["value"].to_list() == [1.5, 1.5]
    if name == "ops":
        assert "ops" not in found
    elif "ops" in found:
        assert found["ops"].height == 10


@EACH
def test_a_missing_file(whole, name):
    if name == "about":
        with (
            damaged(whole, name, None) as path,
            pytest.raises(RunError, match="no run here"),
        ):
            load(path)
    elif name == "scalars":  # no scalar may have been recorded
        with damaged(whole, name, None) as path:
            assert load(path).scalars.collect().height == 0
    else:
        check(whole, name, None)


@EACH
@FUZZ
@given(data=st.binary(max_size=300))
def test_random_bytes(whole, name, data):
    check(whole, name, data)


@EACH
@FUZZ
@given(part=st.floats(0, 1))
def test_truncated(whole, name, part):
    data = whole[FILES[name]]
    check(whole, name, data[: int(part * len(data))])


@EACH
@FUZZ
@given(
    flips=st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4
    )
)
def test_flipped_bits(whole, name, flips):
    data = bytearray(whole[FILES[name]])
    for place, bits in flips:
        data[round(place * (len(data) - 1))] ^= bits
    check(whole, name, bytes(data))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: object, at: tuple = ()) -> list[tuple]:
    """The paths to all values in a JSON document."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(found for key, part in inner for found in places(part, (*at, key)))]


def replaced(value, at: tuple, new: object):
    if not at:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[at[0]] = replaced(value[at[0]], at[1:], new)
    return copied


@pytest.mark.parametrize("name", ["about", "checksums"])
@settings(FUZZ, max_examples=100)
@given(data=st.data())
def test_another_value_in_the_json(whole, name, data):
    content = json.loads(whole[FILES[name]])
    at = data.draw(st.sampled_from(places(content)), label="at")
    check(
        whole,
        name,
        json.dumps(replaced(content, at, data.draw(JSON, label="new"))).encode(),
    )


@settings(FUZZ, max_examples=60)
@given(data=st.data())
def test_another_value_in_the_header_of_the_tensors(whole, data):
    """With a checksum that fits, as a foreign writer might make it: then the header alone is there to be wrong."""
    raw = whole[FILES["tensors"]]
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"]["roundoff"] = json.loads(header["__metadata__"]["roundoff"])
    at = data.draw(st.sampled_from(places(header)), label="at")
    header = replaced(header, at, data.draw(JSON, label="new"))
    with suppress(TypeError, KeyError):
        header["__metadata__"]["roundoff"] = json.dumps(
            header["__metadata__"]["roundoff"]
        )
    text = json.dumps(header).encode()
    changed = len(text).to_bytes(8, "little") + text + raw[8 + size :]
    with damaged(whole, "tensors", changed) as path:
        sums = json.loads((path / FILES["checksums"]).read_text())
        sums[FILES["tensors"].name] = checksum(path / FILES["tensors"])
        (path / FILES["checksums"]).write_text(json.dumps(sums))
        read(path, FILES["tensors"])


@pytest.mark.parametrize(
    "value", [None, "598", 598.0, True, {}, -1, "x" * 32, "A" * 32]
)
@pytest.mark.parametrize("key", ["bytes", "xxh3_128"])
def test_an_entry_that_is_no_checksum(whole, key, value):
    content = json.loads(whole[FILES["checksums"]])
    content["ops.parquet"][key] = value
    with damaged(whole, "checksums", json.dumps(content).encode()) as path:
        with pytest.raises(RunError, match="not a table of checksums") as caught:
            load(path).ops  # noqa: B018
        assert str(path / FILES["checksums"]) in str(caught.value)
        assert load(path).verify() == [path / FILES["checksums"]]


TYPES = [None, pl.Int8, pl.Utf8, pl.Float32, pl.List(pl.Utf8), pl.Null, pl.Boolean]


@settings(FUZZ, max_examples=60)
@given(data=st.data())
def test_another_type_of_a_column(whole, data):
    """A sound table with a sound checksum, in which a column is missing, or of another type."""
    column = data.draw(st.sampled_from(list(OPS)))
    dtype = data.draw(st.sampled_from(TYPES))
    with damaged(whole, "ops", whole[FILES["ops"]]) as path:
        file = path / FILES["ops"]
        table = pl.read_parquet(file.read_bytes())
        empty = pl.Series(column, [None] * table.height, dtype=dtype)
        (
            table.drop(column, strict=False)
            if dtype is None
            else table.with_columns(empty)
        ).write_parquet(file)
        sums = json.loads((path / FILES["checksums"]).read_text())
        sums["ops.parquet"] = checksum(path / FILES["ops"])
        (path / FILES["checksums"]).write_text(json.dumps(sums))
        read(path, FILES["ops"])


SIZES = st.lists(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 7), max_size=3
)


@settings(FUZZ, max_examples=150)
@given(
    shape=st.none() | SIZES,
    stride=st.none() | SIZES,
    offset=st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 7),
    blob=st.none() | st.sampled_from(["0", "9", "../x", ""]) | st.text(max_size=3),
    about=st.sampled_from(["tensors", "sample", None]),
)
def test_rows_that_do_not_fit_their_tensors(shape, stride, offset, blob, about):
    with tempfile.TemporaryDirectory() as folder:
        with Writer(folder, about={"keep": about}) as writer:
            writer.add(0, "0", torch.arange(6.0))
            rows = {
                "record": [0],
                "shape": [shape],
                "stride": [stride],
                "offset": [offset],
                "blob": [blob],
            }
            writer.write_step(0, rows)
        run = load(folder)
        with suppress(RunError):
            tensor = run.tensor(record=0)
            # its memory alone is read
            assert set(tensor.flatten().tolist()) <= set(range(6))
