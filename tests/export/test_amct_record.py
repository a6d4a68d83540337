"""AMCT's record.txt: what it says becomes ours and comes back; what AMCT would take in silence is refused with its lines."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundoff.errors import QuantizationError
from roundoff.export.amct.read_record import read_record
from roundoff.export.amct.text_format import FILES, message_class
from roundoff.export.amct.write_record import write_record
from roundoff.formats import fake_quantize
from roundoff.quantize import (
    Entry,
    Fingerprint,
    Record,
    fingerprint,
    format_named,
)

text_format = pytest.importorskip("google.protobuf.text_format")

#: In the form that AMCT 1.1 writes for a small network: calibrated layers, one with balance factors, one with a KV cache,
#: one that only says not to fold its BatchNorm, and what channel pruning adds.
RECORD = """
record {
  key: "stem.0"
  value {
    scale_d: 0.0798481479
    offset_d: -104
    scale_w: 0.00297622895
    scale_w: 0.00106807391
    scale_w: 0.00104224426
    offset_w: 0
    offset_w: 0
    offset_w: 0
    tensor_balance_factor: 0.948409557
    tensor_balance_factor: 1.44586647
    skip_fusion: true
    dst_type: "INT8"
    act_type: "INT8"
    wts_type: "INT8"
  }
}
record {
  key: "head"
  value {
    scale_d: 0.00759239076
    offset_d: 0
    scale_w: 0.0075149606
    offset_w: 0
    act_type: "INT16"
    wts_type: "INT4"
  }
}
record {
  key: "keys"
  kv_cache_value {
    scale: 0.5
    scale: 0.25
    offset: -3
    offset: 7
  }
}
record {
  key: "free"
  value {
    skip_fusion: true
  }
}
prune_record {
  producer {
    name: "stem.0"
    attr {
      name: "begin"
      type: INT
      i: 0
    }
    attr {
      name: "type"
      type: STRING
      s: "Conv2d"
    }
  }
}
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU())
        self.up = nn.ConvTranspose2d(4, 2, 1, groups=2)
        self.pool = nn.AvgPool2d(2)
        self.keys, self.free, self.head = (
            nn.Linear(3, 2),
            nn.Conv2d(1, 1, 1),
            nn.Linear(3, 2),
        )


def write(tmp_path, text=RECORD):
    path = tmp_path / "record.txt"
    path.write_text(text)
    return path


def merged(path):
    """What AMCT itself reads: ``text_format.Merge`` into its message."""
    message = message_class("record")()
    text_format.Merge(path.read_text(), message)
    return message


def test_each_factor_becomes_the_scale_and_zero_point_of_an_input_or_weight(tmp_path):
    record = read_record(write(tmp_path))
    f32 = lambda x: float(np.float32(x))  # noqa: E731 - the file's decimal digits as the fp32 number that AMCT holds
    assert record.entries == (
        Entry(
            "stem.0/*:0",
            "activation",
            "int8_asym",
            "per_tensor",
            (f32(0.0798481479),),
            (-104,),
            ("stem.0/*",),
            "amct",
        ),
        Entry(
            "stem.0.weight",
            "weight",
            "int8_full",
            "per_axis(0)",
            (f32(0.00297622895), f32(0.00106807391), f32(0.00104224426)),
            None,
            ("stem.0/*",),
            "amct",
        ),
        Entry(
            "head/*:0",
            "activation",
            "int16_full",
            "per_tensor",
            (f32(0.00759239076),),
            None,
            ("head/*",),
            "amct",
        ),
        Entry(
            "head.weight",
            "weight",
            "int4_full",
            "per_tensor",
            (f32(0.0075149606),),
            None,
            ("head/*",),
            "amct",
        ),
        Entry(
            "keys/*",
            "kv_cache",
            "int8_asym",
            "per_axis(-1)",
            (0.5, 0.25),
            (-3, 7),
            (),
            "amct",
        ),
    )
    assert record.balance == {"stem.0.weight": (f32(0.948409557), f32(1.44586647))}
    assert record.about["amct"] == {
        "stem.0": {"skip_fusion": True, "dst_type": "INT8"},
        "free": {"skip_fusion": True},
    }
    assert record.model == Fingerprint()


