"""After Flax: kernels [in, ...out], parameters in a tree, memories scanned over time.

Letters of the einsums: B batch, T places, D features, N heads or blocks, H features of a head
that are read, K those that are written, G gates, W taps.
"""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class XLSTMConfig:
    vocab_size: int = 43
    embedding_dim: int = 40
    slstm_at: tuple = (1,)
    num_blocks: int = 3
    conv1d_kernel_size: int = 4
    norm_eps: float = 1e-5
    head_norm_eps: float = 5e-3
    mlstm_inner_dim: int = 72
    mlstm_num_heads: int = 3
    qkv_proj_blocksize: int = 6
    gate_soft_cap: float = 5.0
    denominator_eps: float = 1e-6
    slstm_num_heads: int = 5
    ffn_dim: int = 52


# ---------------------------------------------------------------- as in jax and lax


def scan(f, init, xs):
    """Over the first axis of each array of xs, which is a dict."""
    carry, ys = init, []
    for t in range(len(next(iter(xs.values())))):
        carry, y = f(carry, {name: x[t] for name, x in xs.items()})
        ys.append(y)
    return carry, torch.stack(ys)


def stop_gradient(x):
    return x.detach()


def log_sigmoid(x):
    return -torch.logaddexp(-x, torch.zeros_like(x))


def silu(x):
    return x * torch.sigmoid(x)


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def soft_cap(x, cap):
    return cap * torch.tanh(x / cap)


def fast_variance(x):
    """Mean and variance over the last axis in one pass."""
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean_of_squares = torch.mean(torch.square(x), dim=-1, keepdim=True)
    return mean, mean_of_squares - torch.square(mean)


# --------------------------------------------------------------------------- layers


class Dense(nn.Module):
    def __init__(self, features_in, features):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(features_in, features))

    def forward(self, x):
        return torch.einsum("BTD,DK->BTK", x, self.kernel)


class BlockDense(nn.Module):
    """kernel [N, H, K]: a small kernel for each block."""

    def __init__(self, num_blocks, dim):
        super().__init__()
        size = dim // num_blocks
        self.kernel = nn.Parameter(torch.empty(num_blocks, size, size))

    def forward(self, x):
        blocks = x.reshape(*x.shape[:2], self.kernel.shape[0], -1)
        y = torch.einsum("BTNH,NHK->BTNK", blocks, self.kernel)
        return y.reshape(x.shape)


