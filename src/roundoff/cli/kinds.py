"""The kinds of values that options take: a parser for each, from the text of the
command line.

They run while the command line is read: before a model is loaded, a script starts or a
run is opened. Each raises a ``RoundoffError`` that says what would have been accepted;
``at`` puts the name of the option in front.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import typer

from roundoff.errors import (
    FormatError,
    PatternError,
    PlanError,
    RoundoffError,
    RunError,
    did_you_mean,
    nearest,
)

T = TypeVar("T")

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
#: Seeds that torch's generators take.
_SEEDS = range(-(2**63), 2**64)


class Names(tuple[str, ...]):
    """Names that were separated by commas."""

    def __str__(self) -> str:
        return ",".join(self)


class Pin(NamedTuple):
    """``PATTERN=FORMAT``: these sites run in this format."""

    pattern: str
    format: str


class Allowed(NamedTuple):
    """``PATTERN=FORMAT,FORMAT``: these sites may use these formats."""

    pattern: str
    formats: Names


class Bound(NamedTuple):
    """``METRIC=VALUE``: a limit on a metric."""

    metric: str
    value: float


def option(
    *names: str,
    parse: Callable[[str], Any],
    help: str,  # noqa: A002 - typer's own name
    metavar: str = "TEXT",
) -> Any:
    """Return an option whose text a parser of this module reads."""
    long = next(name for name in names if name.startswith("--"))
    return typer.Option(*names, parser=at(long, parse), help=help, metavar=metavar)


def at(name: str, parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the parser with errors that name the option; a default is a value already.

    >>> at("--precision", decibels)("often")
    Traceback (most recent call last):
    ...
    roundoff.errors.PlanError: --precision: not a number of decibels above 0
      expected: such as 0.6dB
      got: 'often'
    """

    def parsed(text: str | T) -> T:
        if not isinstance(text, str):
            return text
        try:
            return parse(text)
        except RoundoffError as error:
            # a file is named beside its option
            where = f"{name} {text}" if error.where == text else name
            raise type(error)(
                error.what,
                where=where,
                expected=error.expected,
                got=error.got,
                do=error.do,
            ) from None

    return parsed


def _split(text: str) -> Names:
    """Return what commas separate."""
    return Names(part.strip() for part in text.split(",") if part.strip())


def formats(text: str) -> Names:
    """Return names of number formats as they were written.

    >>> formats("bf16, int8")
    ('bf16', 'int8')
    """
    from roundoff.formats import parse_format

    names = _split(text)
    if not names:
        raise FormatError(
            "no format is named", expected="such as bf16,int8", got=repr(text)
        )
    for name in names:
        parse_format(name)
    return names


def one_format(text: str) -> str:
    """Return the name of one format as it was written."""
    from roundoff.formats import parse_format

    parse_format(text)
    return text


def unscaled(text: str) -> str:
    """Return the name of a format in which values overflow by themselves: no integer."""
    from roundoff.formats import limits, parse_format

    limits(parse_format(text))
    return text


def all_unscaled(text: str) -> Names:
    """Return names of such formats."""
    names = formats(text)
    for name in names:
        unscaled(name)
    return names


def target(text: str) -> str:
    """Return the text of a target: decibels of SQNR, or a share of the metric.

    >>> target("-5dB"), target("0.5%"), target("cls=40dB,price=30dB")
    ('-5dB', '0.5%', 'cls=40dB,price=30dB')
    """
    from roundoff.budget import parse_aim

    parse_aim(text)
    return text


def drop(text: str) -> str:
    """Return the text of a drop of the metric: ``0.5%`` or ``0.005``."""
    from roundoff.budget import parse_drop

    parse_drop(text)
    return text


def decibels(text: str) -> float:
    """Return a number of decibels above 0."""
    from roundoff.budget import parse_db

    try:
        value = parse_db(text)
    except PlanError:
        value = math.nan
    if not 0 < value < math.inf:
        raise PlanError(
            "not a number of decibels above 0", expected="such as 0.6dB", got=repr(text)
        )
    return value


def size(text: str) -> int:
    """Return ``512MB``, ``2GiB`` or ``100000`` as a number of bytes (1 MB is 2**20).

    >>> size("1.5 KB")
    1536
    """
    match = _BYTES.fullmatch(text.strip())
    power = "KMGT".find(match[2].upper()) + 1 if match and match[2] else 0
    count = int(float(match[1]) * 1024**power) if match else 0
    if not count:
        raise PlanError(
            "not a size",
            expected="a number with KB, MB or GB, such as 512MB",
            got=repr(text),
        )
    return count


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Return the parser of finite numbers from ``least`` to ``most``.

    >>> number(0)("1e-3")
    0.001
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            raise RunError(
                "not a number that can be", expected=accepted, got=repr(text)
            )
        return value

    accepted = "a number"
    if math.isfinite(least):
        accepted += f" from {least:g}"
    if math.isfinite(most):
        accepted += f" to {most:g}"
    return parse


