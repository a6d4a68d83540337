"""As in an engine: planes of channels, layers stacked, projections apart, chunks of time.

A long convolution is a kernel with a backward of its own. It takes its input in chunks and
adds what each of them gives; the filter of each order is a tensor by itself.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

N_LAYER, N_EMBD, N_CTX = 3, 12, 32
N_BAND = 3
CHUNK = 8
NORM_EPS = 1e-5
WINDOW_FLOOR = 0.05
PARTS = ("v", "g1", "g2")


def overlap_add(signal, taps):
    """Causal convolution along the last axis, of the signal's length."""
    n = signal.shape[-1]
    size = CHUNK + n
    spectrum = torch.fft.rfft(taps, n=size)
    total = torch.zeros_like(signal)
    for start in range(0, n, CHUNK):
        chunk = signal[..., start : start + CHUNK]
        part = torch.fft.irfft(torch.fft.rfft(chunk, n=size) * spectrum, n=size)
        total = total + F.pad(part[..., : n - start], (start, 0))
    return total


class LongConv(torch.autograd.Function):
    """Signal (batch, channels, time), taps (channels, time), skip (channels, 1)."""

    @staticmethod
    def forward(ctx, signal, taps, skip):
        ctx.save_for_backward(signal, taps, skip)
        return overlap_add(signal, taps) + skip * signal

    @staticmethod
    def backward(ctx, grad):
        signal, taps, skip = ctx.saved_tensors
        turned = grad.flip(-1)
        d_signal = overlap_add(turned, taps).flip(-1) + skip * grad
        d_taps = overlap_add(turned, signal).flip(-1).sum(0)
        d_skip = (grad * signal).sum((0, 2)).unsqueeze(1)
        return d_signal, d_taps, d_skip


def norm(x, gain, shift):
    """x: (batch, channels, time)."""
    var, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
    x = (x - mean) * torch.rsqrt(var + NORM_EPS)
    return x * gain.unsqueeze(1) + shift.unsqueeze(1)


def affine(x, weight, bias):
    return torch.matmul(weight, x) + bias.unsqueeze(1)


def gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


def short_conv(x, weight, bias):
    """Weight (channels, taps), the last of them that of the present."""
    history = x.new_zeros(*x.shape[:2], 2)
    windows = torch.cat([history, x], dim=2).unfold(2, 3, 1)
    return torch.einsum("bctk,ck->bct", windows, weight) + bias.unsqueeze(1)


def position_table(n):
    """(features, time): the time, then a cosine and a sine for each of the bands."""
    now = torch.arange(n)
    rows = [now / (N_CTX - 1)]
    for band in range(N_BAND):
        speed = 1e-4 + band * (N_BAND - 1 - 1e-4) / (N_BAND - 1)
        angle = -2 * math.pi * speed * now / N_CTX
        rows += [torch.cos(angle), torch.sin(angle)]
    return torch.stack(rows)


class Engine(nn.Module):
    def __init__(self, tensors, tables):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone().contiguous()))
        for name, table in tables.items():
            self.register_buffer(name, table.clone().contiguous())

    def filter_trunk(self, il, table):
        freq = self.filter_freq[il].unsqueeze(1)
        h = affine(table, self.filter_in_w[il], self.filter_in_b[il])
        h = torch.sin(freq * h)
        h = affine(h, self.filter_mid_w[il], self.filter_mid_b[il])
        return torch.sin(freq * h)

    def filter_taps(self, trunk, out, ratio):
        """Taps (channels, time); the window shrinks by a ratio in each step."""
        age = torch.arange(trunk.shape[1]).to(trunk)
        window = ratio.unsqueeze(1) ** age + WINDOW_FLOOR
        raw = torch.matmul(out, trunk) * window
        return raw / raw.abs().sum(dim=1, keepdim=True)

    def projected(self, il, x, part):
        weight, bias = getattr(self, f"proj_{part}_w"), getattr(self, f"proj_{part}_b")
        taps, shift = getattr(self, f"conv_{part}_w"), getattr(self, f"conv_{part}_b")
        return short_conv(affine(x, weight[il], bias[il]), taps[il], shift[il])

    def hyena(self, il, x, table):
        v, g1, g2 = (self.projected(il, x, part) for part in PARTS)
        trunk = self.filter_trunk(il, table)
        taps1 = self.filter_taps(trunk, self.filter_out1_w[il], self.window1[il])
        taps2 = self.filter_taps(trunk, self.filter_out2_w[il], self.window2[il])
        v = g1 * LongConv.apply(v, taps1, self.filter_skip1[il].unsqueeze(1))
        v = g2 * LongConv.apply(v, taps2, self.filter_skip2[il].unsqueeze(1))
        return affine(v, self.proj_out_w[il], self.proj_out_b[il])

    def feed_forward(self, il, x):
        x = gelu(affine(x, self.ffn_up_w[il], self.ffn_up_b[il]))
        return affine(x, self.ffn_down_w[il], self.ffn_down_b[il])

    def forward(self, tokens):
        table = position_table(tokens.shape[1]).to(self.token_w)
        x = F.embedding(tokens, self.token_w).transpose(1, 2)
        for il in range(N_LAYER):
            cur = norm(x, self.norm_hyena_g[il], self.norm_hyena_b[il])
            x = x + self.hyena(il, cur, table)
            cur = norm(x, self.norm_ffn_g[il], self.norm_ffn_b[il])
            x = x + self.feed_forward(il, cur)
        x = norm(x, self.norm_out_g, self.norm_out_b)
        return torch.matmul(self.token_w, x).transpose(1, 2)


