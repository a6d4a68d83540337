"""After Flax: kernels [in, ...out], modules with setup, a scan that carries the state.

Letters of the einsums: B batch, T and S places, D features, N query heads, K key heads, G
queries of a key head, H features of a head, C chunks, R state, P features of a state space head.
"""

import dataclasses
import math
from pathlib import Path

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 40
    embed_dim: int = 32
    mlp_dim: int = 48
    block_pattern: tuple = ("ssm", "attn", "ssm")
    norm_epsilon: float = 1e-5
    residual_multiplier: float = 0.6
    final_logit_softcap: float = 8.0
    ssm_heads: int = 4
    ssm_head_dim: int = 12
    ssm_groups: int = 2
    ssm_state: int = 8
    conv_width: int = 4
    chunk_size: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 12
    rotary_fraction: float = 2 / 3
    sliding_window: int = 7
    rope_theta: float = 50.0
    rope_scaling: tuple = (4.0, 1.0, 4.0, 48)


# ------------------------------------------------------------------------- basics


def scan(body, carry, xs):
    """Over the first axis of every x."""
    ys = []
    for step in zip(*xs):
        carry, y = body(carry, step)
        ys.append(y)
    return carry, torch.stack(ys)


def silu(x):
    return x * torch.sigmoid(x)


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x))


class DenseGeneral(nn.Module):
    def __init__(self, in_shape, out_shape):
        super().__init__()
        self.axes = len(in_shape)
        self.kernel = nn.Parameter(torch.empty(*in_shape, *out_shape))

    def forward(self, x):
        return torch.tensordot(x, self.kernel, dims=self.axes)


class RMSNorm(nn.Module):
    def __init__(self, features, epsilon):
        super().__init__()
        self.epsilon = epsilon
        self.scale = nn.Parameter(torch.empty(features))

    def forward(self, x):
        ms = torch.mean(torch.square(x), dim=-1, keepdim=True)
        normed = x / torch.sqrt(ms + self.epsilon)
        return normed + normed * self.scale


class Embedder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed_dim = cfg.embed_dim
        self.embedding = nn.Parameter(torch.empty(cfg.vocab_size, cfg.embed_dim))

    def encode(self, tokens):
        x = torch.index_select(self.embedding, 0, tokens.flatten())
        x = x.reshape(*tokens.shape, self.embed_dim)
        return x * math.sqrt(self.embed_dim)

    def decode(self, x):
        return torch.einsum("BTD,VD->BTV", x, self.embedding)


# -------------------------------------------------------------------- state space


class CausalConv(nn.Module):
    """kernel [width, features]; the last row is for the present."""

    def __init__(self, width, features):
        super().__init__()
        self.width = width
        self.kernel = nn.Parameter(torch.empty(width, features))
        self.bias = nn.Parameter(torch.empty(features))

    def forward(self, x):
        padded = nn.functional.pad(x, (0, 0, self.width - 1, 0))
        windows = torch.stack(
            [padded[:, i : i + x.shape[1]] for i in range(self.width)], dim=2
        )
        return torch.einsum("BTWD,WD->BTD", windows, self.kernel) + self.bias


class SSMBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        heads, dim = cfg.ssm_heads, cfg.ssm_head_dim
        group_state = cfg.ssm_groups * cfg.ssm_state
        features = heads * dim + 2 * group_state
        self.gate = DenseGeneral((cfg.embed_dim,), (heads, dim))
        self.xBC = DenseGeneral((cfg.embed_dim,), (features,))
        self.delta = DenseGeneral((cfg.embed_dim,), (heads,))
        self.conv = CausalConv(cfg.conv_width, features)
        self.log_decay = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.delta_bias = nn.Parameter(torch.empty(heads))
        self.out_norm = RMSNorm(heads * dim, cfg.norm_epsilon)
        self.out = DenseGeneral((heads, dim), (cfg.embed_dim,))

    def split(self, u):
        cfg = self.cfg
        inner = cfg.ssm_heads * cfg.ssm_head_dim
        per_group = cfg.ssm_heads // cfg.ssm_groups
        end = inner + cfg.ssm_groups * cfg.ssm_state
        x = u[..., :inner].unflatten(-1, (cfg.ssm_groups, per_group, -1))
        key = u[..., inner:end].unflatten(-1, (cfg.ssm_groups, -1))
        read = u[..., end:].unflatten(-1, (cfg.ssm_groups, -1))
        return x, key, read

    def chunks(self, x):
        """[B, T, ...] -> [C, B, chunk, ...] with zeros at the end."""
        size = self.cfg.chunk_size
        missing = -x.shape[1] % size
        zeros = x.new_zeros(x.shape[0], missing, *x.shape[2:])
        x = torch.cat([x, zeros], dim=1).unflatten(1, (-1, size))
        return torch.movedim(x, 1, 0)

    def body(self, state, step):
        """One chunk; the state is [B, G, N, P, R] with N heads of a group."""
        x, log_a, key, read = step
        length = x.shape[1]
        total = torch.cumsum(log_a, dim=1)
        causal = torch.tril(torch.ones(length, length, dtype=torch.bool))
        gap = total[:, :, None] - total[:, None]
        gap = torch.where(causal[:, :, None, None], gap, -1e30)
        scores = torch.einsum("BTGR,BSGR->BTSG", read, key)
        mixing = scores[..., None] * torch.exp(gap)
        y = torch.einsum("BTSGN,BSGNP->BTGNP", mixing, x)
        carried = torch.einsum("BTGR,BGNPR->BTGNP", read, state)
        y = y + carried * torch.exp(total)[..., None]
        rest = torch.exp(total[:, -1:] - total)
        written = torch.einsum("BSGNP,BSGN,BSGR->BGNPR", x, rest, key)
        state = state * torch.exp(total[:, -1])[..., None, None] + written
        return state, y

    def forward(self, inputs):
        cfg = self.cfg
        gate = self.gate(inputs)
        u = silu(self.conv(self.xBC(inputs)))
        x, key, read = self.split(u)
        delta = softplus(self.delta(inputs) + self.delta_bias)
        log_a = -delta * torch.exp(self.log_decay)
        groups = (cfg.ssm_groups, -1)
        log_a, delta = log_a.unflatten(-1, groups), delta.unflatten(-1, groups)
        xs = [self.chunks(v) for v in (x * delta[..., None], log_a, key, read)]
        state = x.new_zeros(x.shape[0], *x.shape[2:], cfg.ssm_state)
        _, y = scan(self.body, state, xs)
        y = torch.movedim(y, 0, 1).flatten(1, 2)[:, : x.shape[1]].flatten(2, 3)
        y = y + x.flatten(2, 3) * self.skip[:, None]
        y = y * silu(gate)
        y = self.out_norm(y.flatten(2)).unflatten(-1, y.shape[2:])
        return self.out(y)


# ---------------------------------------------------------------------- attention


