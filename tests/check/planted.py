"""Pairs of training scripts that differ in one thing of their set-up, or in none.

Each script is ``SCRIPT`` with one piece of text replaced. What a pair is expected to be
told for is written beside it: words that the first line must have, and both values.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import side_by_side

from roundoff.record import capture_script

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(7)
noise = torch.Generator().manual_seed(3)
images = torch.rand(96, 12, generator=noise)
labels = torch.randint(0, 3, (96,), generator=noise)
images = (images - 0.5) / 0.29


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.02)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
order = torch.Generator().manual_seed(5)
loader = DataLoader(
    TensorDataset(images, labels), batch_size=8, shuffle=True, generator=order
)
model.train()
for epoch in range(1):
    for number, (x, y) in enumerate(loader):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
"""
#: The same loop with a loss scale, and no autocast.
SCALED = (
    SCRIPT.replace(
        "model.train()\n",
        'scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)\nmodel.train()\n',
    )
    .replace(
        "        loss.backward()\n",
        "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)\n",
    )
    .replace(
        "        optimizer.step()\n",
        "        scaler.step(optimizer)\n        scaler.update()\n",
    )
)


#: Two groups of parameters, and an optimizer that has both.
DECAYED = "{'params': [p for p in model.parameters() if p.dim() > 1]}"
PLAIN = (
    "{'params': [p for p in model.parameters() if p.dim() < 2],"
    " 'weight_decay': 0.0, 'lr': 0.005}"
)
GROUPED = SCRIPT.replace("AdamW(model.parameters(),", f"AdamW([{DECAYED}, {PLAIN}],")


@dataclass(frozen=True)
class Planted:
    """One difference: what is replaced in the candidate, and what must be said of it.

    Attributes:
        name: of the case.
        old: text of the script, and ``new`` what the candidate has in its place.
        words: the first line has all of them.
        script: the reference's.
        environment: variables of the candidate's process.
        steps: of both recordings.
    """

    name: str
    old: str
    new: str
    words: Sequence[str]
    script: str = SCRIPT
    environment: tuple[tuple[str, str], ...] = ()
    steps: str = "0-1"
    level: str = "op"


