"""Files of a quantized model: ONNX, checkpoints, records of other tools, and the proof."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
