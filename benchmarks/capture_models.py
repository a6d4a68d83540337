"""The two models on which recording is timed, in plain torch: roundoff's benchmark and the peer's time the same ones.

Only torch is imported, so that an environment without roundoff can use this file. Weights and batches are those of a fixed
seed, and nothing is drawn at random in a step (no dropout).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al., Deep Residual Learning, 2015, figure 5 left)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample = None
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        output: Tensor = self.relu(
            y + (x if self.downsample is None else self.downsample(x))
        )
        return output


class ResNet18(nn.Module):
    """11.2 million parameters in the usual width, 10 classes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu, self.maxpool = (
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        before = width
        for factor, stride in ((1, 1), (2, 2), (4, 2), (8, 2)):
            after = factor * width
            blocks += [BasicBlock(before, after, stride), BasicBlock(after, after, 1)]
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        output: Tensor = self.fc(self.avgpool(self.blocks(x)).flatten(1))
        return output


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            part.view(split).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        # through the module: a peer may replace its functions
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        output: Tensor = x + self.c_out(self.gelu(self.c_fc(self.ln_2(x))))
        return output


class GPT2(nn.Module):
    """4 layers of width 256 with 4 heads, 8,192 tokens, output weights tied to the embedding."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        tokens: int = 8192,
        length: int = 128,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.h = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, tokens, bias=False)
        self.lm_head.weight = self.wte.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        output: Tensor = self.lm_head(self.ln_f(self.h(x)))
        return output


def _resnet18(width: int = 64) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    labels = torch.randint(10, (16,))
    return (
        ResNet18(width),
        torch.randn(16, 3, 64, 64),
        lambda out: functional.cross_entropy(out, labels),
    )


def _gpt2() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    ids = torch.randint(8192, (4, 128))
    return (
        GPT2(),
        ids,
        lambda out: functional.cross_entropy(
            out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ),
    )


def _tiny() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """What --quick takes."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.randn(4, 8), lambda out: out.square().mean()


def narrow() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """ResNet-18 of an eighth of the width."""
    return _resnet18(8)


BUILDERS = {"resnet18": _resnet18, "gpt2": _gpt2}
TINY = "tiny"


def build(name: str, seed: int = 0) -> tuple[nn.Module, Callable[[], None]]:
    """The model in training mode, and one step of it: forward, loss and backward; gradients are dropped before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, batch, loss = {**BUILDERS, TINY: _tiny}[name]()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss(model(batch)).backward()

    return model.train(), step


def perturb(model: nn.Module, size: float, seed: int = 1) -> None:
    """Move every weight by this relative amount, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))
