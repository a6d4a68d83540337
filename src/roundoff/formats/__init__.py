"""Number formats as data, and rounding to them.

>>> import torch
>>> round_tensor(torch.tensor([0.1, 2.3]), parse_format("fp8_e4m3fn"))
tensor([0.1016, 2.2500])
>>> round_tensor(torch.tensor([[1.0, 7.0], [70.0, 20.0]]), parse_format("int4"), granularity=PerAxis(0))
tensor([[ 1.,  7.],
        [70., 20.]])
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
