"""Does LossScaler move its scale and its weights as torch.amp.GradScaler does, bit for bit?

Two copies of a small network train side by side on the same random steps: gradients accumulated over one to three
micro-batches, NaN and Inf planted at random in them, clipped or not. After each step scales, counts and all weights are
compared as bits. Two optimizers together are compared only where torch steps both or none: elsewhere it steps one of them
and LossScaler none, on purpose. Then the exponential rule, beside the published one in plain Python.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterable

import torch
from common import ROOT, options, table, verdict
from torch import Tensor, nn

import roundoff as ro
from roundoff.train import Exponential, ScaleState

sys.path.insert(0, str(ROOT))
from tests.train.scaling.published import paddle, tensorflow

BAR = 10_000
#: shares of steps with a planted value: rare as in training, and often
SHARES = (0.02, 0.3)
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.01, 0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
}


def main() -> None:
    args = options(__doc__)
    torch.set_num_threads(1)
    steps = 200 if args.quick else BAR
    rows = []
    for name in OPTIMIZERS:
        for share in SHARES:
            start = time.perf_counter()
            good, skipped, scales = equal(name, share, steps)
            rows.append(
                (
                    name,
                    f"{share:.0%}",
                    steps,
                    skipped,
                    f"{min(scales):g} – {max(scales):g}",
                    good,
                    verdict(good, steps),
                    time.perf_counter() - start,
                )
            )
    header = (
        "optimizer",
        "planted",
        "steps",
        "skipped",
        "scales",
        "equal",
        f"bar: all of {steps}",
        "seconds",
    )
    table("Steps after which scale, count and weights are the same bits", header, rows)
    table(
        "Exponential rule: scales and counts equal to the published ones",
        ("rule of", "steps", "equal", "bar: all"),
        [
            (name, steps, good, verdict(good, steps))
            for name, good in exponential(steps)
        ],
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def equal(optimizer: str, share: float, steps: int) -> tuple[int, int, list[float]]:
    """How many steps ended alike, how many of them were skipped, and the scales there were."""
    draw = random.Random(share)
    theirs, ours = network(), network()
    make = OPTIMIZERS[optimizer]
    reference, mine = make(theirs.parameters()), make(ours.parameters())
    interval = 20
    torchs = torch.amp.GradScaler("cpu", growth_interval=interval)
    scaler = ro.LossScaler(growth_interval=interval, floor=0.0, patience=None)
    good = skipped = 0
    scales: list[float] = []
    for step in range(steps):
        if (
            scaler.get_scale() < 2.0**-100
        ):  # the end of torch's rule: 1/0 makes NaN of the next good step
            start = {**torchs.state_dict(), "scale": 2.0**16}
            torchs.load_state_dict(start)
            scaler.load_state_dict(start)
        planted = (
            draw.choice((math.inf, -math.inf, math.nan))
            if draw.random() < share
            else 1.0
        )
        clip = draw.choice((None, 0.5))
        generator = torch.Generator().manual_seed(step)
        reference.zero_grad()
        mine.zero_grad()
        for _ in range(draw.randint(1, 3)):
            x = torch.randn(4, 8, generator=generator)
            torchs.scale(loss_of(theirs, x, planted)).backward()
            scaler.backward(loss_of(ours, x, planted))
        torchs.unscale_(reference)
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        torchs.step(reference)
        torchs.update()
        scaler.step(mine, clip=clip)
        same = all(
            torch.equal(p.view(torch.int32), q.view(torch.int32))
            for p, q in zip(theirs.parameters(), ours.parameters(), strict=True)
        )
        count = (
            scaler.state_dict()["_growth_tracker"]
            == torchs.state_dict()["_growth_tracker"]
        )
        good += same and count and scaler.get_scale() == torchs.get_scale()
        skipped += bool(scaler.skipped)
        scales.append(scaler.get_scale())
    return good, skipped, scales


def loss_of(model: nn.Module, x: Tensor, planted: float) -> Tensor:
    """A finite loss whose gradient is multiplied by ``planted``."""
    y = model(x)
    if planted != 1.0:
        y.register_hook(lambda gradient: gradient * planted)
    output: Tensor = y.square().mean()
    return output


def exponential(steps: int) -> list[tuple[str, int]]:
    draw = random.Random(1)
    pattern = [draw.random() < 0.2 for _ in range(steps)]
    found = []
    for name, consecutive, published in (
        ("TensorFlow, Ascend", False, tensorflow),
        ("PaddlePaddle", True, paddle),
    ):
        rule = Exponential(2.0**16, 5, 2, 2.0, 0.8, consecutive)
        state = ScaleState(rule, torch.device("cpu"), rule.init_scale, 1.0, math.inf)
        good = 0
        for bad, expected in zip(
            pattern, published(2.0**16, 5, 2, 2.0, 0.8, pattern), strict=True
        ):
            state.update(torch.tensor(float(bad)))
            good += (float(state.scale), int(state.good), int(state.bad)) == expected
        found.append((name, good))
    return found


if __name__ == "__main__":
    main()
