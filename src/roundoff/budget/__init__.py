"""The adjoint error budget: what each site's rounding costs the output.

The package is also the verb: ``roundoff.budget(workload, formats)``.
"""

from __future__ import annotations

import lazy_loader

from roundoff.packages import call_forwards_to

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
call_forwards_to(__name__, "roundoff.budget.measure:budget")