class CausalConv1D(nn.Module):
    """kernel [width, 1, features], a group for each feature; the last tap is the present."""

    def __init__(self, width, dim):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(width, 1, dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        width = self.kernel.shape[0]
        padded = nn.functional.pad(x, (0, 0, width - 1, 0))
        patches = padded.unfold(1, width, 1)
        return torch.einsum("BTDW,WD->BTD", patches, self.kernel[:, 0]) + self.bias


class LayerNorm(nn.Module):
    """The scale is around zero."""

    def __init__(self, dim, epsilon):
        super().__init__()
        self.epsilon = epsilon
        self.scale = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        mean, var = fast_variance(x)
        return (x - mean) * (torch.rsqrt(var + self.epsilon) * (1.0 + self.scale))


class MultiHeadLayerNorm(nn.Module):
    """x [B, T, N, H]; the scale is [N, H] and around zero."""

    def __init__(self, num_heads, head_dim, epsilon):
        super().__init__()
        self.epsilon = epsilon
        self.scale = nn.Parameter(torch.empty(num_heads, head_dim))

    def forward(self, x):
        mean, var = fast_variance(x)
        x = (x - mean) * torch.rsqrt(var + self.epsilon)
        return torch.flatten(x * (1.0 + self.scale), 2)


# ---------------------------------------------------------------------------- mLSTM


class MatrixCarry(NamedTuple):
    c: torch.Tensor  # [B, N, H, K]
    n: torch.Tensor  # [B, N, H]
    m: torch.Tensor  # [B, N]


class MLSTMCell(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        heads, dim = cfg.mlstm_num_heads, cfg.mlstm_inner_dim
        head_dim = dim // heads
        self.gate_kernel = nn.Parameter(torch.empty(3, heads, head_dim, 2, heads))
        self.gate_bias = nn.Parameter(torch.empty(2, heads))
        self.norm = MultiHeadLayerNorm(heads, head_dim, cfg.head_norm_eps)

    def initial_carry(self, batch):
        heads = self.cfg.mlstm_num_heads
        size = self.cfg.mlstm_inner_dim // heads
        return MatrixCarry(
            c=torch.zeros(batch, heads, size, size),
            n=torch.zeros(batch, heads, size),
            m=torch.full((batch, heads), -1e30),
        )

    def step(self, carry, x):
        log_f = log_sigmoid(x["f"]) + carry.m
        m = stop_gradient(torch.maximum(log_f, x["i"]))
        keep, write = torch.exp(log_f - m), torch.exp(x["i"] - m)
        outer = torch.einsum("BNH,BNK->BNHK", x["k"], x["v"])
        c = keep[..., None, None] * carry.c + write[..., None, None] * outer
        n = keep[..., None] * carry.n + write[..., None] * x["k"]
        numerator = torch.einsum("BNHK,BNH->BNK", c, x["q"])
        similarity = torch.einsum("BNH,BNH->BN", n, x["q"])
        denominator = torch.maximum(torch.abs(similarity), torch.exp(-m))
        h = numerator / (denominator + self.cfg.denominator_eps)[..., None]
        return MatrixCarry(c, n, m), h

    def forward(self, q, k, v):
        """Each is [B, T, N, H]."""
        qkv = torch.stack([q, k, v], dim=2)
        gates = torch.einsum("BTPNH,PNHGM->BTGM", qkv, self.gate_kernel)
        gates = soft_cap(gates + self.gate_bias, self.cfg.gate_soft_cap)
        k = k / math.sqrt(k.shape[-1])
        xs = {"q": q, "k": k, "v": v, "i": gates[:, :, 0], "f": gates[:, :, 1]}
        xs = {name: torch.swapaxes(x, 0, 1) for name, x in xs.items()}
        _, h = scan(self.step, self.initial_carry(q.shape[0]), xs)
        return self.norm(torch.swapaxes(h, 0, 1))


class MLSTMLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        dim, inner = cfg.embedding_dim, cfg.mlstm_inner_dim
        blocks = inner // cfg.qkv_proj_blocksize
        self.num_heads = cfg.mlstm_num_heads
        self.proj_up_x = Dense(dim, inner)
        self.proj_up_z = Dense(dim, inner)
        self.conv1d = CausalConv1D(cfg.conv1d_kernel_size, inner)
        self.q_proj = BlockDense(blocks, inner)
        self.k_proj = BlockDense(blocks, inner)
        self.v_proj = BlockDense(blocks, inner)
        self.cell = MLSTMCell(cfg)
        self.learnable_skip = nn.Parameter(torch.empty(inner))
        self.proj_down = Dense(inner, dim)

    def split_heads(self, x):
        return x.reshape(*x.shape[:2], self.num_heads, -1)

    def forward(self, x):
        x_mlstm, z = self.proj_up_x(x), self.proj_up_z(x)
        x_conv = silu(self.conv1d(x_mlstm))
        q = self.split_heads(self.q_proj(x_conv))
        k = self.split_heads(self.k_proj(x_conv))
        v = self.split_heads(self.v_proj(x_mlstm))
        h_tilde = self.cell(q, k, v)
        h_skip = h_tilde + self.learnable_skip * x_conv
        return self.proj_down(h_skip * silu(z))


# ---------------------------------------------------------------------------- sLSTM


class ScalarCarry(NamedTuple):
    """Each is [B, N, H]."""

    h: torch.Tensor
    c: torch.Tensor
    n: torch.Tensor
    m: torch.Tensor


class SLSTMCell(nn.Module):
    """Gates stand in the order z, i, f, o."""

    def __init__(self, cfg):
        super().__init__()
        heads = cfg.slstm_num_heads
        size = cfg.embedding_dim // heads
        self.recurrent_kernel = nn.Parameter(torch.empty(heads, size, 4, size))
        self.bias = nn.Parameter(torch.empty(4, heads, size))

    def initial_carry(self, batch):
        heads, size = self.bias.shape[1:]
        zeros = torch.zeros(batch, heads, size)
        return ScalarCarry(h=zeros, c=zeros, n=zeros, m=zeros - 1e30)

    def step(self, carry, x):
        recurrent = torch.einsum("BNH,NHGK->BGNK", carry.h, self.recurrent_kernel)
        z, i, f, o = torch.unbind(x["wx"] + recurrent + self.bias, dim=1)
        log_f = log_sigmoid(f) + carry.m
        m = stop_gradient(torch.maximum(log_f, i))
        keep, write = torch.exp(log_f - m), torch.exp(i - m)
        c = keep * carry.c + write * torch.tanh(z)
        n = keep * carry.n + write
        h = torch.sigmoid(o) * (c / n)
        return ScalarCarry(h, c, n, m), h

    def forward(self, wx):
        """wx [B, T, 4, N, H] -> h [B, T, N, H]"""
        xs = {"wx": torch.swapaxes(wx, 0, 1)}
        _, h = scan(self.step, self.initial_carry(wx.shape[0]), xs)
        return torch.swapaxes(h, 0, 1)


class SLSTMLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        dim, heads = cfg.embedding_dim, cfg.slstm_num_heads
        self.num_heads = heads
        self.conv1d = CausalConv1D(cfg.conv1d_kernel_size, dim)
        self.z_gate = BlockDense(heads, dim)
        self.i_gate = BlockDense(heads, dim)
        self.f_gate = BlockDense(heads, dim)
        self.o_gate = BlockDense(heads, dim)
        self.cell = SLSTMCell(cfg)
        self.group_norm = MultiHeadLayerNorm(heads, dim // heads, cfg.head_norm_eps)

    def forward(self, x):
        x_conv = silu(self.conv1d(x))
        z, o = self.z_gate(x), self.o_gate(x)
        i, f = self.i_gate(x_conv), self.f_gate(x_conv)
        wx = torch.stack([z, i, f, o], dim=2)
        h = self.cell(wx.reshape(*wx.shape[:3], self.num_heads, -1))
        return self.group_norm(h)


class GatedFeedForward(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.wi_gate = Dense(cfg.embedding_dim, cfg.ffn_dim)
        self.wi_up = Dense(cfg.embedding_dim, cfg.ffn_dim)
        self.wo = Dense(cfg.ffn_dim, cfg.embedding_dim)

    def forward(self, x):
        return self.wo(gelu(self.wi_gate(x)) * self.wi_up(x))


# ---------------------------------------------------------------------------- model


class XLSTMBlock(nn.Module):
    def __init__(self, cfg, is_slstm):
        super().__init__()
        self.is_slstm = is_slstm
        self.xlstm_norm = LayerNorm(cfg.embedding_dim, cfg.norm_eps)
        self.xlstm = SLSTMLayer(cfg) if is_slstm else MLSTMLayer(cfg)
        if is_slstm:
            self.ffn_norm = LayerNorm(cfg.embedding_dim, cfg.norm_eps)
            self.ffn = GatedFeedForward(cfg)

    def forward(self, x):
        x = x + self.xlstm(self.xlstm_norm(x))
        if self.is_slstm:
            x = x + self.ffn(self.ffn_norm(x))
        return x


class XLSTMLMModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.token_embedding = nn.Parameter(
            torch.empty(cfg.vocab_size, cfg.embedding_dim)
        )
        for i in range(cfg.num_blocks):
            self.add_module(f"block_{i}", XLSTMBlock(cfg, i in cfg.slstm_at))
        self.post_blocks_norm = LayerNorm(cfg.embedding_dim, cfg.norm_eps)
        self.lm_head = Dense(cfg.embedding_dim, cfg.vocab_size)

    def forward(self, tokens):
        x = torch.index_select(self.token_embedding, 0, torch.ravel(tokens))
        x = x.reshape(*tokens.shape, -1)
        for i in range(self.cfg.num_blocks):
            x = getattr(self, f"block_{i}")(x)
        return self.lm_head(self.post_blocks_norm(x))


# ----------------------------------------------------------------------- checkpoint


def dense(weight):
    return {"kernel": weight.T}


def block_dense(weight):
    return {"kernel": torch.swapaxes(weight, 1, 2)}


def conv(src, name):
    kernel = torch.permute(src[f"{name}.conv.weight"], (2, 1, 0))
    return {"kernel": kernel, "bias": src[f"{name}.conv.bias"]}


def convert_mlstm(cfg, src):
    heads = cfg.mlstm_num_heads
    x, z = torch.split(src["proj_up.weight"], cfg.mlstm_inner_dim)
    gates = torch.stack([src["igate.weight"], src["fgate.weight"]])
    kernel = torch.permute(gates, (2, 0, 1)).reshape(3, heads, -1, 2, heads)
    bias = torch.stack([src["igate.bias"], src["fgate.bias"]])
    return {
        "proj_up_x": dense(x),
        "proj_up_z": dense(z),
        "conv1d": conv(src, "conv"),
        "q_proj": block_dense(src["q_proj.weight"]),
        "k_proj": block_dense(src["k_proj.weight"]),
        "v_proj": block_dense(src["v_proj.weight"]),
        "cell": {
            "gate_kernel": kernel,
            "gate_bias": bias,
            "norm": {"scale": src["norm.weight"].reshape(heads, -1)},
        },
        "learnable_skip": src["skip"],
        "proj_down": dense(src["proj_down.weight"]),
    }


def convert_slstm(cfg, src):
    heads = cfg.slstm_num_heads
    order = ["ifzo".index(gate) for gate in "zifo"]
    layer = {f"{g}_gate": block_dense(src[f"{g}gate.weight"]) for g in "zifo"}
    cell = {
        "recurrent_kernel": torch.permute(src["recurrent"][order], (1, 3, 0, 2)),
        "bias": src["bias"][order].reshape(4, heads, -1),
    }
    scale = src["norm.weight"].reshape(heads, -1)
    norm = {"scale": scale}
    return {"conv1d": conv(src, "conv"), **layer, "cell": cell, "group_norm": norm}


def subtree(flat, prefix):
    return {k[len(prefix) :]: v for k, v in flat.items() if k.startswith(prefix)}


def convert(cfg, state):
    """PyTorch's names and layouts -> a tree of ours."""
    params = {
        "token_embedding": state["embed.weight"],
        "post_blocks_norm": {"scale": state["norm.weight"]},
        "lm_head": dense(state["head.weight"]),
    }
    for i in range(cfg.num_blocks):
        src = subtree(state, f"blocks.{i}.")
        block = {"xlstm_norm": {"scale": src["norm.weight"]}}
        if i in cfg.slstm_at:
            gate, up = torch.split(src["ff.proj_up.weight"], cfg.ffn_dim)
            wo = src["ff.proj_down.weight"]
            block["xlstm"] = convert_slstm(cfg, subtree(src, "cell."))
            block["ffn_norm"] = {"scale": src["ff_norm.weight"]}
            block["ffn"] = {
                "wi_gate": dense(gate),
                "wi_up": dense(up),
                "wo": dense(wo),
            }
        else:
            block["xlstm"] = convert_mlstm(cfg, subtree(src, "cell."))
        params[f"block_{i}"] = block
    return params


def flatten_dict(tree, prefix=""):
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten_dict(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def model():
    cfg = XLSTMConfig()
    net = XLSTMLMModel(cfg)
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(flatten_dict(convert(cfg, state)))
    return net


# ------------------------------------------------------------------------- training


def forward(net, batch):
    return net(batch["tokens"])


def cross_entropy_with_integer_labels(logits, labels):
    label_logits = torch.take_along_dim(logits, labels[..., None], dim=-1)[..., 0]
    return torch.logsumexp(logits, dim=-1) - label_logits


def loss(output, batch):
    labels = batch["tokens"][:, 1:]
    positions = torch.arange(1, batch["tokens"].shape[1])
    weights = (positions < batch["length"][:, None]).to(output.dtype)
    losses = cross_entropy_with_integer_labels(output[:, :-1], labels)
    return torch.sum(losses * weights) / torch.sum(weights)


class AdamW(torch.optim.Optimizer):
    """As optax.adamw with a mask of what decays."""

    def __init__(self, params, learning_rate, b1, b2, eps, weight_decay, mask):
        super().__init__(list(params.values()), {})
        self.params, self.mask = params, mask
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.b1, self.b2, self.eps = b1, b2, eps
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for name, param in self.params.items():
            slots = self.state[param]
            if not slots:
                slots["mu"] = torch.zeros_like(param)
                slots["nu"] = torch.zeros_like(param)
            grad = param.grad
            slots["mu"] = self.b1 * slots["mu"] + (1 - self.b1) * grad
            slots["nu"] = self.b2 * slots["nu"] + (1 - self.b2) * torch.square(grad)
            mu_hat = slots["mu"] / (1 - self.b1**self.count)
            nu_hat = slots["nu"] / (1 - self.b2**self.count)
            update = mu_hat / (torch.sqrt(nu_hat) + self.eps)
            if self.mask(name):
                update = update + self.weight_decay * param
            param.sub_(self.learning_rate * update)


def is_kernel(name):
    return name.endswith(("kernel", "embedding"))


def optimizer(net):
    params = dict(net.named_parameters())
    return AdamW(params, 4e-3, 0.9, 0.95, 1e-5, 0.1, is_kernel)