PLANTED = (
    Planted("learning rate", "lr=0.01", "lr=0.02", ("learning rate", "0.01", "0.02")),
    Planted(
        "rate of a group in another place",
        f"{DECAYED}, {PLAIN}",
        f"{PLAIN.replace('0.005', '0.02')}, {DECAYED}",
        ("learning rate", "0.005", "0.02"),
        script=GROUPED,
    ),
    Planted(
        "weight decay",
        "weight_decay=0.02",
        "weight_decay=0.1",
        ("weight decay", "0.02", "0.1"),
    ),
    Planted(
        "betas", "lr=0.01,", "lr=0.01, betas=(0.9, 0.95),", ("beta", "0.999", "0.95")
    ),
    Planted("eps", "lr=0.01,", "lr=0.01, eps=1e-4,", ("eps", "1e-08", "0.0001")),
    Planted(
        "optimizer class",
        "torch.optim.AdamW",
        "torch.optim.Adam",
        ("optimizer", "AdamW", "Adam"),
    ),
    Planted(
        "batch size",
        "batch_size=8",
        "batch_size=16",
        ("batch size", "8", "16"),
    ),
    Planted(
        "accumulation",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n",
        "        if number % 2 == 0:\n            continue\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n",
        ("backward pass", "1", "2"),
    ),
    Planted(
        "clipping",
        "model.parameters(), 1.0)",
        "model.parameters(), 5.0)",
        ("clip", "1", "5"),
    ),
    Planted(
        "no clipping",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "",
        ("clip", "none"),
    ),
    Planted("seed", "torch.manual_seed(7)", "torch.manual_seed(8)", ("seed", "7", "8")),
    Planted("shuffle", "shuffle=True", "shuffle=False", ("shuffle", "True", "False")),
    Planted(
        "another order",
        "order = torch.Generator().manual_seed(5)",
        "order = torch.Generator().manual_seed(6)",
        ("order", "5", "6"),
    ),
    Planted(
        "sampler and shard",
        "batch_size=8, shuffle=True, generator=order",
        "batch_size=8, sampler=torch.utils.data.DistributedSampler("
        "images, num_replicas=2, rank=1, shuffle=False)",
        ("sampler", "RandomSampler", "DistributedSampler"),
    ),
    Planted(
        "normalisation missing",
        "images = (images - 0.5) / 0.29\n",
        "",
        ("data", "mean"),
    ),
    Planted(
        "other initial weights",
        "model = Net()\n",
        "model = Net()\nnn.init.kaiming_normal_(model.last.weight)\n",
        ("initial", "last.weight"),
    ),
    Planted("dropout", "nn.Dropout(0.1)", "nn.Dropout(0.3)", ("dropout", "0.1", "0.3")),
    Planted(
        "evaluation mode left on",
        "model.train()\n",
        "model.eval()\n",
        ("mode", "training", "evaluation"),
    ),
    Planted(
        "a frozen layer",
        "model = Net()\n",
        "model = Net()\nmodel.first.requires_grad_(False)\n",
        ("frozen", "first.weight"),
    ),
    Planted(
        "a parameter in no optimizer",
        "torch.optim.AdamW(model.parameters(),",
        "torch.optim.AdamW([p for n, p in model.named_parameters() if n != 'last.bias'],",
        ("no optimizer", "last.bias"),
    ),
    Planted(
        "scheduler",
        "StepLR(optimizer, 4, gamma=0.5)",
        "StepLR(optimizer, 4, gamma=0.1)",
        ("learning rate", "0.005", "0.001"),
    ),
    Planted(
        "no scheduler",
        "        schedule.step()\n",
        "",
        ("learning rate", "0.005", "0.01"),
    ),
    Planted(
        "loss scale",
        "init_scale=1024.0",
        "init_scale=2.0",
        ("loss scale", "1024", "2"),
        script=SCALED,
    ),
    Planted(
        "autocast missing",
        '        with torch.autocast("cpu", torch.bfloat16):\n    ',
        "        if True:\n    ",
        ("bfloat16", "low precision"),
    ),
    Planted(
        "autocast of another device",
        'torch.autocast("cpu", torch.bfloat16)',
        'torch.autocast("cuda", torch.bfloat16)',
        ("bfloat16", "low precision"),
    ),
    Planted(
        "matmul precision",
        "torch.set_num_threads(1)\n",
        'torch.set_num_threads(1)\ntorch.set_float32_matmul_precision("high")\n',
        ("matmul precision", "highest", "high"),
    ),
    Planted(
        "TF32",
        "torch.set_num_threads(1)\n",
        "torch.set_num_threads(1)\ntorch.backends.cudnn.allow_tf32 = False\n",
        ("TF32", "on", "off"),
    ),
    Planted(
        "threads",
        "torch.set_num_threads(1)\n",
        "torch.set_num_threads(2)\n",
        ("threads", "1", "2"),
    ),
    Planted(
        "deterministic flag",
        "torch.set_num_threads(1)\n",
        "torch.set_num_threads(1)\ntorch.use_deterministic_algorithms(True)\n",
        ("deterministic", "off", "on"),
    ),
    Planted(
        "torch.compile",
        "model = Net()\n",
        'model = Net()\nmodel.compile(backend="eager")\n',
        ("compile", "none", "eager"),
    ),
    Planted(
        "an environment variable",
        "",
        "",
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
        environment=(("CUBLAS_WORKSPACE_CONFIG", ":16:8"),),
    ),
    Planted(
        "world size",
        "",
        "",
        ("processes", "1", "2"),
        environment=(("WORLD_SIZE", "2"), ("RANK", "0")),
    ),
    Planted(
        "version",
        "import torch\n",
        'import torch\nimport numpy\nnumpy.__version__ = "2.0.1"\n',
        ("numpy", "2.0.1"),
    ),
)

