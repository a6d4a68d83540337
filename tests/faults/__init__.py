"""The fault bank: faults that people meet, each with the place where it sits. See ``bank``."""

from __future__ import annotations

from . import code, constants, kernels, precision, training  # noqa: F401 (each enters its faults)
from .bank import FAULTS as FAULTS
from .bank import Fault as Fault
from .bank import record as record
from .clean import Pair as Pair
from .clean import clean_pairs as clean_pairs
