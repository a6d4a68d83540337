"""A model or script → ``Run``: what every operator computed, and the run on disk."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
