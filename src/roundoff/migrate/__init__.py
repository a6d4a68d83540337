"""A training script → the same script with mixed precision, or with present APIs.

The package is also the verb: ``roundoff.migrate(script, to="amp")``.
"""

from __future__ import annotations

import lazy_loader

from roundoff.packages import call_forwards_to

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
call_forwards_to(__name__, "roundoff.verbs.migrate:migrate")