#: Kept apart: looked at once, after the rules were written.
KEPT_APART = (
    Planted(
        "momentum",
        "momentum=0.9",
        "momentum=0.5",
        ("momentum", "0.9", "0.5"),
        script=SCRIPT.replace(
            "torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.02)",
            "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",
        ),
    ),
    Planted(
        "clipping before unscaling",
        "        scaler.unscale_(optimizer)\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        scaler.unscale_(optimizer)\n",
        ("clip", "unscale"),
        script=SCALED,
    ),
    Planted(
        "dropped last batch",
        "shuffle=True,",
        "shuffle=True, drop_last=True,",
        ("drop_last", "False", "True"),
        script=SCRIPT.replace("batch_size=8", "batch_size=9"),
    ),
    Planted(
        "norm's eps",
        "nn.BatchNorm1d(16)",
        "nn.BatchNorm1d(16, eps=1e-3)",
        ("norm", "1e-05", "0.001"),
    ),
    Planted(
        "half-precision kind",
        "torch.bfloat16",
        "torch.float16",
        ("bfloat16", "float16"),
        level="module",
    ),
    Planted(
        "frozen statistics",
        "model.train()\n",
        "model.train()\nmodel.norm.eval()\n",
        ("mode", "norm"),
        level="module",
    ),
    Planted(
        "data set",
        "TensorDataset(images, labels)",
        "TensorDataset(images[:80], labels[:80])",
        ("samples", "96", "80"),
    ),
    Planted(
        "group's rate",
        "[{'params': model.first.parameters()},",
        "[{'params': model.first.parameters(), 'lr': 0.001},",
        ("learning rate", "0.001", "0.01"),
        script=SCRIPT.replace(
            "torch.optim.AdamW(model.parameters(), lr=0.01,",
            "torch.optim.AdamW([{'params': model.first.parameters()},"
            " {'params': [p for n, p in model.named_parameters() if 'first' not in n]}],"
            " lr=0.01,",
        ),
    ),
)


@dataclass(frozen=True)
class Alike:
    """A pair of scripts that train alike; the candidate has ``new`` for ``old``."""

    name: str
    old: str = ""
    new: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    level: str = "op"
    script: str = SCRIPT


ALIKE = (
    Alike("another folder"),
    Alike("module level", level="module"),
    Alike(
        "a comment and other names", "loss.backward()", "loss.backward()  # goes back"
    ),
    Alike(
        "another host and home",
        environment=(("HOSTNAME", "other"), ("TORCH_HOME", "/x")),
    ),
    Alike("a secret in the environment", environment=(("TORCH_HUB_TOKEN", "abc"),)),
    Alike(
        "printing and time",
        "    for number",
        "    import time; time.time(); print('epoch', epoch)\n    for number",
    ),
    Alike(
        "the same sum written otherwise",
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad(set_to_none=True)\n",
    ),
    Alike(
        "cleared at the beginning",
        "        loss.backward()\n",
        "        optimizer.zero_grad()\n        loss.backward()\n",
    ),
    Alike("with a loss scale", script=SCALED),
    Alike(
        "groups of parameters in another order",
        f"{DECAYED}, {PLAIN}",
        f"{PLAIN}, {DECAYED}",
        script=GROUPED,
    ),
    Alike("a worker for the data", "shuffle=True,", "shuffle=True, pin_memory=False,"),
)


def record_pair(case: Planted | Alike, folder: Path) -> tuple[Path, Path]:
    """Record both scripts, each ``train.py`` in a folder; return those of the runs."""
    steps = case.steps if isinstance(case, Planted) else "0-1"
    text = case.script.replace(case.old, case.new) if case.old else case.script
    if case.old:
        assert text != case.script, case.name
    path = folder / "b" / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    run = path.parent / "run"
    record_in_fork(path, run, case.environment, steps=steps, level=case.level)
    return _reference(case.script, steps, case.level), run


def record_in_fork(
    script: Path,
    run: Path,
    environment: Sequence[tuple[str, str]] = (),
    **options: str,
) -> None:
    """Record a script in a process of its own, whose settings end with it."""
    side_by_side(_record, [str(script), str(run), options], [dict(environment)])


def _record(script: str, run: str, options: dict[str, Any]) -> None:
    capture_script([script], run, **options)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of recordings that several pairs share; it ends with the process."""
    return tempfile.TemporaryDirectory()


@functools.cache
def _reference(script: str, steps: str, level: str) -> Path:
    """Record a script that several pairs have for their reference, once."""
    folder = Path(_folder().name, str(len(list(Path(_folder().name).iterdir()))), "a")
    path = folder / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text(script, encoding="utf-8")
    record_in_fork(path, folder / "run", steps=steps, level=level)
    return folder / "run"
