"""After llama.cpp: a table of tensors by name, functions that build a graph, chunks of tokens.

Matrices are [out, in] and fused where they read the same rows: those of the keys behind those
of the queries, forget gates behind input gates. Norms hold what they multiply by. Taps of a
convolution are rows, the oldest first.
"""

import math
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

hparams = SimpleNamespace(
    n_vocab=43,
    n_embd=40,
    n_layer=3,
    slstm_layer=(False, True, False),
    n_conv=4,
    n_chunk=8,
    n_inner=72,
    n_head=3,
    n_qkv_block=12,
    n_head_s=5,
    n_ff=52,
    f_norm_eps=1e-5,
    f_norm_group_eps=5e-3,
    f_gate_softcap=5.0,
    f_norm_min=1e-6,
)


# ------------------------------------------------------------------------------ ops


def mul_mat(w, x):
    return x @ w.transpose(-2, -1)


def mul_mat_blocks(w, x):
    """w [blocks, out, in], x [seqs, tokens, blocks * in] -> [seqs, tokens, blocks, out]"""
    n_seqs, n_tokens, _ = x.shape
    x = x.reshape(n_seqs, n_tokens, w.shape[0], w.shape[2]).permute(0, 2, 1, 3)
    return mul_mat(w, x).permute(0, 2, 1, 3)


def op_sigmoid(x):
    return 1.0 / (1.0 + torch.exp(-x))


def op_silu(x):
    return x * op_sigmoid(x)


def op_log_sigmoid(x):
    """Nothing of a large x goes through the exponential."""
    return torch.clamp(x, max=0.0) - torch.log1p(torch.exp(-torch.abs(x)))


def op_gelu_erf(x):
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def op_norm(x, eps):
    """Rows are what is along the last axis."""
    x = x - x.sum(dim=-1, keepdim=True) / x.shape[-1]
    variance = (x * x).sum(dim=-1, keepdim=True) / x.shape[-1]
    return x / torch.sqrt(variance + eps)


def build_norm(x, weight):
    return op_norm(x, hparams.f_norm_eps) * weight


def build_head_norm(x, weight):
    """x [seqs, tokens, heads, head]"""
    x = op_norm(x, hparams.f_norm_group_eps)
    return x.reshape(x.shape[0], x.shape[1], -1) * weight


def build_conv(x, taps, bias):
    """x [seqs, tokens, channels], taps [n_conv, channels]"""
    n_tokens = x.shape[1]
    state = torch.zeros(x.shape[0], hparams.n_conv - 1, x.shape[2])
    x = torch.cat([state, x], dim=1)
    out = bias
    for i in range(hparams.n_conv):
        out = out + x[:, i : i + n_tokens] * taps[i]
    return op_silu(out)


def soft_cap(x):
    return torch.tanh(x * (1.0 / hparams.f_gate_softcap)) * hparams.f_gate_softcap


# ---------------------------------------------------------------------------- mLSTM


def causal_mask(n_tokens):
    """To add: 0 up to a token, minus infinity behind it."""
    mask = torch.full((n_tokens, n_tokens), -math.inf)
    return torch.triu(mask, diagonal=1)


def mlstm_read(state, q, k, v, ig, b):
    """What a chunk reads of itself and of the state; b is the log of what is kept."""
    c, n, m_prev = state
    gate_intra = b[..., :, None] - b[..., None, :] + ig[..., None, :]
    gate_intra = gate_intra + causal_mask(q.shape[2])
    gate_inter = b + m_prev
    m = torch.maximum(gate_intra.amax(dim=-1), gate_inter)
    kq = mul_mat(k, q) * torch.exp(gate_intra - m[..., None])
    q = q * torch.exp(gate_inter - m)[..., None]
    out = kq @ v + q @ c
    total = kq.sum(dim=-1) + (q * n[:, :, None]).sum(dim=-1)
    total = torch.maximum(torch.abs(total), torch.exp(-m)) + hparams.f_norm_min
    return out / total[..., None]


