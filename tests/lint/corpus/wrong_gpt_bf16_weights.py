import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, h, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask=None):
        y = self.ln(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, v, d, n, h):
        super().__init__()
        self.te = nn.Embedding(v, d)
        self.pe = nn.Embedding(512, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(n))
        self.head = nn.Linear(d, v, bias=False)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.te(idx) + self.pe(pos)
        mask = torch.full((idx.shape[1],) * 2, float("-inf"), device=idx.device).triu(1)
        for b in self.blocks:
            x = b(x, mask)
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate(model, batches, device):
    model.eval()
    out = torch.stack([model(x.to(device), y.to(device))[1] for x, y in batches]).mean()
    model.train()
    return out.item()


def main(rank, batches, val):
    model = GPT(1000, 128, 2, 4).to(rank).bfloat16()  # expect: RO301
    model = DDP(model, device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-4, total_steps=1000)
    for it, (x, y) in enumerate(batches):
        _, loss = model(x.to(rank), y.to(rank))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if it % 100 == 0:
            print(it, estimate(model, val, rank))
