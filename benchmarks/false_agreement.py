"""Is a wrong program ever said to agree, from the default recording (statistics), bf16 beside fp32?

Mistakes of users in five trainings: an axis, a constant, a missing bias, another activation, the optimizer's numbers, a
scheduler, the loss. The right training in fp32 is the reference, the wrong one in bf16 (autocast and a bf16 model in
turn) the candidate; two steps of each are recorded. The answer may name a culprit, or say that statistics cannot
decide; it may not be that the runs agree. The right program in bf16 is held to no culprit, and to an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from common import progress, table, verdict
from operator_nets import NETS, Net
from torch import Tensor, nn
from torch.nn import functional

import roundoff as ro

STEPS = 2
Layer = TypeVar("Layer", bound=nn.Module)


@dataclass
class Training:
    """A training that is to run, open to being changed."""

    net: Net
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    before_step: Callable[[], object] = lambda: None
    after_step: Callable[[], object] = lambda: None
    around: list[AbstractContextManager[object]] = field(default_factory=list)

    def layer(self, name: str, kind: type[Layer]) -> Layer:
        """The layer of this name, which is of this kind."""
        layer = self.model.get_submodule(name)
        if not isinstance(layer, kind):
            raise TypeError(f"{name} is a {type(layer).__name__}")
        return layer


@dataclass(frozen=True)
class Mistake:
    """What somebody did wrong in one of the trainings."""

    net: str
    name: str
    make: Callable[[Training], None]


MISTAKES: list[Mistake] = []


def mistake(net: str) -> Callable[[Callable[[Training], None]], None]:
    """Enter the decorated function under its name."""

    def enter(make: Callable[[Training], None]) -> None:
        MISTAKES.append(Mistake(net, make.__name__, make))

    return enter


def instead(owner: Any, name: str, other: Callable[..., Any]) -> Any:
    """Return what puts ``other(original, *args)`` in the place of a function."""
    original = getattr(owner, name)
    return mock.patch.object(
        owner, name, lambda *args, **kwargs: other(original, *args, **kwargs)
    )


# -- words -----------------------------------------------------------------------------


@mistake("words")
def softmax_over_queries(t: Training) -> None:
    t.around.append(instead(Tensor, "softmax", lambda f, x, _: f(x, -2)))


@mistake("words")
def gelu_by_tanh(t: Training) -> None:
    t.around.append(instead(functional, "gelu", lambda f, x: f(x, approximate="tanh")))


@mistake("words")
def no_bias(t: Training) -> None:
    t.layer("up", nn.Linear).register_parameter("bias", None)


@mistake("words")
def norm_eps(t: Training) -> None:
    t.layer("norm1", nn.LayerNorm).eps = 1e-3


@mistake("words")
def no_mask(t: Training) -> None:
    t.around.append(instead(Tensor, "masked_fill", lambda _f, x, _m, _v: x))


@mistake("words")
def no_label_smoothing(t: Training) -> None:
    t.loss = lambda y, target: functional.cross_entropy(y, target)


@mistake("words")
def doubled_rate(t: Training) -> None:
    t.optimizer.param_groups[0]["lr"] *= 2


@mistake("words")
def other_beta(t: Training) -> None:
    t.optimizer.param_groups[0]["betas"] = (0.9, 0.99)


@mistake("words")
def no_weight_decay(t: Training) -> None:
    t.optimizer.param_groups[0]["weight_decay"] = 0.0


@mistake("words")
def attention_scale(t: Training) -> None:
    original = functional.scaled_dot_product_attention
    t.around.append(
        mock.patch.object(
            functional,
            "scaled_dot_product_attention",
            lambda q, k, v: original(q, k, v, scale=0.4),
        )
    )


# -- pictures --------------------------------------------------------------------------


@mistake("pictures")
def norm_momentum(t: Training) -> None:
    t.layer("batch", nn.BatchNorm2d).momentum = 0.01


@mistake("pictures")
def no_convolution_bias(t: Training) -> None:
    t.layer("depth", nn.Conv2d).register_parameter("bias", None)


@mistake("pictures")
def corners_aligned(t: Training) -> None:
    t.around.append(
        instead(
            functional,
            "interpolate",
            lambda f, x, **k: f(x, **k | {"align_corners": True}),
        )
    )


@mistake("pictures")
def less_momentum(t: Training) -> None:
    t.optimizer.param_groups[0]["momentum"] = 0.8


@mistake("pictures")
def nesterov(t: Training) -> None:
    t.optimizer.param_groups[0]["nesterov"] = True


@mistake("pictures")
def fewer_groups(t: Training) -> None:
    t.layer("group", nn.GroupNorm).num_groups = 2


@mistake("pictures")
def statistics_of_evaluation(t: Training) -> None:
    t.layer("batch", nn.BatchNorm2d).eval()


@mistake("pictures")
def halved_rate(t: Training) -> None:
    t.optimizer.param_groups[0]["lr"] /= 2


# -- sequences -------------------------------------------------------------------------


@mistake("sequences")
def scheduler(t: Training) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 0.9)
    t.after_step = schedule.step


@mistake("sequences")
def loss_beta(t: Training) -> None:
    t.loss = lambda y, target: functional.smooth_l1_loss(y, target, beta=0.5)


@mistake("sequences")
def elu_alpha(t: Training) -> None:
    t.around.append(instead(functional, "elu", lambda f, x: f(x, 0.9)))


@mistake("sequences")
def gates_exchanged(t: Training) -> None:
    def exchanged(f: Any, x: Tensor, n: int, dim: int) -> Any:
        r, z, new = f(x, n, dim)
        return z, r, new

    t.around.append(instead(Tensor, "chunk", exchanged))


@mistake("sequences")
def clipped(t: Training) -> None:
    t.before_step = lambda: nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)


@mistake("sequences")
def optimizer_eps(t: Training) -> None:
    t.optimizer.param_groups[0]["eps"] = 1e-3


# -- formulas --------------------------------------------------------------------------


@mistake("formulas")
def biased_deviation(t: Training) -> None:
    t.around.append(
        instead(Tensor, "std", lambda f, x, d, **k: f(x, d, correction=0, **k))
    )


@mistake("formulas")
def clamped_elsewhere(t: Training) -> None:
    t.around.append(instead(Tensor, "clamp", lambda f, x, a, _b: f(x, a, 0.35)))


@mistake("formulas")
def other_norm(t: Training) -> None:
    t.around.append(
        instead(functional, "normalize", lambda f, x, dim: f(x, p=1.5, dim=dim))
    )


@mistake("formulas")
def smoothing(t: Training) -> None:
    t.optimizer.param_groups[0]["alpha"] = 0.9


@mistake("formulas")
def sum_of_losses(t: Training) -> None:
    t.loss = lambda y, target: functional.mse_loss(y, target, reduction="sum")


@mistake("formulas")
def softplus_beta(t: Training) -> None:
    t.around.append(
        instead(
            functional,
            "mish",
            lambda _f, x: x * torch.tanh(functional.softplus(x, 1.2)),
        )
    )


# -- graph -----------------------------------------------------------------------------


@mistake("graph")
def softmax_over_rows(t: Training) -> None:
    t.around.append(instead(Tensor, "softmax", lambda f, x, _: f(x, 0)))


@mistake("graph")
def summed_over_fewer(t: Training) -> None:
    t.around.append(instead(Tensor, "sum", lambda f, x, *d, **k: f(x, *d, **k) * 1.2))


@mistake("graph")
def smallest_for_largest(t: Training) -> None:
    t.around.append(instead(Tensor, "amax", lambda _f, x, d: x.amin(d)))


@mistake("graph")
def weighted_positives(t: Training) -> None:
    t.loss = lambda y, target: functional.binary_cross_entropy_with_logits(
        y, target, pos_weight=torch.full((4,), 1.1, dtype=y.dtype)
    )


@mistake("graph")
def rate_of_sum(t: Training) -> None:
    t.optimizer.param_groups[0]["lr"] *= 1.5


@mistake("graph")
def no_decay(t: Training) -> None:
    t.optimizer.param_groups[0]["weight_decay"] = 0.0


# -- running ---------------------------------------------------------------------------


def record(path: Path, net: Net, kind: str, wrong: Mistake | None, keep: str) -> None:
    """Record two steps, in fp32, under autocast or with a bf16 model."""
    torch.manual_seed(0)
    model = net.build()
    batches = [net.batch() for _ in range(STEPS)]
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    model.to(dtype)
    training = Training(net, model, net.optimizer(model.parameters()), net.loss)
    if wrong is not None:
        wrong.make(training)
    with contextlib.ExitStack() as stack:
        for each in training.around:
            stack.enter_context(each)
        run = stack.enter_context(ro.capture(path, model, keep=keep, overwrite=True))
        for x, target in batches:
            _step(training, kind, _cast(x, dtype), _cast(target, dtype))
            run.step()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _step(training: Training, kind: str, x: Tensor, target: Tensor) -> None:
    training.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        loss = training.loss(training.model(x), target)
    loss.backward()
    training.before_step()
    training.optimizer.step()
    training.after_step()


@dataclass(frozen=True)
class Answer:
    """What is said of one pair: the word, the culprit, the first sentence."""

    net: str
    mistake: str
    kind: str
    word: str
    first: str
    sentence: str


def answered(net: str, name: str, kind: str, comparison: Any) -> Answer:
    culprits = comparison.culprits(1)
    first = ""
    if culprits:
        c = culprits[0]
        first = f"{c.phase} {c.site or c.reference_site}: {c.looks_like} {c.evidence}"
    sentence = comparison.answer.split(". ")[0]
    return Answer(net, name, kind, word_of(comparison), first[:110], sentence)


def word_of(comparison: Any) -> str:
    if "fail" in comparison.verdicts:
        return "parts"
    return "agrees" if comparison.agrees else "undecided"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MISTAKE")
    parser.add_argument("--keep", default="stats", choices=("stats", "tensors"))
    parser.add_argument("--answers", action="store_true", help="print the sentences")
    parser.add_argument("--quick", action="store_true", help="does it run?")
    args = parser.parse_args()
    torch.set_num_threads(1)
    answers: list[Answer] = []
    clean: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for net in NETS[:1] if args.quick else NETS:
            wrong = [m for m in MISTAKES if m.net == net.name]
            wrong = [m for m in wrong if not args.names or m.name in args.names]
            if not wrong:
                continue
            record(place / "reference", net, "fp32", None, args.keep)
            clean += list(clean_answers(place, net, args.keep))
            answers += list(wrong_answers(place, net, wrong, args.keep))
    show(answers, clean, args.keep)
    if args.answers:
        for answer in (*answers, *clean):
            print(f"{answer.net} {answer.mistake} {answer.kind}: {answer.sentence}")


def clean_answers(place: Path, net: Net, keep: str) -> Iterator[Answer]:
    for kind in ("fp32", "autocast", "bf16"):
        record(place / "candidate", net, kind, None, keep)
        yield _answer(place, net, "nothing wrong", kind)


def wrong_answers(
    place: Path, net: Net, wrong: Sequence[Mistake], keep: str
) -> Iterator[Answer]:
    for number, each in enumerate(wrong):
        kind = ("autocast", "bf16")[number % 2]
        record(place / "candidate", net, kind, each, keep)
        yield _answer(place, net, each.name, kind)


def _answer(place: Path, net: Net, name: str, kind: str) -> Answer:
    comparison = ro.compare(
        reference=place / "reference", candidate=place / "candidate"
    )
    answer = answered(net.name, name, kind, comparison)
    progress(f"{net.name} {name} {kind}: {answer.word} {answer.first}")
    return answer


def show(answers: Sequence[Answer], clean: Sequence[Answer], keep: str) -> None:
    header = ("net", "mistake", "candidate", "answer", "first culprit")
    rows = [(a.net, a.mistake, a.kind, a.word, a.first) for a in answers]
    table(f"What is said of a wrong program, from {keep}", header, rows)
    rows = [(a.net, a.mistake, a.kind, a.word, a.first) for a in clean]
    table("What is said of the right one", header, rows)
    counts = Counter(a.word for a in answers)
    of_clean = Counter(a.word for a in clean)
    words = ("parts", "undecided", "agrees")
    totals = [
        ("wrong", len(answers), *(counts[w] for w in words)),
        ("right", len(clean), *(of_clean[w] for w in words)),
    ]
    table("Answers", ("program", "pairs", *words), totals)
    print(f"said to agree: {counts['agrees']}, {verdict(-counts['agrees'], 0)}")
    print(f"false alarms: {of_clean['parts']}, {verdict(-of_clean['parts'], 0)}")


if __name__ == "__main__":
    main()
