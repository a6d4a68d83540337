"""What does training under a plan cost beside torch.autocast with the same casts, and what does bf16 gain over fp32?

A step is forward, loss and backward of GPT-2 (4 layers, width 256, 4 sequences of 128) or ResNet-18 (16 images of 3x64x64).
Steps take turns in one process, in an order that changes; a ratio is of the processor time of two steps of one round, and
what is shown is the median. One thread (OMP_NUM_THREADS to change it).

Plans: autocast's own lists; every site named, with the format that it has under them; and rules for operators, beside
torch.autocast with those operators' inputs cast by hand.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from capture_models import BUILDERS, narrow
from common import clock, options, progress, table, verdict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import roundoff as ro
from roundoff.plan import Plan, Rule

WARM, ROUNDS = 3, 40
BAR = 1.05
#: What torch.autocast gained when the bars were set, on two cores with AVX512-BF16.
MEASURED = {"gpt2": 2.7, "resnet18": 1.35}
Around = Callable[[], AbstractContextManager[Any]]


class Float(nn.Module):
    """A module that gets its input in fp32: what one writes by hand to keep an operator in fp32 under autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x.float())
        return output


#: Modules that the rules for operators keep in fp32, and the operators that these call.
KEPT = {
    "gpt2": ((nn.LayerNorm, nn.GELU), ("layer_norm", "gelu")),
    "resnet18": ((nn.BatchNorm2d,), ("batch_norm",)),
}


def main() -> None:
    args = options(__doc__)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    names = ("resnet18",) if args.quick else ("gpt2", "resnet18")
    rows, gains = [], []
    for name in names:
        if args.only is not None and name not in args.only:
            continue
        ways = dict(contenders(name, small=args.quick))
        casts = {label: counted(way) for label, way in ways.items()}
        times = take_turns(ways, 0, 2) if args.quick else take_turns(ways, WARM, ROUNDS)
        for label in ("the built-in lists", "every site named", "rules for operators"):
            other = "by hand" if label == "rules for operators" else "torch.autocast"
            ratio, low, high = quartiles(times[label], times[other])
            progress(f"{name}, {label}: {ratio:.3f}")
            rows.append(
                (
                    name,
                    label,
                    f"{ratio:.3f} ({low:.3f} – {high:.3f})",
                    f"{casts[label]} / {casts[other]}",
                    BAR,
                    verdict(ratio, BAR, at_most=True),
                )
            )
        plain, ours = (
            quartiles(times["fp32"], times[label])[0]
            for label in ("torch.autocast", "the built-in lists")
        )
        gains.append(
            (name, f"{ours:.3f}", f"{plain:.3f}", MEASURED[name], verdict(ours, plain))
        )
    threads = torch.get_num_threads()
    table(
        f"Step under roundoff.autocast / step under torch.autocast, median (quartiles), {threads} thread(s)",
        ("model", "plan", "ratio", "casts of both", "bar", "verdict"),
        rows,
    )
    table(
        f"Training speed over fp32, {threads} thread(s)",
        (
            "model",
            "bf16 plan",
            "torch.autocast",
            "torch.autocast when the bar was set",
            "as fast as torch.autocast",
        ),
        gains,
    )


def contenders(name: str, small: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each way to train, as a step of a model of its own; all have equal weights."""
    model, batch, loss = built(name, small)
    sites = every_site(model, batch, loss)
    operators = Plan(
        (Rule("fp32", tuple(f"op:{op}" for op in KEPT[name][1])),), autocast="bf16"
    )
    for label, plan in (
        ("fp32", None),
        ("torch.autocast", None),
        ("by hand", None),
        ("the built-in lists", "bf16"),
        ("every site named", sites),
        ("rules for operators", operators),
    ):
        model, batch, loss = built(name, small)
        if label == "by hand":
            upcast(model, KEPT[name][0])
        around: Around
        if plan is not None:
            around = partial(same, ro.autocast(plan, model))
        elif label == "fp32":
            around = nullcontext
        else:
            around = partial(torch.autocast, "cpu", torch.bfloat16)

        def step(
            model: Any = model,
            batch: Any = batch,
            loss: Any = loss,
            around: Around = around,
        ) -> None:
            model.zero_grad(set_to_none=True)
            with around():
                value = loss(model(batch))
            value.backward()

        yield label, step


def same(region: Any) -> Any:
    """A region can be entered again and again."""
    return region


def built(
    name: str, small: bool
) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The model in training mode, a batch and the loss; the ``small`` ResNet-18 is narrow.

    A processor without products in bf16 takes thirty times as long for them as for fp32.
    """
    torch.manual_seed(0)
    model, batch, loss = narrow() if small else BUILDERS[name]()
    return model.train(), batch, loss


def every_site(model: nn.Module, batch: Any, loss: Any) -> Plan:
    """A plan without autocast that names every site with the format it has under autocast's own lists."""
    region = ro.autocast("bf16", model, record=True)
    with region:
        loss(model(batch))
    formats: dict[str, list[str]] = {}
    for row in region.report.iter_rows(named=True):
        if row["ran"] in ("bf16", "fp32"):
            formats.setdefault(row["ran"], []).append(row["site"])
    return Plan(
        tuple(
            Rule(form, tuple(dict.fromkeys(sites))) for form, sites in formats.items()
        ),
        "fp32",
    )


def upcast(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    for path, module in list(model.named_modules()):
        if isinstance(module, kinds):
            parent, _, own = path.rpartition(".")
            setattr(model.get_submodule(parent), own, Float(module))


def take_turns(
    ways: dict[str, Callable[[], None]], warm: int, rounds: int
) -> dict[str, list[float]]:
    """Processor seconds of each way in each round after the first, ``warm`` ones."""
    order = list(ways)
    times: dict[str, list[float]] = {label: [] for label in ways}
    shuffled = random.Random(0)
    for number in range(warm + rounds):
        shuffled.shuffle(order)
        for label in order:
            seconds = clock(ways[label])[1]
            if number >= warm:
                times[label].append(seconds)
    return times


def quartiles(over: list[float], under: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratios of one round."""
    low, median, high = statistics.quantiles(
        [a / b for a, b in zip(over, under, strict=True)], n=4
    )
    return median, low, high


class Casts(TorchDispatchMode):
    """How many floating-point tensors change their format."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_to_copy":
            self.count += args[0].dtype != result.dtype and result.is_floating_point()
        return result


def counted(step: Callable[[], None]) -> int:
    casts = Casts()
    with casts:
        step()
    return casts.count


if __name__ == "__main__":
    main()
