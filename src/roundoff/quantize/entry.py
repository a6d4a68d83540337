"""Entry: the qparams of one weight or activation in a record, and the names in files."""

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
_INTEGER = re.compile(r"int(?P<width>\d{1,3})(?P<asym>_asym)?(?P<range>_full|_narrow)?")
_GRANULARITY = re.compile(r"(?P<name>per_[a-z]+)(?:\((?P<numbers>[-\d, ]*)\))?")


@dataclass(frozen=True)
class Entry:
    """The qparams of one weight or activation.

    Attributes:
        name: see ``record``.
        kind: ``weight``, ``activation`` or ``kv_cache``.
        format: name of the format, as :func:`format_named` reads it.
        granularity: as :func:`granularity_named` reads it: ``per_tensor``,
            ``per_axis(0)``, ``per_group(32, -1)``, ``per_token``, ``per_block(128, 128)``.
        scale: one for each set of elements that share one, in the order of the
            granularity's view; finite and above 0. Empty where scales are chosen at run
            time (``dynamic``) or inside a block format.
        zero_point: codes of real 0, as many as scales; ``None``: 0.
        sites: the calls that read it.
        observer: what chose the scale, ``minmax`` say; empty where unknown.
        dynamic: scales are chosen anew for each input.

    Raises:
        QuantizationError: one of these doesn't hold.

    Example:
        >>> entry = Entry("c1.weight", "weight", "int8", "per_axis(0)", (0.5, 0.25))
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
        # lists and numpy's numbers are taken too
        object.__setattr__(self, "scale", tuple(map(float, self.scale)))
        object.__setattr__(self, "sites", tuple(self.sites))
        if self.zero_point is not None:
            object.__setattr__(self, "zero_point", tuple(map(int, self.zero_point)))
        if self.kind not in KINDS:
            raise QuantizationError(
                "no such kind of entry",
                where=self._where,
                expected=", ".join(KINDS),
                got=repr(self.kind),
            )
        fmt = format_named(self.format, self._where)
        granularity = granularity_named(self.granularity, self._where)
        self._check_scale(fmt, granularity)
        if self.zero_point is not None:
            _check_zero_point(self.zero_point, len(self.scale), fmt, self._where)

    @property
    def _where(self) -> str:
        return f"record, {self.name}"

    def _check_scale(self, fmt: Format, granularity: Granularity) -> None:
        bad = [s for s in self.scale if not 0.0 < s < float("inf")]
        if bad:
            raise QuantizationError(
                f"{len(bad)} of {len(self.scale)} scales cannot be used",
                where=self._where,
                expected="finite scales above 0",
                got=str(bad[0]),
            )
        self._check_count(fmt, granularity)

    def _check_count(self, fmt: Format, granularity: Granularity) -> None:
        """Raise where there are scales that should not be, or none that should."""
        scaled_at_run_time = self.dynamic or isinstance(fmt, BlockFormat)
        if not self.scale and not scaled_at_run_time:
            raise QuantizationError(
                "no scale",
                where=self._where,
                expected="a scale, or dynamic = true",
                got=f"{self.format} {self.granularity} without any",
            )
        if self.dynamic and self.scale:
            raise QuantizationError(
                "a dynamic entry has no scale of its own",
                where=self._where,
                got=f"{len(self.scale)} scales",
                do="leave them out, or set dynamic = false",
            )
        if isinstance(granularity, PerTensor) and len(self.scale) > 1:
            raise QuantizationError(
                "one scale is needed",
                where=self._where,
                expected="one scale for per_tensor",
                got=f"{len(self.scale)} scales",
            )

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
        """Return the entry of these qparams.

        ``None`` for dynamic ones and block formats (then give the granularity).

        >>> fmt = format_named("int8")
        >>> Entry.of("x", "activation", fmt, QParams(torch.tensor(0.5))).scale
        (0.5,)
        """
        if granularity is None and qparams is not None:
            granularity = qparams.granularity
        scale: list[float] = []
        zero_point: tuple[int, ...] | None = None
        if qparams is not None and not dynamic:
            scale = qparams.scale.detach().double().flatten().tolist()
            if qparams.zero_point is not None:
                codes = qparams.zero_point.detach().flatten().tolist()
                zero_point = tuple(int(code) for code in codes)
        return cls(
            name,
            kind,
            fmt.name,
            granularity_name(granularity or PerTensor()),
            tuple(scale),
            zero_point,
            tuple(sites),
            observer,
            dynamic,
        )

    def qparams(
        self, shape: Iterable[int] = (), dtype: torch.dtype = torch.float32
    ) -> QParams:
        """Return the qparams for a tensor of this shape.

        With ``per_tensor`` the shape does not matter. Raises ``QuantizationError`` where
        the scales don't fit the shape, and for an entry without scales.
        """
        shape = tuple(shape)
        granularity = granularity_named(self.granularity, self._where)
        if not self.scale:
            raise QuantizationError(
                "this entry has no scale",
                where=self._where,
                expected="a static entry, no block format",
                got=f"{self.format}, dynamic = {str(self.dynamic).lower()}",
            )
        scale_shape = self._scale_shape(granularity, shape)
        scale = torch.tensor(self.scale, dtype=torch.float64).to(dtype)
        zero_point = None
        if self.zero_point is not None:
            zero_point = torch.tensor(self.zero_point, dtype=dtype).reshape(scale_shape)
        return QParams(scale.reshape(scale_shape), zero_point, granularity)

    def _scale_shape(
        self, granularity: Granularity, shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the shape of the scales in a tensor's view."""
        try:
            view, axes = granularity.split(shape)
        except FormatError as error:
            raise QuantizationError(
                f"{self.granularity} does not fit this tensor: {error.what}",
                where=self._where,
                expected=error.expected,
                got=f"shape {shape}",
            ) from error
        if isinstance(granularity, PerTensor):
            return ()
        scale_shape = tuple(1 if i in axes else n for i, n in enumerate(view))
        count = torch.Size(scale_shape).numel()
        if count != len(self.scale):
            raise QuantizationError(
                "the scales do not fit this tensor",
                where=self._where,
                got=f"{len(self.scale)} scales",
                expected=f"{count}: {self.granularity} of shape {shape}",
            )
        return scale_shape


