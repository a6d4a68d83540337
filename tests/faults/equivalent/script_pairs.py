"""Scripts that compute the same in two ways: nothing in them may be blamed."""

from __future__ import annotations

from .scripts import ScriptCase

PAIRS: list[ScriptCase] = []
#: Scripts without an optimizer of torch are recorded as one step.
WHOLE = {
    "mlp_sgd_nesterov_by_hand",
    "mlp_adam_by_hand",
    "mlp_functional_call_grad",
    "lm_halves_kvcache_eval",
    "conv_batchnorm_folded_eval",
}


def _pair(name: str, text: str) -> None:
    # the one candidate: its lines are those of all
    PAIRS.append(ScriptCase(name=name, text=text, whole=name in WHOLE))


MLP = """
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
"""
LOOP = """
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
"""
_pair(
    "mlp_adamw_foreach_fused",
    MLP
    + """
A|opt = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
B|opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
"""
    + LOOP,
)
_pair(
    "mlp_sgd_nesterov_by_hand",
    MLP
    + """
A|opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
B|class Hand:
B|    def __init__(self, ps): self.ps = list(ps); self.v = [None] * len(self.ps)
B|    def zero_grad(self):
B|        for p in self.ps: p.grad = None
B|    @torch.no_grad()
B|    def step(self):
B|        for n, p in enumerate(self.ps):
B|            g = p.grad + 1e-3 * p
B|            self.v[n] = g if self.v[n] is None else 0.9 * self.v[n] + g
B|            p -= 0.05 * (g + 0.9 * self.v[n])
B|opt = Hand(model.parameters())
"""
    + LOOP,
)
_pair(
    "mlp_adam_by_hand",
    MLP
    + """
A|opt = torch.optim.Adam(model.parameters(), lr=3e-3)
B|class Adam:
B|    def __init__(self, ps, lr): self.ps, self.lr, self.t = list(ps), lr, 0; self.m = [torch.zeros_like(p) for p in self.ps]; self.s = [torch.zeros_like(p) for p in self.ps]
B|    def zero_grad(self):
B|        for p in self.ps: p.grad = None
B|    def step(self):
B|        self.t += 1
B|        with torch.no_grad():
B|            for p, m, s in zip(self.ps, self.m, self.s):
B|                m.copy_(0.9 * m + 0.1 * p.grad)
B|                s.copy_(0.999 * s + 0.001 * p.grad ** 2)
B|                mhat, shat = m / (1 - 0.9 ** self.t), s / (1 - 0.999 ** self.t)
B|                p.sub_(self.lr * mhat / (shat.sqrt() + 1e-8))
B|opt = Adam(model.parameters(), 3e-3)
"""
    + LOOP,
)
_pair(
    "mlp_clip_by_hand",
    MLP
    + """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
A|    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
B|    total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
B|    for p in model.parameters():
B|        p.grad *= min(1.0, 0.1 / (float(total) + 1e-6))
    opt.step()
""",
)
_pair(
    "mlp_scheduler_by_hand",
    MLP
    + """
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
A|sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 4))
for step in range(4):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
B|    for group in opt.param_groups: group["lr"] = 1e-2 * min(1.0, (step + 1) / 4)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
A|    sched.step()
""",
)
_pair(
    "mlp_logsumexp_loss",
    MLP
    + """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
    logits = model(x)
A|    loss = F.cross_entropy(logits, y)
B|    loss = (logits.logsumexp(-1) - logits.gather(-1, y[:, None]).squeeze(-1)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "mlp_label_smoothing_by_hand",
    MLP
    + """
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
    logits = model(x)
A|    loss = F.cross_entropy(logits, y, label_smoothing=0.1)
B|    target = torch.full_like(logits, 0.1 / 5).scatter_(1, y[:, None], 1 - 0.1 + 0.1 / 5)
B|    loss = -(target * logits.log_softmax(1)).sum(1).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "mlp_halves_accumulated",
    MLP
    + """
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
    opt.zero_grad()
A|    F.cross_entropy(model(x), y).backward()
B|    for part, label in zip(x.chunk(2), y.chunk(2)):
B|        (F.cross_entropy(model(part), label) / 2).backward()
    opt.step()
""",
)
_pair(
    "mlp_one_sample_at_a_time",
    MLP
    + """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    g = gen(step)
    x, y = torch.randn(8, 12, generator=g), torch.randint(5, (8,), generator=g)
    opt.zero_grad()
A|    F.cross_entropy(model(x), y).backward()
B|    loss = torch.stack([F.cross_entropy(model(x[i]), y[i]) for i in range(8)]).mean()
B|    loss.backward()
    opt.step()
""",
)
_pair(
    "mlp_functional_call_grad",
    MLP
    + """
A|opt = torch.optim.SGD(model.parameters(), lr=0.1)
B|params = {k: v.detach().clone() for k, v in model.named_parameters()}
B|def objective(params, x, y): return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
A|    opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
B|    grads = torch.func.grad(objective)(params, x, y)
B|    params = {k: v - 0.1 * grads[k] for k, v in params.items()}
""",
)
_pair(
    "mlp_vmap_per_sample_loss",
    MLP
    + """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(8, 12, generator=g), torch.randint(5, (8,), generator=g)
    opt.zero_grad()
A|    loss = torch.vmap(lambda a, b: F.cross_entropy(model(a), b))(x, y).mean()
B|    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step()
""",
)
_pair(
    "mlp_wrapped_and_renamed",
    """
A|class Net(nn.Module):
A|    def __init__(self):
A|        super().__init__(); self.first = nn.Linear(12, 32); self.second = nn.Linear(32, 5)
A|    def forward(self, x): return self.second(F.silu(self.first(x)))
B|class Block(nn.Module):
B|    def __init__(self, a, b): super().__init__(); self.weight = nn.Linear(a, b)
B|    def forward(self, x): return self.weight(x)
B|class Net(nn.Module):
B|    def __init__(self):
B|        super().__init__(); self.layers = nn.ModuleList([Block(12, 32), Block(32, 5)])
B|    def forward(self, x):
B|        x = self.layers[0](x)
B|        return self.layers[1](x * x.sigmoid())
class Wrapper(nn.Module):
    def __init__(self, module): super().__init__(); self.module = module
    def forward(self, *args): return self.module(*args)
A|model = Net()
B|model = Wrapper(Net())
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
    + LOOP,
)
_pair(
    "mlp_loader_workers",
    MLP
    + """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
g = gen(5)
X, Y = torch.randn(64, 12, generator=g), torch.randint(5, (64,), generator=g)
A|loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16)
B|class Rows(torch.utils.data.Dataset):
B|    def __len__(self): return 64
B|    def __getitem__(self, i): return {"x": X[i].numpy(), "y": int(Y[i])}
B|def collate(rows): return torch.stack([torch.from_numpy(r["x"]) for r in rows]), torch.tensor([r["y"] for r in rows])
B|loader = torch.utils.data.DataLoader(Rows(), batch_size=16, collate_fn=collate)
for x, y in loader:
    opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
