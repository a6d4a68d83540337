"""The faults of the scripts: read, written as a script, recorded, and looked for."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from roundoff.record import capture_script

FOLDER = Path(__file__).parent / "programs"
#: What a fault can be: a value made or loaded before the step, something that did not
#: happen, the data, the order of the loop, a kernel of the user's, any other operator.
KINDS = ("loaded", "missing", "data", "loop", "kernel", "operator")
#: Their faults are looked at last, after all rules were written.
KEPT_APART = (
    "gru_tagger",
    "graphnet",
    "translate",
    "byol",
    "pendulum",
    "retrieval",
    "caption",
    "radiance",
    "fewshot",
    "tracker",
    "dreamer",
    "continual",
    "superres",
    "protein",
    "anomaly",
    "cluster",
    "beam_ctc",
    "sentiment",
    "audio_tag",
    "weather",
    "rerank",
    "instruct",
    "survival",
    "dpo",
    "volume",
    "quantiles",
    "clickrank",
    "pose",
    "normflow",
    "moco",
    "asr",
    "flowmatch",
    "seqrec",
    "preference",
    "fedavg",
    "lora_encoder",
    "sac",
    "energy",
    "ranker",
    "prune",
    "qat",
    "graphcl",
    "movement",
    "curriculum",
    "detector",
    "cascade",
    "voice",
    "kge",
    "pinn",
    "cpc",
    "dagger",
    "unlearn",
    "bandit",
    "neuralproc",
    "hypernet",
    "fixmatch",
    "linkpred",
    "vicreg",
    "tabdiff",
    "goals",
    "committee",
    "tsp",
    "blindspot",
    "hvae",
    "ocr",
    "gflow",
    "speaker",
    "lottery",
    "selfplay",
    "ner",
    "wgan",
    "pix2pix",
    "pcgrad",
)
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@dataclass(frozen=True, kw_only=True)
class ScriptFault:
    """A change of a script's text, and what a comparison has to name.

    Attributes:
        script: the name of the script.
        name: in words.
        kind: one of ``KINDS``.
        old: a text that the script has once.
        new: what stands there in the wrong script.
        lines: texts of other lines that may be named in place of the changed ones.
        parameter: names of parameters or buffers, or parts of them, one of which may
            be named too.
        says: a pattern that the words about the fault must match; "" for none.
        whole: the script ends no step where it is wrong.
    """

    script: str
    name: str
    kind: str
    old: str
    new: str
    lines: tuple[str, ...] = ()
    parameter: tuple[str, ...] = ()
    says: str = ""
    whole: bool = False

    @property
    def text(self) -> str:
        """The text of the wrong script."""
        right = text_of(self.script)
        if right.count(self.old) != 1:
            raise ValueError(f"{self.script}, {self.name}: {self.old!r} is not once")
        return right.replace(self.old, self.new)

    def true_lines(self) -> tuple[set[int], set[int]]:
        """Return the lines that may be named in the right script and in the wrong one."""
        right = text_of(self.script)
        wrong = self.text
        start = right.index(self.old)
        ours = _lines_between(right, start, start + len(self.old))
        theirs = _lines_between(wrong, start, start + len(self.new))
        for part in self.lines:
            ours |= _lines_with(right, part)
            theirs |= _lines_with(wrong, part)
        return ours, theirs


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A script written in another way that computes the same: nothing may be blamed.

    Attributes:
        script: the name of the script.
        name: in words.
        edits: texts that the script has once, and what stands in their places.
        sites: what may be named: nothing.
    """

    script: str
    name: str
    edits: tuple[tuple[str, str], ...]
    sites: ClassVar[tuple[str, ...]] = ()

    @property
    def text(self) -> str:
        """The text of the rewritten script."""
        text = text_of(self.script)
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.script}, {self.name}: {old!r} is not once")
            text = text.replace(old, new)
        return text

    @property
    def apart(self) -> bool:
        """True for the quarter that is measured at the end alone."""
        return zlib.crc32(self.name.encode()) % 4 == 0

    def record(self, folder: Path, *, candidate: bool, keep: str) -> Path:
        """Record the script, or as it is rewritten, and return the run."""
        text = self.text if candidate else text_of(self.script)
        return record_script(text, folder / "script", keep=keep)