def test_an_offset_is_a_zero_point_sign_included():
    """The field notes' formula x ~ (clip(round(x / scale) + offset, -128, 127) - offset) * scale, in numpy."""
    x = np.linspace(-2, 8, 101, dtype=np.float64)
    for scale, offset in ((0.0390625, -77), (0.0390625, 0), (0.03125, 5)):
        expected = (np.clip(np.round(x / scale) + offset, -128, 127) - offset) * scale
        fmt = "int8_asym" if offset else "int8_full"
        entry = Entry(
            "a",
            "activation",
            fmt,
            "per_tensor",
            (scale,),
            (offset,) if offset else None,
        )
        got = fake_quantize(torch.tensor(x), entry.qparams(), format_named(fmt))
        assert np.array_equal(got.numpy(), expected)


def test_with_the_model_sites_are_exact_and_what_has_no_factors_is_listed(tmp_path):
    model = Net()
    record = read_record(write(tmp_path), model)
    names = [
        "stem.0/conv2d:0",
        "stem.0.weight",
        "head/linear:0",
        "head.weight",
        "keys/linear",
    ]
    assert [entry.name for entry in record.entries] == names
    assert record.model == fingerprint(model)
    record.check(model)
    assert record.skipped == (
        ("up/conv_transpose2d", "no factors in AMCT's record"),
        ("pool/avg_pool2d", "no factors in AMCT's record"),
    )


@pytest.mark.parametrize("model", [None, Net()])
def test_a_record_comes_back_as_amct_would_read_it(tmp_path, model):
    path = write(tmp_path)
    record = read_record(path, model)
    again = tmp_path / "again.txt"
    assert write_record(record, again) == []
    before, after = merged(path), merged(again)
    assert {r.key: r for r in before.record} == {r.key: r for r in after.record}
    assert list(before.prune_record) == list(after.prune_record)
    assert read_record(again, model) == record


