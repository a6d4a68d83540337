"""A small Evoformer: an alignment and its pairs of residues tell each other what they know."""

import torch
from torch import nn
from torch.nn import functional as F

LETTERS, MSA, PAIR, HEADS, BLOCKS, BINS = 8, 12, 8, 2, 2, 6
FARTHEST = 3


class GatedAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(-3, -2)

    def forward(self, x, there, bias=None):
        """x (batch, rows, length, dim); there (batch, length); bias (batch, heads, length, length)."""
        q, k, v = map(self.split, (self.to_q(x), self.to_k(x), self.to_v(x)))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias[:, None]
        scores = scores.masked_fill(~there[:, None, None, None], -1e9)
        x_out = scores.softmax(dim=-1) @ v
        x_out = x_out.transpose(-3, -2).flatten(-2)
        return self.out(torch.sigmoid(self.gate(x)) * x_out)


class RowAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_m = nn.LayerNorm(MSA)
        self.norm_z = nn.LayerNorm(PAIR)
        self.pair_bias = nn.Linear(PAIR, HEADS, bias=False)
        self.mha = GatedAttention(MSA)

    def forward(self, m, z, residues):
        bias = self.pair_bias(self.norm_z(z)).permute(0, 3, 1, 2)
        return self.mha(self.norm_m(m), residues, bias)


class ColumnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_m = nn.LayerNorm(MSA)
        self.mha = GatedAttention(MSA)

    def forward(self, m, rows):
        m = self.norm_m(m.transpose(1, 2))
        return self.mha(m, rows).transpose(1, 2)


