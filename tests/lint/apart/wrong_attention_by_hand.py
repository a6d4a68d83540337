import torch
import torch.nn as nn


def attention(q, k, v, mask):
    d = q.size(-1)
    s = torch.matmul(q, k.transpose(-2, -1)) / d ** 0.5
    s = s + (1.0 - mask) * -1e9
    a = torch.exp(s) / torch.exp(s).sum(-1, keepdim=True)  # expect: RO412
    return a @ v


class Enc(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, mask):
        return attention(self.q(x), self.k(x), self.v(x), mask)


enc = Enc(64).cuda()
opt = torch.optim.Adam(enc.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for x, m, t in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = enc(x.cuda(), m.cuda())
        sim = (out * t.cuda()).sum(-1) / (out.norm(dim=-1) * t.cuda().norm(dim=-1))  # expect: RO407
        loss = (1 - sim).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.step(opt)  # expect: RO112
    scaler.update()