""",
)
_pair(
    "mlp_threads",
    MLP.replace("32", "256")
    + """
B|torch.set_num_threads(2)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
    + LOOP.replace("16", "128"),
)
_pair(
    "mlp_dropout_same_seed_foreach",
    """
model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 5))
A|opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, foreach=True)
B|opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, foreach=False)
torch.manual_seed(3)
"""
    + LOOP,
)
_pair(
    "mlp_ema_lerp_by_hand",
    MLP
    + """
import copy
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
    loss = F.cross_entropy(model(x), y) + F.mse_loss(model(x), ema(x))
    opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
A|            e.lerp_(p, 0.1)
B|            e.mul_(0.9).add_(p, alpha=0.1)
""",
)
_pair(
    "mlp_fp16_scaler_honest",
    MLP
    + """
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
B|scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
    opt.zero_grad()
A|    loss = F.cross_entropy(model(x), y)
A|    loss.backward()
A|    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
A|    opt.step()
B|    with torch.autocast("cpu", torch.float16):
B|        loss = F.cross_entropy(model(x), y)
B|    scaler.scale(loss).backward()
B|    scaler.unscale_(opt)
B|    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
B|    scaler.step(opt)
B|    scaler.update()
""",
)
# --- CNN
CNN = """
class Net(nn.Module):
    def __init__(self, c=3):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c2, self.b2 = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        x = F.relu(self.b1(self.c1(x)))
        x = F.relu(self.b2(self.c2(x)))
        return self.head(x.mean((2, 3)))
"""
CLOOP = """
for step in range(3):
    g = gen(step)
    x, y = torch.randn(8, CH, 12, 12, generator=g), torch.randint(4, (8,), generator=g)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
"""


def _images(channels=3):
    return CLOOP.replace("CH", str(channels))


