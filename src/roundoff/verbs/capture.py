"""``roundoff.capture``: record the steps that run inside a ``with`` block."""

from roundoff.record import Capture as capture  # noqa: N813

__all__ = ["capture"]
