"""AMCT's configuration files: priorities, defaults and names as its schema and field notes say; unknown ones are refused."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import QuantizationError
from roundoff.export.amct.config import (
    ADAROUND,
    IFMR,
    AutoPrune,
    LayerConfig,
    Levels,
    Pruning,
    QuantizeConfig,
)
from roundoff.export.amct.read_config import read_config
from roundoff.export.amct.write_config import write_config
from roundoff.quantize.observers import make_observer

pytest.importorskip("google.protobuf.text_format")

LAYERS = {
    "stem.0": "Conv2d",
    "stem.1": "ReLU",
    "body.0": "Conv2d",
    "pool": "AvgPool2d",
    "fc": "Linear",
    "head": "Linear",
}
CALIBRATION = """
batch_num: 4
activation_offset: false
skip_layers: "head"
skip_layer_types: "AvgPool2d"
skip_fusion_layers: "stem.0"
common_config : {   # everything that nothing below names
    arq_quantize : { channel_wise : true quant_bits : 6 }
    ifmr_quantize : { search_range_start : 0.8 search_range_end : 1.2 search_step : 0.02
        max_percentile : 0.99999 asymmetric : true }
    dmq_balancer : { migration_strength : 0.4 }
}
override_layer_types : {
    layer_type : "Linear"
    calibration_config : {
        ada_quantize : { num_iteration : 500 channel_wise : false }
        hfmg_quantize : { num_of_bins : 8192 dst_type : INT16 }
    }
}
override_layer_configs : {
    layer_name : "body.0"
    calibration_config : { arq_quantize : { quant_bits : 4 } }
}
"""


def save(tmp_path, text, name="a.cfg"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_layer_goes_before_its_type_and_that_before_the_common_configuration_each_as_a_whole(
    tmp_path,
):
    config = read_config(save(tmp_path, CALIBRATION))
    assert (
        config.kind,
        config.batch_num,
        config.symmetric,
        config.fold,
        config.skip_fold,
    ) == ("calibration", 4, True, True, ("stem.0",))
    of = config.for_layers(LAYERS)
    assert list(of) == [
        "stem.0",
        "body.0",
        "pool",
        "fc",
        "head",
    ]  # AMCT quantizes no ReLU
    assert [name for name, c in of.items() if c.skip] == ["pool", "head"]
    assert of["stem.0"] == LayerConfig(
        False,
        6,
        True,
        "arq",
        {},
        8,
        False,
        "ifmr",
        {
            "search_range": (0.8, 1.2),
            "search_step": 0.02,
            "max_percentile": 0.99999,
            "min_percentile": 0.999999,
        },
        0.4,
    )
    # the type's: nothing of the common one but the symmetry, which AMCT hands down
    assert of["fc"] == LayerConfig(
        False,
        8,
        False,
        "adaround",
        {**ADAROUND, "num_iteration": 500},
        16,
        False,
        "hfmg",
        {"num_of_bins": 8192},
        None,
    )
    # the layer's: 4 bits; channels, IFMR's parameters and no balancing are defaults
    assert of["body.0"] == LayerConfig(
        False, 4, True, "arq", {}, 8, False, "ifmr", IFMR, None
    )


def test_activation_offset_decides_where_no_level_says(tmp_path):
    for text, symmetric in (
        ("activation_offset: false", True),
        ("activation_offset: true", False),
        ("", False),
    ):
        config = read_config(save(tmp_path, text))
        assert config.for_layers({"c": "Conv2d"})["c"].symmetric is symmetric


def test_our_observers_take_the_parameters_as_they_are(tmp_path):
    for layer in read_config(save(tmp_path, CALIBRATION)).for_layers(LAYERS).values():
        made = make_observer(
            layer.observer, None, **layer.observer_parameters
        )  # an unknown parameter would raise
        assert made.name == layer.observer


def test_an_empty_file_is_amcts_defaults(tmp_path):
    of = read_config(save(tmp_path, "")).for_layers({"c": "Conv2d", "f": "Linear"})
    assert of["c"] == LayerConfig(per_channel=True, symmetric=False)
    assert of["f"] == LayerConfig(per_channel=False, symmetric=False)


RETRAIN = """
batch_num: 2
skip_layers: "stem.0"
quant_skip_layers: "fc"
regular_prune_skip_types: "Linear"
retrain_data_quant_config: { ulq_quantize: { clip_max_min: { clip_max: 6.0 clip_min: -6.0 } dst_type: INT4 } }
retrain_weight_quant_config: { ulq_retrain: { dst_type: INT4 channel_wise: true } }
prune_config: { filter_pruner: { balanced_l2_norm_filter_prune: { prune_ratio: 0.3 ascend_optimized: false } } }
override_layer_types: { layer_type: "Linear" retrain_weight_quant_config: { arq_retrain: { } } }
override_layer_configs: { layer_name: "body.0"
    prune_config: { n_out_of_m_pruner: { l1_selective_prune: { update_freq: 3 } } } }
