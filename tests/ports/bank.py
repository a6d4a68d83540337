"""The bank of ports: reference files, ports by other hands, and small wrong changes of these.

Each folder is a network: ``reference.py``, its ports, and ``faults.py``. A port reads the
reference's weights from ``weights.pt`` beside it, turned and renamed by a loader of its own.
Where a port defines no batches, those of the reference stand behind its text.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
NETWORKS = (
    "cnn",
    "resnet",
    "vit",
    "gpt",
    "lstm",
    "gru",
    "unet",
    "mixer",
    "graph",
    "swin",
    "conformer",
    "gat",
    "segmenter",
    "experts",
    "flow",
    "llama",
    "seq2seq",
    "convnext",
    "wavenet",
    "yolo",
    "mamba",
    "crf",
    "diffusion",
    "bert",
    "gpt2",
    "regnet",
    "t5",
    "clip",
    "detr",
    "latent_ode",
    "perceiver",
    "points",
    "recommender",
    "nerf",
    "retnet",
    "codec",
    "actor",
    "operators",
    "forecast",
    "tabular",
    "mobilenet",
    "capsules",
    "transformer_xl",
    "wav2vec",
    "latent_attention",
    "vocoder",
    "molecule",
    "doubly_residual",
    "efficientnet",
    "tagger",
    "mvit",
    "deberta",
    "evoformer",
    "gemma",
    "sam",
    "tacotron",
    "stylegan",
    "rwkv",
    "raft",
    "hyena",
    "matcher",
    "slots",
    "densenet",
    "vae",
    "deepspeech",
    "sasrec",
    "landmarks",
    "mae",
    "keyword",
    "albert",
    "bidaf",
    "inception",
    "textcnn",
    "dcgan",
    "marian",
    "deeplab",
    "patchtst",
    "simclr",
    "ssd",
    "convlstm",
    "arcface",
    "charlm",
    "wrn",
    "shufflenet",
    "crnn",
    "tasnet",
    "retinanet",
    "rnnt",
    "din",
    "whisper",
    "segformer",
    "glow",
    "graphormer",
    "hrnet",
    "tft",
    "poolformer",
    "fno",
    "mobilevit",
    "dlrm",
    "s4d",
    "dien",
    "pixelcnn",
    "fastpitch",
    "restormer",
    "schnet",
    "performer",
    "longformer",
    "vitdet",
    "dit",
    "natten",
    "tabnet",
    "gmlp",
    "convmixer",
    "xdeepfm",
    "bigbird",
    "hubert",
    "settransformer",
    "tcn",
    "granite",
    "unetr",
    "timesnet",
    "bisenet",
    "coatnet",
    "informer",
    "xlstm",
    "maskformer",
    "biaffine",
    "fcos",
    "pointer",
    "pvt",
    "gin",
    "rcan",
    "cait",
    "deepar",
)
#: They were written after the rules: docs/benchmarks.md has what a first look at them gave.
KEPT_APART = (
    "operators",
    "forecast",
    "tabular",
    "mobilenet",
    "capsules",
    "transformer_xl",
    "wav2vec",
    "latent_attention",
    "vocoder",
    "molecule",
    "doubly_residual",
    "efficientnet",
    "tagger",
    "mvit",
    "deberta",
    "evoformer",
    "gemma",
    "sam",
    "tacotron",
    "stylegan",
    "rwkv",
    "raft",
    "hyena",
    "matcher",
    "slots",
    "densenet",
    "vae",
    "deepspeech",
    "sasrec",
    "landmarks",
    "mae",
    "keyword",
    "albert",
    "bidaf",
    "inception",
    "textcnn",
    "dcgan",
    "marian",
    "deeplab",
    "patchtst",
    "simclr",
    "ssd",
    "convlstm",
    "arcface",
    "charlm",
    "wrn",
    "shufflenet",
    "crnn",
    "tasnet",
    "retinanet",
    "rnnt",
    "din",
    "whisper",
    "segformer",
    "glow",
    "graphormer",
    "hrnet",
    "tft",
    "poolformer",
    "fno",
    "mobilevit",
    "dlrm",
    "s4d",
    "dien",
    "pixelcnn",
    "fastpitch",
    "restormer",
    "schnet",
    "performer",
    "longformer",
    "vitdet",
    "dit",
    "natten",
    "tabnet",
    "gmlp",
    "convmixer",
    "xdeepfm",
    "bigbird",
    "hubert",
    "settransformer",
    "tcn",
    "granite",
    "unetr",
    "timesnet",
    "bisenet",
    "coatnet",
    "informer",
    "xlstm",
    "maskformer",
    "biaffine",
    "fcos",
    "pointer",
    "pvt",
    "gin",
    "rcan",
    "cait",
    "deepar",
)
_NOT_PORTS = ("__init__", "reference", "faults")
_BATCHES = re.compile(r"^def batches\(\):\n(?:[ \t].*\n|\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """One wrong edit of a port, and what is to be named.

    Attributes:
        port: name of the file.
        what: what was done wrong, in words.
        old: the text that is replaced, everywhere it stands.
        new: what stands there instead.
        at: a part of the lines that compute the wrong value, or several with ``|``
            between; these and the changed lines are right readings.
        parameter: names of parameters that hold the wrong values, with ``|`` between;
            then no line is asked for,
            unless ``at`` says where either reading is right.
        phase: the phase in which the wrong values come up; then no line is asked for.
        reference: a part of the reference's line that the port leaves out; naming it
            counts too.
        steps: how many have to be recorded until it does something: what an optimizer
            keeps shows in the second.
    """

    port: str
    what: str
    old: str
    new: str
    at: str | None = None
    parameter: str | None = None
    phase: str | None = None
    reference: str | None = None
    steps: int = 1

    def lines(self, right: str) -> set[int]:
        """Return the numbers of the changed lines and of those that compute the wrong value.

        A statement of several lines is one: a call is recorded at the first of them.
        """
        wrong = self.applied(right)
        numbered = list(enumerate(wrong.splitlines(), 1))
        edits = SequenceMatcher(None, right.splitlines(), wrong.splitlines(), False)
        changed = {
            number + 1
            for tag, _, _, start, end in edits.get_opcodes()
            if tag != "equal"
            for number in range(start, end)
        }
        parts = self.at.split("|") if self.at is not None else []
        changed = {n for line in changed for n in _statement(wrong, line)}
        return changed | {n for n, line in numbered if any(p in line for p in parts)}

    def applied(self, right: str) -> str:
        """Return the port's text with the change."""
        if self.old not in right:
            raise ValueError(f"{self.port}, {self.what}: no {self.old!r}")
        return right.replace(self.old, self.new)


