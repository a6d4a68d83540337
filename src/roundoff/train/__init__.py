"""Training under a plan: autocast, loss scale, tune, bench, watch, monitor."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
