"""How much memory does a budget need, against one training step of the same batch of 32?

Each measurement has a process of its own. Resident: the peak of the resident set (its high-water mark is reset once model
and batch are loaded) above what was resident then. Allocated: the peak of what torch's CPU allocator hands out
(allocated.py), above zero at the start. The training step is forward, backward and the first step of
SGD or AdamW (which also creates its state). Bar: at most 1.5 times the step. The last column compares with what the method
needs in principle: the activations that a forward pass keeps for backward, plus the probe gradients of the largest site.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from allocated import allocated_peak
from common import FORMATS, ROOT, options, progress, table, verdict

import roundoff as ro
from roundoff.ops import Call, float_tensors, watch
from roundoff.plan import Plain
from roundoff.workload import Workload, target_tensors

BAR = 1.5
ROWS = 32
#: example, and the length that sentences are repeated to: the short ones of the example, and full-length input
CASES = (("minilm", 0), ("minilm", 128), ("resnet18", 0))


def main() -> None:
    args = options(__doc__)
    rows = []
    for name, length in CASES[:1] if args.quick else CASES:
        found = {
            what: _measure(args.examples / f"{name}.py", length, what)
            for what in ("sgd", "adamw", "budget")
        }
        label = f"{name}, {length} tokens" if length else name
        budget = found["budget"]
        ideal = budget["activations"] + budget["largest"] * (budget["probes"] + 1)
        for kind, key in (("resident", "rss"), ("allocated", "peak")):
            ratios = [budget[key] / found[step][key] for step in ("sgd", "adamw")]
            rows.append(
                (
                    label,
                    kind,
                    budget["probes"],
                    *(
                        f"{found[w][key] / 2**20:.0f}"
                        for w in ("sgd", "adamw", "budget")
                    ),
                    f"{ratios[0]:.2f}",
                    verdict(ratios[0], BAR, at_most=True),
                    f"{ratios[1]:.2f}",
                    verdict(ratios[1], BAR, at_most=True),
                    f"{budget[key] / ideal:.2f}",
                )
            )
        progress(
            f"{label}: activations {budget['activations'] >> 20} MiB, "
            f"largest site {budget['largest'] >> 20} MiB, K = {budget['probes']}"
        )
    table(
        f"Peak memory of one budget of {len(FORMATS)} formats, batch {ROWS} (MiB)",
        (
            "workload",
            "memory",
            "probes",
            "step, SGD",
            "step, AdamW",
            "budget",
            "budget / SGD",
            f"bar {BAR}",
            "budget / AdamW",
            f"bar {BAR}",
            "budget / (activations + probes of one site)",
        ),
        rows,
    )


def _measure(path: Path, length: int, what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tracker in ("rss", "peak"):
        command = [
            sys.executable,
            __file__,
            "--child",
            str(path),
            str(length),
            what,
            tracker,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT
        )
        if done.returncode:
            raise SystemExit(f"{what} of {path.name} failed:\n{done.stderr}")
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def child(path: str, length: str, what: str, tracker: str) -> None:
    """Run one measurement and print it as JSON."""
    torch.set_num_threads(2)
    whole = Workload.load(path)
    workload, small = _batch_of(whole, int(length), ROWS), _batch_of(whole, 0, 2)
    extra: dict[str, Any] = _needs(workload) if what == "budget" else {}

    def work(on: Workload) -> None:
        if what == "budget":
            extra["probes"] = ro.budget(on, FORMATS).about.probes
        else:
            _step(on, what)

    work(small)  # code that is loaded at first use does not count
    workload.model.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if tracker == "rss":
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the high-water mark starts from now
        before = _status("VmRSS")
        work(workload)
        print(json.dumps({"rss": _status("VmHWM") - before} | extra))
        return
    print(json.dumps({"peak": allocated_peak(lambda: work(workload))} | extra))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def _batch_of(workload: Workload, length: int, rows: int) -> Workload:
    """The same workload on one batch of ``rows`` samples, sentences repeated up to ``length`` tokens."""

    def fit(parts: list[torch.Tensor]) -> torch.Tensor:
        width = min(p.shape[1] for p in parts)
        joined = torch.cat([p[:, :width] for p in parts])[:rows]
        return joined.repeat(1, -(-length // width))[:, :length] if length else joined

    batches = workload.batches
    if isinstance(batches[0], dict):
        batch: Any = {k: fit([b[k] for b in batches]) for k in batches[0]}
    elif isinstance(batches[0], tuple):
        batch = tuple(torch.cat(parts)[:rows] for parts in zip(*batches, strict=True))
    else:
        batch = torch.cat(batches)[:rows]
    return Workload(
        workload.model, [batch], forward=workload.forward, name=workload.name
    )


def _step(workload: Workload, name: str) -> None:
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    workload.model.train()
    optimizer = kinds[name](workload.model.parameters(), lr=1e-6)
    outputs = target_tensors(workload.run(workload.batches[0]), None)
    torch.stack([t.square().mean() for t in outputs.values()]).sum().backward()
    optimizer.step()


class _Largest(Plain):
    size = 0

    def run(self, call: Call) -> Any:
        result = call.run()
        self.size = max(
            [self.size, *(t.numel() * t.element_size() for t in float_tensors(result))]
        )
        return result


def _needs(workload: Workload) -> dict[str, int]:
    """Bytes that a forward pass keeps for backward besides the parameters, and of the largest site."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in workload.model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    largest = _Largest()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = workload.run(workload.batches[0])
    del output
    with torch.no_grad(), watch(workload.model, largest) as mode, mode:
        workload.run(workload.batches[0])
    return {"activations": sum(kept.values()), "largest": largest.size}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
