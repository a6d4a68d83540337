"""Number formats as data, and rounding to them.

>>> import torch
>>> round_tensor(torch.tensor([0.1, 1000.0]), parse_format("fp8_e4m3fn"))
tensor([  0.1016, 448.0000])
>>> round_tensor(torch.tensor([[0.1, 1.0], [10.0, 100.0]]), parse_format("int4"), granularity=PerAxis(0))
tensor([[  0.1429,   1.0000],
        [ 14.2857, 100.0000]])
"""

from __future__ import annotations

from roundoff.formats.affine import QParams as QParams
from roundoff.formats.affine import choose_qparams as choose_qparams
from roundoff.formats.affine import fake_quantize as fake_quantize
from roundoff.formats.types import BlockFormat as BlockFormat
from roundoff.formats.types import Execution as Execution
from roundoff.formats.types import Format as Format
from roundoff.formats.types import Layout as Layout
from roundoff.formats.types import Rounding as Rounding
from roundoff.formats.types import ScaleRule as ScaleRule
from roundoff.formats.granularity import Granularity as Granularity
from roundoff.formats.granularity import PerAxis as PerAxis
from roundoff.formats.granularity import PerBlock as PerBlock
from roundoff.formats.granularity import PerGroup as PerGroup
from roundoff.formats.granularity import PerTensor as PerTensor
from roundoff.formats.granularity import PerToken as PerToken
from roundoff.formats.named import ALIASES as ALIASES
from roundoff.formats.named import FORMATS as FORMATS
from roundoff.formats.named import integer as integer
from roundoff.formats.named import parse_format as parse_format
from roundoff.formats.round import round_tensor as round_tensor