_pair(
    "cnn_channels_last",
    CNN
    + """
A|model = Net()
B|model = Net().to(memory_format=torch.channels_last)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""
    + _images().replace(
        "    loss",
        "B|    x = x.contiguous(memory_format=torch.channels_last)\n    loss",
    ),
)
_pair(
    "cnn_mkldnn_off_one_channel",
    CNN
    + """
B|torch.backends.mkldnn.enabled = False
model = Net(1)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
"""
    + _images(1),
)
_pair(
    "cnn_bf16_autocast",
    CNN
    + """
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
    + _images().replace(
        "    loss = F.cross_entropy(model(x), y)",
        "A|    loss = F.cross_entropy(model(x), y)\nB|    with torch.autocast('cpu', torch.bfloat16): loss = F.cross_entropy(model(x), y)",
    ),
)
_pair(
    "cnn_compiled",
    CNN
    + """
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
B|model = torch.compile(model)
"""
    + _images(),
)
_pair(
    "cnn_batchnorm_by_hand",
    CNN
    + """
B|class BN(nn.Module):
B|    def __init__(self, c):
B|        super().__init__()
B|        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))
B|        self.register_buffer("running_mean", torch.zeros(c)); self.register_buffer("running_var", torch.ones(c))
B|    def forward(self, x):
B|        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
B|        n = x.numel() / x.shape[1]
B|        with torch.no_grad():
B|            self.running_mean += 0.1 * (mean - self.running_mean)
B|            self.running_var += 0.1 * (var * n / (n - 1) - self.running_var)
B|        scale = self.weight * (var + 1e-5).rsqrt()
B|        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]
B|nn.BatchNorm2d = BN
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
"""
    + _images(),
)
_pair(
    "cnn_conv_as_unfold_matmul",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1); self.head = nn.Linear(8, 4)
    def forward(self, x):
A|        x = self.conv(x)
B|        cols = F.pad(x, (1, 1)).unfold(2, 3, 1)
B|        x = torch.einsum("bctk,ock->bot", cols, self.conv.weight) + self.conv.bias[:, None]
        return self.head(F.gelu(x).amax(-1))
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(8, 4, 20, generator=g), torch.randint(4, (8,), generator=g)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "cnn_groupnorm_inplace_maxpool",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8 * 4 * 4, 4)
    def forward(self, x):
        x = self.n(self.a(x))
A|        x = F.max_pool2d(F.leaky_relu(x), 2)
A|        x = x + 0.5 * F.relu(F.pad(self.b(x), (1, 1, 1, 1)))
B|        x = F.leaky_relu_(x).unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
B|        x = x + F.pad(F.relu(self.b(x), inplace=True), (1, 1, 1, 1)) / 2
        return self.head(F.adaptive_avg_pool2d(x, 4).flatten(1))
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
"""
    + _images(),
)
# --- transformer
TR = """
class Attention(nn.Module):
    def __init__(self, d=16, h=2):
        super().__init__()
        self.h = h
A|        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
B|        parts = [nn.Linear(d, d) for _ in range(3)]
B|        self.qkv = nn.utils.skip_init(nn.Linear, d, 3 * d)
B|        with torch.no_grad():
B|            self.qkv.weight.copy_(torch.cat([p.weight for p in parts])); self.qkv.bias.copy_(torch.cat([p.bias for p in parts]))
        self.o = nn.Linear(d, d)
    def forward(self, x):
        b, t, d = x.shape
