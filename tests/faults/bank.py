"""The bank: what a fault is, how it is recorded, and how its true site is recognised."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import roundoff
from roundoff.site import matches

from .program import Program, program


@dataclass(frozen=True)
class Fault:
    """One thing people get wrong, in one place of a small training.

    Attributes:
        name: of the fault.
        family: the model: cnn, encoder, decoder, lstm.
        about: what was done wrong, in a line.
        sites: where: globs over ``module/operator#n`` as a recording names calls (all calls of the operator without
            ``#n``; the first is also ``#0``), or the name of a parameter or buffer that was wrong to begin with.
        phase: of the sites; several are separated by ``|``.
        steps: how many steps it takes to show.
        clean: the program, right.
        break_it: makes it wrong.
        random: the reason why two recordings of the broken program differ; empty where they don't.
        usual: whether ``clean`` is the family's usual program.
    """

    name: str
    family: str
    about: str
    sites: tuple[str, ...]
    phase: str
    steps: int
    clean: Callable[[], Program]
    break_it: Callable[[Program], None]
    random: str = ""
    usual: bool = True

    def run(self, faulty: bool) -> Program:
        """The program, right or wrong, ready to run."""
        made = self.clean()
        if faulty:
            self.break_it(made)
        return made

    def named_by(self, phase: str, *names: str | None) -> bool:
        """Whether one of the names of a row or culprit is that of the true site."""
        known = [name for name in names if name is not None]
        spelt = {
            form
            for n in known
            for form in (n, n.partition("#")[0], n if "#" in n else f"{n}#0")
        }
        return phase in self.phase.split("|") and any(
            matches(glob, name) for glob in self.sites for name in spelt
        )


FAULTS: list[Fault] = []


def fault(
    family: str,
    about: str,
    sites: str,
    *,
    phase: str = "forward",
    steps: int = 1,
    clean: Callable[[Program], None] | None = None,
    random: str = "",
) -> Callable[[Callable[[Program], None]], Callable[[Program], None]]:
    """Enters the decorated function, which breaks a program, into the bank under its own name.

    ``sites`` are separated by spaces, and ``module/{a,b}`` is short for ``module/a module/b``. ``clean`` changes what
    both sides run, where the family's usual program has no place for the fault.
    """

    def build() -> Program:
        made = program(family)
        if clean is not None:
            clean(made)
        return made

    def enter(break_it: Callable[[Program], None]) -> Callable[[Program], None]:
        FAULTS.append(
            Fault(
                break_it.__name__,
                family,
                about,
                _each(sites),
                phase,
                steps,
                build,
                break_it,
                random,
                clean is None,
            )
        )
        return break_it

    return enter


def _each(sites: str) -> tuple[str, ...]:
    found: list[str] = []
    for site in sites.split():
        head, brace, names = site.partition("{")
        found += (
            [head + name for name in names.removesuffix("}").split(",")]
            if brace
            else [site]
        )
    return tuple(found)


def record(
    fault: Fault, folder: str | os.PathLike[str], faulty: bool, keep: str = "tensors"
) -> None:
    """Runs the fault's program and records it into ``folder``."""
    write(partial(fault.run, faulty), folder, fault.steps, keep)


def write(
    make: Callable[[], Program],
    folder: str | os.PathLike[str],
    steps: int = 1,
    keep: str = "tensors",
) -> None:
    """Runs what ``make`` gives for ``steps`` steps and records it into ``folder``."""
    made = make()
    with made.beneath, roundoff.capture(folder, made.model, keep=keep) as run:
        for number in range(steps):
            made.step(made, number)
            run.step()
