"""Changes to honest files: of their bytes, their values, and what they name.

A change keeps checksums right where there are some, as whoever means harm would.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from roundoff.files import toml_value
from roundoff.record.disk.tensors import checksum

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\x08"
TEXTS = (
    ESCAPE,
    f"5/addmm{ESCAPE}",
    "../../../outside",
    "/outside",
    "a\nb",
    "\ud800",
    "[bold red]x[/]",
    "<script>alert(1)</script>",
    "",
    "x" * 100_000,
    "{}",
    "NaN",
    "aten.from_file.default",
    "re:(a|[^b]+)+$",
    "(.*)*(.*)*x$",
    "*a" * 3000,
    '\\"' * 50_000,
)
NUMBERS = (0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**30, 65, 0.5, 1e308)
VALUES: tuple[Any, ...] = (
    None,
    True,
    [],
    {},
    [[]],
    {"a": {"b": []}},
    [None] * 3,
    [1] * 70,
    [2**63] * 3,
    *NUMBERS,
    *TEXTS,
)
#: What JSON and Python's reader take beyond numbers.
WILD = ("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000)


def deep(suffix: str) -> bytes:
    """A text of 100,000 levels."""
    if suffix == ".py":
        return b"x = " + b"-(" * 20_000 + b"1" + b")" * 20_000 + b"\n"
    if suffix == ".toml":
        return b"a = " + b"[" * 100_000
    return b'{"schema":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values of a document."""
    if isinstance(value, dict):
        inner = list(value.items())
    else:
        inner = list(enumerate(value)) if isinstance(value, list) else []
    return [at, *(place for key, part in inner for place in places(part, (*at, key)))]


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """The document with another value in one place."""
    if not at:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[at[0]] = replaced(value[at[0]], at[1:], new)
    return copied


def _other_document(content: Any, chance: random.Random) -> Any:
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.choice(places(content))
        content = replaced(content, at, chance.choice(VALUES))
        if not isinstance(content, dict | list):
            break
    return content


def change_json(file: Path, chance: random.Random) -> None:
    text = json.dumps(_other_document(json.loads(file.read_text()), chance))
    if chance.random() < 0.15 and "1" in text:
        text = text.replace("1", chance.choice(WILD), 1)
    file.write_text(text)


def change_toml(file: Path, chance: random.Random) -> None:
    content = _other_document(tomllib.loads(file.read_text()), chance)
    try:
        lines = [f"{json.dumps(k)} = {toml_value(v)}" for k, v in content.items()]
    except (TypeError, AttributeError):
        change_bytes(file, chance)
        return
    file.write_text("\n".join(lines), encoding="utf-8", errors="replace")


def change_script(file: Path, chance: random.Random) -> None:
    """Repeat, nest or leave out lines of a Python file."""
    lines = file.read_text().splitlines(keepends=True)
    place = chance.randrange(len(lines) + 1)
    added = chance.choice(
        [
            "    \t\f",
            "if 1:\n" + "".join(" " * i + "if 1:\n" for i in range(1, 120)),
            "x = " + " + ".join(["torch.ones(1)"] * 20_000) + "\n",
            "x = torch" + ".a" * 20_000 + "\n",
            "x = " + "lambda: " * 5_000 + "1\n",
            "# -*- coding: utf-7 -*-\n",
            "\x00",
            f"s = '{ESCAPE}'\nmodel.cuda()\n",
            "from torch import *\nfrom . import *\n",
            "async def f():\n    await x\nmatch x:\n    case [1, *_]: pass\n",
            "x = 0x" + "f" * 20_000 + "\n",
            "x = 1" + "0" * 5_000 + "\n",
            "\u202e = 1\n",
        ]
    )
    kept = lines[place + chance.randrange(3) :]
    file.write_text("".join([*lines[:place], added, *kept]))


def change_bytes(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    kind = chance.randrange(5)
    if kind == 0:
        data = data[: chance.randrange(len(data) + 1)]
    elif kind == 1:
        for _ in range(chance.randrange(1, 5)):
            if data:
                data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    elif kind == 2:
        data = bytearray(chance.randbytes(chance.randrange(300)))
    elif kind == 3:
        data = bytearray(deep(file.suffix))
    else:
        place = chance.randrange(len(data) + 1)
        data[place:place] = ESCAPE.encode()
    file.write_bytes(bytes(data))


def _series(column: pl.Series, chance: random.Random) -> pl.Series | None:
    """Another column: other values of its type, nulls, or another type."""
    rows = len(column)
    kind = chance.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        return pl.Series(column.name, [None] * rows, dtype=column.dtype)
    if kind == 2:
        other = chance.choice((pl.Utf8, pl.Float64, pl.Null, pl.List(pl.Utf8)))
        return pl.Series(column.name, [None] * rows, dtype=other)
    values = column.to_list()
    for _ in range(max(1, chance.randrange(rows + 1))):
        values[chance.randrange(rows)] = _of_type(column.dtype, chance)
    return pl.Series(column.name, values, dtype=column.dtype, strict=False)


def _of_type(dtype: Any, chance: random.Random) -> Any:
    if chance.random() < 0.2:
        return None
    if isinstance(dtype, pl.List):
        length = chance.choice((0, 1, 2, 3, 65, 70))
        return [_of_type(dtype.inner, chance) for _ in range(length)]
    if isinstance(dtype, pl.Struct):
        return {field.name: _of_type(field.dtype, chance) for field in dtype.fields}
    if dtype == pl.Utf8:
        return chance.choice(TEXTS[:5] + TEXTS[6:]).encode("utf-8", "replace").decode()
    if dtype == pl.Boolean:
        return chance.random() < 0.5
    if dtype.is_float():
        return chance.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), 5e-324))
    return chance.choice((0, -1, 1, 3, 2**31 - 1, 2**63 - 1, -(2**63), 65))


