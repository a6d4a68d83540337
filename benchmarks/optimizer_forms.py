"""Is the other form of an optimizer called wrong, and is a wrong one still named?

Each optimizer of torch in its single form beside its foreach, fused and capturable forms,
from tensors and from statistics: alarms, of which there may be none. Then the same with
something wrong in the other form: how many are found, with the optimizer named first.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, progress, table, verdict
from torch import nn

import roundoff as ro
from roundoff.compare import Culprit

sys.path.insert(0, str(ROOT))
from tests.faults.damage import Damage, tail, times

#: The share of the planted faults that must be named first.
BAR = 0.9
STEPS = 2
KEPT = ("tensors", "stats")
Options = Mapping[str, Any]
#: Further options that an optimizer is tried with.
FURTHER: dict[str, list[Options]] = {
    "SGD": [
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1}, {"maximize": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Adagrad": [{}, {"lr_decay": 0.1}],
}
#: Written for sparse gradients, or for a closure that is called several times.
LEFT_OUT = ("Optimizer", "LBFGS", "SparseAdam")


#: A comparison, its culprits and its answer.
Told = tuple[ro.Comparison, Sequence[Culprit], str]


@dataclass(frozen=True)
class Wrong:
    """Something that is wrong in the other form alone.

    Attributes:
        name: in words.
        kinds: optimizers that it is planted in.
        options: what the candidate is given in place of the reference's.
        reference: options of the reference.
        source: text of the function that computes the update, and what stands there.
        damage: a kernel that is wrong beneath the recording, and how.
    """

    name: str
    kinds: tuple[str, ...]
    options: Options = field(default_factory=dict)
    reference: Options = field(default_factory=dict)
    source: tuple[str, str] | None = None
    damage: tuple[str, Callable[[torch.Tensor], None]] | None = None


ADAMS = ("Adam", "AdamW", "NAdam")
#: Whose update is computed by one function, which is written anew.
REWRITTEN = ("Adam", "AdamW")
#: Where the functions of an update begin to compute: text can be put before.
BEGINNING = r"\n(    for i, param in enumerate\(params\):|    if len\(params\) == 0:)"
POWERS = r"torch._foreach_pow\(beta%d, device_state_steps\)"
#: Stands for zero in place of a power, as the place needs it.
NO_POWER = "no power"
WRONG = (
    Wrong("eps 1e-5 for 1e-8", (*ADAMS, "Adagrad", "RMSprop"), {"eps": 1e-5}),
    Wrong("the first beta 0.8 for 0.9", (*ADAMS, "Adamax"), {"betas": (0.8, 0.999)}),
    Wrong("no weight decay", ADAMS, {"weight_decay": 0.0}, {"weight_decay": 0.1}),
    Wrong("twice the learning rate", ("Adam", "ASGD"), {"lr": 2e-3}, {"lr": 1e-3}),
    *[
        Wrong(
            f"{name}, in the code",
            REWRITTEN,
            reference=reference,
            source=(BEGINNING, rf"\n    {statement}\n\1"),
        )
        for name, statement, reference in (
            ("eps 1e-5 for 1e-8", "eps = 1e-5", {}),
            ("the first beta 0.8 for 0.9", "beta1 = 0.8", {}),
            ("the second beta 0.99 for 0.999", "beta2 = 0.99", {}),
            ("no weight decay", "weight_decay = 0", {"weight_decay": 0.1}),
            ("1.01 times the learning rate", "lr = 1.01 * lr", {}),
        )
    ],
    *[
        Wrong(
            f"the {which} bias not corrected",
            REWRITTEN,
            source=(
                rf"(?<=1 - )beta{n} ?\*\* ?\w+(\(step\))?|{POWERS % n}",
                NO_POWER,
            ),
        )
        for n, which in ((1, "first"), (2, "second"))
    ],
)
OF_LISTS = (
    Wrong("a root 1 % too large", ADAMS, damage=("_foreach_sqrt", times(1.01))),
    Wrong("the end of a root not written", ADAMS, damage=("_foreach_sqrt", tail(0.25))),
)
OF_TENSORS = (
    Wrong("a root 1 % too large", ADAMS, damage=("sqrt", times(1.01))),
    Wrong("the end of a root not written", ADAMS, damage=("sqrt", tail(0.25))),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="these optimizers alone")
    parser.add_argument("--keep", choices=KEPT, help="recorded with this alone")
    parser.add_argument("--show", action="store_true", help="print the answers")
    parser.add_argument("--quick", action="store_true", help="two pairs: does it run?")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = [args.keep] if args.keep else list(KEPT)
    names = ["SGD"] if args.quick else args.names
    with capturable_on_the_cpu():
        rights(names, kept)
        if not args.quick:
            wrongs(names, kept, args.show)


@contextmanager
def capturable_on_the_cpu() -> Iterator[None]:
    """Let torch take ``capturable`` on a CPU, which computes the same."""
    asked = "_get_capturable_supported_devices"
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.optim.") and hasattr(module, asked):
                stack.callback(setattr, module, asked, getattr(module, asked))
                setattr(module, asked, lambda *_, **__: ["cpu"])
        yield


def kinds(names: list[str]) -> dict[str, Any]:
    """The optimizers of torch by name."""
    return {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
        if name not in LEFT_OUT and (not names or name in names)
    }


def single(kind: Any) -> Options:
    """The options of the form that updates tensor by tensor."""
    return {"foreach": False} if "foreach" in _parameters(kind) else {}


def forms(kind: Any) -> dict[str, Options]:
    """The options of the other forms."""
    has = _parameters(kind)
    others: dict[str, Options] = {}
    for name in ("foreach", "fused"):
        if name in has:
            others[name] = {name: True}
    if "capturable" in has:
        others["capturable"] = {**single(kind), "capturable": True}
        others["both"] = {"foreach": True, "capturable": True}
    return others


def _parameters(kind: Any) -> Mapping[str, Any]:
    return inspect.signature(kind.__init__).parameters


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 5)
    )


def record(
    folder: Path, kind: Any, options: Options, keep: Any, wrong: Wrong | None = None
) -> None:
    """Train for a few steps and record them."""
    model = network()
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 12, generator=draw)
    y = torch.randint(0, 5, (8,), generator=draw)
    optimizer = kind(model.parameters(), **options)
    with ExitStack() as stack:
        if wrong is not None and wrong.damage is not None:
            operator, harm = wrong.damage
            stack.enter_context(Damage(operator, 0, partial(_harm_first, harm)))
        if wrong is not None and wrong.source is not None:
            stack.enter_context(_rewritten(kind, *wrong.source))
        run = stack.enter_context(ro.capture(folder, model, keep=keep))
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            run.step()


def _harm_first(harm: Callable[[torch.Tensor], None], result: Any) -> None:
    harm(result[0] if isinstance(result, list) else result)


@contextmanager
def _rewritten(kind: Any, pattern: str, text: str) -> Iterator[None]:
    """Write another text into the functions that compute an optimizer's update."""
    module = sys.modules["torch.optim.adam"]
    names = ("_single_tensor_adam", "_multi_tensor_adam")
    with ExitStack() as stack:
        for name in names:
            stack.callback(setattr, module, name, getattr(module, name))
            replace = _no_power if text == NO_POWER else text
            source = inspect.getsource(getattr(module, name))
            written, count = re.subn(pattern, replace, source)
            if not count:
                raise ValueError(f"{kind.__name__}: no {pattern} in {name}")
            exec(written, vars(module))
        yield


