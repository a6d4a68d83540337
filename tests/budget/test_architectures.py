"""Models as people write them work unchanged: measured, predicted and rounded, with no word about their structure."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundoff import Workload, budget
from roundoff.plan.output_noise import worst_noise
from roundoff.plan.rounded_model import run_batches


def check(model, batches, *, formats=("bf16", "int8"), within=2.0, **kwargs):
    """Budget, then every site in each format: prediction and measurement within ``within`` dB.

    With 64 samples and 32 probes sampling is 0.1 dB of it. The rest: roundings of the joint run are other draws than
    those of the reference run, and in layers of a few elements two draws may agree or cancel, up to 3 dB for two sites.
    """
    workload = Workload(model.eval(), batches, **kwargs)
    measured = budget(workload, formats, probes=32)
    reference = run_batches(workload).targets
    for fmt in formats:
        chosen = {
            s.site: fmt
            for s in measured.sites
            if fmt not in s.refused and not s.no_path
        }
        predicted = measured.predict(chosen).db
        actual = -10 * math.log10(
            worst_noise(run_batches(workload, chosen).targets, reference)
        )
        assert abs(predicted - actual) <= within, (fmt, predicted, actual)
    return measured


def kinds(measured):
    return {s.operator for s in measured.sites if not s.no_path}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class TestTransformers:
    """Tiny sizes of the configurations of Hugging Face; weights at random."""

    @pytest.fixture(autouse=True)
    def _transformers(self):
        self.hf = pytest.importorskip("transformers")

    def test_bert(self):
        config = self.hf.BertConfig(
            vocab_size=50,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        mask = torch.ones(32, 6, dtype=torch.int64)
        mask[13:, 4:] = 0
        batch = {"input_ids": torch.randint(0, 50, (32, 6)), "attention_mask": mask}
        measured = check(
            self.hf.BertModel(config, add_pooling_layer=False),
            [batch],
            formats=("bf16", "fp16", "int8"),
        )
        names = [s.site for s in measured.sites]
        assert "encoder.layer.1.attention.self.query/linear" in names
        assert {"linear", "layer_norm", "embedding", "gelu", "add"} <= kinds(measured)
        assert not [s.site for s in measured.sites if s.no_path]
        # the position embeddings have no sample axis
        pooled = set(measured.terms.filter(measured.terms["pooled"])["site"])
        assert pooled <= {"embeddings.position_embeddings/embedding"}
        assert measured.about.target.name == "output"

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_gpt2(self, attention):
        config = self.hf.GPT2Config(
            vocab_size=50,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_positions=16,
            attn_implementation=attention,
        )
        model = self.hf.GPT2LMHeadModel(config)
        batches = [
            {"input_ids": torch.randint(0, 50, (32, 6)), "use_cache": False}
            for _ in range(2)
        ]
        measured = check(model, batches, formats=("bf16", "fp16", "int8"))
        assert {"addmm", "embedding", "linear"} <= kinds(measured)  # Conv1D is addmm
        tied = [s for s in measured.sites if "transformer.wte.weight" in s.params]
        assert [s.operator for s in tied] == ["embedding", "linear"]
        weight = [
            s for s in measured.sites if s.site == "transformer.h.0.attn.c_attn/addmm"
        ]
        assert weight[0].params == (
            "transformer.h.0.attn.c_attn.bias",
            "transformer.h.0.attn.c_attn.weight",
        )

    def test_resnet(self):
        config = self.hf.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            layer_type="basic",
            num_labels=5,
            num_channels=3,
        )
        model = self.hf.ResNetForImageClassification(config)
        batches = [{"pixel_values": torch.randn(16, 3, 16, 16)} for _ in range(2)]
        measured = check(model, batches)
        assert {"conv2d", "batch_norm", "relu", "add", "max_pool2d", "linear"} <= kinds(
            measured
        )


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(
            nn.Linear(6, 6), nn.ReLU(inplace=True), nn.LayerNorm(6)
        )
        self.alias = self.block

    def forward(self, x):
        for _ in range(2):
            x = x + self.alias(self.block(x))
        return x


def test_a_module_called_four_times():
    measured = check(Shared(), [torch.randn(16, 6)])
    linears = [s.site for s in measured.sites if s.operator == "linear"]
    assert linears == [
        "block.0/linear",
        "block.0/linear#1",
        "block.0/linear#2",
        "block.0/linear#3",
    ]


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple
    ids: torch.Tensor


class Many(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        z = self.b(h)
        return {
            "tuple": (z, (h, x), z.argmax(-1)),
            "dict": {"logits": z, "hidden": {"h": h}, "ids": z.argmax(-1)},
            "dataclass": Output(z, (h,), z.argmax(-1)),
        }[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_outputs_of_many_tensors(kind):
    measured = check(Many(kind), [torch.randn(32, 6), torch.randn(8, 6)])
    assert (
        len(measured.about.target.tensors)
        == {"tuple": 3, "dict": 2, "dataclass": 2}[kind]
    )
    part = budget(Workload(Many("dict"), [torch.randn(32, 6)]), ["bf16"], of="hidden")
    assert {s.site: s.no_path is None for s in part.sites} == {
        "a/linear": True,
        "/tanh": True,
        "b/linear": False,
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(cell, packed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = (
                cell(5, 7, num_layers=2, bidirectional=True, batch_first=True),
                nn.Linear(14, 4),
            )

        def forward(self, x, lengths):
            if not packed:
                return self.head(self.rnn(x)[0][:, -1])
            sequence = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = nn.utils.rnn.pad_packed_sequence(
                self.rnn(sequence)[0], batch_first=True
            )
            return self.head(out.mean(1))

    measured = check(Net(), [(torch.randn(64, 4, 5), torch.randint(1, 5, (64,)))])
    (site,) = [s for s in measured.sites if s.kind == "rnn"]
    assert len(site.params) == 16
    assert site.sizes["macs"] > 0


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention(batch_first):
    layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=batch_first)
    with torch.no_grad():
        measured = check(
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            [torch.randn(8, 5, 12)],
            within=2.5,  # of eight sequences: the draws of one seed are 2 dB off others
        )
    assert {"scaled_dot_product_attention", "linear", "layer_norm"} <= kinds(measured)


def test_integers_branches_and_numpy():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gate = nn.Embedding(20, 6), nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, ids):
            x = self.embed(ids).mean(1)
            chosen = self.gate(x).argmax(-1)  # hard routing: no gradient
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                if bool((chosen == index).any()):
                    out[chosen == index] = expert(x[chosen == index])
            return out

    workload = Workload(Net(), [torch.randint(0, 20, (32, 4))])
    measured = budget(workload, ["bf16"], trials=0)
    unreached = {s.site: s.no_path for s in measured.sites if s.no_path}
    assert unreached == {"gate/linear": "its output does not reach the target"}
    tried = budget(workload, ["bf16"])
    assert not any(s.no_path for s in tried.sites)
    assert ("argmax", "integer or boolean result") in {
        (e.operator, e.reason) for e in measured.about.excluded
    }


def test_mixed_dtypes_and_casts():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 3)

        def forward(self, x):
            return self.b(self.a(x.double()).relu().float())

    check(Net(), [torch.randn(32, 6)])


def test_autocast_inside_the_model():
    """The operator is run again in the region it came from: its reference is the bf16 result."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.a(x)
            return self.b(y.float())

    measured = budget(Workload(Net(), [torch.randn(32, 6)]), ["bf16", "fp16"])
    rows = {(r["site"], r["format"]): r["noise"] for r in measured.table.to_dicts()}
    assert rows["a/linear", "bf16"] == 0.0  # already so
    assert rows["b/linear", "bf16"] > 0


def test_functional_code_with_every_corner():
    weight = torch.randn(4, 2, 3, 3)

    class Net(nn.Module):
        def forward(self, x):
            y = F.conv2d(x, weight, padding="same", groups=1)
            y = F.interpolate(
                F.leaky_relu(y, 0.1),
                scale_factor=2,
                mode="bilinear",
                align_corners=False,
            )
            y = F.unfold(y, 2, stride=2).transpose(1, 2)
            y = torch.einsum("bij,bkj->bik", y, y) / math.sqrt(16)
            y = torch.logsumexp(y, -1).clamp(min=-5.0)
            return torch.where(y > 0, y, 0.1 * y).cumsum(-1)

    measured = check(Net(), [torch.randn(64, 2, 4, 4)])
    assert {
        "conv2d",
        "leaky_relu",
        "interpolate",
        "einsum",
        "logsumexp",
        "clamp",
        "cumsum",
    } & kinds(measured)


def test_a_model_without_parameters_and_one_without_operators():
    check(nn.Tanh(), [torch.randn(32, 6)], formats=("bf16",))
    from roundoff.errors import GradientPathError

    with pytest.raises(GradientPathError):
        budget(Workload(nn.Identity(), [torch.randn(3, 4)]), ["bf16"])
