"""Packages that are called: ``roundoff.compare`` is a room of the house and a verb.

A package and a function cannot share a name: importing ``roundoff.compare.tensors.metrics``
sets ``roundoff.compare`` to the package. So the package forwards the call.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any


class CallablePackage(types.ModuleType):
    """A package that forwards calls, signature and help to a function elsewhere."""

    __verb__: str
    """``module:function``, imported when the package is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())

    def _function(self) -> Callable[..., Any]:
        module, _, name = self.__verb__.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


def call_forwards_to(package: str, verb: str) -> None:
    """Make the package ``package`` (its ``__name__``) callable.

    Args:
        package: ``__name__`` of the package.
        verb: ``module:function``; it is imported when the package is called.
    """
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module.__dict__["__verb__"] = verb


def installed_version() -> str:
    """Return the version of this package; ``"0"`` where it runs without being installed."""
    from importlib import metadata

    try:
        return metadata.version("roundoff")
    except metadata.PackageNotFoundError:
        return "0"