A|        q, k, v = self.q(x), self.k(x), self.v(x)
B|        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (z.view(b, t, self.h, -1).transpose(1, 2) for z in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(a.transpose(1, 2).reshape(b, t, d))
"""
ATT1 = "\n".join(
    line.removeprefix("A|") for line in TR.split("\n") if not line.startswith("B|")
)
BLOCK = """
class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.n1, self.att, self.n2 = nn.LayerNorm(d), Attention(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.mlp(self.n2(x))
"""
LM = """
class LM(nn.Module):
    def __init__(self, v=40, d=16):
        super().__init__()
        self.emb, self.pos = nn.Embedding(v, d), nn.Embedding(32, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, v, bias=False)
    def forward(self, ids):
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks: x = block(x)
        return self.head(self.norm(x))
"""
LMLOOP = """
for step in range(3):
    ids = torch.randint(40, (4, 12), generator=gen(step))
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
"""
OPT = "opt = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
_pair("lm_qkv_fused", TR + BLOCK + LM + "model = LM()\n" + OPT + LMLOOP)
SDPA = "        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
_pair(
    "lm_sdpa_eager",
    (ATT1 + BLOCK + LM + "model = LM()\n" + OPT + LMLOOP).replace(
        SDPA,
        "A|"
        + SDPA
        + """B|        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
B|        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
B|        a = s.softmax(-1) @ v
""",
    ),
)
_pair(
    "lm_softmax_without_maximum",
    (ATT1 + BLOCK + LM + "model = LM()\n" + OPT + LMLOOP).replace(
        SDPA,
        """        s = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        keep = torch.ones(t, t, dtype=torch.bool).tril()
A|        s = s.masked_fill(~keep, torch.finfo(s.dtype).min)
A|        a = F.softmax(s, -1) @ v
B|        e = s.exp() * keep
B|        a = (e / e.sum(-1, keepdim=True)) @ v
""",
    ),
)
_pair(
    "lm_additive_mask_einsum",
    (ATT1 + BLOCK + LM + "model = LM()\n" + OPT + LMLOOP).replace(
        SDPA,
        """        bias = torch.zeros(t, t).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e9)
A|        s = q @ k.mT / 8 ** 0.5 + bias
A|        a = s.softmax(-1) @ v
B|        s = torch.einsum("bhqd,bhkd->bhqk", q / 8 ** 0.25, k / 8 ** 0.25) + bias
B|        s = (s - s.amax(-1, keepdim=True)).exp()
B|        a = torch.einsum("bhqk,bhkd->bhqd", s, v) / s.sum(-1, keepdim=True)
""",
    ),
)
_pair(
    "lm_checkpointed",
    (ATT1 + BLOCK + LM + "model = LM()\n" + OPT + LMLOOP)
    .replace("x = block(x)", "x = RUN")
    .replace(
        "        for block in self.blocks: x = RUN",
        """A|        for block in self.blocks: x = block(x)
B|        for block in self.blocks: x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)""",
    )
    .replace("class LM", "import torch.utils.checkpoint\nclass LM"),
)
_pair(
    "lm_tied_two_ways",
    (
        ATT1
        + BLOCK
        + LM
        + """
model = LM()
A|model.head.weight = model.emb.weight
B|del model.head
B|model.head = lambda x: x @ model.emb.weight.T
"""
        + OPT
        + LMLOOP
    ),
)
_pair(
    "lm_layernorm_fp32_by_hand",
    (
        ATT1
        + BLOCK
        + LM
        + """
B|class LN(nn.Module):
B|    def __init__(self, d): super().__init__(); self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
B|    def forward(self, x):
B|        y = x.float()
B|        y = y - y.mean(-1, keepdim=True)
B|        y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
B|        return (y * self.weight + self.bias).to(x.dtype)
B|nn.LayerNorm = LN
model = LM()
"""
        + OPT
        + LMLOOP
    ),
)
_pair(
    "lm_bf16_autocast",
    (ATT1 + BLOCK + LM + "model = LM()\n" + OPT + LMLOOP).replace(
        "    logits = model(ids[:, :-1])\n",
        "A|    logits = model(ids[:, :-1])\nB|    with torch.autocast('cpu', torch.bfloat16): logits = model(ids[:, :-1])\n",
    ),
)
_pair(
    "lm_compiled_dynamic",
    (
        ATT1
        + BLOCK
        + LM
        + "model = LM()\n"
        + OPT
        + "B|model = torch.compile(model, dynamic=True)\n"
        + LMLOOP.replace("(4, 12)", "(4, 10 + 2 * step)")
    ),
)
_pair(
    "lm_sequence_mean_of_sums",
    (ATT1 + BLOCK + LM + "model = LM()\n" + OPT + LMLOOP)
    .replace("    loss = F.cross", "A|    loss = F.cross")
    .replace(
        "    opt.zero_grad()",
        """B|    lp = logits.log_softmax(-1).gather(2, ids[:, 1:, None])
B|    loss = -(lp.sum(1).sum(0) / lp.numel()).sum()
    opt.zero_grad()""",
    ),
)
_pair(
    "lm_onehot_embedding",
    (ATT1 + BLOCK + LM + "model = LM()\n" + OPT + LMLOOP)
    .replace("        x = self.emb(ids) + ", "A|        x = self.emb(ids) + ")
    .replace(
        "        for block in",
        """B|        x = F.one_hot(ids, 40).float() @ self.emb.weight
B|        x = x + self.pos.weight[: ids.shape[1]]
        for block in""",
    ),
)
_pair(
    "encoder_padded_unpadded",
    """
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
emb, head = nn.Embedding(30, 16, padding_idx=0), nn.Linear(16, 3)
model = nn.ModuleList([emb, layer, head])
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    g = gen(step)
    ids, y = torch.randint(1, 30, (4, 8), generator=g), torch.randint(3, (4,), generator=g)
