"""Number formats as data, and rounding to them: a slow scalar oracle and a fast tensor twin.

>>> import torch
>>> round_tensor(torch.tensor([0.1, 2.3]), parse_format("fp8_e4m3fn"))
tensor([0.1016, 2.2500])
>>> round_tensor(torch.tensor([[1.0, 7.0], [70.0, 20.0]]), parse_format("int4"), granularity=PerAxis(0))
tensor([[ 1.,  7.],
        [70., 20.]])
"""

from __future__ import annotations

from roundoff.formats.affine import QParams as QParams
from roundoff.formats.affine import choose_qparams as choose_qparams
from roundoff.formats.affine import dequantize as dequantize
from roundoff.formats.affine import fake_quantize as fake_quantize
from roundoff.formats.affine import quantize as quantize
from roundoff.formats.codes import all_values as all_values
from roundoff.formats.codes import decode as decode
from roundoff.formats.codes import encode as encode
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
from roundoff.formats.scalar import fake_quantize_scalar as fake_quantize_scalar
from roundoff.formats.scalar import round_block_scalar as round_block_scalar
from roundoff.formats.scalar import round_scalar as round_scalar
from roundoff.formats.types import BlockFormat as BlockFormat
from roundoff.formats.types import Execution as Execution
from roundoff.formats.types import Format as Format
from roundoff.formats.types import Layout as Layout
from roundoff.formats.types import Rounding as Rounding
from roundoff.formats.types import ScaleRule as ScaleRule
