import torch
from torch import nn
import torch.nn.functional as F

NEG = -1e9


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-5)

    def forward(self, x, pad):
        x = self.norm(x)
        s = torch.einsum("bid,bjd->bij", self.q(x), self.k(x)).float() * x.shape[-1] ** -0.5
        s = s.masked_fill(pad[:, None], NEG)
        return s.softmax(-1).to(x.dtype) @ self.v(x)


def rms(x, eps=1e-6):
    dt = x.dtype
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(dt)


@torch.inference_mode()
def generate(model, ids):
    model = model.half().eval().cuda()
    positions = torch.arange(ids.shape[1], device="cuda")
    return rms(model(ids.cuda(), positions))
