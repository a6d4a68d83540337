"""What a run is on disk: the files, and the columns of its tables.

    RUN/run.json                                  one object; SCHEMA, environment, coverage
    RUN/rank0/step000003/ops.parquet              OPS, one row for each tensor value
    RUN/rank0/step000003/tensors-000.safetensors  where tensors are kept; keys are the column `blob`
    RUN/rank0/step000003/checksums.json           file name -> {"bytes": n, "xxh3_128": hex}
    RUN/rank0/scalars.txt                         SCALARS, a line for each

A step is written as ``.step000003.partial`` and renamed when it is whole, so whatever kills the process, a folder
with a step's name is a whole step.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl

SCHEMA = 1
"""Version of the layout. A reader takes its own version and those before it."""

ABOUT = "run.json"
OPERATORS = "ops.parquet"
CHECKSUMS = "checksums.json"
SCALAR_FILE = "scalars.txt"

OPS: dict[str, Any] = {
    "rank": pl.Int32,
    "step": pl.Int64,
    "record": pl.Int64,  # id within (rank, step), rising in order of creation
    "call": pl.Int64,  # operator call that made it, in order within the step; -1: there before
    "phase": pl.Utf8,  # forward | backward | optimizer | collective
    "module": pl.Utf8,  # module path, "" for the root and outside
    "operator": pl.Utf8,  # aten packet name; parameter | buffer | input for call == -1
    "index": pl.Int64,  # how often (phase, module, operator) was called before in this step
    "place": pl.Int64,  # which of the call's output tensors
    "role": pl.Utf8,  # output | input | parameter | grad; null is output. Runs of roundoff have outputs alone
    "overload": pl.Utf8,  # "aten.convolution.default"
    "name": pl.Utf8,  # of the parameter or buffer that this is, or that the call updated in place
    "line": pl.Utf8,  # "train.py:31"
    "inputs": pl.List(pl.Int64),  # records of the call's tensor arguments, in order
    "arguments": pl.Utf8,  # JSON of the others, {"record": id} in place of tensors; null: unwritable
    "view_of": pl.Int64,  # record whose memory this is a view of
    "inplace": pl.Boolean,
    "recomputed": pl.Boolean,  # in the backward pass, of the forward: a checkpoint
    "dtype": pl.Utf8,  # "float32"
    "shape": pl.List(pl.Int64),
    # how the kept elements, which lie in the order of memory, become the tensor: of the record itself, or of view_of; null
    # where they do not: the values of a sparse or nested tensor, the shard of a distributed one
    "stride": pl.List(pl.Int64),
    "offset": pl.Int64,
    "device": pl.Utf8,
    "layout": pl.Utf8,  # strided | sparse_coo | nested ...
    "numel": pl.Int64,
    # Statistics over the finite elements, null when there are none; of the modulus where complex.
    "min": pl.Float64,
    "max": pl.Float64,
    "mean": pl.Float64,
    "l2": pl.Float64,
    "std": pl.Float64,  # of the population
    # Counts over all elements.
    "nan": pl.Int64,
    "posinf": pl.Int64,
    "neginf": pl.Int64,
    "zero": pl.Int64,
    "subnormal": pl.Int64,
    # exponents[i]: how many of `sampled` elements, finite and not zero, have floor(log2|x|) = exponent + i
    "exponent": pl.Int32,
    "exponents": pl.List(pl.Int64),
    "sampled": pl.Int64,
    "hash": pl.Utf8,  # content_hash
    "blob": pl.Utf8,  # key in tensors-*.safetensors
    "group": pl.Utf8,  # ranks of a collective, "0,1"
    # Shadow: actual minus the fp64 result on the same inputs.
    "own_l2": pl.Float64,
    "own_max": pl.Float64,
    "own_reason": pl.Utf8,  # why it could not be run
    "reason": pl.Utf8,  # why statistics, or the tensor, are missing
}

SCALARS: dict[str, Any] = {"step": pl.Int64, "name": pl.Utf8, "value": pl.Float64}

_STEP = re.compile(r"step([0-9]{6,18})")
_RANK = re.compile(r"rank([0-9]{1,6})")
_CHUNK = re.compile(r"tensors-[0-9]{3,}\.safetensors")


def rank_name(rank: int) -> str:
    """The folder of a rank."""
    return f"rank{rank}"


def step_name(step: int) -> str:
    """The folder of a whole step.

    >>> step_name(3)
    'step000003'
    """
    return f"step{step:06d}"


def partial_name(step: int) -> str:
    """The folder of a step that is being written."""
    return f".{step_name(step)}.partial"


def parse_rank(name: str) -> int | None:
    """The rank whose folder has this name, or None when it is no such name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match and rank_name(int(match[1])) == name else None


def parse_step(name: str) -> int | None:
    """The step whose folder has this name, or None when it is no such name.

    >>> parse_step("step000003"), parse_step(".step000003.partial"), parse_step("step3")
    (3, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def is_chunk(name: str) -> bool:
    """Whether this names a file of tensors."""
    return _CHUNK.fullmatch(name) is not None


def site_name() -> pl.Expr:
    """The column ``site``: the text of :class:`roundoff.site.Site` for each row of OPS."""
    # not pl.format: polars 2.1 panics where a filter has emptied a chunk of the frame
    count = (
        pl.when(pl.col("index") > 0)
        .then("#" + pl.col("index").cast(pl.Utf8))
        .otherwise(pl.lit(""))
    )
    return (pl.col("module") + "/" + pl.col("operator") + count).alias("site")