def granularity_name(granularity: Granularity) -> str:
    """Write a granularity as it stands in files.

    >>> granularities = (PerTensor(), PerAxis(0), PerGroup(32), PerBlock((128, 128)))
    >>> [granularity_name(granularity) for granularity in granularities]
    ['per_tensor', 'per_axis(0)', 'per_group(32, -1)', 'per_block(128, 128)']
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
    """Read what :func:`granularity_name` wrote.

    Raises ``QuantizationError`` for anything else.

    >>> granularity_named("per_group(32)") == granularity_named("per_group(32, -1)")
    True
    """
    match = _GRANULARITY.fullmatch(text.strip())
    granularity = None
    if match is not None:
        granularity = _granularity(match["name"], match["numbers"] or "")
    if granularity is None:
        raise QuantizationError(
            "no such granularity",
            where=where,
            got=repr(text),
            expected="per_tensor, per_axis(0), per_group(32, -1), per_token or per_block(128, 128)",
        )
    return granularity


def _granularity(name: str, text: str) -> Granularity | None:
    """Return the granularity of this name with these numbers; None where there is none."""
    try:
        numbers = [int(n) for n in text.split(",") if n.strip()]
    except ValueError:
        return None
    match name, numbers:
        case "per_tensor", []:
            return PerTensor()
        case "per_token", []:
            return PerToken()
        case "per_axis", [axis]:
            return PerAxis(axis)
        case "per_group", [size]:
            return PerGroup(size)
        case "per_group", [size, axis]:
            return PerGroup(size, axis)
        case "per_block", [_, *_]:
            return PerBlock(tuple(numbers))
    return None


def format_named(name: str, where: str = "format") -> Format:
    """Return the format with this name.

    Beside those of ``parse_format``, integers of any width: ``int6``, ``int8_full``.
    Raises ``QuantizationError`` where there is none.

    >>> format_named("int16_asym").min_finite, format_named("int8_full").min_finite
    (-32768.0, -128.0)
    """
    try:
        match = _INTEGER.fullmatch(name)
        if match is None:
            return parse_format(name)
        width = int(match["width"])
        narrow = {None: None, "_full": False, "_narrow": True}[match["range"]]
        fmt = integer(width, symmetric=match["asym"] is None, narrow_range=narrow)
        is_named = fmt.name == name and width in (2, 4, 8) and narrow is None
        return parse_format(name) if is_named else fmt
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
    lowest = int(fmt.min_finite)
    highest = int(fmt.max_finite)
    outside = [z for z in zero_point if not lowest <= z <= highest]
    if outside:
        raise QuantizationError(
            f"a zero point is no code of {fmt.name}",
            where=where,
            expected=f"integers in [{lowest}, {highest}]",
            got=str(outside[0]),
        )
