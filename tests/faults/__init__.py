"""The fault bank: faults that people meet, each a change to one place of a small training.

    program.py    what is run: cnn.py, encoder.py, decoder.py, lstm.py with data, optimizer and a step
    bank.py       what a fault is; ``record``
    constants.py code.py kernels.py precision.py training.py     the faults, by kind; damage.py breaks kernels
    clean.py      pairs of runs in which nothing is wrong; equivalent/ many more, schedules and layouts, with their bugs

A new fault is a function that breaks a program, below ``@fault(family, what was done wrong, its sites)``. test_bank.py
proves that the runs agree bit for bit until one of these sites. benchmarks/fault_bank.py asks a comparison for them.
"""

from __future__ import annotations

from . import code, constants, kernels, precision, training  # noqa: F401 (each enters its faults)
from .bank import FAULTS as FAULTS
from .bank import Fault as Fault
from .bank import record as record
from .clean import Pair as Pair
from .clean import clean_pairs as clean_pairs
