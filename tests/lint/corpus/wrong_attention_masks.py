import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        att = (q @ k.transpose(-1, -2)).half() / math.sqrt(d // self.heads)
        att = att.masked_fill(mask == 0, -1e9)  # expect: RO304
        att = F.softmax(att, dim=-1)
        return self.out((att @ v).transpose(1, 2).reshape(b, t, d))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(512, dim)
        self.layers = nn.ModuleList(Attention(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, mask):
        pos = torch.arange(ids.size(1), device=ids.device)
        h = self.tok(ids) + self.pos(pos)
        for layer in self.layers:
            h = h + layer(h, mask)
        return self.head(h)


def train(loader, steps):
    model = Encoder(30000, 512, 8, 4).cuda().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # expect: RO302
    model.train()
    done = 0
    for ids, mask, labels in loader:
        logits = model(ids.cuda(), mask.cuda())
        loss = F.cross_entropy(logits.float().view(-1, 30000), labels.cuda().view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        if done % 100 == 0:
            print(done, loss.item())
        if done == steps:
            break


def normalize(x):
    x = x.to(torch.float16)
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)  # expect: RO304
