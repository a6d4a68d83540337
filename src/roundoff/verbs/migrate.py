"""``roundoff.migrate``: mixed precision written into a training script."""

from __future__ import annotations

import os
from pathlib import Path

from roundoff.errors import PlanError, RoundoffError, ScriptError
from roundoff.files import as_path
from roundoff.lint import read
from roundoff.migrate import Migration, check_direction, migrate_script
from roundoff.plan import read_lists


def migrate(
    script: str | os.PathLike[str],
    to: str | None = None,
    *,
    source: str | None = None,
    plan: str | os.PathLike[str] = "plan.toml",
) -> Migration:
    """Write mixed precision into a plain fp32 training script, or present interfaces into
    one that has others. Nothing is imported, run or written.

    Args:
        script: the file.
        to: ``amp`` (torch.amp in fp16 with a gradient scaler), ``bf16`` (torch.amp in
            bf16), ``roundoff`` (``roundoff.autocast`` with a plan), or ``npu_bridge``
            (Ascend's adapter, for TensorFlow 1).
        source: ``torch.cuda.amp``, ``apex`` or ``npu_bridge``: rewritten to torch.amp, or
            to plain TensorFlow.
        plan: of ``roundoff``, the plan that the script is to name. Its loss is scaled
            unless the file is there and has nothing in fp16.

    Returns:
        The new text and its diff, each changed line with its reason, and what could not be
        changed safely: a training loop is migrated as a whole, or left as it is.

    Raises:
        ScriptError: the script cannot be read, is no Python or has no training loop, or
            the direction is none.

    Example:
        >>> import tempfile, pathlib, roundoff
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder, "train.py")
        ...     _ = script.write_text('''
        ... import torch
        ... model = torch.nn.Linear(4, 2)
        ... optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ... for step in range(10):
        ...     optimizer.zero_grad()
        ...     loss = model(torch.ones(3, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ... ''')
        ...     migration = roundoff.migrate(script, "bf16")
        >>> print(*(line for line in migration.diff() if line[:2] == "+ "), sep=chr(10))
        +    with torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16):
        +        loss = model(torch.ones(3, 4)).square().mean()
    """
    check_direction(to, source)
    path = as_path(script, "script")
    try:
        text = read(path)
    except ValueError as error:
        raise ScriptError(f"cannot be read: {error}", where=str(path)) from None
    if text.cells or path.suffix == ".ipynb":
        raise ScriptError(
            "notebooks are not migrated",
            where=str(path),
            do="export it: jupyter nbconvert --to script",
        )
    return migrate_script(
        text.code,
        str(path),
        to=to,
        source=source,
        plan=str(plan),
        scales=to != "roundoff" or _may_run_fp16(Path(plan)),
    )


def _may_run_fp16(plan: Path) -> bool:
    """Return True unless a plan is there and certainly runs nothing in fp16.

    Raises ``PlanError`` for a file that is none.
    """
    if not plan.exists():
        return True
    try:
        rules = read_lists(plan)
    except PlanError:
        raise
    except RoundoffError as error:
        raise PlanError(str(error), where=str(plan)) from error
    formats = {rules.default, rules.autocast, *(rule.format for rule in rules.rules)}
    return "fp16" in formats
