"""A small DeepSeek in the style of its modelling file: latent attention, experts, a window."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LAYERS = 23, 16, 2, 3
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 10, 8, 6, 4, 5
EXPERTS, CHOSEN, HIDDEN, WINDOW = 5, 2, 12, 4


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states


class RotaryEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, ROPE, 2).float() / ROPE))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary(x, cos, sin):
    b, h, s, d = x.shape
    x = x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    return x * cos + rotate_half(x) * sin


class Attention(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window
        self.q_a_proj = nn.Linear(WIDTH, Q_RANK, bias=False)
        self.q_a_layernorm = RMSNorm(Q_RANK)
        self.q_b_proj = nn.Linear(Q_RANK, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(WIDTH, KV_RANK + ROPE, bias=False)
        self.kv_a_layernorm = RMSNorm(KV_RANK)
        self.kv_b_proj = nn.Linear(KV_RANK, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, WIDTH, bias=False)
        mscale = 0.1 * math.log(4.0) + 1.0
        self.softmax_scale = (NOPE + ROPE) ** -0.5 * mscale * mscale

    def forward(self, hidden_states, cos, sin, attention_mask):
        bsz, q_len, _ = hidden_states.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(bsz, q_len, HEADS, NOPE + ROPE).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [NOPE, ROPE], dim=-1)
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        compressed, k_pe = torch.split(compressed, [KV_RANK, ROPE], dim=-1)
        k_pe = k_pe.view(bsz, q_len, 1, ROPE).transpose(1, 2)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed))
        kv = kv.view(bsz, q_len, HEADS, NOPE + VALUE).transpose(1, 2)
        k_nope, value = torch.split(kv, [NOPE, VALUE], dim=-1)
        q_pe, k_pe = apply_rotary(q_pe, cos, sin), apply_rotary(k_pe, cos, sin)
        query = torch.cat([q_nope, q_pe], dim=-1)
        key = torch.cat([k_nope, k_pe.expand(-1, HEADS, -1, -1)], dim=-1)
        positions = torch.arange(q_len)
        distance = positions[:, None] - positions[None, :]
        visible = (distance >= 0) & (distance < self.window)
        visible = visible & attention_mask[:, None, None, :].bool()
        weights = query @ key.transpose(2, 3) * self.softmax_scale
        weights = weights.masked_fill(~visible, torch.finfo(weights.dtype).min)
        weights = F.softmax(weights, dim=-1)
        output = (weights @ value).transpose(1, 2).reshape(bsz, q_len, HEADS * VALUE)
        return self.o_proj(output)


class MLP(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, hidden, bias=False)
        self.up_proj = nn.Linear(WIDTH, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.correction = nn.Parameter(torch.zeros(EXPERTS), requires_grad=False)
        self.experts = nn.ModuleList(MLP(HIDDEN) for _ in range(EXPERTS))
        self.shared_experts = MLP(HIDDEN)

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, WIDTH)
        scores = self.gate(x).sigmoid()
        chosen = torch.topk(scores + self.correction, CHOSEN, dim=-1)[1]
        weight = scores.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * 1.5
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, nth = torch.where(chosen == i)
            y = y.index_add(0, row, expert(x[row]) * weight[row, nth, None])
        return y.view_as(hidden_states) + self.shared_experts(hidden_states)


class DecoderLayer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.self_attn = Attention(WINDOW if index == 1 else 10**6)
        self.mlp = MLP(20) if index == 0 else MoE()
        self.input_layernorm = RMSNorm(WIDTH)
        self.post_attention_layernorm = RMSNorm(WIDTH)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class ForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer(i) for i in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.rotary_emb = RotaryEmbedding()

    def forward(self, input_ids, attention_mask, labels):
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x, cos, sin, attention_mask)
        logits = self.lm_head(self.norm(x))
        shift_logits = logits[:, :-1].reshape(-1, VOCAB)
        shift_labels = labels[:, 1:].reshape(-1)
        return F.cross_entropy(shift_logits, shift_labels, ignore_index=-100)


def model():
    torch.manual_seed(610)
    net = ForCausalLM()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "norm" in name:
                weight.uniform_(0.6, 1.4)
            elif "correction" in name:
                weight.uniform_(-0.05, 0.05)
            elif weight.dim() == 2 and "embed" not in name:
                weight.normal_(0, 1.5 / weight.shape[1] ** 0.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(611)
    ids = torch.randint(1, 23, (3, 11), generator=generator)
    mask = (torch.arange(11) < torch.tensor([[11], [7], [9]])).long()
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return [{"input_ids": ids, "attention_mask": mask, "labels": labels}]


def forward(net, batch):
    return net(batch["input_ids"], batch["attention_mask"], batch["labels"])


def loss(output, batch):
    return output


def optimizer(net):
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