def rotary_table(cfg, length):
    """sin and cos [T, rotary // 2]."""
    rotary = round(cfg.head_dim * cfg.rotary_fraction)
    exponents = torch.arange(rotary // 2) * (2.0 / rotary)
    freqs = 1.0 / torch.pow(torch.tensor(cfg.rope_theta), exponents)
    factor, low, high, original = cfg.rope_scaling
    wavelength = 2.0 * math.pi / freqs
    blend = (original / wavelength - low) / (high - low)
    mixed = (1.0 - blend) * freqs / factor + blend * freqs
    scaled = torch.where(wavelength > original / low, freqs / factor, mixed)
    scaled = torch.where(wavelength < original / high, freqs, scaled)
    angles = torch.arange(length)[:, None] * scaled[None]
    return torch.sin(angles), torch.cos(angles)


def apply_rotary(x, sin, cos):
    """x [B, T, N, H]; what is beyond the table passes."""
    half = sin.shape[-1]
    sin, cos = sin[:, None], cos[:, None]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


def sliding_mask(length, window):
    row = torch.arange(length)[:, None]
    column = torch.arange(length)[None, :]
    return (column <= row) & (column > row - window)


class AttentionBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        heads, kv_heads, dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.query = DenseGeneral((cfg.embed_dim,), (heads, dim))
        self.key = DenseGeneral((cfg.embed_dim,), (kv_heads, dim))
        self.value = DenseGeneral((cfg.embed_dim,), (kv_heads, dim))
        self.out = DenseGeneral((heads, dim), (cfg.embed_dim,))
        self.query_norm = RMSNorm(dim, cfg.norm_epsilon)
        self.key_norm = RMSNorm(dim, cfg.norm_epsilon)
        self.sink = nn.Parameter(torch.empty(heads))

    def forward(self, x):
        cfg = self.cfg
        length = x.shape[1]
        sin, cos = rotary_table(cfg, length)
        query = apply_rotary(self.query_norm(self.query(x)), sin, cos)
        key = apply_rotary(self.key_norm(self.key(x)), sin, cos)
        value = self.value(x)
        query = query / math.sqrt(cfg.head_dim)
        query = query.unflatten(2, (cfg.num_kv_heads, -1))
        logits = torch.einsum("BTKGH,BSKH->BKGTS", query, key)
        mask = sliding_mask(length, cfg.sliding_window)
        logits = torch.where(mask, logits, -1e30)
        sink = self.sink.reshape(cfg.num_kv_heads, -1, 1, 1)
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        probs = torch.exp(logits - torch.logaddexp(total, sink))
        encoded = torch.einsum("BKGTS,BSKH->BTKGH", probs, value)
        return self.out(encoded.flatten(2, 3))


# -------------------------------------------------------------------------- model


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.wi_0 = DenseGeneral((cfg.embed_dim,), (cfg.mlp_dim,))
        self.wi_1 = DenseGeneral((cfg.embed_dim,), (cfg.mlp_dim,))
        self.wo = DenseGeneral((cfg.mlp_dim,), (cfg.embed_dim,))

    def forward(self, x):
        gate = silu(self.wi_0(x))
        return self.wo(gate * self.wi_1(x))


class DecoderLayer(nn.Module):
    def __init__(self, cfg, kind):
        super().__init__()
        self.multiplier = cfg.residual_multiplier
        self.pre_mixer_norm = RMSNorm(cfg.embed_dim, cfg.norm_epsilon)
        self.mixer = SSMBlock(cfg) if kind == "ssm" else AttentionBlock(cfg)
        self.pre_mlp_norm = RMSNorm(cfg.embed_dim, cfg.norm_epsilon)
        self.mlp = MLP(cfg)

    def forward(self, x):
        mixed = self.mixer(self.pre_mixer_norm(x))
        x = x + mixed * self.multiplier
        fed = self.mlp(self.pre_mlp_norm(x))
        return x + fed * self.multiplier


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embedder = Embedder(cfg)
        for i, kind in enumerate(cfg.block_pattern):
            self.add_module(f"layers_{i}", DecoderLayer(cfg, kind))
        self.final_norm = RMSNorm(cfg.embed_dim, cfg.norm_epsilon)

    def forward(self, tokens):
        x = self.embedder.encode(tokens)
        for i in range(len(self.cfg.block_pattern)):
            x = getattr(self, f"layers_{i}")(x)
        logits = self.embedder.decode(self.final_norm(x))
        cap = self.cfg.final_logit_softcap
        return torch.tanh(logits / cap) * cap


# --------------------------------------------------------------------- checkpoint


def convert_ssm(cfg, src):
    inner = cfg.ssm_heads * cfg.ssm_head_dim
    kernel = src["in_proj.weight"].T
    gate, xbc, delta = kernel.tensor_split((inner, kernel.shape[1] - cfg.ssm_heads), 1)
    heads = (cfg.ssm_heads, cfg.ssm_head_dim)
    return {
        "gate.kernel": gate.reshape(-1, *heads),
        "xBC.kernel": xbc,
        "delta.kernel": delta,
        "conv.kernel": src["conv1d.weight"].squeeze(1).T,
        "conv.bias": src["conv1d.bias"],
        "log_decay": src["A_log"],
        "skip": src["D"],
        "delta_bias": src["dt_bias"],
        "out_norm.scale": src["norm.weight"],
        "out.kernel": src["out_proj.weight"].T.reshape(*heads, -1),
    }


def convert_attention(cfg, src):
    def heads_last(name, heads):
        return src[name].T.reshape(cfg.embed_dim, heads, cfg.head_dim)

    out = src["o_proj.weight"].T
    return {
        "query.kernel": heads_last("q_proj.weight", cfg.num_heads),
        "key.kernel": heads_last("k_proj.weight", cfg.num_kv_heads),
        "value.kernel": heads_last("v_proj.weight", cfg.num_kv_heads),
        "out.kernel": out.reshape(cfg.num_heads, cfg.head_dim, -1),
        "query_norm.scale": src["q_norm.weight"],
        "key_norm.scale": src["k_norm.weight"],
        "sink": src["sinks"],
    }


def subtree(tree, prefix):
    return {k[len(prefix) :]: v for k, v in tree.items() if k.startswith(prefix)}


def convert(cfg, state):
    """PyTorch's names and layouts -> ours."""
    params = {
        "embedder.embedding": state["embed.weight"],
        "final_norm.scale": state["norm.weight"],
    }
    for i, kind in enumerate(cfg.block_pattern):
        src = subtree(state, f"layers.{i}.")
        mixer = convert_ssm if kind == "ssm" else convert_attention
        layer = {
            "pre_mixer_norm.scale": src["input_norm.weight"],
            "pre_mlp_norm.scale": src["post_norm.weight"],
            "mlp.wi_0.kernel": src["mlp.gate_proj.weight"].T,
            "mlp.wi_1.kernel": src["mlp.up_proj.weight"].T,
            "mlp.wo.kernel": src["mlp.down_proj.weight"].T,
        }
        for name, value in mixer(cfg, subtree(src, "mixer.")).items():
            layer[f"mixer.{name}"] = value
        params.update({f"layers_{i}.{name}": v for name, v in layer.items()})
    return params


def model():
    cfg = Config()
    net = Decoder(cfg)
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(convert(cfg, state))
    return net


# ----------------------------------------------------------------------- training

Z_LOSS_WEIGHT = 1e-2


def forward(net, batch):
    return net(batch["tokens"])


def loss_weights(batch):
    """[B, T - 1]; one where the next token is an answer."""
    steps = torch.arange(batch["tokens"].shape[1])[None, :]
    answer = steps >= batch["prompt"][:, None]
    answer = answer & (steps < batch["length"][:, None])
    return answer[:, 1:].float()


def loss(output, batch):
    targets = batch["tokens"][:, 1:]
    logits = output[:, :-1]
    weights = loss_weights(batch)
    log_z = torch.logsumexp(logits, dim=-1)
    picked = torch.gather(logits, -1, targets[..., None])[..., 0]
    nll = log_z - picked
    per_token = nll + Z_LOSS_WEIGHT * torch.square(log_z)
    return torch.sum(per_token * weights) / torch.sum(weights)


class AdamW(torch.optim.Optimizer):
    """As optax: scale_by_adam, add_decayed_weights with a mask, scale by -rate."""

    def __init__(self, net, learning_rate, b1, b2, eps, weight_decay):
        self.named = dict(net.named_parameters())
        super().__init__(list(self.named.values()), {})
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.b1, self.b2, self.eps = b1, b2, eps
        self.count = 0

    def decays(self, name):
        if ".conv." in name:
            return False
        return name.endswith(("kernel", "embedding"))

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for name, param in self.named.items():
            slots = self.state[param]
            if not slots:
                slots["mu"] = torch.zeros_like(param)
                slots["nu"] = torch.zeros_like(param)
            mu, nu, grad = slots["mu"], slots["nu"], param.grad
            mu.copy_(self.b1 * mu + (1.0 - self.b1) * grad)
            nu.copy_(self.b2 * nu + (1.0 - self.b2) * torch.square(grad))
            mu_hat = mu / (1.0 - self.b1**self.count)
            nu_hat = nu / (1.0 - self.b2**self.count)
            update = mu_hat / (torch.sqrt(nu_hat) + self.eps)
            if self.decays(name):
                update = update + self.weight_decay * param
            param.sub_(self.learning_rate * update)


def optimizer(net):
    return AdamW(net, 5e-3, b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.2)
