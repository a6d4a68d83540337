"""Transformer-XL: relative positions and a memory of the segments before."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, INNER, DEPTH = 13, 12, 3, 20, 2
SEGMENT, MEMORY = 4, 6


class PositionalEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        inv_freq = 1 / (100 ** (torch.arange(0.0, width, 2.0) / width))
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, positions):
        angles = torch.outer(positions, self.inv_freq)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RelAttention(nn.Module):
    """Layout (time, batch, width)."""

    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.qkv_net = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.r_net = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_net = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layer_norm = nn.LayerNorm(WIDTH)

    def shifted(self, x):
        zero = x.new_zeros((x.size(0), 1, *x.size()[2:]))
        padded = torch.cat([zero, x], dim=1)
        padded = padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return padded[1:].view_as(x)

    def forward(self, w, r, r_w_bias, r_r_bias, mask, mems):
        qlen, rlen, bsz = w.size(0), r.size(0), w.size(1)
        heads = self.qkv_net(torch.cat([mems, w], 0))
        q, k, v = torch.chunk(heads, 3, dim=-1)
        q = q[-qlen:]
        q = q.view(qlen, bsz, HEADS, self.size)
        k = k.view(-1, bsz, HEADS, self.size)
        v = v.view(-1, bsz, HEADS, self.size)
        r_k = self.r_net(r).view(rlen, HEADS, self.size)
        ac = torch.einsum("ibnd,jbnd->ijbn", q + r_w_bias, k)
        bd = torch.einsum("ibnd,jnd->ijbn", q + r_r_bias, r_k)
        score = (ac + self.shifted(bd)) * (1 / self.size**0.5)
        score = score.masked_fill(mask[:, :, None, None], -float("inf"))
        prob = F.softmax(score, dim=1)
        vec = torch.einsum("ijbn,jbnd->ibnd", prob, v)
        return self.layer_norm(w + self.o_net(vec.flatten(2)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = RelAttention()
        self.core = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.ReLU(inplace=True), nn.Linear(INNER, WIDTH)
        )
        self.layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x, *args):
        x = self.attn(x, *args)
        return self.layer_norm(x + self.core(x))


class TransformerXL(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.pos_emb = PositionalEmbedding(WIDTH)
        self.r_w_bias = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS) * 0.3)
        self.r_r_bias = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS) * 0.3)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.out_bias = nn.Parameter(torch.randn(VOCABULARY) * 0.2)

    def segment(self, tokens, mems):
        qlen = tokens.size(0)
        mlen = mems[0].size(0)
        klen = mlen + qlen
        x = self.word_emb(tokens) * WIDTH**0.5
        mask = torch.triu(x.new_ones(qlen, klen), diagonal=1 + mlen).bool()
        r = self.pos_emb(torch.arange(klen - 1, -1, -1.0, dtype=x.dtype))
        hidden = [x]
        for layer, mem in zip(self.layers, mems):
            x = layer(x, r, self.r_w_bias, self.r_r_bias, mask, mem)
            hidden.append(x)
        with torch.no_grad():
            mems = [
                torch.cat([m, h], 0)[-MEMORY:].detach() for m, h in zip(mems, hidden)
            ]
        return F.linear(x, self.word_emb.weight, self.out_bias), mems

    def forward(self, tokens):
        mems = [self.r_w_bias.new_zeros(0, tokens.size(1), WIDTH)] * DEPTH
        outputs = []
        for part in tokens.split(SEGMENT):
            logits, mems = self.segment(part, mems)
            outputs.append(logits)
        return torch.cat(outputs).transpose(0, 1)


def model():
    torch.manual_seed(520)
    net = TransformerXL()
    with torch.no_grad():
        net.word_emb.weight.mul_(0.4)
        for layer in net.layers:
            for norm in (layer.layer_norm, layer.attn.layer_norm):
                norm.weight.uniform_(0.6, 1.4)
                norm.bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(521)
    text = torch.randint(0, 13, (2, 13), generator=generator)
    return [{"text": text}]


def forward(net, batch):
    return net(batch["text"][:, :-1].t())


def loss(output, batch):
    target = batch["text"][:, 1:]
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-6)
