"""Loss scaling in PyTorch: where the scaler is made, and the order of its calls."""

from __future__ import annotations

from collections.abc import Iterator

from roundoff.lint.events import Act
from roundoff.lint.rule import Hit, Rule
from roundoff.lint.script import Script
from roundoff.lint.things import Kind


def _made_in_loop(script: Script) -> Iterator[Hit]:
    for program in script.programs:
        training = {loop for event in program.of(Act.BACKWARD) for loop in event.loops}
        for event in program.of(Act.CREATE):
            is_scaler = event.subject is not None and event.subject.kind is Kind.SCALER
            if is_scaler and training.intersection(event.loops):
                yield Hit(event.node)


RULES = (
    Rule(
        code="RO101",
        name="scaler-in-loop",
        message="the gradient scaler is made anew in the loop and its scale never adapts: make it once, before",
        why="A new scaler starts at 65536. It forgets which scale overflowed, so that the same "
        "steps are skipped again and again.",
        wrong="""\
import torch

scaler = None
for x, y in loader:
    scaler = torch.amp.GradScaler("cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        right="""\
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        check=_made_in_loop,
    ),
)