def above_zero(text: str) -> float:
    """Return a finite number above 0."""
    value = number(0)(text)
    if value == 0:
        raise RunError(
            "not a number that can be", expected="a number above 0", got=repr(text)
        )
    return value


def mebibytes(text: str) -> float:
    """Return a number of MiB, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise RunError("not a size", expected="a number of MiB", got=repr(text))
    return value


def seed(text: str) -> int:
    """Return a whole number that torch's generators take as a seed."""
    try:
        value = int(text)
    except ValueError:
        value = _SEEDS.stop
    if value not in _SEEDS:
        raise RunError(
            "not a seed", expected="a whole number of 64 bits", got=repr(text)
        )
    return value


def choice(names: Iterable[str]) -> Callable[[str], str]:
    """Return the parser of one of these names."""
    accepted = list(names)
    return lambda text: one_of(text, accepted)


def one_of(text: str, names: Iterable[str]) -> str:
    """Return the text; raise ``PlanError`` with the nearest where it is none of the names."""
    accepted = list(names)
    if text not in accepted:
        raise PlanError(
            "there is no such choice",
            expected=", ".join(accepted),
            got=repr(text),
            do=did_you_mean(nearest(text, accepted, at_most=1)),
        )
    return text


def cost(text: str) -> str:
    """Return the name of a cost model."""
    from roundoff.plan import UNITS

    return one_of(text, UNITS)


def tie(text: str) -> str:
    """Return what shares a format: see ``roundoff.plan``."""
    from roundoff.budget import TIES

    return one_of(text, TIES)


def migration_target(text: str) -> str:
    """Return what a script is migrated to."""
    from roundoff.migrate import TARGETS

    return one_of(text, TARGETS)


def migration_source(text: str) -> str:
    """Return what a script is migrated from."""
    from roundoff.migrate import SOURCES

    return one_of(text, SOURCES)


def cost_of_codes(text: str) -> str:
    """Return the name of a cost model that knows integer kernels: all but seconds."""
    from roundoff.plan import UNITS

    return one_of(text, [name for name in UNITS if name != "seconds"])


def pin(text: str) -> Pin:
    """Return a pattern of sites and the format that they run in.

    >>> pin("*/softmax=fp32")
    Pin(pattern='*/softmax', format='fp32')
    """
    pattern, value = _pair(text, "PATTERN=FORMAT, such as '*/softmax=fp32'")
    return Pin(pattern, one_format(value))


def allowed(text: str) -> Allowed:
    """Return a pattern of sites and the formats that they may use."""
    pattern, value = _pair(text, "PATTERN=FORMAT,FORMAT, such as '*/linear=bf16,int8'")
    return Allowed(pattern, formats(value))


def _pair(text: str, expected: str) -> tuple[str, str]:
    pattern, _, value = text.rpartition("=")
    if not pattern or not value:
        raise PatternError(
            "a pattern and a format are needed", expected=expected, got=repr(text)
        )
    return pattern, value


def pattern(text: str) -> str:
    """Return a pattern over names; it may not be empty."""
    if not text.strip():
        raise PatternError(
            "a pattern is needed", expected="such as '*/softmax'", got=repr(text)
        )
    return text


def bound(text: str) -> Bound:
    """Return the limit on a metric of ``roundoff compare``.

    >>> bound("max_abs=1e-3")
    Bound(metric='max_abs', value=0.001)
    """
    from roundoff.compare import LARGER_IS_BETTER

    name, _, value = text.partition("=")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        raise RunError(
            "a limit needs a metric and a number",
            expected="METRIC=VALUE, such as max_abs=1e-3",
            got=repr(text),
        )
    if name.strip() not in LARGER_IS_BETTER:
        raise RunError(
            "there is no such metric",
            expected=", ".join(LARGER_IS_BETTER),
            got=repr(name.strip()),
            do=did_you_mean(nearest(name.strip(), LARGER_IS_BETTER, at_most=1)),
        )
    return Bound(name.strip(), limit)


def run(text: str) -> str:
    """Return the place of a run: a folder that is there, or a URL."""
    from roundoff.record import check_place

    check_place(text)
    return text


def engine(text: str) -> str:
    """Return where tasks run: ``local``, ``ray`` or the address of a cluster."""
    from roundoff.engine import check_engine

    check_engine(text)
    return text


def phase(text: str) -> str:
    """Return a phase of a recorded step."""
    from roundoff.record import PHASES

    return one_of(text, PHASES)


def sort_key(text: str) -> str:
    """Return what the sites of a run are sorted by."""
    from roundoff.record import SORT_KEYS

    return one_of(text, SORT_KEYS)


