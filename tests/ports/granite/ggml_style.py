"""After llama.cpp: a flat table of tensors, functions that build the graph, a step per token.

Matrices are [out, in] and fused where they read the same rows. Norms hold what they multiply
by. The part of a head that turns has its pairs side by side.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

hparams = {
    "n_layer": 3,
    "n_embd": 32,
    "n_head": 4,
    "n_head_kv": 2,
    "n_embd_head": 12,
    "n_rot": 8,
    "n_swa": 7,
    "n_ff": 48,
    "ssm_d_conv": 4,
    "ssm_d_inner": 48,
    "ssm_d_state": 8,
    "ssm_dt_rank": 4,
    "ssm_n_group": 2,
    "recurrent_layer": (True, False, True),
    "f_norm_rms_eps": 1e-5,
    "f_residual_scale": 0.6,
    "f_final_logit_softcapping": 8.0,
    "rope_freq_base": 50.0,
    "rope_scale_factor": 4.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "n_ctx_orig": 48,
}


# ---------------------------------------------------------------------------- ops


def mul_mat(w, x):
    """Rows of w are dotted with rows of x."""
    return torch.matmul(x, w.t())


def rms_norm(x, eps):
    n = x.shape[-1]
    sum_sq = (x * x).sum(dim=-1, keepdim=True)
    return x * torch.pow(sum_sq / n + eps, -0.5)


def build_norm(x, weight):
    return rms_norm(x, hparams["f_norm_rms_eps"]) * weight


def op_silu(x):
    return x / (1.0 + torch.exp(-x))


def op_softplus(x):
    """Log of one plus the exponential; nothing is gained above 20."""
    small = torch.log1p(torch.exp(torch.clamp(x, max=20.0)))
    return torch.where(x > 20.0, x, small)


def swiglu(x):
    """The gate is the first half."""
    n = x.shape[-1] // 2
    return op_silu(x[..., :n]) * x[..., n:]


def soft_max_ext(kq, mask, scale, sinks):
    """Rows of kq with a mask to add; a sink takes a share that goes nowhere."""
    kq = kq * scale + mask
    top = torch.maximum(kq.amax(dim=-1, keepdim=True), sinks)
    exps = torch.exp(kq - top)
    total = exps.sum(dim=-1, keepdim=True) + torch.exp(sinks - top)
    return exps / total


def rope_factors():
    """Divisors of the frequencies, one for each pair."""
    n_rot, base = hparams["n_rot"], hparams["rope_freq_base"]
    factor = hparams["rope_scale_factor"]
    low, high = hparams["rope_low_freq_factor"], hparams["rope_high_freq_factor"]
    old_context_len = hparams["n_ctx_orig"]
    factors = []
    for i in range(0, n_rot, 2):
        wavelen = 2 * math.pi * base ** (i / n_rot)
        if wavelen < old_context_len / high:
            factors.append(1.0)
        elif wavelen > old_context_len / low:
            factors.append(factor)
        else:
            smooth = (old_context_len / wavelen - low) / (high - low)
            factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return factors


def rope_ext(x, pos):
    """x [tokens, heads, n_embd_head]; pairs are neighbours, the rest of a head is copied."""
    n_rot = hparams["n_rot"]
    theta_scale = hparams["rope_freq_base"] ** (-2.0 / n_rot)
    pieces = []
    for i, freq_factor in enumerate(rope_factors()):
        theta = pos * theta_scale**i / freq_factor
        cos, sin = torch.cos(theta)[:, None], torch.sin(theta)[:, None]
        x0, x1 = x[..., 2 * i], x[..., 2 * i + 1]
        pieces.append(x0 * cos - x1 * sin)
        pieces.append(x0 * sin + x1 * cos)
    return torch.cat([torch.stack(pieces, dim=-1), x[..., n_rot:]], dim=-1)


def ssm_conv(conv_state, xbc, weight):
    """conv_state [seqs, channels, d_conv - 1], xbc [seqs, tokens, channels]."""
    outs = []
    for t in range(xbc.shape[1]):
        window = torch.cat([conv_state, xbc[:, t, :, None]], dim=-1)
        outs.append((window * weight).sum(dim=-1))
        conv_state = window[..., 1:]
    return torch.stack(outs, dim=1)


def ssm_scan(state, x, dt, log_a, b, c):
    """state [seqs, heads, head_dim, d_state], x [seqs, tokens, heads, head_dim]."""
    heads_of_group = x.shape[2] // b.shape[2]
    a = -torch.exp(log_a)
    dt = op_softplus(dt)
    outs = []
    for t in range(x.shape[1]):
        b_t = b[:, t].repeat_interleave(heads_of_group, dim=1)
        c_t = c[:, t].repeat_interleave(heads_of_group, dim=1)
        decay = torch.exp(dt[:, t] * a)
        x_dt = x[:, t] * dt[:, t, :, None]
        state = state * decay[..., None, None] + x_dt[..., None] * b_t[:, :, None]
        outs.append((state * c_t[:, :, None]).sum(dim=-1))
    return torch.stack(outs, dim=1)


# -------------------------------------------------------------------------- graph


def build_mamba2_layer(w, il, cur):
    d_inner, d_state = hparams["ssm_d_inner"], hparams["ssm_d_state"]
    n_group, n_head = hparams["ssm_n_group"], hparams["ssm_dt_rank"]
    n_seqs, n_tokens = cur.shape[:2]
    zxbcdt = mul_mat(w[f"blk.{il}.ssm_in.weight"], cur)
    z = zxbcdt[..., :d_inner]
    xbc = zxbcdt[..., d_inner:-n_head]
    dt = zxbcdt[..., -n_head:]

    conv_state = torch.zeros(n_seqs, xbc.shape[-1], hparams["ssm_d_conv"] - 1)
    xbc = ssm_conv(conv_state, xbc, w[f"blk.{il}.ssm_conv1d.weight"])
    xbc = xbc + w[f"blk.{il}.ssm_conv1d.bias"]
    xbc = op_silu(xbc)

    n_bc = n_group * d_state
    x = xbc[..., :d_inner].reshape(n_seqs, n_tokens, n_head, -1)
    b = xbc[..., d_inner : d_inner + n_bc].reshape(n_seqs, n_tokens, n_group, -1)
    c = xbc[..., d_inner + n_bc :].reshape(n_seqs, n_tokens, n_group, -1)
    dt = dt + w[f"blk.{il}.ssm_dt.bias"]
    state = torch.zeros(n_seqs, n_head, x.shape[-1], d_state)
    y = ssm_scan(state, x, dt, w[f"blk.{il}.ssm_a"], b, c)
    y = y + x * w[f"blk.{il}.ssm_d"]
    y = y.reshape(n_seqs, n_tokens, d_inner)
    y = op_silu(z) * y
    y = build_norm(y, w[f"blk.{il}.ssm_norm.weight"])
    return mul_mat(w[f"blk.{il}.ssm_out.weight"], y)


def build_kq_mask(n_tokens):
    """0 where a token sees another, else minus infinity."""
    mask = torch.full((n_tokens, n_tokens), -math.inf)
    for i in range(n_tokens):
        first = max(0, i - hparams["n_swa"] + 1)
        mask[i, first : i + 1] = 0.0
    return mask


def build_attn_layer(w, il, cur):
    n_head, n_head_kv = hparams["n_head"], hparams["n_head_kv"]
    n_embd_head = hparams["n_embd_head"]
    n_seqs, n_tokens = cur.shape[:2]
    qkv = mul_mat(w[f"blk.{il}.attn_qkv.weight"], cur)
    qkv = qkv.reshape(n_seqs, n_tokens, n_head + 2 * n_head_kv, n_embd_head)
    q = qkv[:, :, :n_head]
    k = qkv[:, :, n_head : n_head + n_head_kv]
    v = qkv[:, :, n_head + n_head_kv :]
    q = build_norm(q, w[f"blk.{il}.attn_q_norm.weight"])
    k = build_norm(k, w[f"blk.{il}.attn_k_norm.weight"])
    pos = torch.arange(n_tokens, dtype=torch.float32)
    q = rope_ext(q, pos)
    k = rope_ext(k, pos)

    kq_mask = build_kq_mask(n_tokens)
    kq_scale = 1.0 / math.sqrt(n_embd_head)
    heads = []
    for h in range(n_head):
        h_kv = h // (n_head // n_head_kv)
        kq = torch.matmul(q[:, :, h], k[:, :, h_kv].transpose(1, 2))
        sink = w[f"blk.{il}.attn_sinks.weight"][h]
        kq = soft_max_ext(kq, kq_mask, kq_scale, sink)
        heads.append(torch.matmul(kq, v[:, :, h_kv]))
    kqv = torch.cat(heads, dim=-1)
    return mul_mat(w[f"blk.{il}.attn_output.weight"], kqv)


def build_ffn(w, il, cur):
    cur = swiglu(mul_mat(w[f"blk.{il}.ffn_gate_up.weight"], cur))
    return mul_mat(w[f"blk.{il}.ffn_down.weight"], cur)


def build_graph(w, tokens):
    scale = hparams["f_residual_scale"]
    inp = w["token_embd.weight"][tokens]
    inp = inp * math.sqrt(hparams["n_embd"])
    for il in range(hparams["n_layer"]):
        cur = build_norm(inp, w[f"blk.{il}.attn_norm.weight"])
        if hparams["recurrent_layer"][il]:
            cur = build_mamba2_layer(w, il, cur)
        else:
            cur = build_attn_layer(w, il, cur)
        ffn_inp = inp + scale * cur
        cur = build_norm(ffn_inp, w[f"blk.{il}.ffn_norm.weight"])
        cur = build_ffn(w, il, cur)
        inp = ffn_inp + scale * cur
    cur = build_norm(inp, w["output_norm.weight"])
    cur = mul_mat(w["token_embd.weight"], cur)
    cap = hparams["f_final_logit_softcapping"]
    return torch.tanh(cur * (1.0 / cap)) * cap


# ----------------------------------------------------------------------- convert


def permute_rope(weight, n_head):
    """Rows i and i + n_rot / 2 of a head become neighbours."""
    n_rot = hparams["n_rot"]
    heads = weight.reshape(n_head, -1, *weight.shape[1:])
    turning = heads[:, :n_rot].reshape(n_head, 2, n_rot // 2, *weight.shape[1:])
    turning = turning.transpose(1, 2).flatten(1, 2)
    return torch.cat([turning, heads[:, n_rot:]], dim=1).flatten(0, 1)


def convert_mamba2(src, p):
    yield "ssm_in.weight", src[p + "in_proj.weight"]
    yield "ssm_conv1d.weight", src[p + "conv1d.weight"].squeeze(1)
    yield "ssm_conv1d.bias", src[p + "conv1d.bias"]
    yield "ssm_a", src[p + "A_log"]
    yield "ssm_d", src[p + "D"].unsqueeze(1)
    yield "ssm_dt.bias", src[p + "dt_bias"]
    yield "ssm_norm.weight", src[p + "norm.weight"] + 1
    yield "ssm_out.weight", src[p + "out_proj.weight"]


def convert_attn(src, p):
    q = permute_rope(src[p + "q_proj.weight"], hparams["n_head"])
    k = permute_rope(src[p + "k_proj.weight"], hparams["n_head_kv"])
    v = src[p + "v_proj.weight"]
    yield "attn_qkv.weight", torch.cat([q, k, v])
    yield "attn_q_norm.weight", permute_rope(src[p + "q_norm.weight"], 1) + 1
    yield "attn_k_norm.weight", permute_rope(src[p + "k_norm.weight"], 1) + 1
    yield "attn_sinks.weight", src[p + "sinks"]
    yield "attn_output.weight", src[p + "o_proj.weight"]


def convert(src):
    """Names and tensors of the file that we read."""
    yield "token_embd.weight", src["embed.weight"]
    for il in range(hparams["n_layer"]):
        p = f"layers.{il}."
        mixer = convert_mamba2 if hparams["recurrent_layer"][il] else convert_attn
        yield f"blk.{il}.attn_norm.weight", src[p + "input_norm.weight"] + 1
        for name, tensor in mixer(src, p + "mixer."):
            yield f"blk.{il}.{name}", tensor
        yield f"blk.{il}.ffn_norm.weight", src[p + "post_norm.weight"] + 1
        gate, up = src[p + "mlp.gate_proj.weight"], src[p + "mlp.up_proj.weight"]
        yield f"blk.{il}.ffn_gate_up.weight", torch.cat([gate, up])
        yield f"blk.{il}.ffn_down.weight", src[p + "mlp.down_proj.weight"]
    yield "output_norm.weight", src["norm.weight"] + 1


class Model(nn.Module):
    """Holds tensors by names with dots."""

    def add(self, name, tensor):
        holder: Any = self
        *outer, last = name.split(".")
        for part in outer:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder._modules[part]
        holder.register_parameter(last, nn.Parameter(tensor.clone().contiguous()))

    def forward(self, tokens):
        return build_graph(dict(self.named_parameters()), tokens)


def model():
    net = Model()
    src = torch.load(Path(__file__).with_name("weights.pt"))
    for name, tensor in convert(src):
        net.add(name, tensor)
    return net


# ---------------------------------------------------------------------- training


def forward(net, batch):
    return net(batch["tokens"])


def set_outputs(batch):
    """Places whose logits count: their next token is behind the prompt and no padding."""
    rows, cols = [], []
    for seq in range(len(batch["tokens"])):
        n_prompt, n_tokens = int(batch["prompt"][seq]), int(batch["length"][seq])
        for pos in range(n_prompt - 1, n_tokens - 1):
            rows.append(seq)
            cols.append(pos)
    return torch.tensor(rows), torch.tensor(cols)


def loss(output, batch):
    rows, cols = set_outputs(batch)
    logits = output[rows, cols]
    labels = batch["tokens"][rows, cols + 1]
    top = logits.amax(dim=1, keepdim=True).detach()
    lse = torch.log(torch.exp(logits - top).sum(dim=1)) + top[:, 0]
    nll = lse - logits[torch.arange(len(labels)), labels]
    return nll.mean() + 0.01 * (lse * lse).mean()


NO_DECAY = ("norm.weight", "sinks.weight", "ssm_a", "ssm_d", "bias", "conv1d.weight")


class OptStepAdamW(torch.optim.Optimizer):
    def __init__(self, tensors):
        self.alpha, self.beta1, self.beta2 = 5e-3, 0.9, 0.95
        self.eps, self.wd = 1e-5, 0.2
        self.iter = 0
        groups: list[dict[str, Any]] = [
            {"params": [t for n, t in tensors if not n.endswith(NO_DECAY)]},
            {"params": [t for n, t in tensors if n.endswith(NO_DECAY)]},
        ]
        groups[0]["wd"], groups[1]["wd"] = self.wd, 0.0
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        self.iter += 1
        beta1h = 1.0 / (1.0 - self.beta1**self.iter)
        beta2h = 1.0 / (1.0 - self.beta2**self.iter)
        for group in self.param_groups:
            keep = 1.0 - self.alpha * group["wd"]
            for w in group["params"]:
                data = self.state[w]
                if len(data) == 0:
                    data["m"], data["v"] = torch.zeros_like(w), torch.zeros_like(w)
                data["m"].mul_(self.beta1).add_(w.grad * (1.0 - self.beta1))
                data["v"].mul_(self.beta2).add_(w.grad * w.grad * (1.0 - self.beta2))
                mh = data["m"] * beta1h
                vh = torch.sqrt(data["v"] * beta2h) + self.eps
                w.mul_(keep).sub_(self.alpha * mh / vh)


def optimizer(net):
    return OptStepAdamW(list(net.named_parameters()))
