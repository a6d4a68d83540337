"""Number formats as data, and rounding to them: a slow scalar oracle and a fast tensor twin."""

from roundoff.formats.granularity import Granularity as Granularity
from roundoff.formats.granularity import PerAxis as PerAxis
from roundoff.formats.granularity import PerBlock as PerBlock
from roundoff.formats.granularity import PerGroup as PerGroup
from roundoff.formats.granularity import PerTensor as PerTensor
from roundoff.formats.granularity import PerToken as PerToken
from roundoff.formats.named import FORMATS as FORMATS
from roundoff.formats.named import parse_format as parse_format
from roundoff.formats.scalar import all_values as all_values
from roundoff.formats.scalar import decode as decode
from roundoff.formats.scalar import encode as encode
from roundoff.formats.scalar import round_scalar as round_scalar
from roundoff.formats.tensor import QParams as QParams
from roundoff.formats.tensor import choose_qparams as choose_qparams
from roundoff.formats.tensor import fake_quantize as fake_quantize
from roundoff.formats.tensor import round_tensor as round_tensor
from roundoff.formats.types import BlockFormat as BlockFormat
from roundoff.formats.types import Execution as Execution
from roundoff.formats.types import Format as Format
from roundoff.formats.types import Layout as Layout
from roundoff.formats.types import NumberFormat as NumberFormat
from roundoff.formats.types import Rounding as Rounding
from roundoff.formats.types import ScaleRule as ScaleRule
