"""Weights as codes in safetensors: the same words as the compressed-tensors library makes, and back without a change."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from roundoff.errors import QuantizationError
from roundoff.export.checkpoint.packing import pack, unpack
from roundoff.export.checkpoint.read import read_compressed
from roundoff.export.checkpoint.shards import read_tensors, write_tensors
from roundoff.export.checkpoint.weights import write_checkpoint
from roundoff.export.checkpoint.write import write_compressed
from roundoff.formats import (
    PerAxis,
    PerBlock,
    PerGroup,
    PerTensor,
    QParams,
    choose_qparams,
    dequantize,
    fake_quantize,
    integer,
    parse_format,
    quantize,
)
from roundoff.quantize import Entry, QuantizedModel
from roundoff.quantize import quantize as quantize_model


def test_words_are_those_of_the_library():
    """Golden: compressed_tensors 0.20.0, compressors.pack_quantized.helpers.pack_to_int32 of these codes."""
    four = [[-8, -7, -1, 0, 1, 6, 7, 3, -5, 4], [7, 6, 5, 4, 3, 2, 1, 0, -1, -2]]
    for codes, bits, axis, words in (
        (four, 4, 1, [[-1075214576, 195], [-1985229329, 103]]),
        ([[-128, 127, 0, 5, -1]], 8, 1, [[-2055143680, 127]]),
        ([[-2, 1, 0, -1] * 5], 2, 1, [[1819044972, 108]]),
        ([[-8, 7], [0, 1], [3, -3]], 4, 0, [[2944, 1439]]),
    ):
        tensor = torch.tensor(codes)
        assert pack(tensor, bits, axis).tolist() == words
        assert torch.equal(
            unpack(torch.tensor(words, dtype=torch.int32), bits, tensor.shape, axis),
            tensor.to(torch.int8),
        )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.integers(0, 5),
    st.integers(0, 37),
    st.sampled_from([0, 1]),
    st.integers(0, 2**32 - 1),
)
def test_every_bit_of_a_word_is_where_the_layout_says(bits, rows, columns, axis, seed):
    """By hand, one code after the other, in Python's integers."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns))
    along = codes if axis == 1 else codes.T
    each = 32 // bits
    expected = np.zeros((along.shape[0], -(-along.shape[1] // each)), dtype=np.uint32)
    for row in range(along.shape[0]):
        for column in range(along.shape[1]):
            unsigned = int(along[row, column]) + 2 ** (bits - 1)
            expected[row, column // each] |= np.uint32(
                unsigned << bits * (column % each)
            )
    expected = expected if axis == 1 else expected.T
    words = pack(torch.tensor(codes), bits, axis)
    assert np.array_equal(
        words.numpy(),
        expected.view(np.int32) if expected.size else expected.astype(np.int32),
    )
    assert np.array_equal(unpack(words, bits, codes.shape, axis).numpy(), codes)


def test_widths_that_do_not_fill_a_word_and_words_that_do_not_fit_are_refused():
    with pytest.raises(
        QuantizationError, match="codes of this width do not fill a word"
    ):
        pack(torch.zeros(2, 2, dtype=torch.int8), 3)
    with pytest.raises(QuantizationError, match="packed codes do not fit"):
        unpack(torch.zeros(2, 1, dtype=torch.int32), 4, (2, 9))


def layer(fmt, granularity, rows=16, columns=32, seed=0):
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * torch.logspace(-1, 1, rows).unsqueeze(1) + 0.1
    fmt = parse_format(fmt)
    qparams = choose_qparams(weight, fmt, granularity)
    return weight, quantize(weight, qparams, fmt), qparams, fmt


CASES = [
    (fmt, granularity)
    for fmt in ("int4", "int4_asym", "int8", "int8_asym", "int2", "fp8_e4m3fn")
    for granularity in (PerTensor(), PerAxis(0), PerGroup(8), PerBlock((8, 16)))
]


@pytest.mark.parametrize(("fmt", "granularity"), CASES)
def test_codes_and_qparams_come_back_as_they_were_written(tmp_path, fmt, granularity):
    weight, codes, qparams, number = layer(fmt, granularity)
    assert torch.equal(
        dequantize(codes.float() if codes.is_floating_point() else codes, qparams),
        fake_quantize(weight, qparams, number),
    )
    write_compressed(
        {"a.q.weight": (codes, qparams, number)},
        {"norm.weight": torch.ones(3)},
        tmp_path,
    )
    read = read_compressed(tmp_path)
    again, found, format_of = read.tensors["a.q.weight"]
    assert torch.equal(again.float(), codes.float())
    assert torch.equal(found.scale, qparams.scale)
    assert (found.zero_point is None) == (qparams.zero_point is None)
    assert found.zero_point is None or torch.equal(found.zero_point, qparams.zero_point)
    assert found.granularity == granularity
    assert format_of.width == number.width
    assert torch.equal(dequantize(again, found), fake_quantize(weight, qparams, number))
    assert list(read.others) == ["norm.weight"]


def test_the_files_have_the_names_types_and_shapes_of_the_library(tmp_path):
    """Golden: the state dict of compressed_tensors 0.20.0's compressors for the same schemes, of 16 x 32 weights."""
    static = Entry("c/linear:0", "activation", "int8_asym", "per_tensor", (0.5,), (3,))
    dynamic = Entry("d/linear:0", "activation", "fp8_e4m3fn", "per_token", dynamic=True)
    made = {
        f"{name}.weight": layer(fmt, granularity)[1:]
        for name, fmt, granularity in (
            ("a", "int4", PerGroup(8)),
            ("b", "int4_asym", PerGroup(8)),
            ("c", "int8", PerAxis(0)),
            ("d", "fp8_e4m3fn", PerAxis(0)),
            ("e", "int8_asym", PerTensor()),
        )
    }
    sizes = write_compressed(
        made,
        {},
        tmp_path,
        inputs={"c.weight": static, "d.weight": dynamic},
        config={"model_type": "llama"},
    )
    tensors = load_file(tmp_path / "model.safetensors")
    held = {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in tensors.items()
    }
    assert held == {
        "a.weight_packed": ("int32", (16, 4)),
        "a.weight_scale": ("float32", (16, 4)),
        "a.weight_shape": ("int64", (2,)),
        "b.weight_packed": ("int32", (16, 4)),
        "b.weight_scale": ("float32", (16, 4)),
        "b.weight_shape": ("int64", (2,)),
        "b.weight_zero_point": ("int32", (2, 4)),
        "c.weight": ("int8", (16, 32)),
        "c.weight_scale": ("float32", (16, 1)),
        "c.input_scale": ("float32", (1,)),
        "c.input_zero_point": ("int8", (1,)),
        "d.weight": ("float8_e4m3fn", (16, 32)),
        "d.weight_scale": ("float32", (16, 1)),
        "e.weight_packed": ("int32", (16, 8)),
        "e.weight_scale": ("float32", (1,)),
        "e.weight_shape": ("int64", (2,)),
        "e.weight_zero_point": ("int8", (1,)),
    }
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["model_type"] == "llama"
    said = said["quantization_config"]
    assert (said["quant_method"], said["quantization_status"], said["format"]) == (
        "compressed-tensors",
        "compressed",
        "mixed-precision",
    )
    assert {g["targets"][0]: g["format"] for g in said["config_groups"].values()} == {
        "a": "pack-quantized",
        "b": "pack-quantized",
        "c": "int-quantized",
        "d": "float-quantized",
        "e": "pack-quantized",
    }
    assert said["config_groups"]["group_1"]["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 8,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
    }
    # a and b: 512 codes of half a byte; c, d, e: 512 of one. Their qparams: 4 bytes a scale, 16 bytes a shape, 32 of b's
    # zero points, 1 of e's, and of c's input 4 + 1. In bf16 5 * 512 weights of two bytes.
    assert (sizes.weights, sizes.qparams, sizes.others, sizes.as_bf16) == (
        2 * 256 + 3 * 512,
        2 * 64 * 4 + 2 * 16 * 4 + 4 + 3 * 16 + 32 + 1 + 5,
        0,
        5 * 512 * 2,
    )
    read = read_compressed(tmp_path)
    assert read.inputs["c.weight"] == replace(static, sites=("c/linear",))
    assert read.inputs["d.weight"].dynamic


def test_the_library_itself_reads_what_is_written(tmp_path):
    pytest.importorskip(
        "compressed_tensors", reason="compressed-tensors is not installed"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the library and what it imports
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

    made = {f"m{i}.weight": layer(*case)[1:] for i, case in enumerate(CASES)}
    write_compressed(made, {}, tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    config = QuantizationConfig.model_validate(
        json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    )
    for group in config.config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(group.format)
        for module in group.targets:
            own = {
                name.removeprefix(f"{module}."): t
                for name, t in held.items()
                if name.startswith(f"{module}.")
            }
            weight = compressor.decompress(own, group)["weight"]
            codes, qparams, _ = made[f"{module}.weight"]
            assert torch.equal(weight, dequantize(codes.float(), qparams)), (
                module,
                group,
            )


def test_the_library_s_own_folder_is_read(tmp_path):
    pytest.importorskip(
        "compressed_tensors", reason="compressed-tensors is not installed"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
        )

    torch.manual_seed(0)
    weight, scale = torch.randn(16, 8), torch.rand(16, 2) + 0.1
    point = torch.randint(-8, 8, (16, 2), dtype=torch.int8)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=4, type="int", symmetric=False, strategy="group", group_size=4
        ),
    )
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    own = compressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": point}, scheme
    )
    save_file(
        {f"model.q.{name}": tensor for name, tensor in own.items()},
        tmp_path / "model.safetensors",
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        quantization_status="compressed",
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": config.model_dump(mode="json")})
    )
    codes, qparams, _ = read_compressed(tmp_path).tensors["model.q.weight"]
    assert torch.equal(
        dequantize(codes, qparams), compressor.decompress(own, scheme)["weight"]
    )


@pytest.mark.parametrize(
    ("name", "codes", "qparams", "fmt", "message"),
    [
        (
            "a.bias",
            torch.zeros(2, 2),
            QParams(torch.ones(1)),
            integer(8),
            "not the name of a layer's weight",
        ),
        (
            "a.weight",
            torch.zeros(2, 2, 1, 1).int(),
            QParams(torch.ones(1)),
            integer(8),
            "weights of linear layers alone",
        ),
        (
            "a.weight",
            torch.zeros(2, 2),
            QParams(torch.ones(1)),
            integer(8),
            "codes that have no place",
        ),
        (
            "a.weight",
            torch.zeros(2, 2).int(),
            QParams(torch.ones(1)),
            integer(3),
            "codes that have no place",
        ),
        (
            "a.weight",
            torch.zeros(2, 2),
            QParams(torch.ones(1)),
            parse_format("fp8_e5m2"),
            "codes that have no place",
        ),
        (
            "a.weight",
            torch.zeros(2, 2).int(),
            QParams(torch.ones(1, 2), None, PerAxis(1)),
            integer(8),
            "no words for this granularity",
        ),
        (
            "a.weight",
            torch.full((2, 2), -8),
            QParams(torch.ones(1)),
            integer(4),
            "codes that int4 does not have",
        ),
    ],
)
def test_what_has_no_place_is_refused_and_nothing_is_written(
    tmp_path, name, codes, qparams, fmt, message
):
    with pytest.raises(QuantizationError, match=message) as caught:
        write_compressed({name: (codes, qparams, fmt)}, {}, tmp_path / "out")
    assert caught.value.where == name
    assert not (tmp_path / "out").exists()


def test_names_that_clash_inputs_of_nothing_and_formats_that_do_not_fit_are_refused(
    tmp_path,
):
    _, codes, qparams, fmt = layer("int8", PerAxis(0))
    made = {"a.weight": (codes, qparams, fmt)}
    token = Entry("x", "activation", "int4", "per_token", dynamic=True)
    with pytest.raises(QuantizationError, match="a tensor is both quantized and not"):
        write_compressed(made, {"a.weight_packed": torch.ones(1)}, tmp_path)
    with pytest.raises(
        QuantizationError, match="inputs of a layer without a quantized weight"
    ):
        write_compressed(
            made, {}, tmp_path, inputs={"b.weight": replace(token, format="int8")}
        )
    with pytest.raises(QuantizationError, match="no words for this input"):
        write_compressed(made, {}, tmp_path, inputs={"a.weight": token})
    with pytest.raises(QuantizationError, match="no such way of storing"):
        write_compressed(made, {}, tmp_path, format="dense")
    fp8 = {"a.weight": layer("fp8_e4m3fn", PerAxis(0))[1:]}
    with pytest.raises(QuantizationError, match="pack-quantized holds integers"):
        write_compressed(fp8, {}, tmp_path, format="pack-quantized")
    assert list(tmp_path.iterdir()) == []


def damaged(tmp_path, change):
    """A written folder, changed: its tensors and its quantization_config."""
    write_compressed({"a.weight": layer("int4_asym", PerGroup(8))[1:]}, {}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def arguments(config):
    return config["quantization_config"]["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop("a.weight_scale"), "a tensor is missing"),
        (lambda t, c: t.pop("a.weight_zero_point"), "a tensor is missing"),
        (
            lambda t, c: t.update(
                {"a.weight_packed": t["a.weight_packed"][:, :1].clone()}
            ),
            "packed codes do not fit",
        ),
        (
            lambda t, c: t.update(
                {"a.weight_scale": t["a.weight_scale"][:, :1].clone()}
            ),
            "the scales do not fit the weight",
        ),
        (
            lambda t, c: t.update({"a.weight_g_idx": torch.arange(32) % 4}),
            "columns are grouped in another order",
        ),
        (lambda t, c: c.clear(), "not compressed by compressed-tensors"),
        (
            lambda t, c: c["quantization_config"].update(quant_method="gptq"),
            "not compressed by compressed-tensors",
        ),
        (
            lambda t, c: arguments(c).update(targets=["b"]),
            "no group of quantization_config names this layer",
        ),
        (
            lambda t, c: arguments(c).update(format="marlin-24"),
            "a way of storing that is not read here",
        ),
        (
            lambda t, c: arguments(c)["weights"].update(num_bits=3),
            "a way of storing that is not read here",
        ),
        (
            lambda t, c: arguments(c)["weights"].update(strategy="magic"),
            "no such strategy",
        ),
        (
            lambda t, c: arguments(c).update(
                input_activations={"num_bits": 8, "dynamic": False}
            ),
            "a tensor is missing",
        ),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, change, message):
    with pytest.raises(QuantizationError, match=message):
        read_compressed(damaged(tmp_path, change))


@pytest.mark.parametrize("target", ["a", "re:.*a", "Linear"])
def test_groups_name_layers_by_name_pattern_or_class(tmp_path, target):
    folder = damaged(tmp_path, lambda t, c: arguments(c).update(targets=[target]))
    assert list(read_compressed(folder).tensors) == ["a.weight"]


def test_groups_of_neighbouring_columns_are_read_whether_or_not_their_order_is_said(
    tmp_path,
):
    folder = damaged(
        tmp_path, lambda t, c: t.update({"a.weight_g_idx": torch.arange(32) // 8})
    )
    assert list(read_compressed(folder).tensors) == ["a.weight"]


def test_folders_without_config_or_tensors_are_refused(tmp_path):
    with pytest.raises(QuantizationError, match=r"no readable config.json"):
        read_compressed(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(QuantizationError, match=r"config.json is no object"):
        read_compressed(tmp_path)
    write_compressed(
        {"a.weight": layer("int8", PerAxis(0))[1:]}, {}, tmp_path, config={}
    )
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(QuantizationError, match="not a readable model"):
        read_compressed(tmp_path)


def test_large_models_are_split_and_old_files_do_not_stay(tmp_path):
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(5)}
    names = write_tensors(tensors, tmp_path, limit=900)  # 400 bytes each, two in a file
    assert [p.name for p in names] == [
        f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert all(
        torch.equal(t, tensors[name]) for name, t in read_tensors(tmp_path).items()
    )
    assert (
        json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"][
            "total_size"
        ]
        == 2000
    )
    write_tensors({"t": torch.ones(1)}, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_tied_tensors_are_each_written_whole(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    write_tensors({"a": shared, "b": shared, "c": shared.T}, tmp_path)
    read = read_tensors(tmp_path)
    assert torch.equal(read["a"], shared)
    assert torch.equal(read["b"], shared)
    assert torch.equal(read["c"], shared.T)


def test_codes_of_values_on_the_grid_are_exact_also_for_extreme_scales():
    """x = scale * (code - zero_point) in fp32, so a division in fp64 is off by 2**-23 of a code at most: it rounds back."""
    for scale in (2.0**-120, 1e-3, 0.1, 3e5, 2.0**100):
        codes = torch.arange(-128, 128)
        qparams = QParams(torch.tensor(scale), torch.tensor(-5.0))
        x = dequantize(codes, qparams)
        assert torch.equal(
            quantize(x, qparams, integer(8, symmetric=False)), codes.int()
        )


def test_nan_has_no_code():
    from roundoff.errors import FormatError

    with pytest.raises(FormatError, match="NaN has no integer code"):
        quantize(
            torch.tensor([1.0, float("nan")]), QParams(torch.tensor(1.0)), integer(8)
        )
    with pytest.raises(FormatError, match="torch has no dtype for codes of fp6_e2m3"):
        quantize(
            torch.tensor([1.0]), QParams(torch.tensor(1.0)), parse_format("fp6_e2m3")
        )


def _codes() -> QuantizedModel:
    torch.manual_seed(0)
    return quantize_model(nn.Sequential(nn.Linear(8, 4)), "int8", [torch.randn(4, 8)])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("weights", "num_bits"), {"a": 1}),
        (("weights", "num_bits"), 10**30),
        (("input_activations", "num_bits"), 10**30),
        (("targets",), 7),
        ((), "a text"),
    ],
)
def test_what_no_writer_puts_there(
    tmp_path: Path, path: tuple[str, ...], value: object
) -> None:
    write_checkpoint(_codes(), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    place = config["quantization_config"]["config_groups"]
    for key in ("group_0", *path)[:-1]:
        place = place[key]
    place[("group_0", *path)[-1]] = value
    file.write_text(json.dumps(config))
    with pytest.raises(QuantizationError):
        read_compressed(tmp_path)


def test_an_index_names_no_file_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(_codes(), folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"0.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(QuantizationError, match="elsewhere"):
        read_compressed(folder)
