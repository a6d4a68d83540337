"""The batches of two workload files: what differs, and how."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roundoff.compare.loop.batch_data import differing_batches

IMAGES = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


def test_a_normalisation_by_channel_is_named():
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    [found] = differing_batches([IMAGES], [(IMAGES - mean) / std])
    assert "for each of the 3 entries of dimension 1" in found.words
    rows = IMAGES.flatten(1)[:, :4].repeat(3, 1) + torch.randn(12, 4)
    [found] = differing_batches([rows], [(rows - rows.mean(0)) / rows.std(0)])
    assert "for each of the 4 entries of dimension 1" in found.words


@pytest.mark.parametrize(
    "twin",
    [
        IMAGES.contiguous(memory_format=torch.channels_last),
        IMAGES.double(),
        IMAGES.numpy(),
        IMAGES * (1 + 2.0**-23),
    ],
)
def test_layout_and_rounding_are_no_difference(twin):
    assert differing_batches([IMAGES], [twin]) == []


def test_inputs_by_name_and_batches_that_differ_later():
    ids = torch.arange(12).view(3, 4)
    ours = [{"ids": ids, "mask": None, "x": (IMAGES, 2.0)}] * 2
    theirs = [ours[0], {"ids": ids.flip(1), "mask": None, "x": (2 * IMAGES, 2.0)}]
    found = differing_batches(ours, theirs)
    assert [each.name for each in found] == [
        "input ids of batch 1",
        "input x.0 of batch 1",
    ]
    assert found[0].words == "has the same values in another order"
    assert found[1].error == pytest.approx(1.0)


def test_nan_and_empty_and_labels():
    batch = torch.tensor([1.0, torch.nan, torch.inf])
    assert differing_batches([batch], [batch.clone()]) == []
    [found] = differing_batches([batch], [torch.tensor([1.0, 0.0, torch.inf])])
    assert found.error == torch.inf
    assert differing_batches([torch.empty(0, 3)], [torch.empty(0, 3)]) == []
    [found] = differing_batches([np.zeros(4)], [np.array([0.0, 0, 0, 1])])
    assert "values unlike the reference's" in found.words
