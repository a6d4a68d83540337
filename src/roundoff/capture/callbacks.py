"""Callbacks that record a Hugging Face ``Trainer`` or a Lightning ``Trainer``; the library is loaded when one is made."""

from __future__ import annotations

import importlib
import os
from typing import Any

from roundoff.capture.session import Capture
from roundoff.errors import RunError


def transformers_callback(path: str | os.PathLike[str], **options: Any) -> Any:
    """A ``transformers.TrainerCallback`` for ``Trainer(callbacks=[...])``; ``options`` are those of ``roundoff.capture``."""
    base = _library("transformers").TrainerCallback

    class RoundoffCallback(base):  # type: ignore[misc, valid-type]
        run: Capture | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.run = Capture(path, model, **options)
            self.run.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.run is not None:
                self.run.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.run is not None:
                self.run.__exit__(None, None, None)
                self.run = None

    return RoundoffCallback()


def lightning_callback(path: str | os.PathLike[str], **options: Any) -> Any:
    """A Lightning ``Callback`` for ``Trainer(callbacks=[...])``; ``options`` are those of ``roundoff.capture``."""
    base = _library("lightning", "pytorch_lightning").Callback

    class RoundoffCallback(base):  # type: ignore[misc, valid-type]
        run: Capture | None = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.run = Capture(path, module, **options)
            self.run.__enter__()

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if self.run is not None:
                self.run.step()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self._close(None)

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            self._close(exception)

        def _close(self, error: BaseException | None) -> None:
            if self.run is not None:
                self.run.__exit__(None if error is None else type(error), error, None)
                self.run = None

    return RoundoffCallback()


def _library(*names: str) -> Any:
    for name in names:
        try:
            module = importlib.import_module(f"{name}.pytorch" if name == "lightning" else name)
        except ImportError:
            continue
        return module
    raise RunError(f"{names[0]} is not installed", expected=" or ".join(names), do=f"pip install {names[0]}")
