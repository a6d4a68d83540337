"""What the tests of comparisons share: small programs, recorded, and the rows of one step of a recording."""

from __future__ import annotations

from itertools import count

import pytest
import torch

import roundoff
from roundoff.compare import rows_of


@pytest.fixture
def recorded(tmp_path):
    """``recorded(work, model)`` records ``work(model)`` as one step and loads the run; with tensors unless ``keep`` says."""
    number = count()

    def record(work, model=None, *, path=None, steps=1, keep="tensors", **options):
        torch.manual_seed(0)
        folder = tmp_path / (path or f"run{next(number)}")
        with roundoff.capture(folder, model, keep=keep, **options) as run:
            for _ in range(steps):
                work(model) if model is not None else work()
                run.step()
        return roundoff.load(folder)

    return record


@pytest.fixture
def step_rows():
    """``step_rows(run)``: its rows by record."""
    return lambda run, rank=0, step=0: rows_of(run, rank, step)
