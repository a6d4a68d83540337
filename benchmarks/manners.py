"""What do small things cost? Processor time of whole processes, in turns, beside `import torch` and plain Python.

`diagnose` of three linear layers is held against `import torch`, an error in a path against Python doing nothing; then how
long a diagnosis of a small transformer goes without a word of progress, in processor time.
"""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import options, progress, table, verdict

PAIRS = 5
THREE_LAYERS = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))

def batches():
    return [torch.randn(8, 16)]
"""
TRANSFORMER = """
import torch

def model():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

def batches():
    return [torch.randn(4, 16, 64) for _ in range(2)]
"""
#: name, command, beside, most: a ratio, or seconds that it takes more
CASES = (
    ("diagnose, three linear layers", "diagnose three.py -o out", "import torch", 2.5),
    ("the same without the curve and checks", "diagnose three.py -o out --no-pareto --checks 0", "import torch", 2.5),
    ("show nope, seconds beyond Python", "show nope", "pass", 0.5),
    ("--help, seconds beyond Python", "--help", "pass", 0.5),
    ("a bad option, seconds beyond Python", "diagnose three.py --formats bf17", "pass", 0.5),
)  # fmt: skip
#: Most seconds without progress.
SILENCE = 2.0


def main() -> None:
    args = options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "three.py").write_text(THREE_LAYERS)
        (Path(folder) / "transformer.py").write_text(TRANSFORMER)
        rows = []
        for name, command, beside, most in CASES[1:4] if args.quick else CASES:
            pairs = 1 if args.quick else PAIRS
            value = measure(command.split(), beside, pairs, folder)
            progress(f"{name}: {value:.2f}")
            rows.append(
                (name, f"{value:.2f}", most, verdict(value, most, at_most=True))
            )
        if not args.quick:
            longest, stages = silence(folder)
            said = verdict(longest, SILENCE, at_most=True)
            rows.append((f"seconds between two reports, of {stages}", f"{longest:.2f}", SILENCE, said))  # fmt: skip
    table("Processor time, one thread", ("what", "measured", "bar", "verdict"), rows)


def measure(command: Sequence[str], beside: str, pairs: int, folder: str) -> float:
    """The median ratio to importing torch, or of seconds beyond Python that does nothing."""
    values = []
    for _ in range(pairs):
        ours = seconds([sys.executable, "-m", "roundoff", *command], folder)
        base = seconds([sys.executable, "-c", beside], folder)
        values.append(ours - base if beside == "pass" else ours / base)
    return statistics.median(values)


def seconds(command: Sequence[str], folder: str) -> float:
    """Processor time of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def silence(folder: str) -> tuple[float, int]:
    """The most processor time between two reports of a diagnosis, and how many there are."""
    import roundoff

    workload = roundoff.Workload.load(Path(folder) / "transformer.py")
    moments = [time.process_time()]
    roundoff.diagnose(workload, progress=lambda *_: moments.append(time.process_time()))
    moments.append(time.process_time())
    gaps = [later - sooner for sooner, later in itertools.pairwise(moments)]
    return max(gaps), len(moments) - 2


if __name__ == "__main__":
    main()