#: Calls that a table of operators is made to name, with arguments as JSON.
CALLS = (
    ("aten.from_file.default", '[["{outside}",true,64],{}]'),
    (
        "aten.embedding_dense_backward.default",
        '[[{"record":R},{"record":R},1,0,false],{}]',
    ),
    (
        "aten.embedding_dense_backward.default",
        '[[{"record":0},{"record":9},-4,0,false],{}]',
    ),
    (
        "aten.max_pool2d_with_indices_backward.default",
        '[[{"record":R},{"record":R},[9,9],[0,0],[0,0],[1,1],false,{"record":R}],{}]',
    ),
    (
        "aten.native_batch_norm.default",
        '[[{"record":R},{"record":0},null,null,null,true,0.1,0.1],{}]',
    ),
    ("aten.native_layer_norm.default", '[[{"record":R},[4,4,4],null,null,0.1],{}]'),
    ("aten.native_group_norm.default", '[[{"record":R},null,null,4,3,2,0,0.1],{}]'),
    ("aten.as_strided.default", '[[{"record":R},[99,99],[9,9],0],{}]'),
    ("aten._reshape_alias.default", '[[{"record":R},[99,99],[9,9]],{}]'),
    ("aten.set_.source_Storage_storage_offset", '[[{"record":R},1,0,[1]],{}]'),
    ("aten.resize_.default", '[[{"record":R},[1000000000000]],{}]'),
    ("aten.zeros.default", "[[[1000000000000]],{}]"),
    ("aten.zeros.default", "[[[99999999,999999]],{}]"),
    ("aten.arange.default", "[[9000000000000000000],{}]"),
    ("aten.repeat.default", '[[{"record":R},[100000,100000]],{}]'),
    ("aten.bincount.default", '[[{"record":9},null,900000000000],{}]'),
    ("aten.sparse_coo_tensor.indices", '[[{"record":R},{"record":R}],{}]'),
    ("aten._fft_r2c.default", '[[{"record":R},[7],0,true],{}]'),
    ("aten.polygamma.default", '[[2000000000,{"record":R}],{}]'),
    ("aten.linalg_matrix_exp.default", '[[{"record":R}],{}]'),
    ("aten.relu.default", '[[{"record":R}],{"x":{"device":"meta"}}]'),
    ("aten.add.Tensor", '[[{"record":-1},{"record":99999999999999999999}],{}]'),
    ("aten.add.Tensor", "null"),
    ("aten.add.Tensor", "[" * 5000),
    ("aten.einsum.default", '[["' + "a" * 500 + '",[{"record":R}]],{}]'),
    ("prim.Print.default", "[[1],{}]"),
    ("quantized.linear.default", '[[{"record":R},1,1,1],{}]'),
    ("inductor._alloc_from_pool.default", '[[{"record":R},0,null,[1],[1]],{}]'),
    ("c10d.barrier.default", '[[{"record":R},null,[0],-1],{}]'),
    ("__class__.__base__.__subclasses__", "[[],{}]"),
    ("aten._print.default", '[["\\u001b[2J"],{}]'),
    (f"aten.{ESCAPE}.default", "[[],{}]"),
)


def _name_calls(table: pl.DataFrame, chance: random.Random) -> pl.DataFrame:
    overloads = table["overload"].to_list()
    arguments = table["arguments"].to_list()
    records = table["record"].to_list()
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(overloads))
        overload, text = chance.choice(CALLS)
        overloads[place] = overload
        record = chance.choice(records)
        text = text.replace('"record":R', f'"record":{record}')
        arguments[place] = text.replace("{outside}", "../../outside")
    return table.with_columns(
        pl.Series("overload", overloads), pl.Series("arguments", arguments)
    )


