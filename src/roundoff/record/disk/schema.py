"""What a run is on disk: the files, and the columns of its tables.

    RUN/run.json                  one object; SCHEMA, environment, coverage
    RUN/rank0/step000003/
        ops.parquet               OPS, one row for each tensor value
        tensors-000.safetensors   kept tensors; keys are the column `blob`
        loop.json                 what the loop did, a list of LoopEvent
        mark.txt                  whose recording it is (``record.disk.mark``)
        checksums.json            file name -> {"bytes": n, "xxh3_128": hex}
    RUN/rank0/scalars.txt         SCALARS, a line for each
    RUN/rank0/steps.txt           numbers of all steps of the program, as SCALARS
    RUN/rank0/set_up.json         how the program was set up, a SetUp

A step is written as ``.step000003.partial`` and renamed when it is whole, so whatever
kills the process, a folder with a step's name is a whole step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from roundoff.record.disk.typed_rows import ColumnType, column, schema_of
from roundoff.site import Site

#: Version of the layout. A reader takes its own version and those before it.
SCHEMA = 1

ABOUT = "run.json"
OPERATORS = "ops.parquet"
CHECKSUMS = "checksums.json"
LOOP = "loop.json"
MARK = "mark.txt"
SCALAR_FILE = "scalars.txt"
STEP_FILE = "steps.txt"
SET_UP = "set_up.json"
#: Files of a rank beside its steps.
RANK_FILES = (SCALAR_FILE, STEP_FILE, SET_UP)


_INTEGERS = pl.List(pl.Int64)


def _column(dtype: Any) -> Any:
    """Return a column that may be missing."""
    return column(dtype, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor value of a step: a row of ``ops.parquet``, None where the file has null.

    The fields are the columns, in their order; ``OPS`` has their types.
    """

    rank: int = _column(pl.Int32)
    step: int = _column(pl.Int64)
    #: id within (rank, step), rising in order of creation
    record: int = _column(pl.Int64)
    #: operator call that made it, in order within the step; -1: there before
    call: int = _column(pl.Int64)
    #: forward | backward | optimizer | collective
    phase: str = _column(pl.Utf8)
    #: module path, "" for the root and outside
    module: str = _column(pl.Utf8)
    #: aten packet name; parameter | buffer | input for call == -1
    operator: str = _column(pl.Utf8)
    #: how often (phase, module, operator) was called before in this step
    index: int = _column(pl.Int64)
    #: which of the call's output tensors
    place: int = _column(pl.Int64)
    #: output | input | parameter | grad; null is output. Runs of roundoff have outputs
    #: alone
    role: str | None = _column(pl.Utf8)
    #: "aten.convolution.default"
    overload: str | None = _column(pl.Utf8)
    #: of the parameter or buffer that this is, or that the call updated in place
    name: str | None = _column(pl.Utf8)
    #: "train.py:31"
    line: str | None = _column(pl.Utf8)
    #: the lines that called it, the innermost first: "train.py:80 < train.py:112"
    callers: str | None = _column(pl.Utf8)
    #: records of the call's tensor arguments, in order
    inputs: Sequence[int] | None = _column(_INTEGERS)
    #: JSON of the others, {"record": id} in place of tensors; null: unwritable
    arguments: str | None = _column(pl.Utf8)
    #: record whose memory this is a view of
    view_of: int | None = _column(pl.Int64)
    inplace: bool | None = _column(pl.Boolean)
    #: in the backward pass, of the forward: a checkpoint
    recomputed: bool | None = _column(pl.Boolean)
    #: "float32"
    dtype: str | None = _column(pl.Utf8)
    shape: Sequence[int] | None = _column(_INTEGERS)
    #: with ``offset``: how the kept elements, which lie in the order of memory, become
    #: the tensor: of the record itself, or of view_of; null where they do not: the
    #: values of a sparse or nested tensor, the shard of a distributed one
    stride: Sequence[int] | None = _column(_INTEGERS)
    offset: int | None = _column(pl.Int64)
    #: the first record of the memory that it lies in
    memory: int | None = _column(pl.Int64)
    #: where in that memory, in elements: its offset, then its strides
    memory_layout: Sequence[int] | None = _column(_INTEGERS)
    device: str | None = _column(pl.Utf8)
    #: strided | sparse_coo | nested ...
    layout: str | None = _column(pl.Utf8)
    numel: int | None = _column(pl.Int64)
    #: min to std: over the finite elements, null when there are none; of the modulus
    #: where complex
    min: float | None = _column(pl.Float64)
    max: float | None = _column(pl.Float64)
    mean: float | None = _column(pl.Float64)
    #: root of the sum of squares
    l2: float | None = _column(pl.Float64)
    #: of the population
    std: float | None = _column(pl.Float64)
    #: nan to subnormal: counts over all elements
    nan: int | None = _column(pl.Int64)
    posinf: int | None = _column(pl.Int64)
    neginf: int | None = _column(pl.Int64)
    zero: int | None = _column(pl.Int64)
    subnormal: int | None = _column(pl.Int64)
    #: exponents[i]: how many of ``sampled`` elements, finite and not zero, have
    #: floor(log2|x|) = exponent + i
    exponent: int | None = _column(pl.Int32)
    exponents: Sequence[int] | None = _column(_INTEGERS)
    sampled: int | None = _column(pl.Int64)
    #: content_hash
    hash: str | None = _column(pl.Utf8)
    #: key in tensors-*.safetensors
    blob: str | None = _column(pl.Utf8)
    #: ranks of a collective, "0,1"
    group: str | None = _column(pl.Utf8)
    #: own_l2, own_max: of actual minus the fp64 result on the same inputs
    own_l2: float | None = _column(pl.Float64)
    own_max: float | None = _column(pl.Float64)
    #: why the call could not be run in fp64
    own_reason: str | None = _column(pl.Utf8)
    #: why statistics, or the tensor, are missing
    reason: str | None = _column(pl.Utf8)

    @property
    def site(self) -> str:
        """The text of :class:`roundoff.site.Site`, as of the column ``site_name()``."""
        return str(Site(self.module, self.operator, self.index))