SCALES = st.floats(2.0**-126, 2.0**120, width=32)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([4, 6, 7, 8]),
            st.sampled_from([4, 8, 16]),
            SCALES,
            st.integers(-8, 7),
            st.lists(SCALES, min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_layers_amct_can_hold_survive_the_way_there_and_back(
    tmp_path_factory, layers
):
    entries = []
    for index, (weight_bits, bits, scale, offset, scales) in enumerate(layers):
        site = f"b.{index}/conv2d"
        fmt = f"int{bits}_asym" if offset else f"int{bits}_full"
        entries += [
            Entry(
                f"{site}:0",
                "activation",
                fmt,
                "per_tensor",
                (scale,),
                (offset,) if offset else None,
                (site,),
                "amct",
            ),
            Entry(
                f"b.{index}.weight",
                "weight",
                f"int{weight_bits}_full",
                "per_axis(0)" if len(scales) > 1 else "per_tensor",
                tuple(scales),
                None,
                (site,),
                "amct",
            ),
        ]
    path = tmp_path_factory.mktemp("r") / "record.txt"
    assert write_record(Record(Fingerprint(), tuple(entries)), path) == []
    read = read_record(path).entries
    assert [(e.format, e.granularity, e.scale, e.zero_point) for e in read] == [
        (e.format, e.granularity, e.scale, e.zero_point) for e in entries
    ]


def entry(
    name,
    kind,
    fmt,
    granularity="per_tensor",
    scale=(0.5,),
    zero_point=None,
    sites=(),
    **more,
):
    return Entry(name, kind, fmt, granularity, scale, zero_point, sites, **more)


def test_values_named_by_their_source_reach_each_layer_that_reads_them(tmp_path):
    reads = ("c1/conv2d", "c2/conv2d", "/add")
    record = Record(
        Fingerprint(),
        (
            entry(
                "0/relu",
                "activation",
                "int8_asym",
                scale=(0.25,),
                zero_point=(-128,),
                sites=reads,
            ),
            entry(
                "c2/conv2d:0", "activation", "int8_asym", scale=(0.75,), zero_point=(3,)
            ),
            entry("c1.weight", "weight", "int8", sites=reads[:1]),
            entry("c2.weight", "weight", "int8", sites=reads[1:2]),
            entry(
                "c2/conv2d",
                "activation",
                "int8_asym",
                sites=("/avg_pool2d", "pool/avg_pool2d"),
                zero_point=(1,),
            ),
        ),
    )
    lost = write_record(record, tmp_path / "r.txt")
    rows = {row.key: row.value for row in merged(tmp_path / "r.txt").record}
    assert (
        rows["c1"].scale_d,
        rows["c1"].offset_d,
        rows["c2"].scale_d,
        rows["c2"].offset_d,
    ) == (0.25, -128, 0.75, 3)
    assert (rows["pool"].scale_d, list(rows["pool"].scale_w)) == (0.5, [])
    assert lost == [
        "0/relu, read by /add: AMCT quantizes only inputs of layers with weights",
        "c2/conv2d, read by /avg_pool2d: AMCT quantizes only inputs of layers with weights",
    ]


C = ("c/conv2d",)
INPUT = entry("c/conv2d:0", "activation", "int8_asym", zero_point=(0,), sites=C)
WEIGHT = entry("c.weight", "weight", "int8", sites=C)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (
            (WEIGHT,),
            "c/conv2d: weights only, in int8: AMCT needs the scale of the input too",
        ),
        (
            (entry("c.weight", "weight", "fp8_e4m3fn", sites=C), INPUT),
            "c/conv2d: weights in fp8_e4m3fn: AMCT has",
        ),
        (
            (entry("c.weight", "weight", "int3", sites=C), INPUT),
            "c/conv2d: weights in int3: AMCT has",
        ),
        (
            (Entry("c.weight", "weight", "mxfp4", "per_tensor", sites=C), INPUT),
            "c/conv2d: weights in mxfp4",
        ),
        (
            (entry("c.weight", "weight", "int8_asym", zero_point=(1,), sites=C), INPUT),
            "a zero point",
        ),
        (
            (
                entry(
                    "c.weight",
                    "weight",
                    "int8",
                    "per_group(2, -1)",
                    (1.0, 2.0),
                    sites=C,
                ),
                INPUT,
            ),
            "per_group(2, -1)",
        ),
        (
            (
                entry("c.weight", "weight", "int8", "per_axis(1)", (1.0, 2.0), sites=C),
                INPUT,
            ),
            "per_axis(1)",
        ),
        (
            (
                WEIGHT,
                Entry(
                    "c/conv2d:0",
                    "activation",
                    "int8",
                    "per_token",
                    sites=C,
                    dynamic=True,
                ),
            ),
            "dynamic",
        ),
        (
            (
                WEIGHT,
                entry("c/conv2d:0", "activation", "int8", "per_axis(1)", (1.0, 2.0)),
            ),
            "its input is per_axis(1)",
        ),
        (
            (WEIGHT, entry("c/conv2d:0", "activation", "fp8_e5m2")),
            "its input in fp8_e5m2",
        ),
        (
            (WEIGHT, entry("c/conv2d:0", "activation", "int8")),
            "1 inputs are int8 with codes from -127",
        ),
        (
            (entry("w", "weight", "int8", sites=C), INPUT),
            "w is not the weight of a module called once",
        ),
        (
            (entry("c.weight", "weight", "int8", sites=("c/conv2d#1",)),),
            "c/conv2d#1: c.weight is not the weight",
        ),
        (
            (entry("a", "activation", "int8", sites=("/add",)),),
            "a, read by /add: AMCT quantizes only inputs",
        ),
        (
            (INPUT, WEIGHT, entry("c/conv2d", "activation", "int8_asym")),
            "c/conv2d: AMCT quantizes only inputs of layers",
        ),
        (
            (entry("k/linear", "kv_cache", "int4_asym"),),
            "k/linear: a KV cache in int4_asym",
        ),
        (
            (
                entry(
                    "f.weight",
                    "weight",
                    "int8",
                    "per_axis(0)",
                    (1.0, 2.0),
                    sites=("f/linear",),
                ),
                entry("f/linear:0", "activation", "int8_full"),
            ),
            "a linear layer with scales per channel",
        ),
    ],
)
def test_what_amct_has_no_words_for_is_listed_with_the_reason(
    tmp_path, entries, reason
):
    lost = write_record(Record(Fingerprint(), entries), tmp_path / "r.txt")
    assert any(reason in line for line in lost), lost


