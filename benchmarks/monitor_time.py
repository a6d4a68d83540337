"""What does the monitor cost a training step? Plain and monitored steps take turns in one process, on one thread.

A step is forward, backward and AdamW. Each model is there twice, with equal weights and batches; the ratio is of process CPU
time, a median over pairs whose order alternates. Beside it: hooks that look at nothing, and what Python programs
usually write (``isfinite`` and ``.item()`` of min, max, mean, std and norm).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from capture_models import BUILDERS, build
from common import clock, middle, options, progress, table, verdict
from torch import Tensor, nn

from roundoff.train import Monitor

BAR = 1.08
WARM, PAIRS = 3, 25
#: Its step takes a third of a millisecond, most of it Python: no bar, only what it comes to.
TINY = "MLP of 64 x 128"


def main() -> None:
    args = options(__doc__)
    torch.set_num_threads(1)
    cases: dict[str, Callable[[], tuple[nn.Module, Callable[[], None]]]] = {
        name: partial(_capture_model, name) for name in BUILDERS
    }
    cases |= {
        "transformers GPT-2": lambda: _transformers("gpt2"),
        "transformers ResNet-18": lambda: _transformers("resnet18"),
        TINY: _tiny,
    }
    rows = []
    for name, make in cases.items():
        chosen = [TINY] if args.quick and args.only is None else args.only
        if chosen is not None and name not in chosen:
            continue
        found = {}
        for how in ("monitor", "every 10", "naive"):
            found[how] = measure(make, how, 1 if args.quick else PAIRS)
            progress(f"{name}, {how}: {statistics.median(found[how]):.3f}")
        ratio, judged = statistics.median(found["monitor"]), name != TINY
        rows.append(
            (
                name,
                middle(found["monitor"]),
                BAR if judged else None,
                verdict(ratio, BAR, at_most=True) if judged else None,
                middle(found["every 10"]),
                middle(found["naive"]),
            )
        )
    table(
        "Monitored step / plain step, CPU time, median (range), 1 thread",
        ("model", "monitor", "bar", "verdict", "every=10", "five naive statistics"),
        rows,
    )


def measure(make: Any, how: str, pairs: int) -> list[float]:
    """Ratios of watched to plain steps; of the setting that looks at each tenth step, over ten steps each."""
    (model, step), (_, plain) = make(), make()
    ratios = []
    with ExitStack() as stack:
        watched = step
        if how == "naive":
            naive(stack, model)
        else:
            monitor = stack.enter_context(
                Monitor(model, every=10 if how == "every 10" else 1)
            )

            def watched() -> None:
                step()
                monitor.step()

        times = 10 if how == "every 10" else 1
        for pair in range(WARM + (pairs if times == 1 else max(1, pairs // 5))):
            works = [
                lambda: [plain() for _ in range(times)],
                lambda: [watched() for _ in range(times)],
            ]
            order = (0, 1) if pair % 2 else (1, 0)
            taken = {i: clock(works[i])[1] for i in order}
            ratios.append(taken[1] / taken[0])
    return ratios[WARM:]


def naive(stack: ExitStack, model: nn.Module) -> None:
    """Five statistics, each read at once, of the same tensors."""
    kept: list[list[float]] = []

    def look(x: Tensor) -> None:
        x = x.detach()
        kept.append(
            [
                v.item()
                for v in (
                    x.min(),
                    x.max(),
                    x.mean(),
                    x.std(),
                    x.norm(),
                    x.isfinite().all(),
                )
            ]
        )

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            look(output)
            if output.requires_grad:
                output.register_hook(look)

    for module in model.modules():
        stack.callback(module.register_forward_hook(hook).remove)


def _trained(
    model: nn.Module, forward_backward: Callable[[], None]
) -> tuple[nn.Module, Callable[[], None]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def _capture_model(name: str) -> tuple[nn.Module, Callable[[], None]]:
    return _trained(*build(name))


def _transformers(name: str) -> tuple[nn.Module, Callable[[], None]]:
    """The same sizes from the library's own classes; its ResNet adds residuals in place."""
    import transformers as t

    torch.manual_seed(0)
    if name == "gpt2":
        config = t.GPT2Config(
            n_layer=4,
            n_embd=256,
            n_head=4,
            vocab_size=8192,
            n_positions=128,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model: nn.Module = t.GPT2LMHeadModel(config)
        batch = {"input_ids": torch.randint(8192, (4, 128))}
        batch["labels"] = batch["input_ids"]
    else:
        shape = t.ResNetConfig(
            embedding_size=64,
            hidden_sizes=[64, 128, 256, 512],
            depths=[2, 2, 2, 2],
            layer_type="basic",
        )
        shape.num_labels = 10
        model = t.ResNetForImageClassification(shape)
        batch = {
            "pixel_values": torch.randn(16, 3, 64, 64),
            "labels": torch.randint(10, (16,)),
        }
    return _trained(model.train(), lambda: model(**batch).loss.backward())


def _tiny() -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    x, labels = torch.randn(64, 128), torch.randint(10, (64,))
    return _trained(
        model, lambda: nn.functional.cross_entropy(model(x), labels).backward()
    )


if __name__ == "__main__":
    main()
