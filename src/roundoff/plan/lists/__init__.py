"""Other tools' operator lists as plans, and plans as their lists: Ascend, Paddle,
TensorFlow, Apex, MindSpore and Transformer Engine.
"""

from __future__ import annotations

from roundoff.ops import translate
from roundoff.plan.lists.convert import READERS, WRITERS, Lists, read_lists, write_lists

__all__ = ["READERS", "WRITERS", "Lists", "read_lists", "translate", "write_lists"]