def test_balance_factors_that_amct_refuses_and_those_without_a_layer_are_listed(
    tmp_path,
):
    record = Record(
        Fingerprint(),
        (INPUT, WEIGHT),
        balance={"c.weight": (1e-8,), "d.weight": (1.0,)},
    )
    assert write_record(record, tmp_path / "r.txt") == [
        "c.weight: balance factors outside AMCT's [2^-23, 2^23]",
        "d.weight: balance factors of a weight without an entry",
    ]


def test_equal_scales_of_a_linear_layer_are_one(tmp_path):
    record = Record(
        Fingerprint(),
        (
            entry(
                "f.weight",
                "weight",
                "int8",
                "per_axis(0)",
                (0.5, 0.5),
                sites=("f/linear",),
            ),
            entry("f/linear:0", "activation", "int8_full"),
        ),
    )
    assert write_record(record, tmp_path / "r.txt") == []
    assert list(merged(tmp_path / "r.txt").record[0].value.scale_w) == [0.5]


def test_factors_of_a_recurrent_layer_are_kept_and_written_back(tmp_path):
    text = (
        'record { key: "lstm" value { scale_d: 0.5 offset_d: 1 scale_w: [1, 2, 3, 4] offset_w: [0, 0, 0, 0] '
        "scale_h: 0.25 offset_h: 0 scale_r: [1, 1, 1, 1] offset_r: [0, 0, 0, 0] } }"
    )
    record = read_record(write(tmp_path, text))
    assert record.entries == ()
    assert record.skipped == (
        ("lstm/*", "factors of a recurrent layer: kept for AMCT, not applied here"),
    )
    write_record(record, tmp_path / "again.txt")
    assert merged(tmp_path / "again.txt") == merged(tmp_path / "record.txt")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_has_one_scale_for_each_output_channel(
    tmp_path, groups
):
    """The weight's shape is (in, out / groups, ...): channel c of group g is block (g, c) of in / groups rows."""
    text = 'record { key: "0" value { scale_d: 0.5 offset_d: 1 scale_w: [1, 2, 3, 4] offset_w: [0, 0, 0, 0] } }'
    model = nn.Sequential(nn.ConvTranspose2d(6, 4, (2, 3), groups=groups))
    record = read_record(write(tmp_path, text), model)
    weight = torch.full_like(model[0].weight, 0.6)
    rounded = fake_quantize(
        weight, record["0.weight"].qparams(weight.shape), format_named("int8_full")
    )
    for channel, scale in enumerate((1.0, 2.0, 3.0, 4.0)):
        group, column = divmod(channel, 4 // groups)
        rows = slice(group * 6 // groups, (group + 1) * 6 // groups)
        assert (rounded[rows, column] == round(0.6 / scale) * scale).all()
    assert write_record(record, tmp_path / "again.txt") == []
    assert list(merged(tmp_path / "again.txt").record[0].value.scale_w) == [1, 2, 3, 4]


LAYER = 'record {\n  key: "head"\n  value {\n    %s\n  }\n}\n'


@pytest.mark.parametrize(
    ("fields", "line", "message"),
    [
        ("scale_d: 0.5", 4, "scale_d without offset_d"),
        ("offset_d: 1", 4, "offset_d without scale_d"),
        (
            "scale_d: 0.5 offset_d: 200",
            4,
            "offset_d: a zero point is no code of int8_asym",
        ),
        ("scale_d: 0 offset_d: 0", 4, "scale_d: 1 of 1 scales cannot be used"),
        ("scale_d: inf offset_d: 0", 4, "scale_d: 1 of 1 scales cannot be used"),
        ("scale_d: nan offset_d: 0", 4, "scale_d: 1 of 1 scales cannot be used"),
        ("scale_w: 0.5", 4, "as many offset_w as scale_w"),
        ("scale_w: -0.5\n    offset_w: 0", 4, "scale_w: 1 of 1 scales cannot be used"),
        ("scale_w: 0.5\n    offset_w: 3", 5, "offset_w is not 0"),
        ('scale_d: 0.5 offset_d: 0\n    act_type: "INT9"', 5, "no such act_type"),
        ('scale_w: 0.5 offset_w: 0\n    wts_type: "INT2"', 5, "no such wts_type"),
        ("tensor_balance_factor: 0", 4, "a balance factor out of range"),
        ("scale_d: 0.5\n    offset_d: 1\n    scale_d: 0.25", 6, "scale_d stands twice"),
        ("scale_q: 0.5", 4, "an unknown field: scale_q"),
        ("scale_d: x", 4, "not an AMCT record: Couldn't parse float: x"),
        ("offset_d: 1.5", 4, "not an AMCT record: Couldn't parse integer: 1.5"),
    ],
)
def test_a_faulty_layer_is_refused_with_its_line(tmp_path, fields, line, message):
    path = write(tmp_path, LAYER % fields)
    with pytest.raises(QuantizationError, match=re.escape(message)) as caught:
        read_record(path)
    assert caught.value.where == f"{path}, line {line}"


def test_a_field_that_stands_twice_is_what_amct_takes_in_silence(tmp_path):
    path = write(tmp_path, LAYER % "scale_d: 0.5\n    offset_d: 1\n    scale_d: 0.25")
    assert (
        merged(path).record[0].value.scale_d == 0.25
    )  # AMCT: the last, without a word
    with pytest.raises(QuantizationError) as caught:
        read_record(path)
    assert caught.value.got == "the first is at line 4"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            "scale_d: 0.5 offset_d: 0 scale_w: [1, 2, 3] offset_w: [0, 0, 0]",
            "the number of scale_w is not that of output",
        ),
        ("tensor_balance_factor: 1", "as many balance factors as input channels"),
    ],
)
def test_counts_are_compared_with_the_model(tmp_path, fields, message):
    with pytest.raises(QuantizationError, match=message):
        read_record(write(tmp_path, LAYER % fields), Net())


