"""Channels as planes: pairs (batch, channels, i, j), alignments (batch, channels, row, residue)."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class PlaneNorm(nn.Module):
    """Norm over the channels at each place."""

    def __init__(self, state, name, eps=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(state[name + ".weight"].view(-1, 1, 1).clone())
        self.beta = nn.Parameter(state[name + ".bias"].view(-1, 1, 1).clone())
        self.eps = eps

    def forward(self, x):
        x = x - x.mean(dim=1, keepdim=True)
        std = torch.sqrt(x.pow(2).mean(dim=1, keepdim=True) + self.eps)
        return torch.addcmul(self.beta, x / std, self.gamma)


def conv1x1(weight, bias=None):
    """A product over the channels at each place."""
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], 1, bias=bias is not None)
    state = {"weight": weight[:, :, None, None]}
    if bias is not None:
        state["bias"] = bias
    conv.load_state_dict(state)
    return conv


def joined(state, *names):
    """One product in place of several."""
    weight = torch.cat([state[name + ".weight"] for name in names])
    return conv1x1(weight, torch.cat([state[name + ".bias"] for name in names]))


def table(state, *names):
    """Rows to look up, and what is added to each."""
    rows = torch.cat([state[name + ".weight"].t() for name in names], dim=1)
    shift = torch.cat([state[name + ".bias"] for name in names])
    return nn.Parameter(rows.contiguous()), nn.Parameter(shift.clone())


def swap(x):
    return x.transpose(2, 3)


class Attend(nn.Module):
    """Attention along the last axis, for each place along the third."""

    def __init__(self, state, prefix, bias_name=None, heads=2):
        super().__init__()
        self.heads = heads
        parts = [state[f"{prefix}mha.{n}.weight"] for n in ("to_q", "to_k", "to_v")]
        self.qkv = conv1x1(torch.cat(parts))
        self.sluice = joined(state, prefix + "mha.gate")
        self.merge = joined(state, prefix + "mha.out")
        self.favour = None
        if bias_name is not None:
            self.favour = conv1x1(state[f"{prefix}{bias_name}.weight"])

    def forward(self, x, keep, pairs=None):
        n, c, r, t = x.shape
        q, k, v = self.qkv(x).view(n, 3, self.heads, -1, r, t).unbind(1)
        q, k, v = (y.permute(0, 3, 1, 4, 2) for y in (q, k, v))
        block = torch.zeros(n, 1, 1, 1, t).masked_fill(~keep.view(n, 1, 1, 1, t), -1e9)
        if self.favour is not None:
            block = block + self.favour(pairs).unsqueeze(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=block)
        y = y.permute(0, 2, 4, 1, 3).reshape(n, c, r, t)
        return self.merge(y * self.sluice(x).sigmoid())


class FeedForward(nn.Module):
    def __init__(self, state, prefix):
        super().__init__()
        self.ln = PlaneNorm(state, prefix + "norm")
        self.expand = joined(state, prefix + "linear_1")
        self.squeeze = joined(state, prefix + "linear_2")

    def forward(self, x):
        return x + self.squeeze(self.expand(self.ln(x)).relu())


class AlignmentToPairs(nn.Module):
    def __init__(self, state, prefix):
        super().__init__()
        self.ln = PlaneNorm(state, prefix + "norm")
        self.ab = joined(state, prefix + "linear_1", prefix + "linear_2")
        self.write = joined(state, prefix + "out")

    def forward(self, m, mask):
        a, b = (self.ab(self.ln(m)) * mask).chunk(2, dim=1)
        outer = torch.zeros(())
        for row_a, row_b in zip(a.unbind(2), b.unbind(2)):
            outer = outer + row_a[:, :, None, :, None] * row_b[:, None, :, None, :]
        seen = swap(mask) @ mask
        return self.write(outer.flatten(1, 2)) / torch.where(seen > 0, seen, 1.0)


class Triangle(nn.Module):
    """The third side from the two others, each a plane of matrices."""

    def __init__(self, state, prefix, outward):
        super().__init__()
        self.outward = outward
        self.ln_in = PlaneNorm(state, prefix + "norm_in")
        self.sides = joined(state, prefix + "a_p", prefix + "b_p")
        self.gates = joined(state, prefix + "a_g", prefix + "b_g", prefix + "g")
        self.ln_mid = PlaneNorm(state, prefix + "norm_out")
        self.close = joined(state, prefix + "z")

    def forward(self, z, mask):
        u = self.ln_in(z)
        gate_a, gate_b, gate = self.gates(u).sigmoid().chunk(3, dim=1)
        a, b = self.sides(u).chunk(2, dim=1)
        a, b = a * gate_a * mask, b * gate_b * mask
        third = a @ swap(b) if self.outward else swap(a) @ b
        return z + gate * self.close(self.ln_mid(third))


class Trunk(nn.Module):
    def __init__(self, state, prefix):
        super().__init__()
        self.ln_row = PlaneNorm(state, prefix + "row_attn.norm_m")
        self.ln_favour = PlaneNorm(state, prefix + "row_attn.norm_z")
        self.along_row = Attend(state, prefix + "row_attn.", "pair_bias")
        self.ln_column = PlaneNorm(state, prefix + "col_attn.norm_m")
        self.along_column = Attend(state, prefix + "col_attn.")
        self.ffn_m = FeedForward(state, prefix + "msa_transition.")
        self.to_pairs = AlignmentToPairs(state, prefix + "opm.")
        self.leaving = Triangle(state, prefix + "tri_mul_out.", True)
        self.arriving = Triangle(state, prefix + "tri_mul_in.", False)
        self.ln_start = PlaneNorm(state, prefix + "tri_attn_start.norm")
        self.from_start = Attend(state, prefix + "tri_attn_start.", "bias")
        self.ln_end = PlaneNorm(state, prefix + "tri_attn_end.norm")
        self.from_end = Attend(state, prefix + "tri_attn_end.", "bias")
        self.ffn_z = FeedForward(state, prefix + "pair_transition.")

    def forward(self, m, z, rows, residues):
        mask = rows[:, None, :, None] * residues[:, None, None, :].float()
        both = residues[:, None, :, None] * residues[:, None, None, :].float()
        m = m + self.along_row(self.ln_row(m), residues, self.ln_favour(z))
        m = m + swap(self.along_column(swap(self.ln_column(m)), rows))
        m = self.ffn_m(m)
        z = z + self.to_pairs(m, mask)
        z = self.arriving(self.leaving(z, both), both)
        u = self.ln_start(z)
        z = z + self.from_start(u, residues, u)
        u = swap(self.ln_end(z))
        z = z + swap(self.from_end(u, residues, u))
        return m, self.ffn_z(z)


class FoldingTrunk(nn.Module):
    def __init__(self, state, depth=2, near=3):
        super().__init__()
        self.near = near
        # A letter's row: what it adds to the pairs as i, as j, and to the alignment.
        names = ("tf_z_i", "tf_z_j", "tf_m")
        self.sizes = [len(state[n + ".bias"]) for n in names]
        self.letter, self.letter_shift = table(state, *names)
        self.aligned, self.aligned_shift = table(state, "msa_m")
        self.apart, self.apart_shift = table(state, "relpos")
        self.trunk = nn.ModuleList(Trunk(state, f"blocks.{i}.") for i in range(depth))
        self.read_m = joined(state, "masked_msa")
        self.read_z = joined(state, "distogram")

    def forward(self, target, msa, index, rows, residues):
        letter = self.letter[target] + self.letter_shift
        as_i, as_j, single = letter.split(self.sizes, dim=2)
        m = F.embedding(msa, self.aligned) + self.aligned_shift
        m = m + single[:, None]
        steps = torch.clamp(index[:, :, None] - index[:, None], -self.near, self.near)
        z = as_i[:, :, None] + as_j[:, None] + self.apart_shift
        z = z + self.apart[steps + self.near]
        m, z = m.permute(0, 3, 1, 2), z.permute(0, 3, 1, 2)
        for block in self.trunk:
            m, z = block(m, z, rows, residues)
        far = self.read_z(z)
        return self.read_m(m), far + swap(far)


def model():
    return FoldingTrunk(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    seen = batch["rows"], batch["residues"]
    letters, bins = net(batch["target"], batch["msa"], batch["index"], *seen)
    return {"msa": letters.movedim(1, -1), "distogram": bins.movedim(1, -1)}


def loss(output, batch):
    asked = batch["letters"] >= 0
    logp = output["msa"][asked].log_softmax(-1)
    msa = -logp.gather(1, batch["letters"][asked][:, None]).mean()
    logits = output["distogram"].permute(0, 3, 1, 2)
    each = F.cross_entropy(logits, batch["bins"], reduction="none")
    residues = batch["residues"]
    each = torch.where(residues[:, :, None] & residues[:, None, :], each, 0.0)
    pairs = residues.sum(1) ** 2
    distogram = torch.mean(each.flatten(1).sum(1) / (pairs + 1e-6))
    return 2 * msa + 0.3 * distogram


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
