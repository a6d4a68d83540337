"""Scripts as users write them, recorded whole, with what they make before their first step.

A text holds both sides. Lines that begin with ``A|`` stand in the reference alone, ``B|`` in all candidates, ``C|`` in
the right one, ``1|`` and ``2|`` in that with the first or the second bug.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from tests.forked import command, side_by_side

from roundoff.record import capture_script

HEAD = """import math, os
import torch
import torch.distributed as dist
from torch import nn
import torch.nn.functional as F
torch.set_num_threads(1)
torch.manual_seed(0)
def gen(seed): return torch.Generator().manual_seed(seed)
"""
CANDIDATES = "C12"
Folder = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class ScriptCase:
    """Two scripts; ``which`` is ``C`` for a right candidate, ``1`` or ``2`` for a bug.

    Attributes:
        name: of the text.
        text: of both sides.
        world: processes of the candidate.
        whole: the script is recorded as one step.
        which: the candidate.
        truths: by bug: parts of the lines, or of the words about them, that may be named.
    """

    #: What the text of each side begins with, and the name of its file.
    head: ClassVar[str] = HEAD
    filename: ClassVar[str] = "train.py"
    name: str
    text: str
    world: int = 1
    whole: bool = False
    which: str = "C"
    truths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[str, ...]:
        """Parts of what must be named first; empty for a right candidate."""
        return self.truths.get(self.which, ())

    @property
    def apart(self) -> bool:
        """True for the quarter that is measured at the end alone."""
        return zlib.crc32(self.name.encode()) % 4 == 0

    def variants(self) -> list[ScriptCase]:
        """Return the right candidate, and those with bugs."""
        bugs = [
            replace(self, which=bug, name=f"{self.name}, bug {bug}")
            for bug in self.truths
        ]
        return [self, *bugs]

    def source(self, *, candidate: bool) -> str:
        """Return the text of one of the two scripts."""
        kept = f"B{self.which}" if candidate else "A"
        lines = [
            line[2:] if line[1:2] == "|" else line
            for line in self.text.splitlines()
            if line[1:2] != "|" or line[0] in kept
        ]
        return self.head + "\n".join(lines) + "\n"

    def record(self, folder: Folder, *, candidate: bool, keep: str = "tensors") -> Path:
        """Record one of the two, in as many processes as it needs, and return the run."""
        script = self._written(folder, candidate=candidate)
        run = script.parent / "run"
        words = ["capture", "-q", "-o", str(run), "--keep", keep]
        words += ["--whole"] if self.whole else []
        world = self.world if candidate else 1
        _launch([*words, "--", str(script)], world)
        return run

    def record_here(self, folder: Folder, *, candidate: bool, keep: str) -> Path:
        """Record one of the two in this process, and return the run."""
        script = self._written(folder, candidate=candidate)
        run = script.parent / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            capture_script(
                [str(script)], run, keep=keep, whole=self.whole, stop=not self.whole
            )
        return run

    def _written(self, folder: Folder, *, candidate: bool) -> Path:
        script = Path(folder, self.filename)
        script.parent.mkdir(parents=True)
        script.write_text(self.source(candidate=candidate), encoding="utf-8")
        return script

    def is_named(self, culprit: object) -> bool:
        """Return True where a culprit is on a true line, or the words are about it."""
        words = " ".join(
            str(getattr(culprit, part, None) or "")
            for part in ("site", "reference_site", "name", "evidence", "line")
        )
        lines = enumerate(self.source(candidate=True).splitlines(), 1)
        true = [
            f"{self.filename}:{n}"
            for n, line in lines
            if any(t in line for t in self.sites)
        ]
        spelt = {*words.replace(",", " ").replace(")", " ").split()}
        return any(t in words for t in self.sites) or any(
            word.endswith(line) for word in spelt for line in true
        )


def _launch(words: list[str], world: int) -> None:
    environment = {"OMP_NUM_THREADS": "1"}
    if world > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    side_by_side(
        command,
        [words],
        [environment | (rank if world > 1 else {}) for rank in ranks],
    )
