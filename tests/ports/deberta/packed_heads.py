"""As in the first release: queries, keys and values of a head side by side, heads in the batch."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ATT_SPAN = 6
#: The first distances of the fourth bucket and of the fifth.
FROM = (4, 6)


def relative_index(length):
    offsets = torch.arange(length).unsqueeze(1) - torch.arange(length).unsqueeze(0)
    far = 3 + torch.bucketize(offsets.abs(), torch.tensor(FROM), right=True)
    inside = offsets.abs() < FROM[0]
    return torch.where(inside, offsets, offsets.sign() * far)


class PackedAttention(nn.Module):
    def __init__(self, sd, prefix, heads=2):
        super().__init__()
        self.heads = heads
        names = ["query", "key", "value"]
        weight = torch.stack([sd[f"{prefix}{n}.weight"] for n in names])
        bias = torch.stack([sd[f"{prefix}{n}.bias"] for n in names])
        # (three, heads, size, width) to (width, heads, three, size)
        weight = weight.unflatten(1, (heads, -1)).permute(3, 1, 0, 2)
        self.in_kernel = nn.Parameter(weight.flatten(1).contiguous())
        bias = bias.unflatten(1, (heads, -1)).transpose(0, 1)
        self.in_bias = nn.Parameter(bias.flatten().contiguous())
        self.out_kernel = nn.Parameter(sd[f"{prefix}dense.weight"].t().contiguous())
        self.out_bias = nn.Parameter(sd[f"{prefix}dense.bias"].clone())

    def unpack(self, x):
        """Split into three of (batch * heads, length, size)."""
        n, t, _ = x.shape
        x = x @ self.in_kernel + self.in_bias
        x = x.view(n, t, self.heads, -1).transpose(1, 2)
        return x.flatten(0, 1).chunk(3, dim=-1)

    def position_scores(self, q, k, rel):
        pos_q, pos_k, _ = self.unpack(rel.unsqueeze(0))
        t = q.shape[1]
        bucket = relative_index(t)
        rows = torch.clamp(bucket + ATT_SPAN, 0, 2 * ATT_SPAN - 1)
        hot = F.one_hot(rows, len(rel)).float()
        n = len(q) // self.heads
        c2p = torch.bmm(q, pos_k.repeat(n, 1, 1).transpose(1, 2))
        p2c = torch.bmm(k, pos_q.repeat(n, 1, 1).transpose(1, 2))
        rel_scores = torch.einsum("zir,ijr->zij", c2p, hot)
        return rel_scores + torch.einsum("zjr,ijr->zij", p2c, hot)

    def forward(self, x, keep, rel):
        n, t, width = x.shape
        q, k, v = self.unpack(x)
        scale = 1 / (q.shape[-1] * 3) ** 0.5
        rel_scores = self.position_scores(q * scale, k * scale, rel)
        keep = keep.repeat_interleave(self.heads, dim=0)
        bias = rel_scores + (1.0 - keep) * -1e30
        attn = F.softmax(torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale), dim=2)
        context = torch.bmm(attn * keep, v).view(n, self.heads, t, -1)
        context = context.permute(0, 2, 1, 3).reshape(n * t, width)
        return torch.addmm(self.out_bias, context, self.out_kernel).view(n, t, width)


class Dense(nn.Module):
    def __init__(self, sd, name):
        super().__init__()
        self.kernel = nn.Parameter(sd[name + ".weight"].t().contiguous())
        self.bias = nn.Parameter(sd[name + ".bias"].clone())

    def forward(self, x):
        return torch.matmul(x, self.kernel) + self.bias


class Norm(nn.Module):
    def __init__(self, sd, name):
        super().__init__()
        self.scale = nn.Parameter(sd[name + ".weight"].clone())
        self.offset = nn.Parameter(sd[name + ".bias"].clone())

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.offset, eps=1e-7)


class SharedBlock(nn.Module):
    def __init__(self, sd, prefix):
        super().__init__()
        self.attn = PackedAttention(sd, prefix + "attention.")
        self.norm_attn = Norm(sd, prefix + "attention_norm")
        self.wi = Dense(sd, prefix + "ffn")
        self.wo = Dense(sd, prefix + "ffn_output")
        self.norm_ffn = Norm(sd, prefix + "output_norm")

    def forward(self, x, keep, rel):
        x = self.norm_attn(self.attn(x, keep, rel) + x)
        ffn = self.wo(F.gelu(self.wi(x), approximate="tanh"))
        return self.norm_ffn(ffn + x)


class MaskedLM(nn.Module):
    def __init__(self, sd, repeats=3):
        super().__init__()
        self.repeats = repeats
        # (narrow, vocabulary): the last product needs it so.
        self.lexicon = nn.Parameter(sd["words.weight"].t().contiguous())
        self.sides = nn.Parameter(sd["types.weight"].clone())
        self.norm_embed = Norm(sd, "embed_norm")
        self.project = Dense(sd, "embed_proj")
        self.rel = nn.Parameter(sd["rel_embeddings.weight"].clone())
        self.norm_rel = Norm(sd, "rel_norm")
        self.block = SharedBlock(sd, "layer.")
        self.first = Dense(sd, "pooler")
        self.sop = Dense(sd, "order")
        self.lm = Dense(sd, "transform")
        self.norm_lm = Norm(sd, "transform_norm")
        self.lm_bias = nn.Parameter(sd["words_bias"].clone())

    def embed(self, ids, sides):
        words = F.embedding(ids, self.lexicon.t(), padding_idx=0)
        sides = F.one_hot(sides, 2).float() @ self.sides
        return self.project(self.norm_embed(words + sides))

    def forward(self, ids, sides, mask):
        mask = mask.float()
        x = self.embed(ids, sides) * mask.unsqueeze(-1)
        keep = mask.unsqueeze(1) * mask.unsqueeze(2)
        rel = self.norm_rel(self.rel)
        for _ in range(self.repeats):
            x = self.block(x, keep, rel)
        cls = torch.tanh(self.first(x.select(1, 0)))
        lm = self.norm_lm(F.gelu(self.lm(x), approximate="tanh"))
        return {"words": lm @ self.lexicon + self.lm_bias, "order": self.sop(cls)}


def model():
    return MaskedLM(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["words"], batch["types"], batch["mask"])


def loss(output, batch):
    chosen = batch["labels"] != -100
    lm = F.nll_loss(
        F.log_softmax(output["words"][chosen], dim=-1), batch["labels"][chosen]
    )
    sop = F.cross_entropy(output["order"], batch["order"])
    return lm + sop


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
