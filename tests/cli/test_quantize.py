"""``roundoff quantize``: files, exit codes, messages; the sums behind its numbers are tested where they are computed."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

import roundoff as ro
from roundoff.cli.app import main
from roundoff.errors import QuantizationError
from roundoff.export.checkpoint.read import read_compressed
from roundoff.export.delivery.files import FILES
from roundoff.export.delivery.model_file import load_model
from roundoff.plan.rules import Rule
from roundoff.report.strict import json_text

WORKLOAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.relu(self.conv(x)).mean((2, 3)))

def model():
    torch.manual_seed(0)
    return Net()

def data(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 1, 6, 6, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long()

def batches():
    return [data(i) for i in range(3)]

def held_out():
    return [data(9)]

def forward(model, batch):
    return model(batch[0])

def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])

def agreement(outputs, reference):
    return torch.cat([(o.argmax(1) == r.argmax(1)).double() for o, r in zip(outputs, reference)]).mean().item()

metric = agreement
"""
QUICK = "--no-onnx --no-pareto"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def run(arguments, capsys):
    code = main(["quantize", *arguments.split()])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_all_files_and_the_proof(folder, capsys, inference_session):
    code, out, err = run("net.py -o out --no-pareto", capsys)
    assert (code, err) == (0, "")
    assert {p.name for p in (folder / "out").iterdir()} == set(FILES)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert all(
        row["bytes"] or row["name"] in ("report.html", "summary.json")
        for row in summary["files"]
    )
    by = {row["site"]: row for row in summary["sites"]}
    assert (by["conv/conv2d"]["format"], by["fc/linear"]["format"]) == ("int8", "int8")
    # the file on the evaluation set, the simulation on its first and only batch: a code or two differ, if any
    assert by["relu/relu"]["file_db"] == pytest.approx(
        by["relu/relu"]["sqnr_db"], abs=0.1
    )
    assert by["relu/relu"]["file_db"] > 30
    assert summary["proof"]["codes"] <= 1
    assert summary["proof"]["kernels"]
    assert summary["judged_on"] == {"batches": 1, "samples": 32, "held_out": True}
    assert "Quantized: agreement" in out
    assert "model.onnx" in out
    # the file, in ONNX Runtime, and the simulation read back: the same output up to one code of 8 bits here and there
    workload = ro.Workload.load("net.py")
    simulated = load_model("out/model.pt", "net.py").eval()
    x = workload.held_out[0][0]
    session = inference_session("out/model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    exact = workload.run(workload.held_out[0]).detach()
    wanted = simulated(x).detach()
    assert (torch.from_numpy(found) - wanted).norm() < 0.02 * wanted.norm()
    db = 20 * torch.log10(exact.norm() / (exact - wanted).norm())
    assert summary["result"]["sqnr_db"] == pytest.approx(db.item(), abs=1e-3)
    page = (folder / "out" / "report.html").read_text()
    assert "conv/conv2d" in page
    assert "://" not in page
    # the plan can be given again, elsewhere
    code, out, err = run(f"net.py --plan out/plan.toml -o again {QUICK} --json", capsys)
    assert (code, err) == (0, "")
    assert json.loads(out)["formats"] == {"int8": 2}


def test_a_target_decides_the_exit_code(folder, capsys):
    code, out, _ = run(
        "net.py --target 30dB --formats int8,w4a8 -o a --no-onnx --json", capsys
    )
    summary = json.loads(out)
    assert code == 0
    assert summary["result"]["met"]
    assert summary["result"]["sqnr_db"] >= 30
    assert 1 <= len(summary["trials"]) <= 4
    rows = {row["name"]: row for row in summary["tradeoff"]}
    assert [*rows][:2] == ["fp32", "int8"]
    assert [*rows][-1] == "chosen"
    assert rows["fp32"]["bytes"] == 4 * (8 * 9 + 8 + 8 * 4 + 4)
    # codes of 4 bits, a scale in fp32 for each of 8 + 4 channels, biases in fp32
    assert rows["w4"]["bytes"] == (8 * 9 + 8 * 4) // 2 + 4 * 12 + 4 * 12
    # values of 32 bits and weights of 4, of 32 · 32
    assert rows["w4"]["work"] == pytest.approx(4 / 32)
    page = (folder / "a" / "report.html").read_text()
    assert page.count('class="dot format"') == 2 * (
        len(rows) - 1
    )  # two charts; the chosen one is a ring
    code, out, err = run(f"net.py --target 120dB --formats int8 -o b {QUICK}", capsys)
    assert code == 1
    assert "missed" in out or "120dB" in err


def test_weights_alone_with_pins_and_skips(folder, capsys):
    code, out, _ = run(
        f"net.py --weights-only int4 --group 8 --skip conv/* -o a {QUICK} --json",
        capsys,
    )
    assert code == 0
    rows = {row["site"]: row for row in json.loads(out)["sites"]}
    assert rows["fc/linear"]["weights"].startswith("w4g8, per group")
    assert rows["conv/conv2d"]["reason"] == "--skip conv/*"
    code, out, _ = run(
        f"net.py --pin fc/*=fp32 --method nearest --observer minmax -o b {QUICK} --json",
        capsys,
    )
    rows = {row["site"]: row for row in json.loads(out)["sites"]}
    assert (rows["fc/linear"]["format"], rows["conv/conv2d"]["observer"]) == (
        "fp32",
        "minmax",
    )


def test_an_unknown_cost_is_refused(folder, capsys):
    for cost, near in (
        ("bitop", "did you mean bitops?"),
        ("seconds", "bytes, bitops, operators, storage"),
    ):
        code, _, err = run(f"net.py --target 30dB --cost {cost} -o a {QUICK}", capsys)
        assert code == 2
        assert "--cost: there is no such choice" in err
        assert near in err


def test_granularity_and_division(folder, capsys):
    asked = (
        "--pin conv/*=fp32 --granularity token --weight-granularity group:8 --divide"
    )
    code, out, _ = run(f"net.py {asked} -o a {QUICK} --json", capsys)
    assert code == 0
    summary = json.loads(out)
    rows = {row["site"]: row for row in summary["sites"]}
    assert "per group" in rows["fc/linear"]["weights"]
    assert "token" in rows["fc/linear"]["values"]
    assert "divide" in [step["name"] for step in summary["steps"]]
    code, _, err = run(f"net.py --granularity pixel -o b {QUICK}", capsys)
    assert code == 2
    assert "unknown granularity" in err
    assert "tensor, token, channel or group:SIZE" in err


def test_pruned_then_trained_then_still_sparse(folder, capsys):
    code, out, _ = run(
        f"net.py --prune 2:4 --qat --epochs 1 -o a {QUICK} --json", capsys
    )
    summary = json.loads(out)
    assert code == 0
    assert [s["name"] for s in summary["steps"]][-1] == "qat"
    weight = dict(load_model("a/model.pt", "net.py").model.named_parameters())[
        "fc.weight"
    ].detach()
    assert ((weight.view(-1, 4) != 0).sum(1) <= 2).all()
    assert not any("no longer 0" in note for note in summary["notes"])
    assert (
        summary["pruning"]["macs"]["before"] == summary["pruning"]["macs"]["after"]
    )  # zeros are multiplied too
    code, out, _ = run(f"net.py --prune channel:0.5 -o b {QUICK} --json", capsys)
    pruning = json.loads(out)["pruning"]
    # 8 channels of 36 places with 9 products, and 8 · 4 in the last layer, for 32 samples; half of each goes
    assert pruning["macs"] == {
        "before": 32 * (8 * 36 * 9 + 32),
        "after": 32 * (4 * 36 * 9 + 16),
    }
    # in fp32: 9 weights and a bias of each channel, 4 weights that read it, and the last layer's 4 biases
    assert pruning["bytes"] == {"before": 4 * (8 * 14 + 4), "after": 4 * (4 * 14 + 4)}
    assert pruning["time"] > 0
    assert "of the multiply-accumulates" in (folder / "b" / "report.html").read_text()


def test_amct_configuration(folder, capsys):
    (folder / "q.cfg").write_text(
        'skip_layers: "fc"\ncommon_config { hfmg_quantize { num_of_bins: 2048 } }'
    )
    code, out, _ = run(f"net.py --config q.cfg -o a {QUICK} --json", capsys)
    assert code == 0
    rows = {row["site"]: row for row in json.loads(out)["sites"]}
    assert (rows["conv/conv2d"]["observer"], rows["fc/linear"]["format"]) == (
        "hfmg",
        "fp32",
    )
    assert 'key: "conv"' in (folder / "a" / "record.txt").read_text()
    assert (
        tomllib.loads((folder / "a" / "record.toml").read_text())["kind"]
        == "quantization record"
    )


def test_sites_are_ranked_by_what_they_cost_the_output(folder, capsys):
    """The shares of a budget's sites add up to 1; storage is the cost that its plan saves."""
    code, out, _ = run(
        f"net.py --target 30dB --formats int8,w4a8 --cost storage -o a {QUICK} --json",
        capsys,
    )
    summary = json.loads(out)
    shares = {row["site"]: row["share"] for row in summary["sites"]}
    assert (code, sum(shares.values())) == (0, pytest.approx(1, abs=1e-9))
    assert shares["relu/relu"] == 0
    by = {row["site"]: row["format"] for row in summary["sites"]}
    # 8 · 9 + 8 and 8 · 4 + 4 parameters; each in the bits of its format
    size = (
        sum(
            {"int8": 8, "w4a8": 4, "fp32": 32}[by[s]] * n
            for s, n in (("conv/conv2d", 80), ("fc/linear", 36))
        )
        / 8e6
    )
    assert size in [
        pytest.approx(trial["cost"], rel=1e-9) for trial in summary["trials"]
    ]
    page = (folder / "a" / "report.html").read_text()
    assert "Share: of the noise that the budget predicts" in page
    code, out, _ = run(f"net.py --target 30dB -o b {QUICK}", capsys)
    assert "What costs the output most, as the budget predicts" in out
    code, out, _ = run(f"net.py -o c {QUICK}", capsys)
    heading = "Furthest from fp32; SQNR of what a site returns, against fp32 with channels scaled alike"
    assert heading in " ".join(out.split())
    assert "Share: of the noise" not in (folder / "c" / "report.html").read_text()


LAYERS = """batch_num: 2
common_config { ifmr_quantize { search_step: 0.02 asymmetric: false } arq_quantize { channel_wise: true } }
override_layer_configs { layer_name: "fc" calibration_config {
    hfmg_quantize { num_of_bins: 1024 asymmetric: true } arq_quantize { channel_wise: false quant_bits: 4 }
    dmq_balancer { migration_strength: 0.3 } } }
skip_fusion_layers: "conv"
"""


def test_amct_configuration_of_each_layer(folder, capsys):
    """Observer, symmetry, bits, granularity and balancing are those of the layer; what is not obeyed is said."""
    (folder / "q.cfg").write_text(LAYERS)
    code, out, _ = run(f"net.py --config q.cfg -o a {QUICK} --json", capsys)
    summary = json.loads(out)
    assert (code, summary["calibration"]) == (0, {"batches": 2, "samples": 64})
    rows = {row["site"]: row for row in summary["sites"]}
    found = {
        site: (rows[site]["observer"], rows[site]["weights"])
        for site in ("conv/conv2d", "fc/linear")
    }
    assert found == {
        "conv/conv2d": ("ifmr", "int8, per axis(0)"),
        "fc/linear": ("hfmg", "w4a8, per tensor"),
    }
    made = load_model("a/model.pt", "net.py")
    assert made.quantizer("conv/conv2d:0").fmt.symmetric
    reads = [made.quantizer(name) for name in made.routes["fc/linear"].uses.values()]
    assert not next(q for q in reads if not q.weight).fmt.symmetric
    assert summary["steps"][0]["name"] == "dmq"
    assert " of 1 values" in summary["steps"][0]["note"]
    assert any(
        "first 2 of the batches, as batch_num says" in note for note in summary["notes"]
    )
    assert any(
        note.startswith("skip_fusion_layers: BatchNorm behind conv is folded too")
        for note in summary["notes"]
    )
    code, out, _ = run(
        f"net.py --config q.cfg --samples 96 -o b {QUICK} --json", capsys
    )
    assert json.loads(out)["calibration"] == {"batches": 3, "samples": 96}
    assert any(
        "batch_num 2 of the file is not used: --samples 96" in note
        for note in json.loads(out)["notes"]
    )


@pytest.mark.parametrize(
    ("arguments", "name", "observer"),
    [
        ("--weights-only int4 --method awq", "awq", "mse, nearest"),
        ("--method awq+gptq", "awq", "adjoint, gptq"),
        ("--method smoothquant+gptq", "smoothquant", "adjoint, gptq"),
        ("--method dmq", "dmq", "adjoint, nearest"),
    ],
)
def test_balancing_is_a_step_in_decibels(folder, capsys, arguments, name, observer):
    code, out, err = run(f"net.py {arguments} -o a {QUICK} --json", capsys)
    assert (code, err) == (0, "")
    steps = {step["name"]: step for step in json.loads(out)["steps"]}
    assert list(steps) == [name, observer]
    assert steps[name]["after"] >= steps[name]["before"] > 5
    assert "with min-max ranges" in steps[name]["note"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--formats itn8", "did you mean"),
        ("--formats int8,int4", "which site runs in which of these formats"),
        ("--observer minmacs", "did you mean minmax"),
        ("--method awg", "expected: gptq, nearest"),
        ("--target half", "not a target"),
        ("--target 1% --plan p.toml", "a target chooses a plan itself"),
        ("--plan p.toml", "match no site of this model"),
        ("--skip nothing/*", "nothing/*"),
        ("--prune 4:2", "2:4, channel:0.3 or magnitude:0.5"),
        ("--group 8", "add --weights-only int4"),
        ("--epochs 2", "--qat or --prune"),
        ("--weights-only fp16", "weights alone are integers"),
    ],
)
def test_wrong_options(folder, capsys, arguments, expected):
    ro.Plan((Rule("int8", ("other/linear",)),)).save("p.toml")
    code, out, err = run(f"net.py {arguments} -o out {QUICK}", capsys)
    assert (code, out) == (2, ""), err
    assert expected in err
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "arguments", "expected"),
    [
        ("return [data(i) for i in range(3)]", "return []", "", "batches is empty"),
        (
            "return [data(i) for i in range(3)]",
            "return [(torch.full((2, 1, 6, 6), float('nan')), None)]",
            "",
            "NaN",
        ),
        (
            "metric = agreement",
            "",
            "--target 0.5%",
            "a metric in the workload, or decibels",
        ),
        ("def loss", "def lost", "--qat", "training needs a loss"),
    ],
)
def test_wrong_workloads(folder, capsys, old, new, arguments, expected):
    (folder / "net.py").write_text(WORKLOAD.replace(old, new))
    code, out, err = run(f"net.py {arguments} -o out {QUICK}", capsys)
    assert (code, out) == (2, "")
    assert expected in err
    assert not (folder / "out").exists()


