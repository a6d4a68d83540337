"""Events of a training loop, as files of a recording hold them."""

from __future__ import annotations

import json

import pytest
import torch

import roundoff
from roundoff.errors import RunError
from roundoff.record.disk.tensors import checksum


@pytest.mark.parametrize("content", [None, 3, "step", {"what": "step"}, [None], [[]]])
def test_what_are_no_events_is_said(content, tmp_path):
    with roundoff.capture(tmp_path / "run"):
        torch.ones(2).exp()
    folder = next((tmp_path / "run").glob("rank*/step*"))
    file = folder / "loop.json"
    file.write_text(json.dumps(content))
    sums = json.loads((folder / "checksums.json").read_text())
    sums["loop.json"] = checksum(file)
    (folder / "checksums.json").write_text(json.dumps(sums))
    run = roundoff.load(tmp_path / "run")
    with pytest.raises(RunError, match=r"loop\.json"):
        run.loop(0, 0)
