"""Entry: the qparams of one weight or activation in a record, and the names of formats and granularities in files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from roundoff.errors import FormatError, QuantizationError
from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    PerAxis,
    PerBlock,
    PerGroup,
    PerTensor,
    PerToken,
    QParams,
    integer,
    parse_format,
)

#: What an entry may be; ``kv_cache``: an activation that is kept quantized between steps.
KINDS = ("weight", "activation", "kv_cache")
_INTEGER = re.compile(r"int(?P<width>\d+)(?P<asym>_asym)?(?P<range>_full|_narrow)?")
_GRANULARITY = re.compile(r"(?P<name>per_[a-z]+)(?:\((?P<numbers>[-\d, ]*)\))?")


@dataclass(frozen=True)
class Entry:
    """The qparams of one weight or activation.

    Attributes:
        name: see this file's head.
        kind: ``weight``, ``activation`` or ``kv_cache``.
        format: name of the format, as :func:`format_named` reads it.
        granularity: as :func:`granularity_named` reads it: ``per_tensor``, ``per_axis(0)``, ``per_group(32, -1)``,
            ``per_token``, ``per_block(128, 128)``.
        scale: one for each set of elements that share one, in the order of the granularity's view; finite and above 0.
            Empty where scales are chosen at run time (``dynamic``) or inside a block format.
        zero_point: codes of real 0, as many as scales; ``None``: 0.
        sites: the calls that read it.
        observer: what chose the scale, ``minmax`` say; empty where unknown.
        dynamic: scales are chosen anew for each input.

    Raises:
        QuantizationError: one of these doesn't hold.

    Example:
        >>> entry = Entry("c1.weight", "weight", "int8", "per_axis(0)", (0.5, 0.25), sites=("c1/conv2d",))
        >>> entry.qparams((2, 3, 1, 1)).scale.shape
        torch.Size([2, 1, 1, 1])
    """

    name: str
    kind: str
    format: str
    granularity: str
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] | None = None
    sites: tuple[str, ...] = ()
    observer: str = ""
    dynamic: bool = False

    def __post_init__(self) -> None:
        where = f"record, {self.name}"
        for field, value in (
            ("scale", tuple(map(float, self.scale))),
            ("sites", tuple(self.sites)),
            (
                "zero_point",
                None if self.zero_point is None else tuple(map(int, self.zero_point)),
            ),
        ):
            object.__setattr__(
                self, field, value
            )  # lists and numpy's numbers are taken too
        if self.kind not in KINDS:
            raise QuantizationError(
                "no such kind of entry",
                where=where,
                expected=", ".join(KINDS),
                got=repr(self.kind),
            )
        fmt, granularity = (
            format_named(self.format, where),
            granularity_named(self.granularity, where),
        )
        bad = [s for s in self.scale if not 0.0 < s < float("inf")]
        if bad:
            raise QuantizationError(
                f"{len(bad)} of {len(self.scale)} scales cannot be used",
                where=where,
                expected="finite scales above 0",
                got=str(bad[0]),
            )
        inside = self.dynamic or isinstance(fmt, BlockFormat)
        if not self.scale and not inside:
            raise QuantizationError(
                "no scale",
                where=where,
                expected="a scale, or dynamic = true",
                got=f"{self.format} {self.granularity} without any",
            )
        if self.dynamic and self.scale:
            raise QuantizationError(
                "a dynamic entry has no scale of its own",
                where=where,
                got=f"{len(self.scale)} scales",
                do="leave them out, or set dynamic = false",
            )
        if isinstance(granularity, PerTensor) and len(self.scale) > 1:
            raise QuantizationError(
                "one scale is needed",
                where=where,
                expected="one scale for per_tensor",
                got=f"{len(self.scale)} scales",
            )
        if self.zero_point is not None:
            _check_zero_point(self.zero_point, len(self.scale), fmt, where)

    @classmethod
    def of(
        cls,
        name: str,
        kind: str,
        fmt: Format,
        qparams: QParams | None,
        *,
        granularity: Granularity | None = None,
        sites: Iterable[str] = (),
        observer: str = "",
        dynamic: bool = False,
    ) -> Entry:
        """The entry of these qparams; ``None`` for dynamic ones and block formats (then give the granularity).

        >>> Entry.of("x", "activation", format_named("int8"), QParams(torch.tensor(0.5)), sites=["c1/conv2d"]).scale
        (0.5,)
        """
        granularity = (
            granularity
            or (qparams.granularity if qparams is not None else None)
            or PerTensor()
        )
        scale: tuple[float, ...] = ()
        zero_point = None
        if qparams is not None and not dynamic:
            scale = tuple(qparams.scale.detach().double().flatten().tolist())
            if qparams.zero_point is not None:
                zero_point = tuple(
                    int(z) for z in qparams.zero_point.detach().flatten().tolist()
                )
        return cls(
            name,
            kind,
            fmt.name,
            granularity_name(granularity),
            scale,
            zero_point,
            tuple(sites),
            observer,
            dynamic,
        )

    def qparams(
        self, shape: Iterable[int] = (), dtype: torch.dtype = torch.float32
    ) -> QParams:
        """The qparams for a tensor of this shape; with ``per_tensor`` the shape does not matter.

        Raises ``QuantizationError`` where the scales don't fit the shape, and for an entry without scales.
        """
        shape, where = tuple(shape), f"record, {self.name}"
        granularity = granularity_named(self.granularity, where)
        if not self.scale:
            raise QuantizationError(
                "this entry has no scale",
                where=where,
                expected="a static entry, no block format",
                got=f"{self.format}, dynamic = {str(self.dynamic).lower()}",
            )
        try:
            view, axes = granularity.split(shape)
        except FormatError as error:
            raise QuantizationError(
                f"{self.granularity} does not fit this tensor: {error.what}",
                where=where,
                expected=error.expected,
                got=f"shape {shape}",
            ) from error
        own = tuple(1 if axis in axes else length for axis, length in enumerate(view))
        scale = torch.tensor(self.scale, dtype=torch.float64).to(dtype)
        if isinstance(granularity, PerTensor):
            own = ()
        elif torch.Size(own).numel() != len(self.scale):
            raise QuantizationError(
                "the scales do not fit this tensor",
                where=where,
                got=f"{len(self.scale)} scales",
                expected=f"{torch.Size(own).numel()}: {self.granularity} of shape {shape}",
            )
        zero_point = (
            None
            if self.zero_point is None
            else torch.tensor(self.zero_point, dtype=dtype).reshape(own)
        )
        return QParams(scale.reshape(own), zero_point, granularity)


def granularity_name(granularity: Granularity) -> str:
    """How a granularity is written in files.

    >>> [granularity_name(g) for g in (PerTensor(), PerAxis(0), PerGroup(32), PerToken(), PerBlock((128, 128)))]
    ['per_tensor', 'per_axis(0)', 'per_group(32, -1)', 'per_token', 'per_block(128, 128)']
    """
    match granularity:
        case PerAxis(axis):
            return f"per_axis({axis})"
        case PerGroup(size, axis):
            return f"per_group({size}, {axis})"
        case PerBlock(sizes):
            return f"per_block({', '.join(map(str, sizes))})"
        case PerToken():
            return "per_token"
    return "per_tensor"


def granularity_named(text: str, where: str = "granularity") -> Granularity:
    """The granularity that :func:`granularity_name` wrote. Raises ``QuantizationError`` for anything else.

    >>> granularity_named("per_group(32)") == granularity_named("per_group(32, -1)") == PerGroup(32)
    True
    """
    match = _GRANULARITY.fullmatch(text.strip())
    name = match["name"] if match else ""
    try:
        numbers = (
            [int(n) for n in (match["numbers"] or "").split(",") if n.strip()]
            if match
            else []
        )
    except ValueError:
        name, numbers = "", []
    if name in ("per_tensor", "per_token") and not numbers:
        return PerTensor() if name == "per_tensor" else PerToken()
    if name == "per_axis" and len(numbers) == 1:
        return PerAxis(numbers[0])
    if name == "per_group" and len(numbers) in (1, 2):
        return PerGroup(*numbers)
    if name == "per_block" and numbers:
        return PerBlock(tuple(numbers))
    raise QuantizationError(
        "no such granularity",
        where=where,
        got=repr(text),
        expected="per_tensor, per_axis(0), per_group(32, -1), per_token or per_block(128, 128)",
    )


def format_named(name: str, where: str = "format") -> Format:
    """The format with this name; beside those of ``parse_format``, integers of any width: ``int6``, ``int8_full``.

    Raises ``QuantizationError`` where there is none.

    >>> format_named("int16_asym").min_finite, format_named("int8_full").min_finite
    (-32768.0, -128.0)
    """
    match = _INTEGER.fullmatch(name)
    try:
        if match is None:
            return parse_format(name)
        narrow = {None: None, "_full": False, "_narrow": True}[match["range"]]
        fmt = integer(
            int(match["width"]), symmetric=match["asym"] is None, narrow_range=narrow
        )
        return (
            parse_format(name)
            if fmt.name == name and int(match["width"]) in (2, 4, 8) and narrow is None
            else fmt
        )
    except FormatError as error:
        raise QuantizationError(
            error.what,
            where=where,
            expected=error.expected,
            got=repr(name),
            do=error.do,
        ) from error


def _check_zero_point(
    zero_point: tuple[int, ...], scales: int, fmt: Format, where: str
) -> None:
    if fmt.one_quantum != 1.0 or isinstance(fmt, BlockFormat):
        raise QuantizationError(
            "a zero point needs an integer format",
            where=where,
            expected="int8_asym or another integer",
            got=fmt.name,
        )
    if len(zero_point) != scales:
        raise QuantizationError(
            "as many zero points as scales are needed",
            where=where,
            expected=f"{scales} zero points",
            got=f"{len(zero_point)} zero points",
        )
    lowest, highest = int(fmt.min_finite), int(fmt.max_finite)
    outside = [z for z in zero_point if not lowest <= z <= highest]
    if outside:
        raise QuantizationError(
            f"a zero point is no code of {fmt.name}",
            where=where,
            expected=f"integers in [{lowest}, {highest}]",
            got=str(outside[0]),
        )