def test_a_folder_in_use_is_left_alone(folder, capsys):
    (folder / "out").mkdir()
    (folder / "out" / "report.html").write_text("mine")
    code, _, err = run(f"net.py -o out {QUICK}", capsys)
    assert code == 2
    assert "--overwrite" in err
    (folder / "out" / "thesis.tex").write_text("mine")
    code, _, err = run(f"net.py -o out --overwrite {QUICK}", capsys)
    assert code == 2
    assert "thesis.tex" in err
    assert (folder / "out" / "report.html").read_text() == "mine"


def test_what_cannot_be_exported_is_a_row(folder, capsys):
    text = WORKLOAD.replace(
        "return self.fc(",
        "x = torch.from_numpy(x.detach().numpy().copy())\n        return self.fc(",
    )
    (folder / "net.py").write_text(text)
    code, out, _ = run("net.py -o out --no-pareto --json", capsys)
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)["files"]}
    assert "cannot be written as ONNX" in rows["model.onnx"]["reason"]
    assert rows["model.pt"]["bytes"]
    assert not (folder / "out" / "model.onnx").exists()


ODD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.even, self.odd, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.even(x) if x.mean() > 0 else self.odd(x)
        return self.out(self.norm(nn.functional.scaled_dot_product_attention(x, x, x)))

