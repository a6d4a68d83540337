"""Record what a program computes. The package is also the verb: ``roundoff.capture(path, ...)`` (see ``session``)."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Verb(types.ModuleType):
    """A package that is called like the function it is named for, so that ``roundoff.capture`` is one thing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from roundoff.capture.session import Capture

        return Capture(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
