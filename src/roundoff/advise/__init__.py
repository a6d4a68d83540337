"""A workload → where its time goes, what would be faster, what that costs in precision.

The package is also the verb: ``roundoff.advise(workload)``."""

from __future__ import annotations

import lazy_loader

from roundoff.packages import call_forwards_to

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
call_forwards_to(__name__, "roundoff.verbs.advise:advise")