def model():
    torch.manual_seed(0)
    net = Net()
    net.even.weight.data[1] = 0
    return net

def batches():
    return [torch.rand(4, 6, 8) - number % 2 for number in range(4)]
"""


def test_what_runs_in_fp32_and_what_has_no_range_is_said(folder, capsys):
    """The first batch does not reach every call; a value that a reader takes as codes was not computed on codes."""
    (folder / "odd.py").write_text(ODD)
    code, out, _ = run(f"odd.py -o a {QUICK} --json", capsys)
    summary = json.loads(out)
    assert code == 0
    rows = {row["site"]: (row["state"], row["reason"]) for row in summary["sites"]}
    assert (
        rows["even/linear"][0]
        == rows["odd/linear"][0]
        == rows["out/linear"][0]
        == "quantized"
    )
    assert (
        rows["/scaled_dot_product_attention"][0] == rows["norm/layer_norm"][0] == "fp32"
    )
    assert rows["norm/layer_norm"][1] == "the plan leaves it in fp32"
    assert "even.weight: 1 of 8 ranges zero: scale 1" in summary["notes"]


def test_after_pruning_the_steps_say_what_they_are_measured_beside(folder, capsys):
    code, out, _ = run(f"net.py --prune channel:0.5 -o a {QUICK} --json", capsys)
    steps = json.loads(out)["steps"]
    assert code == 0
    assert steps[0]["name"] == "prune channel:0.5"
    assert all(step["note"].endswith("beside the pruned model") for step in steps[1:])


def test_where_nothing_can_be_pruned_a_note_says_why(folder, capsys):
    last = WORKLOAD.replace(
        "self.fc(self.relu(self.conv(x)).mean((2, 3)))", "self.conv(x)[:, :4, 0, 0]"
    )
    (folder / "last.py").write_text(last)
    code, out, _ = run(f"last.py --prune channel:0.5 -o a {QUICK} --json", capsys)
    assert code == 0
    (note,) = [note for note in json.loads(out)["notes"] if "pruned" in note]
    assert note.startswith(
        "nothing could be pruned: cut at a fixed place by getitem (/getitem); no batch reached it"
    )


RECURRENT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.o = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.o(self.lstm(x)[0])

def model():
    torch.manual_seed(0)
    return Net()

def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 6, 8, generator=generator) for _ in range(2)]
"""


