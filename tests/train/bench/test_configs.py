"""Configurations by name."""

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.train.bench.configs import parse_config, parse_configs, rebuilt

FORMATS = "expected: fp32, bf16, fp16, tf32, fp64 or a plan file"


def parts(name):
    c = parse_config(name)
    return (
        c.format,
        c.backend,
        len(c.changes),
        c.optimizer,
        c.accumulate,
        c.scale,
        c.static,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", ("fp32", None, 0, {}, 1, None, False)),
        ("float32", ("fp32", None, 0, {}, 1, None, False)),
        ("bf16+compile", ("bf16", "", 0, {}, 1, None, False)),
        ("compile=eager", ("fp32", "eager", 0, {}, 1, None, False)),
        ("fp16", ("fp16", None, 0, {}, 1, 65536.0, False)),
        ("fp16+scale=static:1024", ("fp16", None, 0, {}, 1, 1024.0, True)),
        ("fp16+scale=dynamic:8", ("fp16", None, 0, {}, 1, 8.0, False)),
        ("fp16+scale=off", ("fp16", None, 0, {}, 1, None, False)),
        ("bf16 + scale=dynamic", ("bf16", None, 0, {}, 1, 65536.0, False)),
        ("bf16+channels_last+weights=bf16", ("bf16", None, 2, {}, 1, None, False)),
        (
            "bf16+weights=bf16+updates=kahan",
            ("bf16", None, 1, {}, 1, None, False),
        ),
        ("fp64", ("fp64", None, 1, {}, 1, None, False)),
        (
            "fused+accumulate=4+checkpoint",
            ("fp32", None, 1, {"fused": True}, 4, None, False),
        ),
        ("plans/mine.toml+channels_last", ("plan", None, 1, {}, 1, None, False)),
        ("ops_info.json", ("plan", None, 0, {}, 1, None, False)),
        ("bf16+cuda:1+threads=1", ("bf16", None, 1, {}, 1, None, False)),
    ],
)
def test_grammar(name, expected):
    assert parts(name) == expected


def test_a_plan_whose_name_has_a_plus(tmp_path):
    path = tmp_path / "a+b.toml"
    path.write_text("")
    assert parse_config(str(path)).plan == str(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "bf61",
            [
                "bf61: 'bf61' is no part of a configuration",
                FORMATS,
                "did you mean bf16",
            ],
        ),
        (
            "bf16+chanels_last",
            [
                "'chanels_last' is no part of a configuration",
                "did you mean channels_last",
            ],
        ),
        (
            "bf16+accumulate=0",
            ["'accumulate=0' is no part", "did you mean accumulate=2"],
        ),
        (
            "fp16+scale=static:-1",
            ["'scale=static:-1' is no part", "did you mean scale=static:1024"],
        ),
        ("fp16+scale=nan", ["'scale=nan' is no part"]),
        (
            "weights=bf16+updates=khan",
            ["'updates=khan' is no part", "did you mean updates=kahan"],
        ),
        (
            "fp32+bf16",
            ["fp32+bf16: two formats in one configuration", "got: fp32, bf16"],
        ),
        (
            "int8",
            [
                "int8: torch cannot train in int8 by itself",
                "do: write a plan that simulates it",
            ],
        ),
        (
            "compile=aot_eagre",
            ["torch.compile has no such backend", "did you mean aot_eager"],
        ),
        ("threads=0", ["there is no such candidate"]),
        ("", ["'' is no part of a configuration"]),
    ],
)
def test_what_is_unknown(name, message):
    with pytest.raises(ro.RoundoffError) as caught:
        parse_config(name)
    for text in message:
        assert text in str(caught.value)


def test_nothing_to_train():
    with pytest.raises(ro.RoundoffError, match="configs: there is nothing to train"):
        parse_configs([])


def test_the_same_twice_is_a_test_of_the_bench():
    assert [c.name for c in parse_configs(["fp32", "fp32", "fp32"])] == [
        "fp32",
        "fp32 (2)",
        "fp32 (3)",
    ]


def test_a_step_by_hand():
    def as_published(model, optimizer, batch): ...

    config = parse_config(as_published)
    assert (config.name, config.format, config.step) == (
        "as published",
        "by hand",
        as_published,
    )


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("flag", ["fused", "foreach"])
def test_an_optimizer_with_other_arguments(kind, flag):
    model = nn.Linear(3, 2)
    groups = [
        {"params": [model.weight], "lr": 0.5},
        {"params": [model.bias], "weight_decay": 0.25},
    ]
    made = rebuilt(kind(groups, lr=0.125, foreach=False), {flag: True})
    assert type(made) is kind
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.125]
    assert made.param_groups[1]["weight_decay"] == 0.25
    assert all(group[flag] for group in made.param_groups)
    model(torch.ones(1, 3)).sum().backward()
    made.step()


def test_an_optimizer_without_it():
    with pytest.raises(ro.RoundoffError, match="LBFGS has no fused"):
        rebuilt(torch.optim.LBFGS(nn.Linear(1, 1).parameters()), {"fused": True})