def _no_power(match: re.Match[str]) -> str:
    if match.group().startswith("torch._foreach"):
        return "torch._foreach_pow(0.0, device_state_steps)"
    return "0 * " + match.group().partition("**")[2]


def rights(names: list[str], kept: list[str]) -> None:
    """Alarms of right forms."""
    counted: dict[tuple[str, str], list[str | None]] = {}
    for name, kind in kinds(names).items():
        for options in FURTHER.get(name, [{}]):
            for form, other in forms(kind).items():
                for keep in kept:
                    told = _compared(
                        kind, {**options, **single(kind)}, {**options, **other}, keep
                    )
                    alarm = _alarm(told)
                    counted.setdefault((form, keep), []).append(alarm)
                    progress(
                        f"{name} {dict(options)} {form} {keep}: {alarm or 'right'}"
                    )
    rows = [
        (form, keep, len(alarms), sum(a is not None for a in alarms))
        for (form, keep), alarms in sorted(counted.items())
    ]
    table("Forms that are right", ("form", "kept", "pairs", "alarms"), rows)
    false = sum(row[3] for row in rows)
    pairs = sum(row[2] for row in rows)
    print(f"false alarms {false}/{pairs}, bar 0: {verdict(false, 0, at_most=True)}")


def _compared(
    kind: Any,
    reference: Options,
    candidate: Options,
    keep: str,
    wrong: Wrong | None = None,
) -> Told:
    with tempfile.TemporaryDirectory() as folder:
        sides = Path(folder, "reference"), Path(folder, "candidate")
        record(sides[0], kind, reference, keep)
        record(sides[1], kind, candidate, keep, wrong)
        compared = ro.compare(reference=sides[0], candidate=sides[1])
        return compared, compared.culprits(3), compared.answer


def _alarm(told: Told) -> str | None:
    compared, culprits, _ = told
    if not compared.verdicts.get("fail") and not compared.fails:
        return None
    return f"{culprits[0].site}: {culprits[0].looks_like}" if culprits else "a cause"


def wrongs(names: list[str], kept: list[str], show: bool) -> None:
    """Culprits of forms that are wrong."""
    rows = []
    for name, kind in kinds(names).items():
        for form, other in forms(kind).items():
            if form == "fused":
                continue
            last = OF_LISTS if form in ("foreach", "both") else OF_TENSORS
            for wrong in (*WRONG, *last):
                if name not in wrong.kinds:
                    continue
                for keep in kept:
                    rows.append(_row(wrong, name, kind, form, other, keep, show))
    header = ("wrong", "optimizer", "form", "kept", "named first", "first is right")
    table("Forms with something wrong in them", header, rows)
    for keep in kept:
        judged = [row[-1] for row in rows if row[3] == keep]
        share = sum(judged) / max(1, len(judged))
        first = f"{keep}: first {sum(judged)}/{len(judged)}"
        print(f"{first}, bar {BAR:.0%}: {verdict(share, BAR)}")


def _row(
    wrong: Wrong, name: str, kind: Any, form: str, other: Options, keep: str, show: bool
) -> tuple[str, str, str, str, str, bool]:
    told = _compared(
        kind,
        {**wrong.reference, **single(kind)},
        {**wrong.reference, **wrong.options, **other},
        keep,
        wrong,
    )
    compared, culprits, answer = told
    first = culprits[0] if culprits else None
    is_right = first is not None and compared.fails and _is_of_the_optimizer(first)
    site = f"{first.site or first.name}: {first.looks_like}" if first else "nothing"
    progress(f"{wrong.name}, {name}, {form}, {keep}: {site}")
    if show:
        print(f"--- {wrong.name}, {name}, {form}, {keep}\n{answer}\n")
    return wrong.name, name, form, keep, site[:60], is_right


def _is_of_the_optimizer(culprit: Culprit) -> bool:
    return culprit.phase == "optimizer" or culprit.looks_like == "other setting"


if __name__ == "__main__":
    main()