#: The columns of ``ops.parquet``: name -> polars type.
OPS: dict[str, ColumnType] = schema_of(TensorRecord)


SCALARS: dict[str, Any] = {"step": pl.Int64, "name": pl.Utf8, "value": pl.Float64}

_STEP = re.compile(r"step([0-9]{6,18})")
_RANK = re.compile(r"rank([0-9]{1,6})")
_CHUNK = re.compile(r"tensors-[0-9]{3,}\.safetensors")


def rank_name(rank: int) -> str:
    """Return the folder of a rank."""
    return f"rank{rank}"


def step_name(step: int) -> str:
    """Return the folder of a whole step.

    >>> step_name(3)
    'step000003'
    """
    return f"step{step:06d}"


def partial_name(step: int) -> str:
    """Return the folder of a step that is being written."""
    return f".{step_name(step)}.partial"


def parse_rank(name: str) -> int | None:
    """Return the rank whose folder has this name; None for any other name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match and rank_name(int(match[1])) == name else None


def parse_step(name: str) -> int | None:
    """Return the step whose folder has this name; None for any other name.

    >>> parse_step("step000003"), parse_step(".step000003.partial"), parse_step("step3")
    (3, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def is_chunk(name: str) -> bool:
    """Return True if this names a file of tensors."""
    return _CHUNK.fullmatch(name) is not None


def site_name() -> pl.Expr:
    """Return the column ``site``: the text of ``roundoff.site.Site`` for each row of OPS."""
    # not pl.format: polars 2.1 panics where a filter has emptied a chunk of the frame
    number = (
        pl.when(pl.col("index") > 0)
        .then("#" + pl.col("index").cast(pl.Utf8))
        .otherwise(pl.lit(""))
    )
    return (pl.col("module") + "/" + pl.col("operator") + number).alias("site")
