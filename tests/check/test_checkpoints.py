"""Two checkpoints: expected values are computed here from the tensors."""

from __future__ import annotations

import argparse
import json
import math
import zipfile

import pytest
import torch
from safetensors.torch import save_file

import roundoff
from roundoff.cli.app import main
from roundoff.errors import RoundoffError


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "body.weight": torch.randn(6, 4, generator=generator),
        "body.bias": torch.randn(6, generator=generator),
        "head.weight": torch.randn(3, 5, generator=generator),
    }


def test_the_largest_relative_change_comes_first(tmp_path):
    ours = tensors()
    theirs = {name: tensor.clone() for name, tensor in ours.items()}
    theirs["body.bias"][2] += 0.5
    theirs["body.weight"] *= 1.001
    save_file(ours, tmp_path / "a.safetensors")
    save_file(theirs, tmp_path / "b.safetensors")
    check = roundoff.check(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    names = [change.name for change in check.changes]
    assert names == ["body.bias", "body.weight", "head.weight"]
    x, y = (side["body.bias"].double() for side in (ours, theirs))
    # sums of six products in fp64, in another order
    exact = {"rel": 1e-12}
    assert check.changes[0].change == pytest.approx(
        float((x - y).norm() / x.norm()), **exact
    )
    assert check.changes[0].cosine == pytest.approx(
        float(x @ y / (x.norm() * y.norm())), **exact
    )
    assert check.changes[0].largest == float((x - y).abs().max())
    assert [change.equal for change in check.changes] == [False, False, True]
    assert check.verdict == "differ"


def test_wrappers_before_the_names_are_left_out(tmp_path, capsys):
    state = tensors()
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    content = {"model": wrapped, "iteration": 3, "args": argparse.Namespace(lr=1)}
    torch.save(content, tmp_path / "a.pt")
    save_file(state, tmp_path / "b.safetensors")
    assert main(["check", f"{tmp_path}/a.pt", f"{tmp_path}/b.safetensors"]) == 0
    assert "All 3 tensors of both are equal" in capsys.readouterr().out


def test_renamed_and_transposed(tmp_path):
    ours = tensors()
    theirs = {**ours, "classifier.weight": ours["head.weight"].t().contiguous()}
    del theirs["head.weight"]
    save_file(ours, tmp_path / "a.safetensors")
    save_file(theirs, tmp_path / "b.safetensors")
    check = roundoff.check(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert check.only_reference == ("head.weight",)
    assert check.only_candidate == ("classifier.weight",)
    (renamed,) = check.renamed
    assert (renamed.candidate, renamed.how) == ("classifier.weight", "transposed")


def test_shards_and_megatron(tmp_path):
    state = tensors()
    shards = tmp_path / "shards"
    shards.mkdir()
    places = {}
    for number, (name, tensor) in enumerate(state.items()):
        places[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, shards / places[name])
    index = {"weight_map": places}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(state, tmp_path / "whole.safetensors")
    assert (
        roundoff.check(shards, tmp_path / "whole.safetensors").verdict == "comparable"
    )
    for side, factor in (("m1", 1.0), ("m2", 2.0)):
        rank = tmp_path / side / "iter_0000007" / "mp_rank_00"
        rank.mkdir(parents=True)
        (tmp_path / side / "latest_checkpointed_iteration.txt").write_text("7\n")
        torch.save(
            {"model": {"w": factor * torch.ones(3)}}, rank / "model_optim_rng.pt"
        )
    check = roundoff.check(tmp_path / "m1", tmp_path / "m2")
    assert [change.name for change in check.changes] == ["mp_rank_00/model.w"]
    assert check.changes[0].change == 1.0
    assert check.changes[0].hint == "times 2"


def test_special_values_and_zero(tmp_path):
    ours = {
        "zero": torch.zeros(2),
        "nan": torch.tensor([1.0, math.nan]),
        "e": torch.ones(0),
    }
    theirs = {
        "zero": torch.ones(2),
        "nan": torch.tensor([math.nan, 1.0]),
        "e": torch.ones(0),
    }
    save_file(ours, tmp_path / "a.safetensors")
    save_file(theirs, tmp_path / "b.safetensors")
    check = roundoff.check(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    changes = {change.name: change for change in check.changes}
    assert changes["zero"].change == math.inf
    assert changes["zero"].cosine is None
    assert changes["nan"].change is None
    assert changes["nan"].nonfinite == 2
    assert changes["e"].equal


class Harmful:
    def __reduce__(self):
        return (print, ("this runs",))


@pytest.mark.parametrize("content", [b"", b"\x00" * 40, b"PK\x03\x04 no archive"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_damaged_files_are_one_message(content, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(RoundoffError):
        roundoff.check(path, path)


#: ``h`` reads what the memo, empty here, has at 146; ``s`` sets an item of nothing.
@pytest.mark.parametrize("pickled", [b"\x80\x02h\x92.", b"\x80\x02s."])
def test_a_damaged_pickle_is_one_message(pickled, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", b"3\n")
    with pytest.raises(RoundoffError, match="cannot be read"):
        roundoff.check(tmp_path / "a.pt", tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["x" * 4000, "../outside.safetensors", "no such file"])
def test_an_index_of_files_that_cannot_be(name, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(RoundoffError) as error:
        roundoff.check(tmp_path, tmp_path)
    assert len(str(error.value)) < 1000


def test_nothing_in_a_file_is_run(tmp_path, capsys):
    torch.save({"w": torch.ones(1), "x": Harmful()}, tmp_path / "a.pt")
    with pytest.raises(RoundoffError, match="cannot be read"):
        roundoff.check(tmp_path / "a.pt", tmp_path / "a.pt")
    assert "this runs" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["none.safetensors", "none.pt"])
def test_a_checkpoint_that_is_not_there(name, tmp_path, capsys):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    assert main(["check", str(tmp_path / "a.safetensors"), str(tmp_path / name)]) == 2
    message = capsys.readouterr().err
    assert "no such file" in message
    assert "run.json" not in message