def steps(text: str) -> str | None:
    """Return which steps to record; None for all of them."""
    from roundoff.record import StepNumbers

    if text == "all":
        return None
    StepNumbers.parse(text)
    return text


def device(text: str) -> str:
    """Return a device that torch knows by this name and that is here."""
    from roundoff.plan import find_device

    try:
        find_device(text)
    except RoundoffError as error:
        raise RunError(
            "this device cannot be used here",
            expected="cpu, or a device of this machine",
            got=error.got or repr(text),
        ) from None
    return text


def device_type(text: str) -> str:
    """Return a kind of device whose autocast lists torch has."""
    from roundoff.plan import DEVICES

    return one_of(text, DEVICES)


def dtype(text: str) -> str:
    """Return the format that recorded operators run in; ``same`` for the recorded one."""
    return text if text == "same" else one_format(text)


def level(text: str) -> str:
    """Return what is recorded: each operator call, or modules."""
    from roundoff.record import LEVELS

    return one_of(text, LEVELS)


def keep(text: str) -> str:
    """Return what is kept of each tensor."""
    from roundoff.record import KEEP

    return one_of(text, KEEP)


def tool(text: str) -> str:
    """Return the tool that a plan is written for."""
    from roundoff.plan import WRITERS

    return one_of(text, ("plan", *WRITERS))


def source_tool(text: str) -> str:
    """Return the tool whose settings are read."""
    from roundoff.plan import READERS

    return one_of(text, ("plan", *READERS))


def half(text: str) -> str:
    """Return one of the two formats that autocast computes in."""
    return one_of(text, ("bf16", "fp16"))


def candidate(text: str) -> str:
    """Return what a workload is compared with."""
    from roundoff.plan import check_candidate

    check_candidate(text)
    return text


def backend(text: str) -> str:
    """Return a backend of torch.compile."""
    from roundoff.plan import check_backend

    check_backend(text)
    return text


def configs(text: str) -> Names:
    """Return configurations of ``roundoff bench``."""
    from roundoff.train import parse_configs

    names = _split(text)
    parse_configs(names)
    return names


def weight_format(text: str) -> str:
    """Return an integer format that weights alone can be in."""
    from roundoff.export import weights_only

    weights_only(text, None)
    return text


def method(text: str) -> str:
    """Return how weights are rounded."""
    from roundoff.export import METHODS

    return one_of(text, METHODS)


def observer(text: str) -> str:
    """Return how ranges of values are chosen."""
    from roundoff.quantize import OBSERVERS

    return one_of(text, OBSERVERS)


def granularity(text: str) -> str:
    """Return which values share a scale."""
    from roundoff.quantize import Options

    Options(activation=text)
    return text


def weight_granularity(text: str) -> str:
    """Return which weights share a scale."""
    from roundoff.quantize import Options

    Options(weight=text)
    return text


def cache_format(text: str) -> str:
    """Return the format of keys and values; the empty text for none."""
    from roundoff.quantize import CacheFormat

    if text:
        CacheFormat.parse(text)
    return text


def pruning(text: str) -> str:
    """Return what to prune; the empty text for nothing."""
    from roundoff.export import parse_prune

    if text:
        parse_prune(text)
    return text


def module_map(text: str) -> Path:
    """Return the path of a file that maps modules of two runs."""
    from roundoff.compare import read_modules

    read_modules(text)
    return Path(text)


def plan_file(text: str) -> Path:
    """Return where a plan is written: a name that ends in .toml or .json."""
    path = Path(text)
    if path.suffix not in (".toml", ".json"):
        raise PlanError(
            "a plan is TOML or JSON",
            expected="a name that ends in .toml or .json",
            got=repr(text),
        )
    return path


def toml_file(text: str) -> Path:
    """Return where a TOML file is written: a name that ends in .toml."""
    path = Path(text)
    if path.suffix != ".toml":
        raise RunError(
            "the file is TOML", expected="a name that ends in .toml", got=repr(text)
        )
    return path


def lint_codes(text: str) -> Names:
    """Return codes of lint rules, or their beginnings.

    >>> lint_codes("RO1,ro101")
    ('RO1', 'RO101')
    """
    from roundoff.lint import check_codes

    return Names(check_codes(_split(text)))


def lint_code(text: str) -> Names:
    """Return the codes of the rules that a code, its beginning or ``all`` stands for."""
    from roundoff.lint import RULES

    codes = [rule.code for rule in RULES]
    if text == "all":
        return Names(codes)
    beginnings = lint_codes(text)
    return Names(code for code in codes if code.startswith(beginnings))


def input_file(text: str) -> Path:
    """Return the path of a file that is there."""
    path = Path(text)
    if not path.is_file():
        raise RunError("there is no such file", expected="a file", got=repr(text))
    return path
