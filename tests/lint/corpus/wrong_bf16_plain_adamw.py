import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, h, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        y = self.ln1(x)
        x = x + self.att(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=50304, d=768, h=12, n=12, ctx=1024):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(ctx, d)
        self.h = nn.ModuleList(Block(d, h) for _ in range(n))
        self.ln = nn.LayerNorm(d)

    def forward(self, ids):
        t = ids.size(1)
        x = self.wte(ids) + self.wpe(torch.arange(t, device=ids.device))
        mask = torch.ones(t, t, device=ids.device).triu(1).bool()
        for block in self.h:
            x = block(x, mask)
        return self.ln(x) @ self.wte.weight.t()


device = "cuda"
dtype = torch.bfloat16
torch.manual_seed(1337)
model = GPT().to(device=device, dtype=dtype)  # expect: RO301
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
data = torch.load("tokens.pt", weights_only=True).to(device)


def get_batch(size=12, ctx=1024):
    at = torch.randint(len(data) - ctx - 1, (size,))
    x = torch.stack([data[i : i + ctx] for i in at])
    y = torch.stack([data[i + 1 : i + 1 + ctx] for i in at])
    return x, y


for step in range(10000):
    x, y = get_batch()
    logits = model(x)
    loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), y.view(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