def text_of(script: str) -> str:
    """Return the text of a script."""
    return (FOLDER / f"{script}.py").read_text(encoding="utf-8")


def faults_of(script: str) -> list[ScriptFault]:
    """Return the faults of a script."""
    return [_fault(script, entry) for entry in _entries(script)["fault"]]


def rewrites_of(script: str) -> list[Rewrite]:
    """Return the ways to write a script that compute the same."""
    return [
        Rewrite(
            script=script,
            name=entry["name"],
            edits=tuple((edit["old"], edit["new"]) for edit in entry["edit"]),
        )
        for entry in _entries(script).get("rewrite", ())
    ]


def _entries(script: str) -> dict[str, Any]:
    with (FOLDER / f"{script}.toml").open("rb") as file:
        return tomllib.load(file)


def _fault(script: str, entry: dict[str, Any]) -> ScriptFault:
    parameter = entry.pop("parameter", ())
    if isinstance(parameter, str):
        parameter = (parameter,)
    lines = tuple(entry.pop("lines", ()))
    return ScriptFault(script=script, lines=lines, parameter=tuple(parameter), **entry)


def _lines_between(text: str, start: int, end: int) -> set[int]:
    first = text.count("\n", 0, start) + 1
    last = text.count("\n", 0, max(start, end - 1)) + 1
    return set(range(first, last + 1))


def _lines_with(text: str, part: str) -> set[int]:
    lines = enumerate(text.splitlines(), 1)
    return {number for number, line in lines if part in line}


def record_script(
    text: str,
    folder: Path,
    *,
    keep: str = "tensors",
    steps: str = "0-1",
    whole: bool = False,
) -> Path:
    """Write a script into a folder, record it there, and return where the run is.

    The words of the command are the same for all folders. A default dtype that the
    script sets ends with it.
    """
    folder.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    run = folder / "run"
    default = torch.get_default_dtype()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            capture_script(
                [str(script)], run, keep=keep, steps=steps, whole=whole, stop=not whole
            )
        finally:
            torch.set_default_dtype(default)
    return run


def rank_of(fault: ScriptFault, culprits: Sequence[Any]) -> int | None:
    """Return which of the culprits, from 1, is the truth; None where none of them is."""
    for rank, culprit in enumerate(culprits, 1):
        if names_truth(fault, culprit):
            return rank
    return None


def names_truth(fault: ScriptFault, culprit: Any) -> bool:
    """Return True where a culprit names the line, the parameter, or the step of the loop.

    Of data and of the loop's order the words count: a line of the loop has a hundred
    operators, and all of them read the data.
    """
    if fault.kind in ("data", "loop"):
        return says_truth(fault, culprit) or (
            fault.kind == "data" and _on_true_line(fault, culprit)
        )
    named = _words(culprit)
    if any(part in named for part in fault.parameter):
        return True
    return _on_true_line(fault, culprit)


def says_truth(fault: ScriptFault, culprit: Any) -> bool:
    """Return True where the words about a culprit say what the fault is."""
    return re.search(fault.says, _words(culprit), re.IGNORECASE) is not None


def _on_true_line(fault: ScriptFault, culprit: Any) -> bool:
    ours, theirs = fault.true_lines()
    pairs = ((culprit.reference_line, ours), (culprit.line, theirs))
    return any(_numbers(line) & lines for line, lines in pairs)


def _numbers(line: str | None) -> set[int]:
    """Return the numbers of the script's own lines: of the call, and of its kernel."""
    return {int(number) for number in re.findall(r"\btrain\.py:(\d+)", line or "")}


def _words(culprit: Any) -> str:
    parts = (
        culprit.name,
        culprit.site,
        culprit.reference_site,
        culprit.looks_like,
        culprit.evidence,
    )
    return " ".join(part for part in parts if part)