def test_a_layer_that_stands_twice_or_that_the_model_lacks_is_refused(tmp_path):
    twice = write(tmp_path, (LAYER % "skip_fusion: true") * 2)
    with pytest.raises(QuantizationError, match="layer head stands twice") as caught:
        read_record(twice)
    assert (caught.value.where, caught.value.got) == (
        f"{twice}, line 8",
        "the first is at line 2",
    )
    other = write(tmp_path, (LAYER % "skip_fusion: true").replace("head", "heads"))
    with pytest.raises(
        QuantizationError, match="the model has no layer heads"
    ) as caught:
        read_record(other, Net())
    assert "head" in caught.value.expected


@pytest.mark.parametrize(
    "text", ["record { }", 'record { key: "a" }', "record { value { } }"]
)
def test_a_record_without_key_or_value_is_refused(tmp_path, text):
    with pytest.raises(QuantizationError, match="a record without key or value"):
        read_record(write(tmp_path, text))


def test_an_empty_file_is_an_empty_record(tmp_path):
    assert read_record(write(tmp_path, "")).entries == ()


def test_no_file_no_text_and_a_required_field_that_is_missing_are_refused(tmp_path):
    with pytest.raises(QuantizationError, match="not a readable file"):
        read_record(tmp_path / "none.txt")
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuantizationError, match="not a readable file"):
        read_record(tmp_path / "b")
    with pytest.raises(
        QuantizationError, match=r"prune_record\[0\].producer\[0\].name is missing"
    ):
        read_record(write(tmp_path, "prune_record { producer { } }"))


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.sampled_from('record{}<>:;,"#value key_scale_d 0.5-\n[]'), max_size=60)
)
def test_any_text_is_read_or_refused_with_our_error(text):
    from roundoff.export.amct.text_format import parse_text

    with contextlib.suppress(QuantizationError):
        parse_text(text, "record", "f")


def test_every_table_makes_a_protobuf_class():
    for file, (_, outermost) in FILES.items():
        assert message_class(file).DESCRIPTOR.name == outermost
