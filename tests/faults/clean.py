"""Pairs of runs that differ in nothing that is wrong: nothing in them may be blamed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from .bank import write
from .program import FAMILIES, Program, program

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Pair:
    """Two ways to run the clean program of a family: ``reference`` and ``candidate`` record into a folder."""

    name: str
    family: str
    reference: Callable[[Folder], None]
    candidate: Callable[[Folder], None]


def clean_pairs(backend: str = "aot_eager") -> list[Pair]:
    """The pairs of every family. ``backend``: of ``torch.compile``; "inductor" needs a C++ compiler and takes longer."""
    found = []
    for family in FAMILIES:
        # What dropout draws depends on the format and on the compiler, so it is left in one pair alone.
        drawing, still = _run(family, lambda p: p), _run(family, _still)
        others = {
            "fp32, bf16 autocast": _run(family, _autocast),
            "eager, compiled": _run(family, lambda p: _compiled(p, backend)),
            "1, 2 threads": _run(family, _still, around=_two_threads),
            "with, without oneDNN": _run(family, _still, around=_without_onednn),
        }
        found.append(Pair("the same twice", family, drawing, drawing))
        found += [
            Pair(name, family, still, candidate) for name, candidate in others.items()
        ]
    return found


def _run(
    family: str,
    change: Callable[[Program], Program],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Callable[[Folder], None]:
    def run(folder: Folder) -> None:
        with around():
            write(lambda: change(program(family)), folder)

    return run


def _still(p: Program) -> Program:
    for module in p.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return p


def _autocast(p: Program) -> Program:
    exact = p.loss

    def loss(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return exact(*args)

    return replace(_still(p), loss=loss)


def _compiled(p: Program, backend: str) -> Program:
    torch.compiler.reset()
    return replace(_still(p), model=torch.compile(p.model, backend=backend))


@contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@contextmanager
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)
