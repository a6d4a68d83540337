"""Ports of networks by other hands, right and faulty: see bank.py."""

from __future__ import annotations

from .bank import KEPT_APART as KEPT_APART
from .bank import NETWORKS as NETWORKS
from .bank import Change as Change
from .bank import Port as Port
from .bank import faults as faults
from .bank import ports as ports
from .bank import written as written
