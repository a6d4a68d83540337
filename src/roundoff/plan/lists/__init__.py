"""Other tools' operator lists as plans, and plans as their lists: Ascend, Paddle, TensorFlow, Apex, MindSpore and
Transformer Engine."""

from __future__ import annotations

from roundoff.plan.lists.convert import READERS, WRITERS, Lists, read_lists, write_lists
from roundoff.plan.lists.names import translate

__all__ = ["READERS", "WRITERS", "Lists", "read_lists", "translate", "write_lists"]
