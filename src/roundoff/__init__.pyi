from .budget.measure import budget as budget
from .budget.table import Budget as Budget
from .errors import RoundoffError as RoundoffError
from .formats.named import FORMATS as FORMATS
from .formats.round_tensor import round_tensor as round_tensor
from .formats.types import Format as Format
from .plan.rules import Plan as Plan
from .record.disk.loading import load as load
from .record.disk.reader import Run as Run
from .train.autocast.context import autocast as autocast
from .train.scaling.scaler import LossScaler as LossScaler
from .verbs.bench import bench as bench
from .verbs.capture import capture as capture
from .verbs.compare import Comparison as Comparison
from .verbs.compare import compare as compare
from .verbs.diagnose import diagnose as diagnose
from .verbs.diff import diff as diff
from .verbs.overflow import overflow as overflow
from .verbs.plan import plan as plan
from .verbs.quantize import quantize as quantize
from .verbs.replay import replay as replay
from .verbs.show import show as show
from .verbs.tune import tune as tune
from .verbs.verify import verify as verify
from .verbs.watch import watch as watch
from .workload.workload import Workload as Workload

__version__: str
