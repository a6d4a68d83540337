"""Collectives: which ranks take part, and when their values are there."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from roundoff.ops import tensors_in

#: Seconds that a collective may take before its values count as missing.
_PATIENCE = 5.0


def finished(operator: str, result: Any) -> bool:
    """Wait for a collective, so that its values can be read; return False if it has not
    finished in time.

    Not for ever, since a program may rely on going on first.
    """
    if operator.startswith("_c10d_functional"):
        for tensor in tensors_in((result,)):
            torch.ops._c10d_functional.wait_tensor(tensor)
        return True
    patience = 0.0 if "recv" in operator or "send" in operator else _PATIENCE
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_in((result,)))
    for value in tree_leaves(result):
        if not isinstance(value, torch.ScriptObject):
            continue
        try:
            work = torch.distributed.Work.unbox(value)
        except (RuntimeError, TypeError):
            continue  # some other object
        if not _completes(work, patience, waits=on_cpu and patience > 0.0):
            return False
    return True


def _completes(work: Any, patience: float, *, waits: bool) -> bool:
    """Return True where a collective completes within ``patience`` seconds.

    ``waits`` waits for it, since some of gloo's never say that they have completed
    (reduce-scatter); a wait for NCCL's in vain would end its group.
    """
    if waits:
        try:
            work.wait(timedelta(seconds=patience))
        except RuntimeError:
            return bool(work.is_completed())
        return True
    deadline = time.monotonic() + patience
    while not work.is_completed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(1e-4)
    return True


def group_of(args: Any, kwargs: Any) -> str | None:
    """Return the ranks of a collective, ``"0,1"``; None where its group cannot be asked."""
    import torch.distributed as dist

    for value in tree_leaves((args, kwargs)):
        try:
            if isinstance(value, str):
                value = dist.distributed_c10d._resolve_process_group(value)  # type: ignore[attr-defined, arg-type]
            elif isinstance(value, torch.ScriptObject):
                value = dist.ProcessGroup.unbox(value)
            if isinstance(value, dist.ProcessGroup):
                return ",".join(map(str, dist.get_process_group_ranks(value)))
        except (RuntimeError, ValueError, TypeError, AttributeError):
            continue
    return None
