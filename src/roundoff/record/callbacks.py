"""Callbacks that record a Hugging Face ``Trainer`` or a Lightning ``Trainer``.

The library is loaded when a callback is made.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from roundoff.errors import RunError
from roundoff.record.session import Capture


def transformers_callback(path: str | os.PathLike[str], **options: Any) -> Any:
    """Return a ``transformers.TrainerCallback`` for ``Trainer(callbacks=[...])``.

    ``options`` are those of ``roundoff.capture``. A step is one of the optimizer's,
    gradient accumulation included. A run that an exception ended is closed when the
    callback is used again or dropped; its finished steps can be read all the time.
    """
    base = _library("transformers").TrainerCallback

    class RoundoffCallback(_Recording, base):  # type: ignore[misc, valid-type]
        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            self.begin(model)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.end(None)

    return RoundoffCallback(path, options)


def lightning_callback(path: str | os.PathLike[str], **options: Any) -> Any:
    """Return a Lightning ``Callback`` for ``Trainer(callbacks=[...])``.

    ``options`` are those of ``roundoff.capture``. A step ends with the batch after which
    the optimizer has stepped, gradient accumulation included.
    """
    base = _library("lightning", "pytorch_lightning").Callback

    class RoundoffCallback(_Recording, base):  # type: ignore[misc, valid-type]
        stepped = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.stepped = trainer.global_step
            self.begin(pl_module)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, *_: Any, **__: Any
        ) -> None:
            if trainer.global_step != self.stepped:
                self.stepped = trainer.global_step
                self.step()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.end(None)

        def on_exception(
            self, trainer: Any, pl_module: Any, exception: BaseException
        ) -> None:
            self.end(exception)

    return RoundoffCallback(path, options)


class _Recording:
    """One ``Capture`` after the other, for hooks that have no ``with`` block."""

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        super().__init__()
        self.path = path
        self.options = options
        self.run: Capture | None = None

    def begin(self, model: Any) -> None:
        self.end(None)
        self.run = Capture(self.path, model, **self.options)
        self.run.__enter__()

    def step(self) -> None:
        if self.run is None:
            return
        self.run.step()
        if self.run.done:
            self.end(None)  # hooks and modes are gone for the rest of the training

    def end(self, error: BaseException | None) -> None:
        run = self.run
        self.run = None
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None)


def _library(*names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(
                f"{name}.pytorch" if name == "lightning" else name
            )
        except ImportError:
            continue
    raise RunError(
        f"{names[0]} is not installed",
        expected=" or ".join(names),
        do=f"pip install {names[0]}",
    )
