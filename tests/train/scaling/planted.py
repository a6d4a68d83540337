"""Overflows planted in small models: where, in which operator, and in which phase is known because it was put there.

``Plant`` is a module of its own at a path in the model. What it computes is finite but for what is planted: in the forward
pass its output overflows; in the backward pass only its gradient does. Also run by a Python that has no roundoff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

H = torch.float16


class _Amplify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(H) * 60000.0 * 60000.0


def some(x: Tensor) -> Tensor:
    """x, bounded and in float16."""
    return x.clamp(-1, 1).to(H)


def zero(x: Tensor) -> Tensor:
    """Zeros with a gradient."""
    return x - x.detach()


#: name -> (phase, aten operators any of which it is, what runs)
PLANTS: dict[str, tuple[str, tuple[str, ...], Callable[[Tensor], Tensor]]] = {
    "exp": ("forward", ("exp",), lambda x: (some(x) * 0 + 12.0).exp()),
    "square": ("forward", ("pow",), lambda x: (some(x) + 300.0).square()),
    "mul": ("forward", ("mul",), lambda x: (some(x) + 2.0) * 60000.0),
    "div": ("forward", ("div",), lambda x: (some(x) + 2.0) / 2e-5),
    "matmul": (
        "forward",
        ("mm", "bmm", "addmm"),
        lambda x: big(some(x) + 2.0, 30000.0),
    ),
    "sum": (
        "forward",
        ("sum",),
        lambda x: x + (some(x) * 0 + 30000.0).sum(-1, keepdim=True),
    ),
    "cast": ("forward", ("_to_copy",), lambda x: (x.float() * 0 + 1e6).to(H)),
    "log": ("forward", ("log",), lambda x: zero(x).log()),
    "reciprocal": ("forward", ("reciprocal",), lambda x: zero(x).reciprocal()),
    "add": (
        "forward",
        ("add",),
        lambda x: (some(x) * 0 + 40000.0) + (some(x) * 0 + 40000.0),
    ),
    "sqrt": ("forward", ("sqrt",), lambda x: (some(x) - 2.0).sqrt()),
    "cumsum": ("forward", ("cumsum",), lambda x: (some(x) * 0 + 30000.0).cumsum(-1)),
    "sqrt at 0": ("backward", ("div",), lambda x: zero(x).sqrt()),
    "pow at 0": ("backward", ("pow", "mul"), lambda x: zero(x).pow(0.3)),
    "log behind where": (
        "backward",
        ("div", "mul"),
        lambda x: torch.where(x > 9.0, zero(x).log(), x * 0),
    ),
    "acos at 1": (
        "backward",
        ("rsqrt", "mul", "div"),
        lambda x: (zero(x) + 1.0).acos(),
    ),
    "norm of zeros by hand": (
        "backward",
        ("div",),
        lambda x: x + zero(x).square().sum(-1, keepdim=True).sqrt(),
    ),
    "mul back": (
        "backward",
        ("mul",),
        lambda x: (some(x) * 1e-6) * 60000.0 * 60000.0 * 1e-4,
    ),
    "matmul back": ("backward", ("mm", "bmm"), lambda x: big(some(x) * 1e-4, 60000.0)),
    "custom function": ("backward", ("mul",), lambda x: _Amplify.apply(x)),
    "cast back": (
        "backward",
        ("_to_copy",),
        lambda x: (some(x) * 1e-4).float() * 1e9 * 1e-6,
    ),
    "div back": ("backward", ("div",), lambda x: (some(x) * 1e-7 * 1e-2) / 1e-7 / 1e-2),
}


def big(x: Tensor, factor: float) -> Tensor:
    """x times a square matrix of equal entries."""
    return x @ torch.full((x.shape[-1], x.shape[-1]), factor, dtype=H)


class Plant(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "nothing":
            return x
        with torch.autocast("cpu", enabled=False):
            return PLANTS[self.name][2](x)


@dataclass(frozen=True)
class Case:
    """A plant in a model: what the report has to say."""

    model: str
    plant: str

    @property
    def phase(self) -> str:
        return PLANTS[self.plant][0]

    @property
    def operators(self) -> tuple[str, ...]:
        return PLANTS[self.plant][1]

    @property
    def path(self) -> str:
        return MODELS[self.model][1]

    def names(self, site: str | None, phase: str | None) -> bool:
        """Whether a site, ``module/operator#n``, and a phase are those of the plant."""
        module, _, operator = (site or "").rpartition("/")
        return (
            module == self.path
            and operator.partition("#")[0] in self.operators
            and phase == self.phase
        )


