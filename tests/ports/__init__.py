"""Ports of networks by other hands, right and faulty."""

from ports.bank import KEPT_APART, NETWORKS, Change, Port, faults, ports, written

__all__ = ["KEPT_APART", "NETWORKS", "Change", "Port", "faults", "ports", "written"]
