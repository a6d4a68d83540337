"""Work and traffic of twelve architectures by formulas on paper, never by the counter.

A sheet adds up one line for each step of a forward pass. Conventions, as documented in
docs/advise.md: 1 MAC = 2 FLOP; one FLOP for each other element computed; softmax 5, norm
of rows 7, batch norm by running statistics 2 an element; bytes are operands read once and
results written once, fp32 unless said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

F32 = 4
INT64 = 8
Shape = tuple[int, ...]


@dataclass
class Sheet:
    """Sums of a forward pass."""

    macs: float = 0
    flops: float = 0
    bytes: float = 0

    def add(self, *, macs: float = 0, flops: float = 0, moved: float = 0) -> None:
        self.macs += macs
        self.flops += 2 * macs + flops
        self.bytes += moved

    def unary(self, elements: int, flops: int = 1, times: int = 1) -> None:
        """Read one operand, write one result."""
        self.add(flops=flops * elements * times, moved=2 * F32 * elements * times)

    def copy(self, elements: int, times: int = 1) -> None:
        self.unary(elements, flops=0, times=times)

    def binary(self, elements: int, times: int = 1) -> None:
        """Read two operands of one shape, write one result."""
        self.add(flops=elements * times, moved=3 * F32 * elements * times)

    def plus_bias(self, elements: int, bias: int) -> None:
        self.add(flops=elements, moved=F32 * (2 * elements + bias))

    def conv(
        self,
        x: Shape,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int = 1,
    ) -> Shape:
        """out = (n + 2p - d(k-1) - 1)/s + 1; each output sums C/g * k^d products."""
        n, c, *sizes = x
        reach = dilation * (kernel - 1) + 1
        out = [(size + 2 * padding - reach) // stride + 1 for size in sizes]
        weights = channels * (c // groups) * kernel ** len(sizes)
        outputs = n * channels * math.prod(out)
        biases = channels if bias else 0
        self.add(
            macs=outputs * (c // groups) * kernel ** len(sizes),
            flops=outputs if bias else 0,
            moved=F32 * (math.prod(x) + weights + biases + outputs),
        )
        return (n, channels, *out)

    def up_conv(self, x: Shape, channels: int, kernel: int) -> Shape:
        """Transposed, stride = kernel: each input spreads k*k*C' products."""
        n, c, h, w = x
        outputs = n * channels * h * w * kernel**2
        self.add(
            macs=n * c * h * w * channels * kernel**2,
            flops=outputs,
            moved=F32 * (math.prod(x) + c * channels * kernel**2 + channels + outputs),
        )
        return (n, channels, h * kernel, w * kernel)

    def batch_norm(self, x: Shape) -> None:
        elements = math.prod(x)
        self.add(flops=2 * elements, moved=F32 * (2 * elements + 4 * x[1]))

    def relu(self, x: Shape) -> None:
        self.unary(math.prod(x))

    def max_pool(self, x: Shape) -> Shape:
        """2 x 2 windows; values and int64 places are written."""
        n, c, h, w = x
        outputs = n * c * h * w // 4
        self.add(
            flops=4 * outputs, moved=F32 * (math.prod(x) + outputs) + INT64 * outputs
        )
        return (n, c, h // 2, w // 2)

    def linear(self, rows: int, inputs: int, outputs: int, bias: bool = True) -> None:
        biases = outputs if bias else 0
        self.add(
            macs=rows * inputs * outputs,
            flops=rows * outputs if bias else 0,
            moved=F32 * (rows * inputs + inputs * outputs + biases + rows * outputs),
        )

    def mean(self, elements: int, results: int) -> None:
        self.add(flops=elements, moved=F32 * (elements + results))

    def layer_norm(self, rows: int, width: int) -> None:
        """Weight and bias read; mean and deviation of each row written too."""
        elements = rows * width
        self.add(flops=7 * elements, moved=F32 * (2 * elements + 2 * width + 2 * rows))

    def attention(
        self, batch: int, heads: int, length: int, width: int, *, causal: bool = False
    ) -> None:
        """Scores and values: two products a pair; the sum of each row is written too."""
        pairs = length * (length + 1) / 2 if causal else length**2
        pairs *= batch * heads
        tokens = batch * heads * length
        self.add(
            macs=2 * pairs * width,
            flops=5 * pairs,
            moved=F32 * (4 * tokens * width + tokens),
        )


@dataclass
class Case:
    """An architecture, its input, and its sheet."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[object, ...]]
    sheet: Callable[[], Sheet]
    #: torch.utils.flop_counter counts too few of its products
    is_peer_wrong: bool = False


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 8 * 8, 10)

    def forward(self, x):
        x = functional.max_pool2d(self.first(x).relu(), 2)
        x = functional.max_pool2d(self.second(x).relu(), 2)
        return self.head(x.flatten(1))


def conv_net() -> Sheet:
    s = Sheet()
    x = s.conv((4, 3, 32, 32), 16, 3, padding=1)
    s.relu(x)
    x = s.max_pool(x)
    x = s.conv(x, 32, 3, padding=1)
    s.relu(x)
    x = s.max_pool(x)
    s.linear(4, 32 * 8 * 8, 10)
    return s


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.n1 = nn.BatchNorm2d(outputs)
        self.c2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.n2 = nn.BatchNorm2d(outputs)
        self.side = None
        if stride != 1:
            self.side = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x):
        y = self.n2(self.c2(self.n1(self.c1(x)).relu()))
        side = x if self.side is None else self.side(x)
        return (y + side).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.blocks(self.norm(self.stem(x)).relu())
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet() -> Sheet:
    s = Sheet()

    def normed(x: Shape, channels: int, kernel: int, stride: int = 1) -> Shape:
        y = s.conv(x, channels, kernel, stride=stride, padding=kernel // 2, bias=False)
        s.batch_norm(y)
        return y

    x = normed((2, 3, 24, 24), 16, 3)
    s.relu(x)
    for channels, stride in ((16, 1), (32, 2)):
        y = normed(x, channels, 3, stride)
        s.relu(y)
        y = normed(y, channels, 3)
        if stride != 1:
            normed(x, channels, 1, stride)
        s.binary(math.prod(y))
        s.relu(y)
        x = y
    s.mean(math.prod(x), 2 * 32)
    s.linear(2, 32, 10)
    return s


def depthwise_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 48, 1, bias=False),
        nn.BatchNorm2d(48),
        nn.ReLU6(),
        nn.Conv2d(48, 48, 3, 2, 1, groups=48, bias=False),
        nn.BatchNorm2d(48),
        nn.ReLU6(),
        nn.Conv2d(48, 16, 1, bias=False),
        nn.BatchNorm2d(16),
    )


def depthwise() -> Sheet:
    s = Sheet()
    x = s.conv((2, 8, 32, 32), 48, 1, bias=False)
    s.batch_norm(x)
    s.relu(x)
    x = s.conv(x, 48, 3, stride=2, padding=1, groups=48, bias=False)
    s.batch_norm(x)
    s.relu(x)
    x = s.conv(x, 16, 1, bias=False)
    s.batch_norm(x)
    return s


def mlp() -> Sheet:
    s = Sheet()
    s.linear(32, 256, 512)
    s.unary(32 * 512)
    s.linear(32, 512, 512)
    s.unary(32 * 512)
    s.linear(32, 512, 10)
    return s


#: FLOPs of an LSTM's gates for each hidden element: four sums of both products, four
#: functions, f*c + i*g (3), tanh(c) and its product with o (2).
LSTM_GATES = 4 + 4 + 3 + 2


def lstm() -> Sheet:
    """Two layers: each step multiplies [x, h] by 4H x (I + H)."""
    s = Sheet()
    steps, batch, hidden = 20, 4, 64
    for inputs in (32, hidden):
        rows = steps * batch
        weights = 4 * hidden * (inputs + hidden) + 2 * 4 * hidden
        states = 2 * 2 * batch * hidden  # h and c, read and written
        s.add(
            macs=rows * 4 * hidden * (inputs + hidden),
            flops=rows * hidden * LSTM_GATES,
            moved=F32 * (rows * inputs + weights + rows * hidden + states),
        )
    zeros = 2 * 2 * batch * hidden  # the first states of both layers are written
    s.add(moved=F32 * zeros)
    s.copy(2 * batch * hidden, times=2)  # the last ones of both, put together
    return s


def gru() -> Sheet:
    """Two directions, step by step:
    r = s(Wx + Uh), z = s(Wx + Uh), n = tanh(Wx + r*(Uh)), h = (h - n) * z + n."""
    s = Sheet()
    steps, batch, inputs, hidden = 12, 4, 48, 64
    for _ in range(2):
        s.linear(steps * batch, inputs, 3 * hidden)
        for _ in range(steps):
            s.linear(batch, hidden, 3 * hidden)
            s.binary(batch * hidden, times=7)  # three sums, r*, h - n, *z, + n
            s.unary(batch * hidden, times=3)  # two sigmoids, one tanh
        s.copy(steps * batch * hidden)  # the steps put together
    s.copy(steps * batch * 2 * hidden)  # both directions
    s.copy(2 * batch * hidden)  # the last states of both
    s.add(moved=F32 * 2 * batch * hidden)  # the first ones, zeros
    return s


def encoder_layer() -> Sheet:
    s = Sheet()
    add_encoder_layer(s, batch=4, length=64, width=64, heads=4, inner=256)
    return s


def add_encoder_layer(
    s: Sheet, *, batch: int, length: int, width: int, heads: int, inner: int
) -> None:
    """nn.TransformerEncoderLayer, norm last: its attention runs with the sequence first,
    so that activations are copied before the first product, behind it and behind the
    attention."""
    rows = batch * length
    elements = rows * width
    s.copy(elements)
    s.linear(rows, width, 3 * width, bias=False)
    s.plus_bias(3 * elements, 3 * width)
    s.copy(3 * elements)
    s.attention(batch, heads, length, width // heads)
    s.linear(rows, width, width)
    s.binary(elements)
    s.layer_norm(rows, width)
    s.linear(rows, width, inner)
    s.unary(rows * inner)
    s.linear(rows, inner, width)
    s.binary(elements)
    s.layer_norm(rows, width)


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.norm1 = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)
        self.norm2 = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.head = nn.Linear(64, 500, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return self.head(x)


def gpt() -> Sheet:
    s = Sheet()
    batch, length, width = 2, 128, 64
    rows = batch * length
    elements = rows * width
    s.add(moved=INT64 * rows + 2 * F32 * elements)  # rows looked up
    s.layer_norm(rows, width)
    s.linear(rows, width, 3 * width)
    s.attention(batch, 4, length, 16, causal=True)
    s.linear(rows, width, width)
    s.binary(elements)
    s.layer_norm(rows, width)
    s.linear(rows, width, 4 * width)
    s.unary(4 * elements)
    s.linear(rows, 4 * width, width)
    s.binary(elements)
    s.linear(rows, width, 500, bias=False)
    return s


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, 64))
        self.places = nn.Parameter(torch.zeros(1, 37, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


def vit() -> Sheet:
    s = Sheet()
    batch, width = 4, 64
    length = 6 * 6 + 1
    s.conv((batch, 3, 48, 48), width, 8, stride=8)
    tokens = batch * length * width
    s.add(moved=F32 * (width + batch * 36 * width + tokens))  # the first token added
    s.plus_bias(tokens, length * width)
    for _ in range(2):
        add_encoder_layer(
            s, batch=batch, length=length, width=width, heads=4, inner=128
        )
    s.layer_norm(batch * length, width)
    s.linear(batch, width, 10)
    return s


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 32, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x):
        side = self.down(x).relu()
        x = self.deep(functional.max_pool2d(side, 2)).relu()
        return self.last(torch.cat([self.up(x), side], 1))


def unet() -> Sheet:
    s = Sheet()
    side = s.conv((2, 1, 32, 32), 16, 3, padding=1)
    s.relu(side)
    x = s.max_pool(side)
    x = s.conv(x, 32, 3, padding=1)
    s.relu(x)
    x = s.up_conv(x, 16, 2)
    s.copy(2 * math.prod(x))
    s.conv((2, 32, 32, 32), 1, 3, padding=1)
    return s


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * 32, 32)
        self.update = nn.Linear(2 * 32, 32)

    def forward(self, x, source, target):
        pairs = torch.cat([x.index_select(0, source), x.index_select(0, target)], 1)
        messages = self.message(pairs).relu()
        sums = torch.zeros_like(x).index_add(0, target, messages)
        return self.update(torch.cat([x, sums], 1))


def graph() -> Sheet:
    s = Sheet()
    nodes, edges, width = 200, 1000, 32
    for _ in range(2):  # every node has edges: all rows are read, once
        s.add(moved=INT64 * edges + F32 * (nodes + edges) * width)
    s.copy(2 * edges * width)
    s.linear(edges, 2 * width, width)
    s.unary(edges * width)
    s.add(moved=F32 * nodes * width)  # zeros
    s.add(  # sums: read and written, messages and their places read
        flops=edges * width,
        moved=F32 * (2 * nodes * width + edges * width) + INT64 * edges,
    )
    s.copy(2 * nodes * width)
    s.linear(nodes, 2 * width, width)
    return s


class AudioNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 32, 8, stride=4)
        self.deep = nn.Conv1d(32, 64, 3, dilation=4, padding=4)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=-1).abs()
        x = self.deep(self.first(x).relu())
        x = functional.glu(x, 1)
        return self.head(x.mean(-1)) * spectrum.mean()


def audio() -> Sheet:
    s = Sheet()
    batch, samples = 2, 4096
    bins = samples // 2 + 1
    s.add(  # half of a complex transform, 5 n log2 n
        flops=batch * 2.5 * samples * math.log2(samples),
        moved=F32 * batch * samples + 2 * F32 * batch * bins,
    )
    s.add(flops=batch * bins, moved=3 * F32 * batch * bins)  # complex in, real out
    s.mean(batch * bins, 1)
    x = s.conv((batch, 1, samples), 32, 8, stride=4)
    s.relu(x)
    x = s.conv(x, 64, 3, dilation=4, padding=4)
    half = math.prod(x) // 2
    s.add(flops=half, moved=F32 * 3 * half)
    s.mean(half, batch * 32)
    s.linear(batch, 32, 8)
    s.add(flops=batch * 8, moved=F32 * (2 * batch * 8 + 1))
    return s


def _randn(*shape: int) -> Callable[[], tuple[object, ...]]:
    return lambda: (torch.randn(*shape),)


def _graph_inputs() -> tuple[object, ...]:
    ends = torch.randint(200, (2, 1000))
    return torch.randn(200, 32), ends[0].contiguous(), ends[1].contiguous()


CASES = [
    Case("conv net", ConvNet, _randn(4, 3, 32, 32), conv_net),
    Case("ResNet", ResNet, _randn(2, 3, 24, 24), resnet),
    Case("depthwise", depthwise_model, _randn(2, 8, 32, 32), depthwise),
    Case(
        "MLP",
        lambda: nn.Sequential(
            nn.Linear(256, 512),
            nn.GELU(),
            nn.Linear(512, 512),
            nn.GELU(),
            nn.Linear(512, 10),
        ),
        _randn(32, 256),
        mlp,
    ),
    Case("LSTM", lambda: nn.LSTM(32, 64, 2), _randn(20, 4, 32), lstm, True),
    Case(
        "bidirectional GRU",
        lambda: nn.GRU(48, 64, bidirectional=True),
        _randn(12, 4, 48),
        gru,
    ),
    Case(
        "encoder layer",
        lambda: nn.TransformerEncoderLayer(64, 4, 256, batch_first=True),
        _randn(4, 64, 64),
        encoder_layer,
        True,
    ),
    Case("GPT block", GptBlock, lambda: (torch.randint(500, (2, 128)),), gpt, True),
    Case("ViT", ViT, _randn(4, 3, 48, 48), vit, True),
    Case("U-Net", UNet, _randn(2, 1, 32, 32), unet),
    Case("graph network", GraphNet, _graph_inputs, graph),
    Case("1-d audio net", AudioNet, _randn(2, 1, 4096), audio),
]