def mlp(plant: nn.Module) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), plant, nn.Linear(16, 4))
    return model, (torch.randn(6, 8),)


def cnn(plant: nn.Module) -> tuple[nn.Module, Any]:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 4, 3), plant),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return model, (torch.randn(2, 3, 8, 8),)


class Recurrent(nn.Module):
    """An LSTM, which oneDNN cannot run in float16 on most CPUs: in float32, the rest under autocast."""

    def __init__(self, plant: nn.Module) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True)
        self.plant, self.head = plant, nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden, _ = self.lstm(self.embed(tokens))
        return self.head(self.plant(hidden))


def lstm(plant: nn.Module) -> tuple[nn.Module, Any]:
    return Recurrent(plant), (torch.randint(0, 11, (2, 5)),)


def transformer(plant: nn.Module) -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    layer.linear1 = nn.Sequential(layer.linear1, plant)  # type: ignore[assignment]
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), (
        torch.randn(2, 4, 16),
    )


def gpt2(plant: nn.Module) -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config: Any = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=31,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config)
    model.transformer.h[1].mlp.act = nn.Sequential(
        model.transformer.h[1].mlp.act, plant
    )
    tokens = torch.randint(0, 31, (2, 6))
    return model, {"input_ids": tokens, "labels": tokens}


def bert(plant: nn.Module) -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(
            num_hidden_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            intermediate_size=32,
            vocab_size=31,
            max_position_embeddings=16,
        )
    )
    layer = model.bert.encoder.layer[0]
    layer.intermediate.dense = nn.Sequential(layer.intermediate.dense, plant)
    return model, {
        "input_ids": torch.randint(0, 31, (2, 6)),
        "labels": torch.tensor([0, 1]),
    }


#: name -> (builder, path of the plant)
MODELS: dict[str, tuple[Callable[[nn.Module], tuple[nn.Module, Any]], str]] = {
    "mlp": (mlp, "2"),
    "cnn": (cnn, "3.1"),
    "lstm": (lstm, "plant"),
    "transformer": (transformer, "layers.0.linear1.1"),
    "gpt2": (gpt2, "transformer.h.1.mlp.act.1"),
    "bert": (bert, "bert.encoder.layer.0.intermediate.dense.1"),
}

CASES = [
    Case(*pair)
    for pair in (
        ("mlp", "exp"),
        ("mlp", "matmul"),
        ("mlp", "sqrt at 0"),
        ("mlp", "mul back"),
        ("mlp", "custom function"),
        ("cnn", "square"),
        ("cnn", "sum"),
        ("cnn", "cast"),
        ("cnn", "pow at 0"),
        ("cnn", "cast back"),
        ("lstm", "reciprocal"),
        ("lstm", "log behind where"),
        ("transformer", "add"),
        ("transformer", "matmul back"),
        ("gpt2", "div"),
        ("gpt2", "norm of zeros by hand"),
        ("gpt2", "sqrt"),
        ("bert", "log"),
        ("bert", "acos at 1"),
        ("bert", "div back"),
    )
]


def build(
    case: Case | str, *, plant: bool = True
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model of a case, and what computes its loss; the same numbers each time."""
    name, what = (
        (case, "nothing") if isinstance(case, str) else (case.model, case.plant)
    )
    torch.manual_seed(7)
    model, inputs = MODELS[name][0](Plant(what if plant else "nothing"))
    model.train()

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=H):
            out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            if isinstance(inputs, dict):
                return out.loss
            return (out.float() - torch.linspace(-1, 1, out.shape[-1])).square().mean()

    return model, loss
