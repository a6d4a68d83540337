"""Values that several layers read, each of which chooses its ranges in another way: a quantizer for each way."""

from __future__ import annotations

import copy

from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.options import Rounding


def apart_(model: QuantizedModel, rounding: Rounding) -> list[str]:
    """Give readers with another observer, or other parameters of it, a quantizer of their own, in place; before calibration.

    Readers that no pattern of ``rounding.layers`` names go with the first that one does. Returns what was done, a line each:
    a value that has two scales is rounded twice, and an integer kernel cannot write both.
    """
    said = []
    for name, quantizer in list(model.named()):
        if quantizer.weight or quantizer.dynamic:
            continue
        ways: dict[str, list[str]] = {}
        for site in quantizer.sites:
            own = rounding.of(site)
            if own is not rounding and name in model.routes[site].uses.values():
                ways.setdefault(
                    f"{own.observer} {sorted(own.parameters.items())}", []
                ).append(site)
        for sites in list(ways.values())[1:]:
            said.append(
                f"{name} has a second scale: {', '.join(sites)} asks for another observer than {quantizer.sites[0]}"
            )
            own_name = ""
            for site in sites:
                uses = model.routes[site].uses
                for place in [p for p, n in uses.items() if n == name]:
                    own_name = own_name or f"{site}:{place}"
                    uses[place] = own_name
            twin = copy.deepcopy(quantizer)
            twin.name, twin.sites = own_name, tuple(sites)
            quantizer.sites = tuple(s for s in quantizer.sites if s not in sites)
            model.add_(own_name, twin)
    return said
