import torch
from torch import nn
import torch.nn.functional as F


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.register_buffer("mask", torch.tril(torch.ones(512, 512)).bool())

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        w = q @ k.transpose(-2, -1) / (C // self.h) ** 0.5
        w = w.masked_fill(~self.mask[:T, :T], -1e9)  # expect: RO304
        return (F.softmax(w, -1) @ v).transpose(1, 2).reshape(B, T, C)


def rms(x, eps=1e-8):
    x = x.half()
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)  # expect: RO304 RO306


model = CausalAttention(256, 8).half().cuda()
pos = torch.arange(4096, dtype=torch.float16, device="cuda")  # expect: RO303
opt = torch.optim.Adam(model.parameters(), lr=1e-4)  # expect: RO302
for x, y in loader:
    opt.zero_grad()
    out = rms(model(x.half().cuda()))
    loss = F.mse_loss(out, y.half().cuda())
    loss.backward()
    opt.step()
