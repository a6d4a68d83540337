"""All layers in one tensor, as in a file for inference: norms hold their one, pairs are neighbours."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

N_LAYER, N_EMBD, N_FF = 4, 40, 56
N_HEAD, N_HEAD_KV, N_ROT = 4, 2, 8
N_SWA = 4
RMS_EPS = 1e-6
F_SOFTCAP_ATTN, F_SOFTCAP_OUT = 3.0, 5.0


def rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], eps=RMS_EPS) * weight


def rope_table(n_tokens, freq_base):
    """Cosines and sines (tokens, 1, pairs)."""
    pair = torch.arange(N_ROT // 2)
    theta = torch.arange(n_tokens).view(-1, 1, 1) * freq_base ** (-2 * pair / N_ROT)
    return torch.cos(theta), torch.sin(theta)


def rope(x, table):
    cos, sin = table
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return pairs.flatten(-2)


def kq_mask(n_tokens, n_swa):
    """Return what is added to the scores: nothing, or minus infinity."""
    row = torch.arange(n_tokens).unsqueeze(1)
    col = torch.arange(n_tokens).unsqueeze(0)
    hidden = (col > row) | (row - col >= n_swa)
    return torch.zeros(n_tokens, n_tokens).masked_fill(hidden, -torch.inf)


class Graph(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.contiguous()))

    def attention(self, il, cur, table, mask):
        n_batch, n_tokens, _ = cur.shape
        qkv = F.linear(cur, self.attn_qkv[il]).unflatten(-1, (-1, N_ROT))
        q_cur = qkv[:, :, :N_HEAD]
        k_cur = qkv[:, :, N_HEAD : N_HEAD + N_HEAD_KV]
        v_cur = qkv[:, :, N_HEAD + N_HEAD_KV :]
        q_cur = rope(rms_norm(q_cur, self.attn_q_norm[il]), table)
        k_cur = rope(rms_norm(k_cur, self.attn_k_norm[il]), table)
        k_cur = k_cur.repeat_interleave(N_HEAD // N_HEAD_KV, dim=2)
        v_cur = v_cur.repeat_interleave(N_HEAD // N_HEAD_KV, dim=2)
        q = q_cur.permute(0, 2, 1, 3).reshape(-1, n_tokens, N_ROT)
        k = k_cur.permute(0, 2, 3, 1).reshape(-1, N_ROT, n_tokens)
        v = v_cur.permute(0, 2, 1, 3).reshape(-1, n_tokens, N_ROT)
        kq = torch.bmm(q, k) / (N_EMBD / N_HEAD) ** 0.5
        kq = F_SOFTCAP_ATTN * torch.tanh(kq / F_SOFTCAP_ATTN)
        kq = F.softmax(kq + mask, dim=-1)
        kqv = torch.bmm(kq, v).view(n_batch, N_HEAD, n_tokens, N_ROT)
        kqv = kqv.permute(0, 2, 1, 3).reshape(n_batch, n_tokens, -1)
        return F.linear(kqv, self.attn_output[il])

    def feed_forward(self, il, cur):
        both = F.linear(cur, self.ffn_gate_up[il])
        gate, up = both[..., :N_FF], both[..., N_FF:]
        return F.linear(F.gelu(gate, approximate="tanh") * up, self.ffn_down[il])

    def forward(self, tokens):
        n_tokens = tokens.shape[1]
        swa = rope_table(n_tokens, 1e2), kq_mask(n_tokens, N_SWA)
        full = rope_table(n_tokens, 1e4), kq_mask(n_tokens, n_tokens)
        inp = F.embedding(tokens, self.token_embd) * N_EMBD**0.5
        for il in range(N_LAYER):
            is_swa = il % 2 == 0
            table, mask = swa if is_swa else full
            cur = rms_norm(inp, self.attn_norm[il])
            cur = self.attention(il, cur, table, mask)
            cur = rms_norm(cur, self.attn_post_norm[il])
            sa_out = cur + inp
            cur = rms_norm(sa_out, self.ffn_norm[il])
            cur = self.feed_forward(il, cur)
            cur = rms_norm(cur, self.ffn_post_norm[il])
            inp = cur + sa_out
        cur = F.linear(rms_norm(inp, self.output_norm), self.token_embd)
        return torch.tanh(cur / F_SOFTCAP_OUT) * F_SOFTCAP_OUT


def permute(rows):
    """Put the halves of each head beside each other."""
    heads = rows.unflatten(0, (-1, 2, N_ROT // 2))
    return heads.transpose(1, 2).flatten(0, 2)


class Converter:
    def __init__(self, weights):
        self.weights = weights

    def layers(self, key):
        """Return one tensor of every layer."""
        return [self.weights[f"layers.{il}.{key}.weight"] for il in range(N_LAYER)]

    def norm(self, key):
        return torch.stack(self.layers(key)) + 1

    def head_norm(self, key):
        return torch.stack([permute(each + 1) for each in self.layers(key)])

    def qkv(self):
        parts = zip(*(self.layers(f"attn.{n}_proj") for n in "qkv"), strict=True)
        return torch.stack(
            [torch.cat([permute(q), permute(k), v]) for q, k, v in parts]
        )

    def gate_up(self):
        parts = zip(
            self.layers("mlp.gate_proj"), self.layers("mlp.up_proj"), strict=True
        )
        return torch.stack([torch.cat([gate, up]) for gate, up in parts])

    def tensors(self):
        return {
            "token_embd": self.weights["embed.weight"],
            "output_norm": self.weights["norm.weight"] + 1,
            "attn_norm": self.norm("pre_attn_norm"),
            "attn_qkv": self.qkv(),
            "attn_q_norm": self.head_norm("attn.q_norm"),
            "attn_k_norm": self.head_norm("attn.k_norm"),
            "attn_output": torch.stack(self.layers("attn.o_proj")),
            "attn_post_norm": self.norm("post_attn_norm"),
            "ffn_norm": self.norm("pre_mlp_norm"),
            "ffn_gate_up": self.gate_up(),
            "ffn_down": torch.stack(self.layers("mlp.down_proj")),
            "ffn_post_norm": self.norm("post_mlp_norm"),
        }


def model():
    weights = torch.load(Path(__file__).with_name("weights.pt"))
    return Graph(Converter(weights).tensors())


def forward(net, batch):
    return net(batch["tokens"][:, :-1])


def loss(output, batch):
    targets = batch["tokens"][:, 1:]
    kept = targets > 0
    logits, targets = output[kept], targets[kept]
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    return (logits.logsumexp(dim=1) - chosen).mean()


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3)