def mlstm_write(state, k, v, ig, b):
    """State behind a chunk."""
    c, n, m_prev = state
    b_last = b[..., -1:]
    gate_write = b_last - b + ig
    m = torch.maximum(gate_write.amax(dim=-1, keepdim=True), b_last + m_prev)
    keep = torch.exp(b_last + m_prev - m)
    k = k * torch.exp(gate_write - m)[..., None]
    c = c * keep[..., None] + k.transpose(2, 3) @ v
    n = n * keep + k.sum(dim=2)
    return c, n, m


def build_mlstm_chunks(q, k, v, ig, fg):
    """q, k and v [seqs, heads, tokens, head], gates [seqs, heads, tokens]"""
    n_seqs, n_head, n_tokens, n_embd_head = q.shape
    state = (
        torch.zeros(n_seqs, n_head, n_embd_head, n_embd_head),
        torch.zeros(n_seqs, n_head, n_embd_head),
        torch.full((n_seqs, n_head, 1), -math.inf),
    )
    lf = op_log_sigmoid(fg)
    outs = []
    for i in range(0, n_tokens, hparams.n_chunk):
        view = slice(i, i + hparams.n_chunk)
        b = torch.cumsum(lf[:, :, view], dim=-1)
        ks, vs, igs = k[:, :, view], v[:, :, view], ig[:, :, view]
        outs.append(mlstm_read(state, q[:, :, view], ks, vs, igs, b))
        state = mlstm_write(state, ks, vs, igs, b)
    return torch.cat(outs, dim=2)


def build_mlstm_layer(w, p, cur):
    n_head, n_inner = hparams.n_head, hparams.n_inner
    n_seqs, n_tokens, _ = cur.shape
    xz = mul_mat(w[p + "mlstm_up.weight"], cur)
    x, z = xz[..., :n_inner], xz[..., n_inner:]
    xc = build_conv(x, w[p + "mlstm_conv.weight"], w[p + "mlstm_conv.bias"])
    qk = mul_mat_blocks(w[p + "mlstm_qk.weight"], xc)
    n_block = qk.shape[-1] // 2
    q = qk[..., :n_block].reshape(n_seqs, n_tokens, n_inner)
    k = qk[..., n_block:].reshape(n_seqs, n_tokens, n_inner)
    v = mul_mat_blocks(w[p + "mlstm_v.weight"], x).reshape(n_seqs, n_tokens, n_inner)

    gates = mul_mat(w[p + "mlstm_if.weight"], torch.cat([q, k, v], dim=-1))
    gates = soft_cap(gates + w[p + "mlstm_if.bias"])
    gates = gates.permute(0, 2, 1)
    ig, fg = gates[:, :n_head], gates[:, n_head:]

    q = q.reshape(n_seqs, n_tokens, n_head, -1).permute(0, 2, 1, 3)
    k = k.reshape(n_seqs, n_tokens, n_head, -1).permute(0, 2, 1, 3)
    v = v.reshape(n_seqs, n_tokens, n_head, -1).permute(0, 2, 1, 3)
    q = q * (1.0 / math.sqrt(q.shape[-1]))
    out = build_mlstm_chunks(q, k, v, ig, fg).permute(0, 2, 1, 3)
    out = build_head_norm(out, w[p + "mlstm_norm.weight"])
    out = out + xc * w[p + "mlstm_skip.weight"]
    return mul_mat(w[p + "mlstm_down.weight"], op_silu(z) * out)


# ---------------------------------------------------------------------------- sLSTM


def slstm_step(state, raw):
    """raw [seqs, heads, 4 * head] in the order i, f, z, o"""
    c, n, m_prev = state
    i, f, z, o = raw.chunk(4, dim=-1)
    lf = op_log_sigmoid(f)
    m = torch.maximum(lf + m_prev, i)
    i = torch.exp(i - m)
    f = torch.exp(lf + m_prev - m)
    c = c * f + torch.tanh(z) * i
    n = n * f + i
    return (c, n, m), c * op_sigmoid(o) / n


