"""What the tests of capture share: a handler that keeps every call, and a way to watch a model once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from roundoff.ops.calls import CallMode, float_tensors, watch


class Recorder:
    """Runs every call as it is and keeps it, with a copy of what it returned."""

    def __init__(self):
        self.calls = []
        self.results = []
        self.written = []

    def call(self, call):
        result = call.run()
        self.calls.append(call)
        self.results.append([t.detach().clone() for t in float_tensors(result)])
        return result

    def before_write(self, tensor):
        self.written.append(tensor.detach().clone())

    @property
    def names(self):
        """The sites of calls that returned floating-point tensors."""
        return [
            str(call.site)
            for call, result in zip(self.calls, self.results, strict=True)
            if result
        ]


@dataclass
class Watched:
    output: object
    mode: CallMode
    recorder: Recorder

    @property
    def names(self):
        return self.recorder.names

    @property
    def calls(self):
        return [
            c
            for c, r in zip(self.recorder.calls, self.recorder.results, strict=True)
            if r
        ]

    def call(self, name):
        """The one call with this site name."""
        (found,) = [call for call in self.calls if str(call.site) == name]
        return found

    @property
    def excluded(self):
        return {(e.operator, e.reason): e.count for e in self.mode.excluded.values()}


@pytest.fixture
def seen():
    """``seen(model, *args)`` runs a model, or a function, under the mode without gradients."""

    def run(model, *args, grad=False, owner=None, **kwargs):
        recorder = Recorder()
        owner = model if isinstance(model, nn.Module) else owner or nn.Module()
        with watch(owner, recorder) as mode, torch.set_grad_enabled(grad):
            mode.begin()
            with mode:
                output = model(*args, **kwargs)
        return Watched(output, mode, recorder)

    return run


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
