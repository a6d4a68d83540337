"""What stands before a value in a recording of memory that is written in parts."""

from __future__ import annotations

import torch

import roundoff
from roundoff.compare.records.recorded_rows import rows_of


def test_an_alias_follows_what_its_own_elements_had(tmp_path):
    layer = torch.nn.Linear(4, 6, bias=False)
    with roundoff.capture(tmp_path / "run", layer, keep="tensors") as run:
        with torch.no_grad():
            first, second = layer(torch.ones(3, 4)).chunk(2, dim=1)
            first.sigmoid_()
            second.tanh_()
            second.mul_(first)
        run.step()
    rows = rows_of(roundoff.load(tmp_path / "run"), 0, 0)
    made_of = {row.operator: [rows[key] for key in row.inputs] for row in rows.values()}
    gate, factor = made_of["mul_"]
    assert gate.operator == "tanh_"
    while factor.operator == "alias":
        [factor] = [rows[key] for key in factor.inputs]
    assert factor.operator == "sigmoid_"
