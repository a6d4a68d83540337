"""A batch of another length is other data, and not the reference's work in other portions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)))


class Sounds(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, sound):
        return self.head(torch.relu(self.conv(sound)).transpose(1, 2))


def ids(length, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(40, (4, length), generator=draw)


def sound(length, seed):
    return torch.randn(4, 2, length, generator=torch.Generator().manual_seed(seed))


def trained(folder, make, batches, keep):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with roundoff.capture(folder, model, keep=keep) as run:
        for batch in batches:
            model(batch).square().mean().backward()
        optimizer.step()
        run.step()
    return folder


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize(("make", "data"), [(Words, ids), (Sounds, sound)])
@pytest.mark.parametrize("count", [1, 2])
def test_other_samples_of_another_length_are_other_data(
    make, data, count, keep, tmp_path
):
    ours = [data(9, seed) for seed in range(count)]
    theirs = [data(11, 10 + seed) for seed in range(count)]
    right = trained(tmp_path / "right", make, ours, keep)
    wrong = trained(tmp_path / "wrong", make, theirs, keep)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other data"
    assert "has the shape" in first.evidence


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize(("make", "data"), [(Words, ids), (Sounds, sound)])
def test_the_first_batch_again_in_place_of_the_others_is_other_data(
    make, data, keep, tmp_path
):
    ours = [data(length, length) for length in (9, 11, 7)]
    right = trained(tmp_path / "right", make, ours, keep)
    wrong = trained(tmp_path / "wrong", make, 3 * ours[:1], keep)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other data"


@pytest.mark.parametrize(("make", "data"), [(Words, ids), (Sounds, sound)])
def test_the_same_samples_one_by_one_are_no_other_batch(make, data, tmp_path):
    whole = data(9, 0)
    right = trained(tmp_path / "right", make, [whole], "tensors")
    parts = list(whole.split(2))
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with roundoff.capture(tmp_path / "parts", model, keep="tensors") as run:
        for part in parts:
            (model(part).square().mean() / 2).backward()
        optimizer.step()
        run.step()
    found = roundoff.compare(reference=right, candidate=tmp_path / "parts")
    assert not any(c.looks_like == "other data" for c in found.culprits())


class Decoder(nn.Module):
    """An encoder that is called once, and a cell for each place."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.encoder = nn.Linear(8, 8)
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        read = self.words(ids)
        state = torch.tanh(self.encoder(read.mean(1)))
        outputs = []
        for place in range(ids.shape[1]):
            state = self.cell(read[:, place], state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_longer_samples_are_other_data_where_a_cell_runs_at_each_place(keep, tmp_path):
    right = trained(tmp_path / "right", Decoder, [ids(3, 0)], keep)
    wrong = trained(tmp_path / "wrong", Decoder, [ids(6, 10)], keep)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other data"


class WordsAtPlaces(Words):
    """Reads labels beside the words, and places that are counted from their mask."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(16, 8)

    def forward(self, ids):
        labels = ids[:, 1:].reshape(-1)
        places = (ids >= 0).long().cumsum(1) - 1
        found = self.head(torch.tanh(self.words(ids) + self.places(places)))
        return nn.functional.cross_entropy(found[:, 1:].flatten(0, 1), labels % 3)


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_places_of_any_batch_stand_in_those_of_a_longer_one(keep, tmp_path):
    right = trained(tmp_path / "right", WordsAtPlaces, [ids(9, 0)], keep)
    wrong = trained(tmp_path / "wrong", WordsAtPlaces, [ids(11, 10)], keep)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other data"


class ChosenWords(Words):
    """Takes the log-probability of a column of words, as many as are no filling."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 40)

    def forward(self, ids):
        labels = torch.where(ids > 2, ids, -1)
        found = self.head(torch.tanh(self.words(ids))).log_softmax(-1)
        return -found[labels >= 0].gather(1, labels[labels >= 0].unsqueeze(1))


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_a_column_of_words_stands_in_any_batch_of_words(keep, tmp_path):
    right = trained(tmp_path / "right", ChosenWords, [ids(9, 0) % 8], keep)
    wrong = trained(tmp_path / "wrong", ChosenWords, [ids(11, 10) % 8], keep)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other data"