class Transition(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear_1 = nn.Linear(dim, 2 * dim)
        self.linear_2 = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.linear_2(F.relu(self.linear_1(self.norm(x))))


class OuterProductMean(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.norm = nn.LayerNorm(MSA)
        self.linear_1 = nn.Linear(MSA, hidden)
        self.linear_2 = nn.Linear(MSA, hidden)
        self.out = nn.Linear(hidden * hidden, PAIR)

    def forward(self, m, mask):
        m = self.norm(m)
        a = self.linear_1(m) * mask[..., None]
        b = self.linear_2(m) * mask[..., None]
        outer = torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2)
        count = torch.einsum("bsi,bsj->bij", mask, mask)
        return self.out(outer) / count.clamp(min=1)[..., None]


class TriangleMultiplication(nn.Module):
    def __init__(self, outgoing):
        super().__init__()
        self.outgoing = outgoing
        self.norm_in = nn.LayerNorm(PAIR)
        self.a_p = nn.Linear(PAIR, PAIR)
        self.a_g = nn.Linear(PAIR, PAIR)
        self.b_p = nn.Linear(PAIR, PAIR)
        self.b_g = nn.Linear(PAIR, PAIR)
        self.norm_out = nn.LayerNorm(PAIR)
        self.z = nn.Linear(PAIR, PAIR)
        self.g = nn.Linear(PAIR, PAIR)

    def forward(self, z, mask):
        z = self.norm_in(z)
        mask = mask[..., None]
        a = mask * torch.sigmoid(self.a_g(z)) * self.a_p(z)
        b = mask * torch.sigmoid(self.b_g(z)) * self.b_p(z)
        if self.outgoing:
            x = torch.einsum("bikc,bjkc->bijc", a, b)
        else:
            x = torch.einsum("bkic,bkjc->bijc", a, b)
        return torch.sigmoid(self.g(z)) * self.z(self.norm_out(x))


class TriangleAttention(nn.Module):
    def __init__(self, starting):
        super().__init__()
        self.starting = starting
        self.norm = nn.LayerNorm(PAIR)
        self.bias = nn.Linear(PAIR, HEADS, bias=False)
        self.mha = GatedAttention(PAIR)

    def forward(self, z, residues):
        if not self.starting:
            z = z.transpose(1, 2)
        z = self.norm(z)
        z = self.mha(z, residues, self.bias(z).permute(0, 3, 1, 2))
        return z if self.starting else z.transpose(1, 2)


class EvoformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.row_attn = RowAttention()
        self.col_attn = ColumnAttention()
        self.msa_transition = Transition(MSA)
        self.opm = OuterProductMean()
        self.tri_mul_out = TriangleMultiplication(outgoing=True)
        self.tri_mul_in = TriangleMultiplication(outgoing=False)
        self.tri_attn_start = TriangleAttention(starting=True)
        self.tri_attn_end = TriangleAttention(starting=False)
        self.pair_transition = Transition(PAIR)

    def forward(self, m, z, rows, residues):
        mask = (rows[:, :, None] & residues[:, None]).float()
        pair_mask = (residues[:, :, None] & residues[:, None]).float()
        m = m + self.row_attn(m, z, residues)
        m = m + self.col_attn(m, rows)
        m = m + self.msa_transition(m)
        z = z + self.opm(m, mask)
        z = z + self.tri_mul_out(z, pair_mask)
        z = z + self.tri_mul_in(z, pair_mask)
        z = z + self.tri_attn_start(z, residues)
        z = z + self.tri_attn_end(z, residues)
        return m, z + self.pair_transition(z)


class Evoformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tf_z_i = nn.Linear(LETTERS, PAIR)
        self.tf_z_j = nn.Linear(LETTERS, PAIR)
        self.tf_m = nn.Linear(LETTERS, MSA)
        self.msa_m = nn.Linear(LETTERS + 1, MSA)
        self.relpos = nn.Linear(2 * FARTHEST + 1, PAIR)
        self.blocks = nn.ModuleList(EvoformerBlock() for _ in range(BLOCKS))
        self.masked_msa = nn.Linear(MSA, LETTERS)
        self.distogram = nn.Linear(PAIR, BINS)

    def forward(self, target, msa, index, rows, residues):
        target = F.one_hot(target, LETTERS).float()
        msa = F.one_hot(msa, LETTERS + 1).float()
        m = self.msa_m(msa) + self.tf_m(target)[:, None]
        z = self.tf_z_i(target)[:, :, None] + self.tf_z_j(target)[:, None]
        apart = index[:, :, None] - index[:, None]
        apart = apart.clamp(-FARTHEST, FARTHEST) + FARTHEST
        z = z + self.relpos(F.one_hot(apart, 2 * FARTHEST + 1).float())
        for block in self.blocks:
            m, z = block(m, z, rows, residues)
        logits = self.distogram(z)
        logits = logits + logits.transpose(1, 2)
        return {"msa": self.masked_msa(m), "distogram": logits}


def model():
    torch.manual_seed(750)
    net = Evoformer()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "norm" in name and name.endswith("weight"):
                value.uniform_(0.6, 1.5)
            elif name.endswith("bias"):
                value.normal_(0, 0.3)
            elif "to_" in name or "bias" in name:
                value.mul_(2.5)
            else:
                value.mul_(1.6)
    return net


def batches():
    generator = torch.Generator().manual_seed(751)
    residues = torch.arange(9) < torch.tensor([[9], [7]])
    rows = torch.arange(5) < torch.tensor([[4], [5]])
    target = torch.randint(0, 8, (2, 9), generator=generator)
    msa = torch.randint(0, 8, (2, 5, 9), generator=generator)
    msa[:, 0] = target
    hidden = torch.rand(2, 5, 9, generator=generator) < 0.35
    hidden &= rows[:, :, None] & residues[:, None]
    places = torch.randn(2, 9, 3, generator=generator)
    index = torch.arange(9).repeat(2, 1)
    index[0, 5:] += 2
    return [
        {
            "target": target,
            "msa": msa.masked_fill(hidden, 8),
            "index": index,
            "rows": rows,
            "residues": residues,
            "letters": msa.masked_fill(~hidden, -100),
            "bins": (torch.cdist(places, places) * 1.7).long().clamp(max=5),
        }
    ]


def forward(net, batch):
    names = ("target", "msa", "index", "rows", "residues")
    return net(*(batch[name] for name in names))


def loss(output, batch):
    msa = F.cross_entropy(output["msa"].flatten(0, 2), batch["letters"].flatten())
    logs = F.log_softmax(output["distogram"], dim=-1)
    errors = -(logs * F.one_hot(batch["bins"], BINS)).sum(-1)
    residues = batch["residues"]
    mask = (residues[:, :, None] & residues[:, None]).float()
    distogram = (errors * mask).sum((1, 2)) / (1e-6 + mask.sum((1, 2)))
    return 2.0 * msa + 0.3 * distogram.mean()


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
