"""Module level: outputs of modules, the gradients at them, and the gradients of parameters; no dispatch mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves

from roundoff.ops import tensors_in
from roundoff.record.module_paths import Paths
from roundoff.record.recorder import Recorder, Source


@contextmanager
def _apart() -> Iterator[None]:
    """Neither autograd nor ``torch.func`` take part in what is computed inside."""
    with torch.no_grad():
        if torch._C._functorch.peek_interpreter_stack() is None:
            yield
        else:
            with temporarily_clear_interpreter_stack():
                yield


class ModuleRecording:
    """Listens to ``Paths`` and writes a row for each output of each module, and for the gradient that comes back to it."""

    def __init__(
        self,
        paths: Paths,
        *,
        failed: Callable[[Exception], None],
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        self.paths, self.failed, self.wanted = paths, failed, wanted
        self.recorder: Recorder | None = None

    def begin(self, recorder: Recorder) -> None:
        """A new step."""
        self.recorder = recorder

    def end(self) -> None:
        """Nothing more is recorded; gradients that still arrive are not looked at."""
        self.recorder = None

    def listen(self, module: nn.Module, path: str, inputs: Any, output: Any) -> None:
        """The hook of every module's forward."""
        recorder = self.recorder
        kind = type(module).__name__
        if (
            recorder is None
            or torch._C._is_tracing()
            or (self.wanted is not None and not self.wanted(f"{path}/{kind}"))
        ):
            return
        try:
            source = Source("forward", path, None)
            outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            with _apart():
                records = [recorder.record_of(t, source) for t in tensors_in(inputs)]
                made = recorder.call(source, kind, None, records, outputs)
            for place, (tensor, record) in enumerate(zip(outputs, made, strict=True)):
                if tensor.requires_grad:
                    tensor.register_hook(
                        functools.partial(
                            self._gradient, recorder, path, kind, place, record
                        )
                    )  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self.failed(error)

    def _gradient(
        self,
        recorder: Recorder,
        path: str,
        kind: str,
        place: int,
        record: int,
        gradient: Tensor,
    ) -> None:
        if recorder is not self.recorder:
            return
        try:
            with _apart():
                recorder.call(
                    Source("backward", path, None),
                    kind,
                    None,
                    [record],
                    [gradient],
                    place=place,
                )
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self.failed(error)
