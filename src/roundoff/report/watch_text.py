"""What ``roundoff watch`` prints of a training, a line for each event."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from roundoff.report.figures import count, percent

if TYPE_CHECKING:
    from rich.live import Live

    from roundoff.train import (
        BadGradients,
        LoopAdvice,
        LostLoss,
        StepEnd,
        WatchEvent,
        WatchSummary,
    )

_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "loss": "outside of the model, in the loss",
    "data": "before the model ran, in the data or in what the script makes of them",
    "weights": "before the step, in the weights",
    "gradients": "between the backward pass and the optimizer's step",
}
_STYLES = {
    "not finite": "red",
    "loss not finite": "red",
    "warning": "yellow",
    "end": "bold",
}


@contextmanager
def print_events(
    console: Console, every: int = 10
) -> Iterator[Callable[[WatchEvent], None]]:
    """Give a function that prints an event.

    On a terminal one line is refreshed at each step, elsewhere each ``every``-th step and
    each skipped one is a line. What is not a plain step always stays.
    """
    from rich.live import Live

    with ExitStack() as stack:
        live: Live | None = None
        if console.is_terminal:
            live = Live(
                console=console,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            stack.enter_context(live)
        yield _EventPrinter(console, every, live).print


class _EventPrinter:
    """Print events to ``console``; ``live`` is the line that is refreshed."""

    def __init__(self, console: Console, every: int, live: Live | None) -> None:
        self.console = console
        self.every = every
        self.live = live
        self._reason: list[str] = []

    def print(self, event: WatchEvent) -> None:
        """Print one event."""
        from roundoff.train import StepEnd

        if isinstance(event, StepEnd):
            self._print_step(event)
            return
        for line in self._lines(event):
            self.console.print(
                line, markup=False, soft_wrap=True, style=_STYLES[event.name]
            )

    def _print_step(self, step: StepEnd) -> None:
        from rich.text import Text

        line = step_line(step)
        if self.live is not None:
            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif step.step % self.every == 0 or step.skipped:
            self.console.print(line, markup=False, soft_wrap=True)

    def _lines(self, event: WatchEvent) -> list[str]:
        from roundoff.train import BadGradients, LoopAdvice, LostLoss, WatchSummary

        if isinstance(event, LoopAdvice):
            return [advice_line(event)]
        if isinstance(event, WatchSummary):
            return [end_line(event)]
        if isinstance(event, BadGradients):
            return self._new_lines(event)
        if isinstance(event, LostLoss):
            return lost_lines(event)
        return []

    def _new_lines(self, event: BadGradients) -> list[str]:
        """Leave out a reason that was printed for the step before."""
        headline, *reason = trouble_lines(event)
        is_repeated = reason == self._reason
        self._reason = reason
        if not is_repeated:
            return [headline, *reason]
        return [headline] if event.skipped else []


def step_line(step: StepEnd) -> str:
    """Write one step.

    >>> from roundoff.train import StepEnd
    >>> step_line(StepEnd(step=7, loss=2.31456, loss_scale=32768.0, gradient_norm=1.25, non_finite=0.125,
    ...                   skipped=True, skips=2, lr=0.001))
    'step 7  loss 2.3146  scale 32768  skips 2  gradients 1.25, 12.5% NaN or Inf  lr 0.001  skipped'
    """
    parts = [f"step {step.step}"]
    if step.loss is not None:
        parts.append(f"loss {step.loss:.5g}")
    if step.loss_scale is not None:
        parts.append(f"scale {step.loss_scale:.10g}")
        parts.append(f"skips {step.skips}")
    if step.gradient_norm is not None:
        parts.append(f"gradients {step.gradient_norm:.3g}{_bad_share(step)}")
    if step.lr is not None and math.isfinite(step.lr):
        parts.append(f"lr {step.lr:.3g}")
    if step.skipped:
        parts.append("skipped")
    return "  ".join(parts)


def _bad_share(step: StepEnd) -> str:
    return f", {percent(step.non_finite)} NaN or Inf" if step.non_finite else ""


def trouble_lines(event: BadGradients) -> list[str]:
    """Write why the gradients of a step are not finite: the headline, then the reason, indented."""
    headline = (
        f"step {event.step}: the optimizer gets gradients that are not finite"
        if event.scale is None or not event.skipped
        else f"step {event.step} skipped at loss scale {event.scale:g}"
    )
    reason = []
    if event.first:
        reason.append(f"first not finite: {event.first}")
    if event.gradient:
        maker = f", made by {event.made_by}" if event.made_by else ""
        reason.append(f"first parameter in backward order: {event.gradient}{maker}")
    if event.phase:
        reason.append(_birth(event, event.phase))
    if event.cause:
        reason.append(event.cause)
    if event.advice:
        reason.append(f"try: {event.advice}")
    return [headline, *(f"  {line}" for line in [*reason, *event.notes])]


def lost_lines(event: LostLoss) -> list[str]:
    """Write why a loss is not finite whose gradients are."""
    reason = []
    if event.first:
        reason.append(f"first not finite: {event.first}")
    if event.phase:
        line = f" ({event.line})" if event.line else ""
        reason.append(f"born at {event.origin}, {_PHASES[event.phase]}{line}")
    if event.cause:
        reason.append(event.cause)
    if event.advice:
        reason.append(f"try: {event.advice}")
    headline = f"step {event.step}: the loss is not finite, though its gradients are"
    return [headline, *(f"  {line}" for line in reason)]


def _birth(event: BadGradients, phase: str) -> str:
    """Say where the first value that is not finite was born."""
    is_elsewhere = event.origin and event.origin != event.made_by
    place = f"at {event.origin}, " if is_elsewhere else ""
    line = f" ({event.line})" if event.line else ""
    verb = "born" if event.born else "inherited: born"
    return f"{verb} {place}{_PHASES[phase]}{line}"


def advice_line(advice: LoopAdvice) -> str:
    """Write a fault of the loop.

    >>> from roundoff.train import LoopAdvice
    >>> advice_line(LoopAdvice(3, "no-gradients", "no parameter of SGD has a gradient"))
    'step 3 [no-gradients]: no parameter of SGD has a gradient'
    >>> advice_line(LoopAdvice(3, "adam-eps", "Adam adds eps 1e-08", "RO302"))
    'step 3 [RO302 adam-eps]: Adam adds eps 1e-08'
    """
    rule = f"{advice.code} {advice.rule}".strip()
    return f"step {advice.step} [{rule}]: {advice.text}"


def end_line(summary: WatchSummary) -> str:
    """Write the last line.

    >>> from roundoff.train import WatchSummary
    >>> end_line(WatchSummary(steps=1200, skips=1, loss_scale=1024.0, trouble=None))
    '1,200 steps, 1 skip, loss scale 1024: it ended well'
    >>> end_line(WatchSummary(steps=10, skips=0, loss_scale=None, trouble=None, warnings=2))
    '10 steps: it ended, with 2 warnings above'
    """
    parts = [count(summary.steps, "step")]
    if summary.loss_scale is not None:
        parts.append(count(summary.skips, "skip"))
        parts.append(f"loss scale {summary.loss_scale:.10g}")
    end = "it ended well"
    if summary.warnings:
        end = f"it ended, with {count(summary.warnings, 'warning')} above"
    return f"{', '.join(parts)}: {summary.trouble or end}"
