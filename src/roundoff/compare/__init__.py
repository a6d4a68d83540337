"""Compare two recorded runs. The package is also the verb: ``roundoff.compare(reference=..., candidate=...)``."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Verb(types.ModuleType):
    """A package that is called like the function it is named for, so that ``roundoff.compare`` is one thing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from roundoff.compare.comparison import compare

        return compare(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
