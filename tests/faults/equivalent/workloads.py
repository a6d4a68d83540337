"""Workload files that differ in a layer; the texts are those of ``scripts.ScriptCase``."""

from __future__ import annotations

from pathlib import Path

from roundoff.plan import Variant, variant
from roundoff.verbs.diagnose_candidate import record
from roundoff.workload import Workload

from .scripts import Folder, ScriptCase

HEAD = """import math
import torch
from torch import nn
import torch.nn.functional as F
def gen(seed): return torch.Generator().manual_seed(seed)
"""


class WorkloadCase(ScriptCase):
    """Two workload files; the candidate is run on the batches of the reference."""

    head = HEAD
    #: Of the file of either side.
    filename = "work.py"

    def files(self, folder: Folder) -> tuple[Path, Path]:
        """Write both files, and return where they are."""
        written = []
        for side, candidate in (("reference", False), ("candidate", True)):
            path = Path(folder, side, self.filename)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.source(candidate=candidate), encoding="utf-8")
            written.append(path)
        return written[0], written[1]

    def record(self, folder: Folder, *, candidate: bool, keep: str = "tensors") -> Path:
        """Record one of the two in this process, and return the run."""
        reference, other = self.files(Path(folder, "files"))
        run = Path(folder, "run")
        workload = Workload.load(reference)
        side = variant(workload, other) if candidate else Variant("reference", workload)
        record(side, run, 1, keep=keep)
        return run
