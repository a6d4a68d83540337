"""Networks of many kinds for the benchmark of kernels: untrained, with the statistics of their own data.

Each is as large as to take some tens of milliseconds on one core: long enough to measure, short enough to measure
twenty of them. BatchNorm's statistics come from data, so the ranges inside are those of a network in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def block(inner: int, outer: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outer),
        nn.ReLU(),
    )


def twice(inner: int, outer: int) -> nn.Sequential:
    """Two convolutions."""
    return nn.Sequential(block(inner, outer), block(outer, outer))


class UNet(nn.Module):
    """Down by max pooling; up as ``up`` says; joined with what was there before by ``cat``."""

    def __init__(self, up: str, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(
            twice(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up, self.join = nn.ModuleList(), nn.ModuleList()
        for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True):
            self.up.append(_upsampler(up, a, b))
            self.join.append(twice(2 * b, b))
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        result: Tensor = self.head(x)
        return result


def _upsampler(up: str, a: int, b: int) -> nn.Module:
    if up == "transposed":
        return nn.ConvTranspose2d(a, b, 2, 2)
    if up == "transposed_bn":
        return nn.Sequential(
            nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()
        )
    corners = False if up == "bilinear" else None
    return nn.Sequential(
        nn.Upsample(scale_factor=2, mode=up, align_corners=corners), nn.Conv2d(a, b, 1)
    )


class Residual(nn.Module):
    """A basic block of a residual network, with an activation of any kind."""

    def __init__(
        self, inner: int, outer: int, stride: int, act: type[nn.Module]
    ) -> None:
        super().__init__()
        self.a = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            act(),
        )
        self.b = nn.Sequential(
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        )
        self.act = act()
        self.short = (
            nn.Identity()
            if inner == outer and stride == 1
            else nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.b(self.a(x)) + self.short(x))
        return result


def resnet(act: type[nn.Module]) -> nn.Module:
    """Six residual blocks."""
    return nn.Sequential(
        block(3, 16),
        Residual(16, 16, 1, act),
        Residual(16, 32, 2, act),
        Residual(32, 32, 1, act),
        Residual(32, 64, 2, act),
        Residual(64, 64, 1, act),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class DenseNet(nn.Module):
    """Each layer reads all before it, behind a BatchNorm that nothing can take."""

    def __init__(self, growth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, 1, 1)
        self.blocks, self.steps = nn.ModuleList(), nn.ModuleList()
        width = 24
        for _ in range(3):
            layers = nn.ModuleList()
            for _ in range(4):
                layers.append(
                    nn.Sequential(
                        nn.BatchNorm2d(width),
                        nn.ReLU(),
                        nn.Conv2d(width, 4 * growth, 1, bias=False),
                        nn.BatchNorm2d(4 * growth),
                        nn.ReLU(),
                        nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
                    )
                )
                width += growth
            self.blocks.append(layers)
            self.steps.append(
                nn.Sequential(
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, width // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                )
            )
            width //= 2
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layers, step in zip(self.blocks, self.steps, strict=True):
            for layer in layers:  # type: ignore[attr-defined]
                x = torch.cat([x, layer(x)], 1)
            x = step(x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


class Inception(nn.Module):
    """Four branches, joined, twice."""

    class Cell(nn.Module):
        """Branches of kernels of several sizes and a pool."""

        def __init__(self, inner: int, w: int) -> None:
            super().__init__()
            self.one = block(inner, w, 1)
            self.three = nn.Sequential(block(inner, w, 1), block(w, w, 3))
            self.five = nn.Sequential(block(inner, w // 2, 1), block(w // 2, w, 5))
            self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), block(inner, w, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(
                [self.one(x), self.three(x), self.five(x), self.pool(x)], 1
            )

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            block(3, 32, 3),
            self.Cell(32, 16),
            self.Cell(64, 24),
            nn.MaxPool2d(2),
            self.Cell(96, 32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(128, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


class Pyramid(nn.Module):
    """A feature pyramid: what is coarse is resized (nearest) and added to what is fine."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 32, 64, 96]
        self.down = nn.ModuleList(
            nn.Sequential(block(a, b, 3, 2), block(b, b))
            for a, b in zip([3, *widths], widths, strict=False)
        )
        self.side = nn.ModuleList(nn.Conv2d(w, 32, 1) for w in widths)
        self.out = nn.ModuleList(nn.Conv2d(32, 32, 3, 1, 1) for _ in widths)
        self.head = nn.Conv2d(32, 6, 3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        levels = []
        for down in self.down:
            x = down(x)
            levels.append(x)
        upper = self.side[-1](levels[-1])
        results = [self.head(functional.relu(self.out[-1](upper)))]
        for level in (2, 1, 0):
            upper = self.side[level](levels[level]) + functional.interpolate(
                upper, scale_factor=2.0, mode="nearest"
            )
            results.append(self.head(functional.relu(self.out[level](upper))))
        return tuple(results)


class Shuffle(nn.Module):
    """ShuffleNet's units: a channel split, a branch, cat, and a shuffle written with views."""

    class Unit(nn.Module):
        """Half of the channels pass as they are."""

        def __init__(self, width: int) -> None:
            super().__init__()
            half = width // 2
            self.branch = nn.Sequential(
                block(half, half, 1),
                nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False),
                nn.BatchNorm2d(half),
                block(half, half, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, 1)
            x = torch.cat([a, self.branch(b)], 1)
            n, c, h, w = x.shape
            return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            block(3, 48, 3, 2),
            nn.MaxPool2d(3, 2, 1),
            *(self.Unit(48) for _ in range(3)),
            block(48, 96, 1, 2),
            *(self.Unit(96) for _ in range(4)),
            block(96, 192, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(192, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


class SqueezeExcite(nn.Module):
    """An inverted residual block of MobileNetV3: hard-swish, and channels scaled by a gate."""

    def __init__(self, inner: int, wide: int, outer: int, stride: int) -> None:
        super().__init__()
        self.same = inner == outer and stride == 1
        self.expand = nn.Sequential(
            nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()
        )
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, wide // 4, 1),
            nn.ReLU(),
            nn.Conv2d(wide // 4, wide, 1),
            nn.Hardsigmoid(),
        )
        self.project = nn.Sequential(
            nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        y = self.project(y * self.gate(y))
        output: Tensor = x + y if self.same else y
        return output


def mobilenet() -> nn.Module:
    """Six blocks of MobileNetV3."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        SqueezeExcite(16, 64, 24, 2),
        SqueezeExcite(24, 72, 24, 1),
        SqueezeExcite(24, 96, 40, 2),
        SqueezeExcite(40, 160, 40, 1),
        SqueezeExcite(40, 160, 40, 1),
        nn.Conv2d(40, 240, 1, bias=False),
        nn.BatchNorm2d(240),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(240, 320),
        nn.Hardswish(),
        nn.Linear(320, 10),
    )


def super_resolution() -> nn.Module:
    """Sub-pixel convolution (ESPCN): twice the resolution by PixelShuffle."""
    return nn.Sequential(
        nn.Conv2d(3, 48, 5, 1, 2),
        nn.ReLU(),
        nn.Conv2d(48, 32, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 1, 1),
        nn.PixelShuffle(2),
        nn.LeakyReLU(0.1),
        nn.Conv2d(16, 12, 3, 1, 1),
        nn.PixelShuffle(2),
    )


def audio() -> nn.Module:
    """Convolutions along time (M5)."""
    layers: list[nn.Module] = []
    for inner, outer, kernel, stride in (
        (1, 32, 79, 4),
        (32, 32, 3, 1),
        (32, 64, 3, 1),
        (64, 128, 3, 1),
    ):
        layers += [
            nn.Conv1d(inner, outer, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm1d(outer),
            nn.ReLU(),
            nn.MaxPool1d(4),
        ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 10)
    )


class Vocoder(nn.Module):
    """Transposed convolutions along time, with residual dilated convolutions (HiFi-GAN)."""

    class Dilated(nn.Module):
        """Leaky ReLU and a convolution, twice, with a residual."""

        def __init__(self, width: int, dilation: int) -> None:
            super().__init__()
            self.a = nn.Conv1d(width, width, 3, 1, dilation, dilation)
            self.b = nn.Conv1d(width, width, 3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(functional.leaky_relu(x, 0.1))
            result: Tensor = x + self.b(functional.leaky_relu(y, 0.1))
            return result

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(40, 128, 7, 1, 3)
        self.up, self.rest = nn.ModuleList(), nn.ModuleList()
        for a, b in ((128, 64), (64, 32)):
            self.up.append(nn.ConvTranspose1d(a, b, 8, 4, 2))
            self.rest.append(nn.Sequential(self.Dilated(b, 1), self.Dilated(b, 3)))
        self.head = nn.Conv1d(32, 1, 7, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for up, rest in zip(self.up, self.rest, strict=True):
            x = rest(up(functional.leaky_relu(x, 0.1)))
        return torch.tanh(self.head(functional.leaky_relu(x, 0.1)))


class Diffusion(nn.Module):
    """A U-Net of a diffusion model: GroupNorm, SiLU, an attention in the middle, nearest resizing."""

    class Res(nn.Module):
        """Norm, SiLU and convolution, twice, with a residual."""

        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.n1, self.c1 = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, 1, 1)
            self.n2, self.c2 = nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, 1, 1)
            self.short = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.c1(functional.silu(self.n1(x)))
            result: Tensor = self.short(x) + self.c2(functional.silu(self.n2(y)))
            return result

    def __init__(self, w: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, w, 3, 1, 1)
        self.a, self.b, self.c = (
            self.Res(w, w),
            self.Res(w, 2 * w),
            self.Res(2 * w, 2 * w),
        )
        self.qkv, self.proj = nn.Conv2d(2 * w, 6 * w, 1), nn.Conv2d(2 * w, 2 * w, 1)
        self.d, self.e = self.Res(4 * w, 2 * w), self.Res(3 * w, w)
        self.norm, self.head = nn.GroupNorm(8, w), nn.Conv2d(w, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(self.stem(x))
        b = self.b(functional.avg_pool2d(a, 2))
        c = self.c(functional.avg_pool2d(b, 2))
        n, w, height, width = c.shape
        q, k, v = self.qkv(c).view(n, 3, w, height * width).transpose(2, 3).unbind(1)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        c = c + self.proj(y.reshape(n, w, height, width))
        y = self.d(torch.cat([functional.interpolate(c, scale_factor=2.0), b], 1))
        y = self.e(torch.cat([functional.interpolate(y, scale_factor=2.0), a], 1))
        result: Tensor = self.head(functional.silu(self.norm(y)))
        return result


class Attention(nn.Module):
    """Attention with one projection for q, k and v, or three; by torch's call or written out."""

    def __init__(
        self, width: int, heads: int, fused: bool, causal: bool, written: bool
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.written = heads, causal, written
        self.qkv = nn.Linear(width, 3 * width) if fused else None
        self.q, self.k, self.v = (
            (nn.Linear(width, width) if not fused else nn.Identity()) for _ in range(3)
        )
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        three = (
            self.qkv(x).chunk(3, -1) if self.qkv else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (y.view(n, t, self.heads, -1).transpose(1, 2) for y in three)
        if self.written:
            scores = q @ k.transpose(-2, -1) / (w // self.heads) ** 0.5
            if self.causal:
                mask = torch.full((t, t), -1e4).triu(1)
                scores = scores + mask
            y = scores.softmax(-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: Tensor = self.out(y.transpose(1, 2).reshape(n, t, w))
        return result


class Block(nn.Module):
    """A transformer block: norms before (GPT, ViT) or behind (BERT)."""

    def __init__(
        self, width: int, before: bool, gelu: str = "none", **attention: bool
    ) -> None:
        super().__init__()
        self.before = before
        self.attention = Attention(width, 4, **attention)
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.n1(x))
            result: Tensor = x + self.mlp(self.n2(x))
            return result
        x = self.n1(x + self.attention(x))
        normed: Tensor = self.n2(x + self.mlp(x))
        return normed


class ViT(nn.Module):
    """Patches, a class token, four blocks."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 65, width) * 0.5)
        self.blocks = nn.Sequential(
            *(
                Block(width, True, fused=True, causal=False, written=False)
                for _ in range(4)
            )
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1) + self.place
        result: Tensor = self.head(self.norm(self.blocks(y))[:, 0])
        return result


class Text(nn.Module):
    """Token and place embeddings, four blocks and a head over the tokens."""

    def __init__(
        self, blocks: Callable[[], nn.Module], width: int = 192, tokens: int = 500
    ) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(tokens, width), nn.Embedding(128, width)
        self.blocks = nn.Sequential(*(blocks() for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.blocks(self.table(ids) + self.place(places))
        result: Tensor = self.head(self.norm(x))
        return result


class RMSNorm(nn.Module):
    """Written out, as language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """A block with RMSNorm, rotary places and SwiGLU."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 192, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, 512, bias=False) for _ in range(2))
        self.down = nn.Linear(512, width, bias=False)
        self.n1, self.n2 = RMSNorm(width), RMSNorm(width)
        angles = torch.outer(
            torch.arange(128.0), 10000.0 ** -torch.arange(0, 1, 2 * heads / width)
        )
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        t = x.shape[-2]
        return x * self.cos[:t] + torch.cat([-b, a], -1) * self.sin[:t]

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        y = self.n1(x)
        q, k, v = (
            p(y).view(n, t, self.heads, -1).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True
        )
        x = x + self.o(y.transpose(1, 2).reshape(n, t, w))
        y = self.n2(x)
        result: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result


@dataclass(frozen=True)
class Case:
    """A network with its data: batches of one sample's shape."""

    make: Callable[[], nn.Module]
    sample: Callable[[int], Tensor]


def picture(size: int) -> Callable[[int], Tensor]:
    """Smooth pictures: sums of a few waves with noise."""

    def sample(count: int) -> Tensor:
        grid = torch.linspace(0, 6.28, size)
        waves = torch.zeros(count, 3, size, size)
        for _ in range(4):
            u, v, phase, weight = torch.randn(4, count, 3, 1, 1)
            waves += weight * torch.sin(u * grid.view(-1, 1) + v * grid + 3 * phase)
        return waves + 0.2 * torch.randn(count, 3, size, size)

    return sample


def sound(channels: int, length: int) -> Callable[[int], Tensor]:
    """Waves along time with noise."""

    def sample(count: int) -> Tensor:
        time = torch.linspace(0, 60, length)
        u, phase, weight = torch.randn(3, count, channels, 1)
        output: Tensor = weight * torch.sin(u * time + 3 * phase) + 0.2 * torch.randn(
            count, channels, length
        )
        return output

    return sample


def ids(count: int) -> Tensor:
    """Tokens, of which few are frequent."""
    weights = 1.0 / torch.arange(1, 501)
    return torch.multinomial(weights, count * 64, replacement=True).view(count, 64)


def _text(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: Text(lambda: Block(192, **settings))


NETS: dict[str, Case] = {
    "unet-transposed": Case(lambda: UNet("transposed"), picture(64)),
    "unet-transposed-bn": Case(lambda: UNet("transposed_bn"), picture(64)),
    "unet-nearest": Case(lambda: UNet("nearest"), picture(64)),
    "unet-bilinear": Case(lambda: UNet("bilinear"), picture(64)),
    "unet-diffusion": Case(Diffusion, picture(32)),
    "resnet": Case(lambda: resnet(nn.ReLU), picture(48)),
    "resnet-silu": Case(lambda: resnet(nn.SiLU), picture(48)),
    "resnet-leaky": Case(lambda: resnet(lambda: nn.LeakyReLU(0.1)), picture(48)),  # type: ignore[arg-type]
    "densenet": Case(DenseNet, picture(32)),
    "inception": Case(Inception, picture(32)),
    "pyramid": Case(Pyramid, picture(96)),
    "shuffle": Case(Shuffle, picture(128)),
    "mobilenet": Case(mobilenet, picture(96)),
    "super-resolution": Case(super_resolution, picture(32)),
    "audio": Case(audio, sound(1, 8000)),
    "vocoder": Case(Vocoder, sound(40, 48)),
    "vit": Case(ViT, picture(64)),
    "bert": Case(_text(before=False, fused=False, causal=False, written=True), ids),
    "gpt": Case(
        _text(before=True, gelu="tanh", fused=True, causal=True, written=False), ids
    ),
    "gpt-written": Case(
        _text(before=True, gelu="tanh", fused=False, causal=True, written=True), ids
    ),
    "llama": Case(lambda: Text(Llama), ids),
}


def made(name: str, seed: int = 0) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """Network in evaluation mode, batches to calibrate on, and others to judge by."""
    torch.manual_seed(seed)
    case = NETS[name]
    net = case.make()
    batches = [case.sample(8) for _ in range(12)]
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.momentum = None
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, 0, 0.3)
            elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, 0, 0.1)
            elif isinstance(
                module, nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d | nn.ConvTranspose2d
            ):
                nn.init.kaiming_normal_(module.weight)
        net.train()
        for batch in batches[:8]:
            net(batch)
    return net.eval(), batches[:8], batches[8:]