class Converter:
    def __init__(self, weights):
        self.weights = weights

    def stack(self, key):
        """Return one tensor of every layer."""
        return torch.stack(
            [self.weights[f"layers.{il}.{key}"] for il in range(N_LAYER)]
        )

    def norms(self):
        tensors = {}
        for name, key in (("norm_hyena", "norm1"), ("norm_ffn", "norm2")):
            tensors[name + "_g"] = self.stack(key + ".weight")
            tensors[name + "_b"] = self.stack(key + ".bias")
        tensors["norm_out_g"] = self.weights["ln_f.weight"]
        tensors["norm_out_b"] = self.weights["ln_f.bias"]
        return tensors

    def matrices(self):
        tensors = {}
        for name, key in (
            ("proj_out", "mixer.out_proj"),
            ("ffn_up", "mlp.fc1"),
            ("ffn_down", "mlp.fc2"),
        ):
            tensors[name + "_w"] = self.stack(key + ".weight")
            tensors[name + "_b"] = self.stack(key + ".bias")
        return tensors

    def parts(self):
        """Split what is in one tensor there; the value comes last in it."""
        tensors = {}
        for name, key in (("proj", "mixer.in_proj"), ("conv", "mixer.short_filter")):
            weights = self.stack(key + ".weight").split(N_EMBD, dim=1)
            biases = self.stack(key + ".bias").split(N_EMBD, dim=1)
            for part, weight, bias in zip(
                PARTS, reversed(weights), reversed(biases), strict=True
            ):
                squeezed = weight.squeeze(2) if name == "conv" else weight
                tensors[f"{name}_{part}_w"] = squeezed
                tensors[f"{name}_{part}_b"] = bias
        return tensors

    def filters(self):
        at = "mixer.filter_fn."
        # the time, all real parts, all imaginary parts: bands together
        rows = self.stack(at + "implicit_filter.0.weight")
        waves = rows[:, :, 1:].unflatten(2, (2, N_BAND)).transpose(2, 3).flatten(2)
        out1, out2 = self.stack(at + "implicit_filter.4.weight").split(N_EMBD, dim=1)
        skip1, skip2 = self.stack(at + "bias").split(N_EMBD, dim=1)
        return {
            "filter_in_w": torch.cat([rows[:, :, :1], waves], dim=2),
            "filter_in_b": self.stack(at + "implicit_filter.0.bias"),
            "filter_mid_w": self.stack(at + "implicit_filter.2.weight"),
            "filter_mid_b": self.stack(at + "implicit_filter.2.bias"),
            "filter_freq": self.stack(at + "implicit_filter.1.freq").squeeze(1),
            "filter_out1_w": out1,
            "filter_out2_w": out2,
            "filter_skip1": skip1,
            "filter_skip2": skip2,
        }

    def tables(self):
        """Return what is left of the window after a step."""
        deltas = self.stack("mixer.filter_fn.modulation.deltas").flatten(1)
        ratio = torch.exp(-deltas.abs() / (N_CTX - 1))
        first, second = ratio.split(N_EMBD, dim=1)
        return {"window1": first, "window2": second}

    def tensors(self):
        return {
            "token_w": self.weights["lm_head.weight"],
            **self.norms(),
            **self.parts(),
            **self.matrices(),
            **self.filters(),
        }


def model():
    converter = Converter(torch.load(Path(__file__).with_name("weights.pt")))
    return Engine(converter.tensors(), converter.tables())


def forward(net, batch):
    return net(batch["input_ids"][:, :-1])


def loss(output, batch):
    targets = batch["input_ids"][:, 1:].reshape(-1)
    kept = targets.nonzero().squeeze(1)
    rows = output.reshape(len(targets), -1)[kept]
    chosen = rows.gather(1, targets[kept].unsqueeze(1)).squeeze(1)
    return (torch.logsumexp(rows, dim=1) - chosen).mean()


def optimizer(net):
    named = dict(net.named_parameters())
    filters = [name for name in named if name.startswith("filter_")]
    others = [name for name in named if name not in filters]
    decays = [name for name in others if name.endswith("_w")]
    stays = [name for name in others if name not in decays]
    groups = (
        (decays, {"weight_decay": 0.1}),
        (stays, {"weight_decay": 0.0}),
        (filters, {"weight_decay": 0.0, "lr": 1e-3}),
    )
    return torch.optim.AdamW(
        [{"params": [named[name] for name in names], **of} for names, of in groups],
        lr=3e-3,
        betas=(0.9, 0.98),
    )
