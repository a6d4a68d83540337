"""The record: exact on the way to disk and back, and refused for another model."""

from __future__ import annotations

import math
import tomllib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerAxis,
    PerBlock,
    PerGroup,
    PerTensor,
    PerToken,
    choose_qparams,
    fake_quantize,
    integer,
    parse_format,
)
from roundoff.quantize import (
    Entry,
    Fingerprint,
    PipelineStep,
    Record,
    fingerprint,
    format_named,
    granularity_name,
    granularity_named,
)

#: names as torch and users make them: any character, quotes, newlines and delete included
NAMES = st.text(min_size=1, max_size=12)
POSITIVE32 = st.integers(1, 0x7F7FFFFF).map(
    lambda bits: float(np.uint32(bits).view(np.float32))
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 1, bias=False))


def record(**changes: object) -> Record:
    given = {
        "model": fingerprint(model(), values=True),
        "entries": (
            Entry(
                "0.weight",
                "weight",
                "int8",
                "per_axis(0)",
                (0.5, 0.1, 2.0**-149),
                None,
                ("0/conv2d",),
                "arq",
            ),
            Entry(
                "1/relu",
                "activation",
                "int8_asym",
                "per_tensor",
                (0.1,),
                (-128,),
                ("2/conv2d",),
                "ifmr",
            ),
            Entry("0/conv2d:0", "activation", "int8", "per_token", dynamic=True),
            Entry("2.weight", "weight", "mxfp4", "per_tensor"),
        ),
        "skipped": (("/add", "neither operand is quantized"),),
        "steps": (
            PipelineStep("fold", math.inf, 41.25),
            PipelineStep("bias correction", 41.25, 43.0, "2 layers"),
        ),
        "balance": {"0.weight": (0.5, 2.0)},
        "about": {
            "target": "38dB",
            "evaluations": 4,
            "formats": ["int8", "int4"],
            "nested": {"a": True},
        },
    }
    return Record(**{**given, **changes})


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    record().save(tmp_path / "record.toml")
    assert Record.load(tmp_path / "record.toml") == record()


@settings(max_examples=30, deadline=None)
@given(NAMES, st.lists(POSITIVE32, min_size=1, max_size=5), NAMES, NAMES)
def test_any_name_and_every_positive_float32_scale_survive(
    tmp_path_factory, name, scales, site, key
):
    path = tmp_path_factory.mktemp("r") / "record.toml"
    entry = Entry(name, "weight", "int4", "per_axis(0)", tuple(scales), sites=(site,))
    if any("\ud800" <= c <= "\udfff" for c in name + site + key):
        return  # TOML has no surrogates
    written = Record(
        Fingerprint({key: (2, 3)}, "x"),
        (entry,),
        ((site, key),),
        (),
        {name: tuple(scales)},
        {key: scales},
    )
    written.save(path)
    read = Record.load(path)
    assert read == written
    got = np.array(read.entries[0].scale)
    assert (got.astype(np.float32) == np.array(scales, dtype=np.float32)).all()
    assert (got == got.astype(np.float32)).all()  # no digit was added


def test_lists_and_numbers_of_numpy_are_taken_as_tuples_and_plain_numbers(tmp_path):
    scales, points = [np.float32(0.1), np.float64(2)], [np.int64(3), 4]
    entry = Entry(
        "w", "weight", "int8_asym", "per_axis(0)", scales, points, ["a/linear"]
    )
    about = {"none": None, "deep": {"none": None, "x": np.float64(0.1)}}
    Record(Fingerprint(), (entry,), about=about).save(tmp_path / "r.toml")
    read = Record.load(tmp_path / "r.toml")
    assert read.entries == (entry,)
    assert (entry.scale, entry.zero_point, entry.sites) == (
        (float(np.float32(0.1)), 2.0),
        (3, 4),
        ("a/linear",),
    )
    assert read.about == {"deep": {"x": 0.1}}


def test_a_scale_of_fp64_survives_too(tmp_path):
    entry = Entry("w", "weight", "int8", "per_tensor", (0.1 + 2**-55,))
    Record(Fingerprint(), (entry,)).save(tmp_path / "r.toml")
    assert Record.load(tmp_path / "r.toml").entries[0].scale == entry.scale


