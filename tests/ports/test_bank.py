"""The bank is right about itself: ports compute the reference's numbers, changes fit."""

from __future__ import annotations

import pytest

from roundoff.workload import Workload, named_tensors

from . import NETWORKS, faults, ports, written
from .bank import _text


def test_the_bank_is_broad():
    assert len(NETWORKS) >= 8
    assert len(ports()) >= 20
    assert len(faults()) >= 100
    assert len({fault.title for fault in faults()}) == len(faults())


def test_every_change_fits_its_port():
    for fault in faults():
        text = _text(fault.network, fault.name)
        assert fault.change.applied(text) != text
        named = fault.change.parameter or fault.change.phase
        assert named or fault.change.lines(text), fault.title


#: One of each network; benchmarks/port_bank.py --all --right compares them all.
ONE_OF_EACH = {port.network: port for port in ports()}.values()


@pytest.mark.parametrize("port", ONE_OF_EACH, ids=lambda port: port.title)
def test_a_right_port_gives_the_numbers_of_its_reference(port, tmp_path):
    outputs = []
    for file in written(port, tmp_path):
        workload = Workload.load(file)
        named = named_tensors(workload.run(workload.batches[0]))  # some need gradients
        outputs.append({name: tensor.detach() for name, tensor in named.items()})
    reference, candidate = outputs
    assert reference.keys() == candidate.keys()
    for name, expected in reference.items():
        given = candidate[name]
        if given.shape != expected.shape:  # in another layout: the same numbers
            expected, given = (
                each.flatten().sort().values for each in (expected, given)
            )
        # fp32 through at most 20 layers: 20 roundings of 2**-24, amplified by less than 8
        assert (expected - given).norm() <= 1e-5 * expected.norm()