def test_weights_of_recurrent_layers_count_in_the_bits_a_weight(folder, capsys):
    (folder / "recurrent.py").write_text(RECURRENT)
    code, out, err = run(
        f"recurrent.py --formats w4a8 --skip o/* -o a {QUICK} --json", capsys
    )
    assert (code, err) == (0, "")
    recurrent, linear = 4 * 16 * (8 + 16), 16 * 4
    bits = (4 * recurrent + 32 * linear) / (recurrent + linear)
    assert json.loads(out)["bits"]["weight"] == pytest.approx(bits)


LINEAR = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 16, generator=generator) for _ in range(2)]
"""


def test_a_checkpoint_is_written_beside_the_other_files(folder, capsys):
    (folder / "linear.py").write_text(LINEAR)
    code, out, err = run(f"linear.py --checkpoint -o a {QUICK} --json", capsys)
    assert (code, err) == (0, "")
    files = {row["name"]: row for row in json.loads(out)["files"]}
    stored = list((folder / "a" / "checkpoint").iterdir())
    assert files["checkpoint"]["bytes"] == sum(path.stat().st_size for path in stored)
    assert set(read_compressed("a/checkpoint").tensors) == {"0.weight", "2.weight"}
    code, out, _ = run(f"net.py --checkpoint -o b {QUICK} --json", capsys)
    files = {row["name"]: row for row in json.loads(out)["files"]}
    assert code == 0
    assert files["checkpoint"]["bytes"] is None
    assert files["checkpoint"]["reason"].startswith("weights of linear layers alone")


def test_the_command_is_a_function(folder):
    workload = ro.Workload.load("net.py")
    delivery = ro.quantize(
        workload, output="a", target="30dB", onnx=False, tradeoff=False
    )
    assert delivery.met
    assert delivery.summary.result.sqnr_db >= 30
    assert delivery.folder == Path("a")
    assert (folder / "a" / "model.pt").stat().st_size
    written = json.loads((folder / "a" / "summary.json").read_text())
    assert written == json.loads(json_text(delivery.summary))
    again = ro.quantize(workload, delivery.plan)
    assert [row.format for row in again.rows] == [
        row.format for row in delivery.model.rows
    ]


def test_a_model_alone_needs_a_plan_or_a_folder():
    with pytest.raises(QuantizationError, match="output=, a folder"):
        ro.quantize(torch.nn.Linear(4, 2))