def test_the_file_is_toml_with_a_line_that_says_the_formula(tmp_path):
    record().save(tmp_path / "record.toml")
    text = (tmp_path / "record.toml").read_text()
    assert "real = scale * (code - zero_point)" in text.splitlines()[0]
    data = tomllib.loads(text)
    assert data["entry"][1] == {
        "name": "1/relu",
        "kind": "activation",
        "format": "int8_asym",
        "granularity": "per_tensor",
        "scale": [0.1],
        "zero_point": [-128],
        "sites": ["2/conv2d"],
        "observer": "ifmr",
    }
    assert data["step"][0]["before"] == math.inf


@pytest.mark.parametrize(
    "name",
    [
        "int8",
        "int8_asym",
        "int4",
        "int2_asym",
        "int8_full",
        "int6",
        "int16_asym",
        "int4_asym_narrow",
    ],
)
@pytest.mark.parametrize(
    "granularity",
    [PerTensor(), PerAxis(0), PerAxis(-1), PerGroup(2), PerToken(), PerBlock((3, 2))],
)
def test_qparams_that_went_through_an_entry_round_as_before(name, granularity):
    fmt = format_named(name)
    torch.manual_seed(1)
    x = torch.randn(6, 4) * torch.tensor([1.0, 10.0, 0.01, 1.0])
    qparams = choose_qparams(x, fmt, granularity)
    entry = Entry.of("w", "weight", fmt, qparams)
    again = entry.qparams(x.shape)
    assert again.granularity == granularity
    assert torch.equal(fake_quantize(x, again, fmt), fake_quantize(x, qparams, fmt))


def test_formats_by_name_are_those_of_the_formats_package_or_integers_of_any_width():
    assert format_named("int8") is parse_format("int8")
    assert format_named("fp8_e4m3fn") is parse_format("fp8_e4m3fn")
    assert format_named("int6") == integer(6)
    for fmt in (
        integer(3, symmetric=False),
        integer(8, narrow_range=False),
        integer(5, symmetric=False, narrow_range=True),
    ):
        assert format_named(fmt.name) == fmt
    with pytest.raises(QuantizationError, match="unknown format") as caught:
        format_named("int8x", "record, w")
    assert caught.value.where == "record, w"
    with pytest.raises(QuantizationError, match="two bits"):
        format_named("int1")


@pytest.mark.parametrize(
    "granularity",
    [
        PerTensor(),
        PerToken(),
        PerAxis(0),
        PerAxis(-1),
        PerGroup(32),
        PerGroup(3, axis=0),
        PerBlock((128, 1)),
    ],
)
def test_a_granularity_comes_back_from_its_name(granularity):
    assert granularity_named(granularity_name(granularity)) == granularity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "per_axis",
        "per_axis()",
        "per_axis(0, 1)",
        "per_group(1,2,3)",
        "per_tensor(0)",
        "per_row(1)",
        "per_axis(--1)",
        "per_axis(0",
    ],
)
def test_other_granularities_are_refused(text):
    with pytest.raises(QuantizationError, match="no such granularity"):
        granularity_named(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "bias"}, "no such kind"),
        ({"format": "int9000x"}, "unknown format"),
        ({"granularity": "per_row"}, "no such granularity"),
        ({"scale": (0.0,)}, "1 of 1 scales cannot be used"),
        ({"scale": (-1.0,)}, "scales cannot be used"),
        ({"scale": (math.nan,)}, "scales cannot be used"),
        ({"scale": (math.inf,)}, "scales cannot be used"),
        ({"scale": ()}, "no scale"),
        ({"scale": (1.0, 2.0)}, "one scale is needed"),
        ({"dynamic": True}, "a dynamic entry has no scale"),
        ({"zero_point": (0, 0)}, "as many zero points as scales"),
        ({"zero_point": (200,)}, "a zero point is no code of int8"),
        (
            {"zero_point": (0,), "format": "fp8_e4m3fn"},
            "a zero point needs an integer format",
        ),
    ],
)
def test_an_entry_that_cannot_be_is_refused_where_it_is_made(given, message):
    fields = {
        "name": "w",
        "kind": "weight",
        "format": "int8",
        "granularity": "per_tensor",
        "scale": (1.0,),
    }
    with pytest.raises(QuantizationError, match=message) as caught:
        Entry(**{**fields, **given})
    assert caught.value.where == "record, w"


