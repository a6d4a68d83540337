"""Two runs or two checkpoints → what differs in how they were set up.

The package is also the verb: ``roundoff.check("runs/a", "runs/b")``."""

from __future__ import annotations

import lazy_loader

from roundoff.packages import call_forwards_to

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
call_forwards_to(__name__, "roundoff.verbs.check:check")