@dataclass(frozen=True)
class Port:
    """A port of a network: right without a change, wrong with one."""

    network: str
    name: str
    change: Change | None = None

    @property
    def title(self) -> str:
        """The port and what is wrong with it."""
        wrong = f": {self.change.what}" if self.change else ""
        return f"{self.network}/{self.name}{wrong}"

    @property
    def steps(self) -> int:
        """How many steps show what is wrong; of a right port as many as its faults need."""
        if self.change is not None:
            return self.change.steps
        changes = _changes(self.network)
        return max((c.steps for c in changes if c.port == self.name), default=1)

    def names_truth(self, culprit: Any) -> bool:
        """Return True where a culprit is the line or the parameter that is wrong."""
        change = self.change
        if change is None or culprit is None:
            return False
        if change.parameter is not None and culprit.name in change.parameter.split("|"):
            return True
        if change.parameter is not None and change.at is None:
            return False
        if change.phase is not None:
            return culprit.phase == change.phase
        lines = change.lines(_text(self.network, self.name))
        if culprit.line and culprit.line.startswith("port.py:"):
            if int(culprit.line.rpartition(":")[2]) in lines:
                return True
        reference = (HERE / self.network / "reference.py").read_text()
        return (
            change.reference is not None
            and bool(culprit.reference_line)
            and change.reference in _line(reference, culprit.reference_line)
        )


@cache
def _statements(text: str) -> list[range]:
    """Return the lines of each statement that has no others in it."""
    return [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and not hasattr(node, "body")
    ]


def _statement(text: str, line: int) -> Iterable[int]:
    return next((lines for lines in _statements(text) if line in lines), [line])


def _line(text: str, line: str) -> str:
    lines = text.splitlines()
    number = int(line.rpartition(":")[2])
    return lines[number - 1] if number <= len(lines) else ""


def ports(networks: Sequence[str] = NETWORKS) -> list[Port]:
    """Return the right ports of these networks."""
    return [
        Port(network, path.stem)
        for network in networks
        for path in sorted((HERE / network).glob("*.py"))
        if path.stem not in _NOT_PORTS
    ]


def faults(networks: Sequence[str] = NETWORKS) -> list[Port]:
    """Return the faulty ports of these networks."""
    return [
        Port(network, change.port, change)
        for network in networks
        for change in _changes(network)
    ]


def _changes(network: str) -> Sequence[Change]:
    """Return the wrong edits of a network's ports."""
    return importlib.import_module(f".{network}.faults", __package__).FAULTS


@cache
def _text(network: str, name: str) -> str:
    text = (HERE / network / f"{name}.py").read_text()
    if "def batches()" not in text:
        reference = (HERE / network / "reference.py").read_text()
        found = _BATCHES.search(reference)
        text += "\n\n" + (found[0] if found else "")
    return text


def written(port: Port, folder: Path) -> tuple[Path, Path]:
    """Write reference, weights and port into a folder; return the two files."""
    folder.mkdir(parents=True, exist_ok=True)
    source = (HERE / port.network / "reference.py").read_text()
    reference = folder / "reference.py"
    reference.write_text(source)
    scope: dict[str, Any] = {"__name__": "reference", "__file__": str(reference)}
    exec(compile(source, str(reference), "exec"), scope)  # noqa: S102 - the bank's own
    torch.save(scope["model"]().state_dict(), folder / "weights.pt")
    text = _text(port.network, port.name)
    if port.change is not None:
        text = port.change.applied(text)
    candidate = folder / "port.py"
    candidate.write_text(text)
    return reference, candidate
