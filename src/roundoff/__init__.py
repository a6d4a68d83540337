"""roundoff: an error budget for neural networks.

Measure what the rounding of every operator costs the output in any number format, choose the cheapest formats that
meet a target, and prove it. ``diagnose`` does all three; ``budget``, ``Budget.plan`` and ``verify`` are its steps.
Names are loaded when they are first used, so importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundoff.capture.session import Capture as capture  # noqa: F401, N813
    from roundoff.compare.comparison import Comparison as Comparison
    from roundoff.compare.comparison import compare as compare
    from roundoff.errors import RoundoffError as RoundoffError
    from roundoff.formats import FORMATS as FORMATS
    from roundoff.formats import Format as Format
    from roundoff.formats import round_tensor as round_tensor
    from roundoff.plan.budget import Budget as Budget
    from roundoff.plan.diagnose import diagnose as diagnose
    from roundoff.plan.measure import budget as budget
    from roundoff.plan.plan import Plan as Plan
    from roundoff.plan.verify import verify as verify
    from roundoff.quantize.pipeline import quantize as quantize
    from roundoff.store import Run as Run
    from roundoff.store import load as load
    from roundoff.train.autocast import autocast as autocast
    from roundoff.train.experiment.bench import bench as bench
    from roundoff.train.scaling.scaler import LossScaler as LossScaler
    from roundoff.train.tuning.tune import tune as tune
    from roundoff.workload import Workload as Workload

_PUBLIC = {
    "Budget": "roundoff.plan.budget",
    "Comparison": "roundoff.compare.comparison",
    "FORMATS": "roundoff.formats",
    "Format": "roundoff.formats",
    "LossScaler": "roundoff.train.scaling.scaler",
    "Plan": "roundoff.plan.plan",
    "RoundoffError": "roundoff.errors",
    "Workload": "roundoff.workload",
    "Run": "roundoff.store",
    "autocast": "roundoff.train.autocast",
    "bench": "roundoff.train.experiment.bench",
    "budget": "roundoff.plan.measure",
    "capture": "roundoff.capture",
    "compare": "roundoff.compare",
    "diagnose": "roundoff.plan.diagnose",
    "load": "roundoff.store",
    "quantize": "roundoff.quantize",
    "round_tensor": "roundoff.formats",
    "tune": "roundoff.train.tuning.tune",
    "verify": "roundoff.plan.verify",
}
__all__ = sorted(_PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'roundoff' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    module = importlib.import_module(_PUBLIC[name])
    value = (
        module if name in ("capture", "compare", "quantize") else getattr(module, name)
    )  # a package that is called
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