B|    ids = F.pad(ids, (0, 3))
B|    pad = ids == 0
A|    h = layer(emb(ids)).mean(1)
B|    h = layer(emb(ids), src_key_padding_mask=pad)
B|    h = (h * ~pad[..., None]).sum(1) / (~pad).sum(1, keepdim=True)
    loss = F.cross_entropy(head(h), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "encoder_mha_by_hand",
    """
class MHA(nn.Module):
    def __init__(self):
        super().__init__()
        self.att = nn.MultiheadAttention(16, 4, batch_first=True)
    def forward(self, x):
A|        return self.att(x, x, x, need_weights=False)[0]
B|        q, k, v = F.linear(x, self.att.in_proj_weight, self.att.in_proj_bias).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
B|        a = (q @ k.mT * 0.5).softmax(-1) @ v
B|        return self.att.out_proj(a.transpose(1, 2).flatten(2))
model = nn.Sequential(nn.Linear(6, 16), MHA(), nn.LayerNorm(16), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(4, 7, 6, generator=gen(step))
    loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "vit_patch_conv_unfold",
    """
class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 4)
    def forward(self, x):
A|        x = self.patch(x).flatten(2).transpose(1, 2)
B|        b, c, h, w = x.shape
B|        x = x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 16)
B|        x = F.linear(x, self.patch.weight.flatten(1), self.patch.bias)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        return self.head(self.block(x)[:, 0])
model = ViT()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
    + _images(),
)
# --- recurrent
_pair(
    "gru_packed_padded",
    """
gru, emb, head = nn.GRU(8, 12, batch_first=True), nn.Embedding(20, 8), nn.Linear(12, 3)
model = nn.ModuleList([gru, emb, head])
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
lengths = torch.tensor([9, 7, 4, 2])
for step in range(2):
    g = gen(step)
    ids, y = torch.randint(20, (4, 9), generator=g), torch.randint(3, (4,), generator=g)
A|    out, _ = gru(emb(ids))
A|    last = out[torch.arange(4), lengths - 1]
B|    packed = nn.utils.rnn.pack_padded_sequence(emb(ids), lengths, batch_first=True)
B|    _, last = gru(packed)
B|    last = last[0]
    loss = F.cross_entropy(head(last), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "lstm_cell_loop",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.rnn = nn.LSTM(6, 10, batch_first=True); self.head = nn.Linear(10, 2)
    def forward(self, x):
A|        return self.head(self.rnn(x)[0][:, -1])
B|        h = c = x.new_zeros(len(x), 10)
B|        r = self.rnn
B|        for t in range(x.shape[1]):
B|            i, f, g, o = (F.linear(x[:, t], r.weight_ih_l0, r.bias_ih_l0) + F.linear(h, r.weight_hh_l0, r.bias_hh_l0)).chunk(4, 1)
B|            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
B|            h = o.sigmoid() * c.tanh()
B|        return self.head(h)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    g = gen(step)
    x, y = torch.randn(4, 6, 6, generator=g), torch.randint(2, (4,), generator=g)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
# --- others
_pair(
    "vae_kl_two_ways",
    """
enc, dec = nn.Linear(10, 8), nn.Linear(4, 10)
model = nn.ModuleList([enc, dec])
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(9)
for step in range(3):
    x = torch.rand(16, 10, generator=gen(step))
    mu, logvar = enc(x).chunk(2, 1)
    eps = torch.randn_like(mu)
A|    z = mu + eps * torch.exp(0.5 * logvar)
A|    rec = F.binary_cross_entropy_with_logits(dec(z), x, reduction="sum")
A|    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
B|    z = torch.addcmul(mu, eps, logvar.exp().sqrt())
B|    l = dec(z)
B|    rec = -(x * F.logsigmoid(l) + (1 - x) * F.logsigmoid(-l)).sum()
B|    kl = torch.distributions.kl_divergence(torch.distributions.Normal(mu, (logvar / 2).exp()), torch.distributions.Normal(0.0, 1.0)).sum()
    loss = (rec + kl) / 16
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "gnn_scatter_dense_adjacency",
    """
class GNN(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.b = nn.Linear(5, 16), nn.Linear(16, 3)
    def forward(self, x, e):
        for n, layer in enumerate((self.a, self.b)):
            h = layer(x)
A|            agg = torch.zeros_like(h).index_add_(0, e[1], h[e[0]])
A|            deg = torch.zeros(len(x)).index_add_(0, e[1], torch.ones(e.shape[1])).clamp(min=1)
A|            x = agg / deg[:, None]
B|            adj = torch.zeros(len(x), len(x)).index_put_((e[1], e[0]), torch.ones(e.shape[1]), accumulate=True)
B|            x = (adj / adj.sum(1, keepdim=True).clamp(min=1)) @ h
            if n == 0: x = F.relu(x)
        return x
model = GNN()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(2):
    g = gen(step)
    x, e, y = torch.randn(20, 5, generator=g), torch.randint(20, (2, 60), generator=g), torch.randint(3, (20,), generator=g)
    loss = F.cross_entropy(model(x, e), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "recommender_embeddingbag",
    """
A|bag = nn.EmbeddingBag(50, 8, mode="mean")
B|bag = nn.Embedding(50, 8)
head = nn.Linear(8, 1)
model = nn.ModuleList([bag, head])
opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
for step in range(3):
    g = gen(step)
    ids, y = torch.randint(50, (16, 6), generator=g), torch.rand(16, generator=g)
A|    z = head(bag(ids)).squeeze(1)
A|    loss = F.binary_cross_entropy_with_logits(z, y)
B|    z = head(bag(ids).mean(1)).squeeze(1)
B|    loss = (F.softplus(z) - z * y).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "clip_contrastive_symmetric",
    """
a, b = nn.Linear(10, 8), nn.Linear(6, 8)
scale = nn.Parameter(torch.tensor(2.0))
model = nn.ModuleList([a, b])
opt = torch.optim.AdamW([*model.parameters(), scale], lr=1e-2)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(8, 10, generator=g), torch.randn(8, 6, generator=g)
A|    u, v = F.normalize(a(x), dim=-1), F.normalize(b(y), dim=-1)
A|    s = scale.exp() * u @ v.T
A|    t = torch.arange(8)
A|    loss = (F.cross_entropy(s, t) + F.cross_entropy(s.T, t)) / 2
B|    u, v = a(x), b(y)
B|    s = F.cosine_similarity(u[:, None], v[None], dim=-1) * scale.exp()
B|    loss = -(s.log_softmax(0).diagonal().mean() + s.log_softmax(1).diagonal().mean()) * 0.5
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "moe_top1_loop_vs_batched",
    """
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4); self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        p = self.gate(x).softmax(-1)
        w, i = p.max(-1)