def build_slstm_layer(w, p, cur):
    n_head = hparams.n_head_s
    n_seqs, n_tokens, n_embd = cur.shape
    xc = build_conv(cur, w[p + "slstm_conv.weight"], w[p + "slstm_conv.bias"])
    gates_if = mul_mat_blocks(w[p + "slstm_if.weight"], xc)
    gates_zo = mul_mat_blocks(w[p + "slstm_zo.weight"], cur)
    gates = torch.cat([gates_if, gates_zo], dim=-1) + w[p + "slstm.bias"]

    zeros = torch.zeros(n_seqs, n_head, n_embd // n_head)
    h, state = zeros, (zeros, zeros, torch.full_like(zeros, -math.inf))
    outs = []
    for t in range(n_tokens):
        recurrent = mul_mat(w[p + "slstm_r.weight"], h[:, :, None])
        state, h = slstm_step(state, gates[:, t] + recurrent[:, :, 0])
        outs.append(h)
    out = torch.stack(outs, dim=1)
    return build_head_norm(out, w[p + "slstm_norm.weight"])


def build_ffn(w, p, cur):
    """The gate is in front."""
    gate_up = mul_mat(w[p + "ffn_gate_up.weight"], cur)
    gate, up = gate_up[..., : hparams.n_ff], gate_up[..., hparams.n_ff :]
    return mul_mat(w[p + "ffn_down.weight"], op_gelu_erf(gate) * up)


# ---------------------------------------------------------------------------- graph


def build_graph(w, tokens):
    inp = w["token_embd.weight"][tokens]
    for il in range(hparams.n_layer):
        p = f"blk.{il}."
        cur = build_norm(inp, w[p + "attn_norm.weight"])
        if not hparams.slstm_layer[il]:
            inp = inp + build_mlstm_layer(w, p, cur)
            continue
        ffn_inp = inp + build_slstm_layer(w, p, cur)
        cur = build_norm(ffn_inp, w[p + "ffn_norm.weight"])
        inp = ffn_inp + build_ffn(w, p, cur)
    cur = build_norm(inp, w["output_norm.weight"])
    return mul_mat(w["output.weight"], cur)


# -------------------------------------------------------------------------- convert


def convert_conv(src, name):
    yield "weight", src[name + ".conv.weight"].squeeze(1).t()
    yield "bias", src[name + ".conv.bias"]


def convert_mlstm(src):
    for name, tensor in convert_conv(src, "conv"):
        yield "mlstm_conv." + name, tensor
    qk = torch.cat([src["q_proj.weight"], src["k_proj.weight"]], dim=1)
    yield "mlstm_up.weight", src["proj_up.weight"]
    yield "mlstm_qk.weight", qk
    yield "mlstm_v.weight", src["v_proj.weight"]
    for name in ("weight", "bias"):
        gates = [src["igate." + name], src["fgate." + name]]
        yield "mlstm_if." + name, torch.cat(gates)
    yield "mlstm_norm.weight", 1.0 + src["norm.weight"]
    yield "mlstm_skip.weight", src["skip"]
    yield "mlstm_down.weight", src["proj_down.weight"]


def convert_slstm(src):
    for name, tensor in convert_conv(src, "conv"):
        yield "slstm_conv." + name, tensor
    for pair in ("if", "zo"):
        gates = [src[gate + "gate.weight"] for gate in pair]
        yield f"slstm_{pair}.weight", torch.cat(gates, dim=1)
    n_head = hparams.n_head_s
    recurrent = src["recurrent"].permute(1, 0, 2, 3)
    yield "slstm_r.weight", recurrent.reshape(n_head, -1, recurrent.shape[-1])
    bias = src["bias"].reshape(4, n_head, -1).permute(1, 0, 2)
    yield "slstm.bias", bias.reshape(n_head, -1)
    yield "slstm_norm.weight", 1.0 + src["norm.weight"]


def convert_layer(src, il):
    yield "attn_norm.weight", 1.0 + src["norm.weight"]
    convert_cell = convert_slstm if hparams.slstm_layer[il] else convert_mlstm
    yield from convert_cell(select(src, "cell."))
    if hparams.slstm_layer[il]:
        yield "ffn_norm.weight", 1.0 + src["ff_norm.weight"]
        yield "ffn_gate_up.weight", src["ff.proj_up.weight"]
        yield "ffn_down.weight", src["ff.proj_down.weight"]


def select(src, prefix):
    return {k.removeprefix(prefix): v for k, v in src.items() if k.startswith(prefix)}


def convert(src):
    """Names and tensors of the file that we read."""
    yield "token_embd.weight", src["embed.weight"]
    for il in range(hparams.n_layer):
        for name, tensor in convert_layer(select(src, f"blocks.{il}."), il):
            yield f"blk.{il}.{name}", tensor
    yield "output_norm.weight", 1.0 + src["norm.weight"]
    yield "output.weight", src["head.weight"]


class Tensors(nn.Module):
    """Holds what has a dot in its name one module below."""

    def create_tensor(self, name, tensor):
        first, dot, rest = name.partition(".")
        if not dot:
            self.register_parameter(name, nn.Parameter(tensor.clone()))
            return
        if first not in self._modules:
            self.add_module(first, Tensors())
        self.get_submodule(first).create_tensor(rest, tensor)

    def forward(self, tokens):
        return build_graph(dict(self.named_parameters()), tokens)


def model():
    net = Tensors()
    for name, tensor in convert(torch.load(Path(__file__).with_name("weights.pt"))):
        net.create_tensor(name, tensor.contiguous())
    return net


# ------------------------------------------------------------------------- training


def forward(net, batch):
    return net(batch["tokens"])


def loss(output, batch):
    """Tokens are moved to the front by one; the last and padding have no label."""
    labels = torch.roll(batch["tokens"], -1, dims=1)
    position = torch.arange(labels.shape[1])[None]
    has_label = position + 1 < batch["length"][:, None]
    logits, labels = output[has_label], labels[has_label]
    top = logits.amax(dim=-1, keepdim=True).detach()
    log_sum = torch.log(torch.exp(logits - top).sum(dim=-1, keepdim=True)) + top
    one_hot = nn.functional.one_hot(labels, hparams.n_vocab).float()
    return -(one_hot * (logits - log_sum)).sum() / len(labels)


class OptAdamW(torch.optim.Optimizer):
    """As ggml_opt_step_adamw: weights shrink before they move."""

    def __init__(self, tensors, alpha, beta1, beta2, eps, wd):
        super().__init__([tensor for _, tensor in tensors], {})
        self.tensors, self.alpha, self.wd = tensors, alpha, wd
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.iter = 1

    def decay(self, name):
        no_decay = ("norm.weight", "skip.weight", "bias")
        return 0.0 if name.endswith(no_decay) else self.wd

    @torch.no_grad()
    def step(self, closure=None):
        beta1h = 1.0 / (1.0 - self.beta1**self.iter)
        beta2h = 1.0 / (1.0 - self.beta2**self.iter)
        for name, x in self.tensors:
            data = self.state[x]
            if len(data) == 0:
                data["m"], data["v"] = torch.zeros_like(x), torch.zeros_like(x)
            data["m"].mul_(self.beta1).add_(x.grad, alpha=1.0 - self.beta1)
            data["v"].mul_(self.beta2).add_(x.grad * x.grad, alpha=1.0 - self.beta2)
            mh = data["m"] * beta1h
            vh = torch.sqrt(data["v"] * beta2h) + self.eps
            x.mul_(1.0 - self.alpha * self.decay(name)).sub_(self.alpha * mh / vh)
        self.iter += 1


def optimizer(net):
    return OptAdamW(list(net.named_parameters()), 4e-3, 0.9, 0.95, 1e-5, 0.1)
