"""What an operator is, and running one call: its operands, in a format, again, in fp64."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