A|        out = torch.zeros_like(x)
A|        for n, expert in enumerate(self.experts):
A|            rows = (i == n).nonzero().squeeze(1)
A|            out = out.index_add(0, rows, expert(x[rows]) * w[rows, None])
A|        return out
B|        W = torch.stack([e.weight for e in self.experts]); bias = torch.stack([e.bias for e in self.experts])
B|        return (torch.einsum("bi,boi->bo", x, W[i]) + bias[i]) * w[:, None]
model = nn.Sequential(nn.Linear(6, 8), MoE(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x = torch.randn(24, 6, generator=gen(step))
    loss = (model(x)[:, 0] - x.prod(1)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "ode_unrolled_inplace_list",
    """
f = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))
model = f
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(2):
    x = torch.randn(8, 3, generator=gen(step))
A|    y = x
A|    for _ in range(4):
A|        k1 = f(y); k2 = f(y + 0.25 * k1)
A|        y = y + 0.5 * (k1 + k2) / 2
B|    states = [x]
B|    for _ in range(4):
B|        k1 = f(states[-1])
B|        k2 = f(torch.add(states[-1], k1, alpha=0.25))
B|        states.append(states[-1].add(torch.stack([k1, k2]).mean(0), alpha=0.5))
B|    y = states[-1]
    loss = F.huber_loss(y, x.flip(1))
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "rl_policy_gradient_categorical",
    """
pi = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
model = pi
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(3):
    g = gen(step)
    s, act, r = torch.randn(20, 4, generator=g), torch.randint(3, (20,), generator=g), torch.randn(20, generator=g)
    adv = (r - r.mean()) / (r.std() + 1e-8)
A|    d = torch.distributions.Categorical(logits=pi(s))
A|    loss = -(d.log_prob(act) * adv).mean() - 0.01 * d.entropy().mean()
B|    lp = pi(s).log_softmax(-1)
B|    loss = -(lp[torch.arange(20), act] * adv).mean() + 0.01 * (lp.exp() * lp).sum(-1).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "diffusion_time_embedding_sum_order",
    """
class Eps(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Linear(8, 16); self.i, self.o = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
    def forward(self, x, t):
        f = torch.exp(-math.log(1000.0) * torch.arange(4) / 4)
        e = torch.cat([(t[:, None] * f).sin(), (t[:, None] * f).cos()], 1)
        h = F.silu(self.i(x) + self.t(e)[:, :, None, None])
        return self.o(h)
model = Eps()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
betas = torch.linspace(1e-4, 0.02, 50)
A|abar = torch.cumprod(1 - betas, 0)
B|abar = torch.exp(torch.cumsum(torch.log1p(-betas), 0))
for step in range(2):
    g = gen(step)
    x, n, t = torch.randn(4, 1, 8, 8, generator=g), torch.randn(4, 1, 8, 8, generator=g), torch.randint(50, (4,), generator=g)
    a = abar[t][:, None, None, None]
    xt = a.sqrt() * x + (1 - a).sqrt() * n
A|    loss = F.mse_loss(model(xt, t.float()), n)
B|    loss = ((model(xt, t.float()) - n) ** 2).sum((3, 2)).sum((0, 1)) / n.numel()
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "flow_logdet_slogdet",
    """
W = nn.Parameter(torch.linalg.qr(torch.randn(4, 4, generator=gen(7)))[0] + 0.1)
net = nn.Linear(2, 4)
model = net
opt = torch.optim.Adam([*net.parameters(), W], lr=1e-2)
for step in range(3):
    x = torch.randn(32, 4, generator=gen(step))
    z = x @ W
    a, b = z.chunk(2, 1)
    s, t = net(a).tanh().chunk(2, 1)
    z = torch.cat([a, b * s.exp() + t], 1)
A|    loss = 0.5 * z.square().sum(1).mean() - s.sum(1).mean() - torch.slogdet(W)[1]
B|    loss = -(torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1) + 2 * math.log(2 * math.pi) + s.sum(1)).mean() - W.det().abs().log()
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "gan_two_optimizers_detach_two_ways",
    """
G, D = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
og, od = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
for step in range(3):
    g = gen(step)
    z, real = torch.randn(8, 4, generator=g), torch.randn(8, 6, generator=g)
A|    fake = G(z).detach()
B|    with torch.no_grad(): fake = G(z)
A|    d = F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean()
B|    both = D(torch.cat([real, fake]))
B|    d = -F.logsigmoid(both[:8]).mean() - F.logsigmoid(-both[8:]).mean()
    od.zero_grad(); d.backward(); od.step()
    loss = F.softplus(-D(G(z))).mean()
    og.zero_grad(); loss.backward(); og.step()
""",
)
_pair(
    "rmsnorm_rope_swiglu_rewritten",
    """
class Norm(nn.Module):
    def __init__(self, d): super().__init__(); self.weight = nn.Parameter(torch.ones(d))
    def forward(self, x):
A|        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)
B|        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
def rope(x):
    t, d = x.shape[-2:]
    ang = torch.arange(t)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
A|    c, s = torch.cat([ang, ang], -1).cos(), torch.cat([ang, ang], -1).sin()
A|    a, b = x.chunk(2, -1)
A|    return x * c + torch.cat([-b, a], -1) * s
B|    z = torch.complex(x[..., : d // 2].contiguous(), x[..., d // 2 :].contiguous()) * torch.polar(torch.ones_like(ang), ang)
B|    return torch.cat([z.real, z.imag], -1)
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.n, self.n2 = nn.Embedding(30, d), Norm(d), Norm(d)
        self.qkv, self.gate, self.up, self.down = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)
    def forward(self, ids):
        x = self.emb(ids)
        q, k, v = self.qkv(self.n(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        h = self.n2(x)
A|        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
B|        gu = F.linear(h, torch.cat([self.gate.weight, self.up.weight]))
B|        g, u = gu.chunk(2, -1)
B|        x = x + self.down(g * torch.sigmoid(g) * u)
        return x @ self.emb.weight.T
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    ids = torch.randint(30, (2, 10), generator=gen(step))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "lm_halves_kvcache_eval",
    (
        ATT1
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.att, self.head = nn.Embedding(40, 16), Attention(), nn.Linear(16, 40)
    def forward(self, ids): return self.head(self.att(self.emb(ids)))
    def step(self, i, cache):
        a = self.att
        x = self.emb(i)
        q, k, v = (p(x).view(len(i), 1, 2, 8).transpose(1, 2) for p in (a.q, a.k, a.v))
        cache.append((k, v))
        k, v = (torch.cat(z, 2) for z in zip(*cache))
        return self.head(a.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(i), 1, 16)))
model = Net().eval()
ids = torch.randint(40, (2, 8), generator=gen(1))
with torch.no_grad():
A|    logits = model(ids)
B|    cache = []
B|    logits = torch.cat([model.step(ids[:, n : n + 1], cache) for n in range(8)], 1)
    print(logits.sum())
"""
    ),
)
_pair(
    "conv_batchnorm_folded_eval",
    """
conv, bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
with torch.no_grad():
    bn.running_mean.uniform_(-1, 1, generator=gen(2)); bn.running_var.uniform_(0.5, 2, generator=gen(3)); bn.weight.uniform_(0.5, 1.5, generator=gen(4)); bn.bias.uniform_(-1, 1, generator=gen(5))
head = nn.Linear(8, 4)
model = nn.Sequential(conv, bn, nn.ReLU()).eval()
B|model = nn.Sequential(nn.utils.fuse_conv_bn_eval(conv.eval(), bn.eval()) if hasattr(nn.utils, "fuse_conv_bn_eval") else torch.nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), bn.eval()), nn.ReLU())
with torch.no_grad():
    x = torch.randn(4, 3, 9, 9, generator=gen(1))
    out = head(model(x).mean((2, 3))).softmax(-1)
    print(out.sum())
""",
)