def test_qparams_of_an_entry_that_do_not_fit_the_tensor_are_refused():
    entry = Entry("w", "weight", "int8", "per_axis(0)", (1.0, 2.0))
    with pytest.raises(
        QuantizationError, match="the scales do not fit this tensor"
    ) as caught:
        entry.qparams((3, 2))
    assert (caught.value.expected, caught.value.got) == (
        "3: per_axis(0) of shape (3, 2)",
        "2 scales",
    )
    with pytest.raises(
        QuantizationError,
        match="does not fit this tensor: size 4 does not divide axis 1",
    ):
        Entry("w", "weight", "int8", "per_group(4, -1)", (1.0, 2.0)).qparams((1, 6))
    with pytest.raises(QuantizationError, match="this entry has no scale"):
        Entry("w", "activation", "int8", "per_token", dynamic=True).qparams((3, 2))


def test_two_entries_of_one_name_are_refused():
    entry = Entry("w", "weight", "int8", "per_tensor", (1.0,))
    with pytest.raises(QuantizationError, match="two entries have this name"):
        Record(Fingerprint(), (entry, entry))


def test_an_entry_is_found_by_its_name_or_the_nearest_are_shown():
    assert record()["1/relu"].observer == "ifmr"
    with pytest.raises(QuantizationError) as caught:
        record()["1/relu#1"]
    assert "1/relu" in caught.value.expected


def test_the_record_of_this_model_is_accepted_and_of_others_refused_with_the_parameters():
    record().check(model())
    other = nn.Sequential(
        nn.Conv2d(2, 3, 5), nn.ReLU(), nn.Identity(), nn.Conv2d(3, 4, 1)
    )
    with pytest.raises(QuantizationError) as caught:
        record().check(other)
    assert str(caught.value).splitlines()[:5] == [
        "record: the record was made for another model, 4 parameters differ:",
        "    2.weight (4, 3, 1, 1): the model has none; nearest: 3.weight, 0.weight",
        "    0.weight: (3, 2, 3, 3) in the record, (3, 2, 5, 5) in the model",
        "    3.weight (4, 3, 1, 1): only in the model",
        "    3.bias (4,): only in the model",
    ]


def test_the_same_shapes_with_other_values_are_another_model_only_where_the_values_were_hashed():
    other = model()
    with torch.no_grad():
        other[0].weight[0, 0, 0, 0] += 1
    with pytest.raises(QuantizationError, match="other weights: the same shapes"):
        record().check(other)
    record(model=fingerprint(model())).check(other)


def test_without_a_fingerprint_the_entries_are_compared_with_the_parameters():
    entries = (
        Entry("0.weight", "weight", "int8", "per_axis(0)", (1.0, 1.0)),
        Entry("9.weight", "weight", "int8", "per_tensor", (1.0,)),
    )
    with pytest.raises(QuantizationError) as caught:
        Record(Fingerprint(), entries).check(model())
    assert (
        "0.weight: the scales do not fit this tensor, shape (3, 2, 3, 3), 2 scales"
        in str(caught.value)
    )
    assert "9.weight: an entry without a parameter" in str(caught.value)
    Record(Fingerprint(), entries[:0]).check(model())


def test_tied_parameters_have_both_names_and_buffers_count_as_values():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[1].weight = net[0].weight
    assert fingerprint(net).shapes["1.weight"] == (3, 3)
    before = fingerprint(net, values=True)
    net.get_buffer("2.running_mean").add_(1)
    after = fingerprint(net, values=True)
    assert before.hash == after.hash
    assert before.values != after.values
    with pytest.raises(QuantizationError, match="a lazy parameter has no shape yet"):
        fingerprint(nn.LazyLinear(2))


def test_values_of_low_precision_and_empty_weights_are_hashed():
    net = nn.Linear(2, 2).to(torch.bfloat16)
    net.register_buffer("none", torch.zeros(0))
    assert (
        fingerprint(net, values=True).values
        == fingerprint(net, values=True).values
        != ""
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = ", "not a readable record"),
        ("schema = 99", "not a quantization record of this version"),
        ('schema = 1\ndefault = "fp32"', "not a quantization record of this version"),
        (
            'schema = 1\nkind = "quantization record"\n[[entry]]\nname = "w"',
            "the record is incomplete: KeyError: 'kind'",
        ),
        (
            'schema = 1\nkind = "quantization record"\nskipped = [["a"]]',
            "the record is incomplete: ValueError",
        ),
        (
            'schema = 1\nkind = "quantization record"\nmodel = 3',
            "the record is incomplete: AttributeError",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text, message):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(QuantizationError, match=message) as caught:
        Record.load(tmp_path / "r.toml")
    assert caught.value.where == str(tmp_path / "r.toml")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(QuantizationError, match="not a readable record"):
        Record.load(tmp_path / "none.toml")