def change_table(file: Path, chance: random.Random) -> None:
    """Change columns of a parquet file; its metadata stay."""
    metadata = pl.read_parquet_metadata(file)
    table = pl.read_parquet(file.read_bytes())
    if "overload" in table.columns and chance.random() < 0.5:
        table = _name_calls(table, chance)
    else:
        for _ in range(chance.choice((1, 1, 2, 4))):
            name = chance.choice(table.columns)
            series = _series(table[name], chance)
            table = table.drop(name) if series is None else table.with_columns(series)
            if not table.width:
                break
    own = {k: v for k, v in metadata.items() if not k.startswith("ARROW")}
    if "roundoff" in own and chance.random() < 0.5:
        facts = _other_document(json.loads(own["roundoff"]), chance)
        own["roundoff"] = json.dumps(facts)
    table.write_parquet(file, metadata=own)


def change_tensors(file: Path, chance: random.Random) -> None:
    """Change the header of a file of tensors."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = _other_document(json.loads(raw[8 : 8 + size]), chance)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def change_archive(file: Path, chance: random.Random) -> None:
    """Give members names that lead elsewhere."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    names = (
        "../../outside",
        "/outside",
        "../outside/run.json",
        "a/../../../../outside",
        "rank0/../../../stack.json",
        "..\\..\\outside",
        "rank0/step000000/../../../../outside",
        "stack.json",
        "../../stack.json",
        f"rank0/{ESCAPE}",
        "con:/x",
    )
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        for name in chance.sample(names, 4):
            archive.writestr(name, b"outside")


class _Runs:
    """A pickle that would run something."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def _nested() -> list[Any]:
    outer: list[Any] = []
    for _ in range(400):
        outer = [outer]
    return outer


def _pickles() -> list[bytes]:
    """What a file of tensors may be made to hold in place of its description."""
    contents: list[Any] = [
        _Runs(os.system, "touch /outside_by_pickle"),
        _Runs(eval, "1"),
        _Runs(bytearray, 2**40),
        _nested(),
        {ESCAPE: 1},
        {"model": {("a", 1): None}},
        ["x" * 10_000] * 100,
        10**4000,
    ]
    many = b"\x80\x02" + b"]" * 100_000 + b"."
    marks = b"\x80\x02" + b"(" * 100_000 + b"l."
    return [*(pickle.dumps(each, protocol=2) for each in contents), many, marks, b""]


def change_torch(file: Path, chance: random.Random) -> None:
    """Change the pickle in a file of torch, or other members; or its bytes."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = chance.choice(sorted(members))
    if chance.random() < 0.6:
        name = next((each for each in members if each.endswith(".pkl")), name)
    kind = chance.randrange(4)
    if kind == 0:
        del members[name]
    elif kind == 1:
        members[name] = chance.choice(_pickles())
    else:
        content = bytearray(members[name])
        for _ in range(chance.randrange(1, 4)):
            if content:
                content[chance.randrange(len(content))] = chance.randrange(256)
        members[name] = bytes(content)
    with zipfile.ZipFile(file, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)


_BY_NAME: dict[str, Callable[[Path, random.Random], None]] = {
    ".py": change_script,
    ".ipynb": change_json,
    ".json": change_json,
    ".toml": change_toml,
    ".parquet": change_table,
    ".safetensors": change_tensors,
    ".zip": change_archive,
    ".pt": change_torch,
}


def attack(file: Path, chance: random.Random) -> None:
    """Change one file, and mend the checksums that tell of it most of the time."""
    change = _BY_NAME.get(file.suffix, change_bytes)
    if chance.random() < 0.25:
        change = change_bytes
    try:
        change(file, chance)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        pl.exceptions.PolarsError,
    ):
        change_bytes(file, chance)  # what an earlier change has left
    if chance.random() < 0.9:
        _mend_checksums(file)


#: What stands where a file should: by name, what makes it.
_NATURES: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe that nobody writes": os.mkfifo,
    "a link to itself": lambda place: place.symlink_to(place.name),
    "a link to nothing": lambda place: place.symlink_to("nothing"),
    "a file without end": lambda place: place.symlink_to("/dev/zero"),
    "no bytes": Path.touch,
    "a file of 2^40 zeros": lambda place: _make_sparse(place, 2**40),
}


def _make_sparse(place: Path, size: int) -> None:
    with place.open("wb") as file:
        file.truncate(size)


def replace_nature(file: Path, chance: random.Random) -> None:
    """Put something that is no file, or none with an end, in place of a file."""
    make = _NATURES[chance.choice(sorted(_NATURES))]
    file.unlink(missing_ok=True)
    make(file)


def _mend_checksums(file: Path) -> None:
    if file.name == "run.json":
        try:
            content = json.loads(file.read_text())
            content.pop("checksum", None)
            file.write_text(json.dumps(content))
        except (ValueError, AttributeError, RecursionError):
            return
    table = file.parent / "checksums.json"
    if file.name == "checksums.json" or not table.exists():
        return
    try:
        sums = json.loads(table.read_text())
        if file.name in sums:
            sums[file.name] = checksum(file)
            table.write_text(json.dumps(sums))
    except (ValueError, TypeError, RecursionError):
        return