_pair(
    "mlp_adam_subclass",
    MLP
    + """
A|opt = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.01)
B|class Adam(torch.optim.Optimizer):
B|    def __init__(self, params, lr): super().__init__(params, {"lr": lr})
B|    @torch.no_grad()
B|    def step(self):
B|        for group in self.param_groups:
B|            for p in group["params"]:
B|                s = self.state[p]
B|                if not s: s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
B|                s["t"] += 1
B|                g = p.grad + 0.01 * p
B|                s["m"] = 0.9 * s["m"] + 0.1 * g
B|                s["v"] = 0.999 * s["v"] + 0.001 * g.square()
B|                rate = group["lr"] * math.sqrt(1 - 0.999 ** s["t"]) / (1 - 0.9 ** s["t"])
B|                p -= rate * s["m"] / (s["v"].sqrt() + 1e-8 * math.sqrt(1 - 0.999 ** s["t"]))
B|opt = Adam(model.parameters(), 3e-3)
"""
    + LOOP,
)
_pair(
    "cnn_bf16_model_casts_norm",
    CNN.replace("x.mean((2, 3))", "x.float().mean((2, 3))")
    + """
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(2):
    g = gen(step)
    x, y = torch.randn(8, 3, 12, 12, generator=g), torch.randint(4, (8,), generator=g)
A|    logits = model(x)
B|    with torch.autocast("cpu", torch.bfloat16): logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "lm_whole_bf16_beside_fp32",
    ATT1
    + BLOCK
    + LM
    + "model = LM()\nB|model = model.bfloat16()\nopt = torch.optim.SGD(model.parameters(), lr=1e-2)\n"
    + LMLOOP.replace("    loss =", "    logits = logits.float()\n    loss ="),
)
_pair(
    "rnn_scan_direction_flip",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.rnn = nn.GRU(5, 8, batch_first=True, bidirectional=True); self.head = nn.Linear(16, 2)
    def forward(self, x):
A|        out, h = self.rnn(x)
A|        return self.head(torch.cat([out[:, -1, :8], out[:, 0, 8:]], 1))
B|        out, h = self.rnn(x)
B|        return self.head(torch.cat([h[0], h[1]], 1))
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(2):
    g = gen(step)
    x, y = torch.randn(4, 6, 5, generator=g), torch.randint(2, (4,), generator=g)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
_pair(
    "cosine_schedule_library_by_hand",
    MLP
    + """
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
A|sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
for step in range(3):
    g = gen(step)
    x, y = torch.randn(16, 12, generator=g), torch.randint(5, (16,), generator=g)
    opt.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), y).backward()
    opt.step()
A|    sched.step()
B|    opt.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * (step + 1) / 10))
""",
)
_pair(
    "two_losses_one_or_two_backwards",
    """
body, a, b = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
model = nn.ModuleList([body, a, b])
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(2):
    g = gen(step)
    x, y, z = torch.randn(12, 8, generator=g), torch.randint(3, (12,), generator=g), torch.randn(12, generator=g)
    opt.zero_grad()
    h = F.relu(body(x))
    one, two = F.cross_entropy(a(h), y), F.mse_loss(b(h)[:, 0], z)
A|    (one + 0.5 * two).backward()
B|    one.backward(retain_graph=True)
B|    (0.5 * two).backward()
    opt.step()
""",
)