"""


def test_a_retrain_file_says_quantization_and_pruning_apart(tmp_path):
    config = read_config(save(tmp_path, RETRAIN))
    assert config.kind == "retrain"
    of = config.for_layers(LAYERS)
    assert [name for name, c in of.items() if c.skip] == ["stem.0", "fc"]
    learned = LayerConfig(
        False, 4, True, "ulq", {}, 4, False, "ulq", {"clip_max": 6.0, "clip_min": -6.0}
    )
    assert of["body.0"] == learned  # its override is about pruning alone
    assert of["head"] == LayerConfig(False, 8, False, "arq", {}, 8, False, "ulq", {})
    assert config.pruning(LAYERS) == {
        "body.0": Pruning(None, False, 3),
        "pool": Pruning(0.3, False),
    }


def test_a_file_of_the_kv_cache_names_its_layers(tmp_path):
    text = """kv_cache_quant_config: {
        quant_layers: "fc"
        calibration_config: { hfmg_quantize: { num_of_bins: 1024 quant_granularity: per_channel } }
    }
    override_layers_configs: { layer_name: "head" kv_data_quant_config: { ifmr_quantize: { asymmetric: false } } }
    """
    config = read_config(save(tmp_path, text))
    assert (config.kind, config.only) == ("kv_cache", ("fc",))
    of = config.for_layers(LAYERS)
    assert [name for name, c in of.items() if not c.skip] == ["fc", "head"]
    assert (of["fc"].observer, of["fc"].observer_parameters) == (
        "hfmg",
        {"num_of_bins": 1024},
    )
    assert (of["fc"].cache_per_channel, of["head"].cache_per_channel) == (True, False)
    assert of["head"].symmetric is True
    assert of["head"].observer_parameters == IFMR


def test_automatic_pruning(tmp_path):
    text = "compress_ratio: 1.4\nascend_optimized: false\nmax_prune_ratio: 0.8\n"
    assert read_config(save(tmp_path, text)) == AutoPrune(1.4, False, 0.8, 1, "")


JSON = {
    "version": 1,
    "batch_num": 2,
    "activation_offset": True,
    "do_fusion": True,
    "skip_fusion_layers": [],
    "stem.0": {
        "quant_enable": True,
        "dmq_balancer_param": 0.5,
        "activation_quant_params": {
            "num_bits": 8,
            "max_percentile": 0.999999,
            "min_percentile": 0.999999,
            "search_range": [0.7, 1.3],
            "search_step": 0.01,
            "act_algo": "ifmr",
            "asymmetric": False,
        },
        "weight_quant_params": {
            "num_bits": 8,
            "wts_algo": "arq_quantize",
            "channel_wise": True,
        },
    },
    "fc": {
        "quant_enable": False,
        "activation_quant_params": {
            "num_bits": 8,
            "num_of_bins": 4096,
            "act_algo": "hfmg",
            "asymmetric": True,
        },
        "weight_quant_params": {
            "num_bits": 8,
            "wts_algo": "ada_quantize",
            "num_iteration": 100,
            "reg_param": 0.02,
            "beta_range": [10, 3],
            "warm_start": 0.1,
            "channel_wise": False,
        },
    },
}


def test_config_json_names_every_layer(tmp_path):
    config = read_config(save(tmp_path, json.dumps(JSON), "config.json"))
    of = config.for_layers({"stem.0": "Conv2d", "fc": "Linear"})
    assert of["stem.0"] == LayerConfig(
        False, 8, True, "arq", {}, 8, True, "ifmr", IFMR, 0.5
    )
    assert of["fc"] == LayerConfig(
        True,
        8,
        False,
        "adaround",
        {
            "num_iteration": 100,
            "reg_param": 0.02,
            "beta_range": (10, 3),
            "warm_start": 0.1,
        },
        8,
        False,
        "hfmg",
        {"num_of_bins": 4096},
    )
    again = tmp_path / "again.json"
    assert write_config(config, again, {"stem.0": "Conv2d", "fc": "Linear"}) == []
    assert json.loads(again.read_text()) == JSON


KV_CACHE = 'kv_cache_quant_config { quant_layers: "a" }'


@pytest.mark.parametrize(
    "text", [CALIBRATION, RETRAIN, "compress_ratio: 2.5", KV_CACHE]
)
def test_a_file_that_is_written_again_says_the_same(tmp_path, text):
    config = read_config(save(tmp_path, text))
    assert write_config(config, tmp_path / "again.cfg") == []
    assert read_config(tmp_path / "again.cfg", getattr(config, "kind", None)) == config


SCHEMES = st.builds(
    LayerConfig,
    st.just(False),
    st.sampled_from([4, 6, 7, 8]),
    st.sampled_from([None, True, False]),
    st.just("arq"),
    st.just({}),
    st.sampled_from([8, 16]),
    st.sampled_from([None, True, False]),
    st.just("ifmr"),
    st.builds(
        lambda step, top: {**IFMR, "search_range": (0.5, top), "search_step": step},
        st.sampled_from([0.01, 0.003]),
        st.sampled_from([1.1, 1.7]),
    ),
    st.sampled_from([None, 0.2, 0.55]),
)


@settings(max_examples=30, deadline=None)
@given(
    SCHEMES,
    st.dictionaries(st.sampled_from(["Linear", "Conv2d"]), SCHEMES),
    st.dictionaries(st.sampled_from(["fc", "body.0"]), SCHEMES),
    st.booleans(),
)
def test_cfg_and_json_say_the_same_of_every_layer(
    tmp_path_factory, common, types, layers, symmetric
):
    folder = tmp_path_factory.mktemp("c")
    config = QuantizeConfig(
        "calibration",
        3,
        symmetric,
        Levels(common, types, layers),
        skip_layers=("head",),
    )
    assert write_config(config, folder / "a.cfg") == []
    assert read_config(folder / "a.cfg") == config
    of = config.for_layers(LAYERS)
    lost = write_config(config, folder / "a.json", LAYERS)
    refused = [
        n
        for n, c in of.items()
        if c.per_channel and LAYERS[n] in ("Linear", "AvgPool2d")
    ]
    assert lost == [
        f"{n}: a scale for each channel of a {LAYERS[n]} layer, which AMCT refuses"
        for n in refused
    ]
    again = read_config(folder / "a.json").for_layers(LAYERS)
    assert again == of


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("batch_nums: 1", 1, "an unknown field: batch_nums"),
        ("batch_num: 0", 1, "batch_num out of range"),
        ('skip_layers: "a"\nskip_layers: "a"', 2, "a is named twice"),
        (
            'override_layer_types { layer_type: "Linear" calibration_config {} }\n'
            'override_layer_types { layer_type: "Linear" calibration_config {} }',
            2,
            "Linear is named twice",
        ),
        (
            "common_config {\n ifmr_quantize {}\n hfmg_quantize {}\n}",
            3,
            "hfmg_quantize and ifmr_quantize exclude each other",
        ),
        (
            "common_config {\n arq_quantize { quant_bits: 5 }\n}",
            1,
            "weight bits out of range",
        ),
        (
            "common_config {\n ifmr_quantize { search_step: 0 }\n}",
            1,
            "search_step out of range",
        ),
        (
            "common_config {\n ifmr_quantize { search_step: 0.7 }\n}",
            1,
            "search_step out of range",
        ),
        (
            "common_config {\n ifmr_quantize { search_range_start: 1.4 }\n}",
            1,
            "search_range out of range",
        ),
        (
            "common_config {\n ifmr_quantize { max_percentile: 0.5 }\n}",
            1,
            "max_percentile out of range",
        ),
        (
            "common_config {\n hfmg_quantize { num_of_bins: 1000 }\n}",
            1,
            "num_of_bins out of range",
        ),
        (
            "common_config {\n dmq_balancer { migration_strength: 0.9 }\n}",
            1,
            "migration_strength out of range",
        ),
        (
            "common_config {\n ada_quantize { beta_range_start: 1 }\n}",
            1,
            "beta_range out of range",
        ),
        (
            "common_config {\n ada_quantize { warm_start: 1 }\n}",
            1,
            "warm_start out of range",
        ),
        (
            "common_config {\n ifmr_quantize { dst_type: INT4 }\n}",
            2,
            "not an AMCT calibration configuration",
        ),
        (
            "batch_num: 1\nprune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 1 } } }",
            2,
            "prune_ratio out of range",
        ),
        (
            "retrain_data_quant_config {\n ulq_quantize { clip_max_min { clip_max: -1 clip_min: -2 } } }",
            1,
            "clip_max_min out of range",
        ),
        ("compress_ratio: 0.5", 1, "compress_ratio out of range"),
        ("compress_ratio: 2\nmax_prune_ratio: 2", 2, "max_prune_ratio out of range"),
    ],
)
def test_a_faulty_cfg_is_refused_with_its_line(tmp_path, text, line, message):
    path = save(tmp_path, text)
    with pytest.raises(QuantizationError, match=re.escape(message)) as caught:
        read_config(path)
    assert caught.value.where == f"{path}, line {line}"


def test_a_required_field_that_is_missing_is_named(tmp_path):
    with pytest.raises(
        QuantizationError, match=r"override_layer_configs\[0\].layer_name is missing"
    ):
        read_config(save(tmp_path, "override_layer_configs { calibration_config { } }"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_numb": 3}, "an unknown parameter (layers hold objects): batch_numb"),
        (
            {"fc": {"quant_enabled": True}},
            "an unknown parameter of layer fc: quant_enabled",
        ),
        (
            {"fc": {"activation_quant_params": {"bits": 8}}},
            "an unknown parameter of fc's activation: bits",
        ),
        ({"fc": {"weight_quant_params": {"num_bits": 3}}}, "weight bits out of range"),
        (
            {
                "fc": {
                    "activation_quant_params": {
                        "num_of_bins": 4096,
                        "search_step": 0.01,
                    }
                }
            },
            "search_step is no parameter of hfmg",
        ),
        (
            {"fc": {"weight_quant_params": {"warm_start": 0.1}}},
            "warm_start is no parameter of arq_quantize",
        ),
        (
            {"fc": {"weight_quant_params": {"wts_algo": "magic"}}},
            "layer fc cannot be read: 'magic'",
        ),
        ({"batch_num": 0}, "batch_num out of range"),
        ({"version": 2}, "not a version that AMCT has"),
    ],
)
def test_a_faulty_config_json_is_refused(tmp_path, changed, message):
    path = save(tmp_path, json.dumps(JSON | changed, indent=1), "config.json")
    with pytest.raises(QuantizationError, match=re.escape(message)) as caught:
        read_config(path)
    assert caught.value.where.startswith(str(path))


def test_a_layer_that_comes_twice_in_json_is_refused_with_both_lines(tmp_path):
    with pytest.raises(QuantizationError, match='"fc" comes twice') as caught:
        read_config(save(tmp_path, '{\n"fc": {},\n"fc": {}\n}', "config.json"))
    assert (caught.value.where.rpartition(", ")[2], caught.value.got) == (
        "line 3",
        "the first is at line 2",
    )


def test_names_that_the_model_lacks_are_refused_with_their_line_and_the_nearest(
    tmp_path,
):
    config = read_config(save(tmp_path, 'batch_num: 1\nskip_layers: "bode.0"'))
    with pytest.raises(
        QuantizationError, match="the model has no layer bode.0"
    ) as caught:
        config.for_layers(LAYERS)
    assert caught.value.where == "line 2"
    assert caught.value.expected.startswith("such as body.0")
    config = read_config(save(tmp_path, 'skip_layer_types: "Conv2D"'))
    with pytest.raises(
        QuantizationError, match="AMCT quantizes no layers of type Conv2D"
    ) as caught:
        config.for_layers(LAYERS)
    assert "Conv2d" in caught.value.expected
    config = read_config(save(tmp_path, '{"fcc": {}}', "config.json"))
    with pytest.raises(QuantizationError, match="the model has no layer fcc"):
        config.for_layers(LAYERS)


def test_what_a_kind_of_file_has_no_words_for_is_listed(tmp_path):
    pruned = QuantizeConfig(prune=Levels(Pruning(0.5)))
    assert write_config(pruned, tmp_path / "a.cfg") == [
        "pruning: a calibration file has none, a retrain file has"
    ]
    ulq = QuantizeConfig(
        quantize=Levels(
            LayerConfig(observer="ulq", weight_algorithm="ulq", observer_parameters={})
        )
    )
    assert write_config(ulq, tmp_path / "a.cfg") == [
        "common_config: activations by ulq: AMCT calibrates with ifmr or hfmg",
        "common_config: weights by ulq: AMCT calibrates with arq or adaround",
    ]
    trained = QuantizeConfig("retrain", quantize=Levels(LayerConfig(weight_bits=6)))
    assert write_config(trained, tmp_path / "a.cfg") == [
        "common: weights in 6 bits: this file of AMCT has no such type",
        "common: activations by ifmr: AMCT trains with ulq",
    ]
    with pytest.raises(
        QuantizationError, match="a layer configuration is for calibration"
    ):
        write_config(trained, tmp_path / "a.json", LAYERS)
    with pytest.raises(
        QuantizationError, match="config.json has an entry for each layer"
    ):
        write_config(pruned, tmp_path / "a.json")
