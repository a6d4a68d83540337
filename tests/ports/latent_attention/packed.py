"""All sequences behind each other without padding; norms fused with the residual sum."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

N_HEADS, NOPE, ROPE, V_DIM, KV_RANK, Q_RANK = 2, 6, 4, 5, 8, 10
NORM_EPS = 1e-6


def add_rms_norm(x, residual, weight):
    """Return the normed sum, and the sum itself."""
    residual = x + residual
    scale = torch.rsqrt(residual.square().mean(dim=-1, keepdim=True) + NORM_EPS)
    return residual * scale * weight, residual


def rms_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, NORM_EPS)


def turn(x, angle):
    """Turn neighbouring pairs; x (tokens, heads, dim), angle (tokens, dim / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(turned).flatten(-2)


class LatentAttention(nn.Module):
    def __init__(self, sd, prefix, window):
        super().__init__()
        self.window = window
        down = [
            sd[prefix + "q_a_proj.weight"],
            sd[prefix + "kv_a_proj_with_mqa.weight"],
        ]
        self.wdown = nn.Parameter(torch.cat(down))
        self.q_norm = nn.Parameter(sd[prefix + "q_a_layernorm.weight"])
        self.kv_norm = nn.Parameter(sd[prefix + "kv_a_layernorm.weight"])
        self.wq = nn.Parameter(sd[prefix + "q_b_proj.weight"])
        up = sd[prefix + "kv_b_proj.weight"].view(N_HEADS, NOPE + V_DIM, KV_RANK)
        self.wk = nn.Parameter(up[:, :NOPE].flatten(0, 1))
        self.wv = nn.Parameter(up[:, NOPE:].flatten(0, 1))
        self.wo = nn.Parameter(sd[prefix + "o_proj.weight"])
        stretch = 0.1 * math.log(4) + 1
        self.scale = stretch**2 * (NOPE + ROPE) ** -0.5

    def forward(self, x, angle, sequence, place):
        total = x.shape[0]
        down = F.linear(x, self.wdown)
        q_latent, latent, k_rope = down.split([Q_RANK, KV_RANK, ROPE], dim=1)
        q = F.linear(rms_norm(q_latent, self.q_norm), self.wq)
        q_nope, q_rope = q.view(total, N_HEADS, -1).split([NOPE, ROPE], dim=2)
        latent = rms_norm(latent, self.kv_norm)
        k = F.linear(latent, self.wk).view(total, N_HEADS, NOPE)
        v = F.linear(latent, self.wv).view(total, N_HEADS, V_DIM)
        q_rope = turn(q_rope, angle)
        k_rope = turn(k_rope[:, None], angle).expand(-1, N_HEADS, -1)
        q = torch.cat([q_nope, q_rope], dim=2).transpose(0, 1)
        k = torch.cat([k, k_rope], dim=2).transpose(0, 1)
        back = place[:, None] - place[None, :]
        seen = (sequence[:, None] == sequence[None, :]) & (back >= 0)
        if self.window:
            seen = seen & (back < self.window)
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(0, 1), attn_mask=seen, scale=self.scale
        )
        return F.linear(out.transpose(0, 1).flatten(1), self.wo)


class SwiGLU(nn.Module):
    def __init__(self, sd, prefix):
        super().__init__()
        both = [sd[prefix + "gate_proj.weight"], sd[prefix + "up_proj.weight"]]
        self.w13 = nn.Parameter(torch.cat(both))
        self.w2 = nn.Parameter(sd[prefix + "down_proj.weight"])

    def forward(self, x):
        gate, up = F.linear(x, self.w13).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w2)


class SparseMLP(nn.Module):
    """Every expert on its tokens, all expert weights in two tensors."""

    def __init__(self, sd, prefix):
        super().__init__()
        self.router = nn.Parameter(sd[prefix + "gate.weight"])
        self.register_buffer("balance", sd[prefix + "correction"])
        experts = [SwiGLU(sd, f"{prefix}experts.{i}.") for i in range(5)]
        self.w13 = nn.Parameter(torch.stack([expert.w13.data for expert in experts]))
        self.w2 = nn.Parameter(torch.stack([expert.w2.data for expert in experts]))
        self.shared = SwiGLU(sd, prefix + "shared_experts.")

    def forward(self, x):
        scores = torch.sigmoid(F.linear(x, self.router))
        _, index = (scores + self.balance).topk(2)
        gates = scores.gather(1, index)
        gates = 1.5 * gates / gates.sum(dim=1, keepdim=True)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        tokens = order // 2
        counts = torch.bincount(flat, minlength=5).tolist()
        results = []
        for expert, rows in enumerate(x[tokens].split(counts)):
            gate, up = F.linear(rows, self.w13[expert]).chunk(2, dim=-1)
            results.append(F.linear(F.silu(gate) * up, self.w2[expert]))
        weighted = torch.cat(results) * gates.flatten()[order, None]
        routed = torch.zeros_like(x).index_add(0, tokens, weighted)
        return routed + self.shared(x)


class Block(nn.Module):
    def __init__(self, sd, index):
        super().__init__()
        prefix = f"layers.{index}."
        self.norm1 = nn.Parameter(sd[prefix + "input_layernorm.weight"])
        self.norm2 = nn.Parameter(sd[prefix + "post_attention_layernorm.weight"])
        window = 4 if index == 1 else None
        self.attention = LatentAttention(sd, prefix + "self_attn.", window)
        self.ffn = (
            SwiGLU(sd, prefix + "mlp.")
            if index == 0
            else SparseMLP(sd, prefix + "mlp.")
        )

    def forward(self, x, residual, angle, sequence, place):
        x, residual = add_rms_norm(x, residual, self.norm1)
        x = self.attention(x, angle, sequence, place)
        x, residual = add_rms_norm(x, residual, self.norm2)
        return self.ffn(x), residual


class Decoder(nn.Module):
    def __init__(self, sd):
        super().__init__()
        self.table = nn.Parameter(sd["embed_tokens.weight"])
        self.blocks = nn.ModuleList(Block(sd, i) for i in range(3))
        self.norm = nn.Parameter(sd["norm.weight"])
        self.head = nn.Parameter(sd["lm_head.weight"])
        exponents = torch.arange(0, ROPE, 2) / ROPE
        self.register_buffer("frequency", 10000.0**-exponents, persistent=False)

    def forward(self, tokens, targets, lengths):
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        starts = lengths.cumsum(0) - lengths
        place = torch.arange(len(tokens)) - starts[sequence]
        angle = place[:, None] * self.frequency
        residual = self.table[tokens]
        x = torch.zeros_like(residual)
        for block in self.blocks:
            x, residual = block(x, residual, angle, sequence, place)
        x, _ = add_rms_norm(x, residual, self.norm)
        logits = F.linear(x, self.head)
        inner = sequence[1:] == sequence[:-1]
        kept = inner & (targets[1:] != -100)
        log_probs = logits[:-1][kept].log_softmax(dim=-1)
        picked = log_probs.gather(1, targets[1:][kept][:, None])
        return -picked.mean()


def model():
    return Decoder(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    real = batch["attention_mask"].bool()
    return net(batch["input_ids"][real], batch["labels"][real], real.sum(1))


def loss(output, batch):
    return output


def optimizer(net):
    plain = [p for name, p in net.named_parameters() if "norm" in name]
    decayed = [p for name, p in net.named_parameters() if "norm" not in name]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
