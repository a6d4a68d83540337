"""Module level: outputs of modules, the gradients at them, and the gradients of
parameters; no dispatch mode."""

from __future__ import annotations

import functools
import threading
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
def _outside_transforms() -> Iterator[None]:
    """Neither autograd nor ``torch.func`` take part in what is computed inside."""
    with torch.no_grad():
        if torch._C._functorch.peek_interpreter_stack() is None:
            yield
        else:
            with temporarily_clear_interpreter_stack():
                yield


class ModuleRecording:
    """Listens to ``Paths`` and writes a row for each output of each module, and for the
    gradient that comes back to it.

    Args:
        paths: which module runs.
        failed: told of a fault of the recording.
        is_wanted: says which ``module/class`` to record; all when None.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        failed: Callable[[Exception], None],
        is_wanted: Callable[[str], bool] | None = None,
    ) -> None:
        self.paths = paths
        self.failed = failed
        self.is_wanted = is_wanted
        self.recorder: Recorder | None = None
        self._lock = threading.RLock()

    def begin(self, recorder: Recorder) -> None:
        """Start a new step."""
        self.recorder = recorder

    def end(self) -> None:
        """Record nothing more; gradients that still arrive are not looked at."""
        self.recorder = None

    def listen(self, module: nn.Module, path: str, inputs: Any, output: Any) -> None:
        """Return the hook of every module's forward."""
        if self.recorder is None or torch._C._is_tracing():
            return
        kind = type(module).__name__
        if self.is_wanted is not None and not self.is_wanted(f"{path}/{kind}"):
            return
        try:
            self._record_outputs(self.recorder, kind, path, inputs, output)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self.failed(error)

    def _record_outputs(
        self, recorder: Recorder, kind: str, path: str, inputs: Any, output: Any
    ) -> None:
        source = Source("forward", path, None)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        with _outside_transforms(), self._lock:
            read = [recorder.record_of(t, source) for t in tensors_in(inputs)]
            records = recorder.call(source, kind, None, read, outputs)
        for place, (tensor, record) in enumerate(zip(outputs, records, strict=True)):
            if tensor.requires_grad:
                hook = functools.partial(
                    self._record_gradient, recorder, path, kind, place, record
                )
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _record_gradient(
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
        source = Source("backward", path, None)
        try:
            with _outside_transforms(), self._lock:
                recorder.call(source, kind, None, [record], [gradient], place=place)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self.failed(error)
