"""Scripts that do one work in portions, in one process or in several: right, and with bugs planted."""

from __future__ import annotations

from .scripts import ScriptCase

SCHEDULES: list[ScriptCase] = []
LAYOUTS: list[ScriptCase] = []


def _schedule(name: str, text: str, **truths: list[str]) -> None:
    SCHEDULES.extend(_case(name, text, 1, truths).variants())


def _layout(name: str, world: int, text: str, **truths: list[str]) -> None:
    LAYOUTS.extend(_case(name, text, world, truths).variants())


def _case(name: str, text: str, world: int, truths: dict[str, list[str]]) -> ScriptCase:
    return ScriptCase(
        name=name,
        text=text,
        world=world,
        whole="backward" not in text,
        truths={bug[-1]: tuple(parts) for bug, parts in truths.items()},
    )


# -- schedules ------------------------------------------------------------------------

NET = """
class Net(nn.Module):
    def __init__(self, v=30, d=16):
        super().__init__()
        self.emb, self.pos = nn.Embedding(v, d), nn.Embedding(24, d)
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.head = nn.Linear(d, v)
    def forward(self, ids, at, keep, cache=None):
        x = self.emb(ids) + self.pos(at)
        h = self.norm(x)
        b, t, d = h.shape
        q, k, v = (p(h).view(b, t, 2, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        if cache is not None:
            cache.append((k, v))
            k, v = (torch.cat(z, 2) for z in zip(*cache))
        s = (q @ k.transpose(-1, -2) / 8 ** 0.5).masked_fill(~keep, float("-inf"))
        a = (s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        return self.head(x + self.o(a))
model = Net()
"""
_schedule(
    "kv_cache_chunked_prefill",
    NET
    + """
ids = torch.randint(30, (2, 10), generator=gen(1))
keep = torch.ones(10, 10, dtype=torch.bool).tril()
with torch.no_grad():
A|    logits = model(ids, torch.arange(10), keep)
B|    cache, out = [], []
B|    for a, b in ((0, 4), (4, 7), (7, 10)):
C|        out.append(model(ids[:, a:b], torch.arange(a, b), keep[a:b, :b], cache))
1|        out.append(model(ids[:, a:b], torch.arange(b - a), keep[a:b, :b], cache))
2|        out.append(model(ids[:, a:b], torch.arange(a, b), torch.ones(b - a, b, dtype=torch.bool), cache))
B|    logits = torch.cat(out, 1)
    print(logits.sum())
""",
    bug1=["self.pos(at)", "torch.arange(b - a)", "pos/embedding"],
    bug2=["masked_fill(~keep", "torch.ones(b - a"],
)
_schedule(
    "kv_cache_decode_greedy",
    NET
    + """
prompt = torch.randint(30, (1, 4), generator=gen(2))
with torch.no_grad():
    ids = prompt
A|    for n in range(4, 9):
A|        t = ids.shape[1]
A|        logits = model(ids, torch.arange(t), torch.ones(t, t, dtype=torch.bool).tril())[:, -1]
A|        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
B|    cache, new, start = [], ids, 0
B|    for n in range(4, 9):
B|        t = new.shape[1]
B|        keep = torch.ones(t, start + t, dtype=torch.bool).tril(start)
B|        logits = model(new, torch.arange(start, start + t), keep, cache)[:, -1]
B|        new = logits.argmax(-1, keepdim=True)
C|        start += t
1|        start += 1
B|        ids = torch.cat([ids, new], 1)
1|        keep = torch.ones(1, 1, dtype=torch.bool)
    print(logits.sum())
""".replace(
        "B|        keep = torch.ones(t, start + t, dtype=torch.bool).tril(start)",
        "B|        keep = torch.ones(t, sum(c[0].shape[2] for c in cache) + t, dtype=torch.bool).tril(sum(c[0].shape[2] for c in cache))",
    ),
    bug1=["start += 1", "self.pos(at)", "torch.arange(start", "pos/embedding"],
)
_schedule(
    "padding_left",
    NET
    + """
rows = [torch.randint(1, 30, (n,), generator=gen(n)) for n in (7, 7, 7)]
with torch.no_grad():
A|    ids = torch.stack(rows)
A|    logits = model(ids, torch.arange(7), torch.ones(7, 7, dtype=torch.bool).tril())
B|    ids = torch.stack([F.pad(r, (3, 0)) for r in rows])
B|    real = ids != 0
C|    at = (real.long().cumsum(1) - 1).clamp(min=0)
1|    at = torch.arange(10)
2|    at = (real.long().cumsum(1) - 1).clamp(min=0)
B|    eye = torch.eye(10, dtype=torch.bool)
C|    keep = (torch.ones(10, 10, dtype=torch.bool).tril() & real[:, None, :]) | eye
1|    keep = (torch.ones(10, 10, dtype=torch.bool).tril() & real[:, None, :]) | eye
2|    keep = torch.ones(3, 10, 10, dtype=torch.bool).tril()
B|    logits = model(ids, at, keep[:, None])[:, 3:]
    print(logits.sum())
""",
    bug1=["self.pos(at)", "at = torch.arange(10)", "pos/embedding"],
    bug2=["masked_fill(~keep", "keep = torch.ones(3"],
)
_schedule(
    "padding_right_loss",
    NET
    + """
lengths = (9, 6)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    rows = [torch.randint(1, 30, (n,), generator=gen(10 * step + n)) for n in lengths]
    opt.zero_grad()
A|    total = 0
A|    for r in rows:
A|        t = len(r) - 1
A|        logits = model(r[None, :-1], torch.arange(t), torch.ones(t, t, dtype=torch.bool).tril())
A|        total = total + F.cross_entropy(logits[0], r[1:], reduction="sum")
A|    loss = total / sum(n - 1 for n in lengths)
B|    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
B|    labels = ids[:, 1:]
C|    labels = labels.masked_fill(labels == 0, -100)
B|    logits = model(ids[:, :-1], torch.arange(8), torch.ones(8, 8, dtype=torch.bool).tril())
C|    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
1|    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
2|    loss = sum(F.cross_entropy(l[: n - 1], y[: n - 1]) for l, y, n in zip(logits, labels, lengths)) / 2
    loss.backward()
    opt.step()
""",
    bug1=["labels = ids", "loss = F.cross_entropy", "cross_entropy", "nll_loss"],
    bug2=["loss = sum("],
)
_schedule(
    "micro_batches",
    """
model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 3))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(2):
    g = gen(step)
    x, y = torch.randn(12, 8, generator=g), torch.randint(3, (12,), generator=g)
    opt.zero_grad()
A|    F.cross_entropy(model(x), y).backward()
B|    for n in range(3):
C|        part, label = x[4 * n : 4 * n + 4], y[4 * n : 4 * n + 4]
1|        part, label = x[4 * n : 4 * n + 4], y[4 * n : 4 * n + 4]
2|        part, label = x[4 * n : 4 * n + 4], y[n : n + 4]
C|        (F.cross_entropy(model(part), label) / 3).backward()
2|        (F.cross_entropy(model(part), label) / 3).backward()
1|        F.cross_entropy(model(part), label).backward()
    opt.step()
""",
    bug1=[
        "F.cross_entropy(model(part), label).backward()",
        "loss",
        "factor of 3",
        "accumul",
    ],
    bug2=["y[n : n + 4]", "input", "data"],
)
_schedule(
    "sliding_windows",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.n, self.head = nn.Conv1d(3, 8, 5), nn.GroupNorm(1, 8), nn.Conv1d(8, 2, 1)
    def forward(self, x):
        h = F.gelu(self.c(x))
        h = h / (1e-3 + h.square().mean(1, keepdim=True)).sqrt()
        return self.head(h)
model = Net()
x = torch.randn(2, 3, 24, generator=gen(4))
with torch.no_grad():
A|    y = model(x)
B|    parts = []
B|    for a in range(0, 20, 5):
C|        parts.append(model(x[..., a : a + 9]))
1|        parts.append(model(x[..., max(a - 1, 0) : max(a - 1, 0) + 9]))
2|        parts.append(model(F.pad(x[..., a : a + 5], (2, 2))))
B|    y = torch.cat(parts, -1)
    print(y.sum())
""",
    bug1=["max(a - 1, 0)", "a wrong slice"],
    bug2=["F.pad(x["],
)
_schedule(
    "streaming_conv_state",
    """
class Causal(nn.Module):
    def __init__(self, i, o): super().__init__(); self.conv = nn.Conv1d(i, o, 3); self.state = None
    def forward(self, x):
A|        x = F.pad(x, (2, 0))
C|        if self.state is None: self.state = x.new_zeros(*x.shape[:2], 2)
2|        if self.state is None: self.state = x.new_zeros(*x.shape[:2], 2)
1|        self.state = x.new_zeros(*x.shape[:2], 2)
B|        x = torch.cat([self.state, x], -1)
C|        self.state = x[..., -2:]
1|        self.state = x[..., -2:]
2|        self.state = x[..., -3:-1]
        return self.conv(x)
model = nn.Sequential(Causal(2, 6), nn.Tanh(), Causal(6, 3))
x = torch.randn(2, 2, 12, generator=gen(4))
with torch.no_grad():
A|    y = model(x)
B|    y = torch.cat([model(part) for part in x.split(4, -1)], -1)
    print(y.sum())
""",
    bug1=["self.state = x.new_zeros(", "torch.cat([self.state"],
    bug2=["x[..., -3:-1]", "torch.cat([self.state"],
)
_schedule(
    "beam_of_one",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.cell, self.head = nn.Embedding(12, 8), nn.GRUCell(8, 10), nn.Linear(10, 12)
    def forward(self, tok, h):
        h = self.cell(self.emb(tok), h)
        return self.head(h).log_softmax(-1), h
model = Net()
with torch.no_grad():
    tok, h, score = torch.tensor([1, 2]), torch.zeros(2, 10), torch.zeros(2)
    for n in range(5):
A|        lp, h = model(tok, h)
A|        best = lp.max(-1)
A|        score, tok = score + best.values, best.indices
B|        lp, h = model(tok, h)
C|        total = score[:, None, None] + lp[:, None]
1|        total = score[:, None, None] + lp[:, None].exp()
2|        total = score[:, None, None] + lp[:, None]
B|        values, flat = total.flatten(1).topk(1)
B|        beam, tok = flat[:, 0] // 12, flat[:, 0] % 12
B|        score = values[:, 0]
C|        h = h.view(2, 1, 10).gather(1, beam[:, None, None].expand(-1, 1, 10))[:, 0]
1|        h = h.view(2, 1, 10).gather(1, beam[:, None, None].expand(-1, 1, 10))[:, 0]
2|        h = h.view(2, 1, 10).flip(0).gather(1, beam[:, None, None].expand(-1, 1, 10))[:, 0]
    print(score)
""",
    bug1=["].exp()"],
    bug2=["flip(0)"],
)
_schedule(
    "packed_documents",
    NET
    + """
docs = [torch.randint(30, (n,), generator=gen(n)) for n in (5, 4, 3)]
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    opt.zero_grad()
A|    total = 0
A|    for d in docs:
A|        t = len(d) - 1
A|        logits = model(d[None, :-1], torch.arange(t), torch.ones(t, t, dtype=torch.bool).tril())
A|        total = total + F.cross_entropy(logits[0], d[1:], reduction="sum")
A|    loss = total / 9
B|    ids, labels = torch.cat([d[:-1] for d in docs])[None], torch.cat([d[1:] for d in docs])
B|    doc = torch.cat([torch.full((len(d) - 1,), n) for n, d in enumerate(docs)])
C|    at = torch.cat([torch.arange(len(d) - 1) for d in docs])
1|    at = torch.arange(len(doc))
2|    at = torch.cat([torch.arange(len(d) - 1) for d in docs])
B|    keep = torch.ones(9, 9, dtype=torch.bool).tril()
C|    keep &= doc[:, None] == doc[None]
1|    keep &= doc[:, None] == doc[None]
B|    loss = F.cross_entropy(model(ids, at, keep)[0], labels)
    loss.backward()
    opt.step()
""",
    bug1=["self.pos(at)", "at = torch.arange(len(doc))", "pos/embedding"],
    bug2=["masked_fill(~keep", "keep = torch.ones(9, 9"],
)

# -- layouts --------------------------------------------------------------------------
INIT = """
R, W = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
B|dist.init_process_group("gloo")
"""
MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(24, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24)
    def forward(self, ids):
        x = self.emb(ids)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norm(x))
model = Net()
"""
LOOP = """
for step in range(2):
    ids = torch.randint(24, (8, 9), generator=gen(step))
PART
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
AFTER
    opt.step()
"""


def _loop(part="", after=""):
    text = LOOP.replace("PART\n", part.lstrip("\n"))
    return text.replace("AFTER\n", after.lstrip("\n"))


_layout(
    "ddp",
    2,
    INIT
    + MODEL
    + """
B|from torch.nn.parallel import DistributedDataParallel as DDP
C|model = DDP(model)
1|ddp = DDP(model)
2|model = DDP(model)
opt = torch.optim.SGD(model.parameters(), lr=0.5)
"""
    + _loop("""
C|    ids = ids.chunk(W)[R]
1|    ids = ids.chunk(W)[R]
2|    ids = ids[:6].chunk(W)[R]
"""),
    bug1=["missing", "all_reduce", "allreduce", "loss.backward()"],
    bug2=["ids = ids[:6]", "a wrong slice"],
)
_layout(
    "ddp_by_hand_four",
    4,
    INIT
    + MODEL
    + "opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
    + _loop(
        """
B|    ids = ids.chunk(W)[R]
""",
        """
B|    for p in model.parameters():
C|        dist.all_reduce(p.grad)
C|        p.grad /= W
1|        dist.all_reduce(p.grad)
2|        dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)
""",
    ),
    bug1=["dist.all_reduce(p.grad)", "all_reduce"],
    bug2=["ReduceOp.MAX", "all_reduce"],
)
_layout(
    "fsdp2",
    2,
    INIT
    + MODEL
    + """
B|from torch.distributed.fsdp import fully_shard
B|from torch.distributed.device_mesh import init_device_mesh
B|mesh = init_device_mesh("cpu", (W,))
B|for m in (model.up, model.down): fully_shard(m, mesh=mesh)
B|fully_shard(model, mesh=mesh)
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
2|model.down.register_full_backward_hook(lambda m, gi, go: tuple(g * W for g in gi))
"""
    + _loop("""
C|    ids = ids.chunk(W)[R]
1|    ids = ids.chunk(W)[0]
2|    ids = ids.chunk(W)[R]
"""),
    bug1=["ids.chunk(W)[0]", "/input", "a wrong slice"],
    bug2=["g * W for g"],
)
_layout(
    "tensor_parallel_dtensor",
    2,
    INIT
    + MODEL
    + """
B|from torch.distributed.device_mesh import init_device_mesh
B|from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel
B|mesh = init_device_mesh("cpu", (W,))
B|parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
1|model.up.weight.data.to_local().copy_(model.up.weight.data.to_local().roll(1, 0))
2|model.down.register_forward_hook(lambda m, i, o: o * W)
opt = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
"""
    + _loop(),
    bug1=["up.weight", "roll(1, 0)"],
    bug2=["o * W"],
)
TPH = (
    INIT
    + """
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        g = g.clone()
C|        dist.all_reduce(g)
2|        dist.all_reduce(g)
        return g
class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, g): return g
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 3)
    def forward(self, x):
        x = torch.tanh(self.inp(x))
A|        x = x + self.down(F.silu(self.up(x)))
B|        h = F.silu(self.up(Enter.apply(x)))
C|        x = x + Leave.apply(F.linear(h, self.down.weight)) + self.down.bias
1|        x = x + Leave.apply(F.linear(h, self.down.weight)) + self.down.bias
2|        x = x + Leave.apply(F.linear(h, self.down.weight, self.down.bias))
        return self.head(x)
model = Net()
B|model.up.weight = nn.Parameter(model.up.weight.data.chunk(W)[R].clone())
B|model.up.bias = nn.Parameter(model.up.bias.data.chunk(W)[R].clone())
B|model.down.weight = nn.Parameter(model.down.weight.data.chunk(W, 1)[R].clone())
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(2):
    g = gen(step)
    x, y = torch.randn(6, 10, generator=g), torch.randint(3, (6,), generator=g)
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
"""
)
_layout(
    "tensor_parallel_by_hand",
    4,
    TPH,
    bug1=[
        "the sum over the ranks",
        "g = g.clone()",
        "def backward(ctx, g):",
        "Enter.apply(x)",
        "all_reduce",
        "return g",
    ],
    bug2=["self.down.weight, self.down.bias)"],
)
SEQ = (
    INIT
    + """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(W)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)
    @staticmethod
    def backward(ctx, g):
        g = g.clone()
C|        dist.all_reduce(g)
1|        dist.all_reduce(g)
        return g.chunk(W, 1)[R]
class Net(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.emb, self.pos = nn.Embedding(20, d), nn.Embedding(16, d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.head = nn.Linear(d, 20)
    def forward(self, ids):
        t = ids.shape[1]
A|        at = torch.arange(t)
B|        at = torch.arange(t) + R * t
        x = self.emb(ids) + self.pos(at)
        q, k, v = self.q(x), self.k(x), self.v(x)
B|        k, v = Gather.apply(k), Gather.apply(v)
        s = q @ k.transpose(1, 2) / 12 ** 0.5
C|        keep = at[:, None] >= torch.arange(k.shape[1])
2|        keep = at[:, None] >= torch.arange(k.shape[1])
1|        keep = torch.arange(t)[:, None] >= torch.arange(k.shape[1])
A|        keep = at[:, None] >= torch.arange(k.shape[1])
        a = s.masked_fill(~keep, float("-inf")).softmax(-1) @ v
        return self.head(x + self.o(a))
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(2):
    ids = torch.randint(20, (3, 9), generator=gen(step))
    x, y = ids[:, :-1], ids[:, 1:]
B|    x, y = x.chunk(W, 1)[R], y.chunk(W, 1)[R]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    opt.zero_grad()
B|    (loss / W).backward()
A|    loss.backward()
B|    for p in model.parameters(): dist.all_reduce(p.grad)
    opt.step()
"""
)
_layout(
    "sequence_split",
    2,
    SEQ,
    bug1=["keep = torch.arange(t)", "masked_fill(~keep"],
    bug2=[
        "g = g.clone()",
        "return g.chunk",
        "all_reduce",
        "Gather.apply(k)",
        "/mm",
        "all_gather",
    ],
)
PIPE = (
    INIT
    + """
A|first, second = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12)), nn.Sequential(nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 4))
A|model = nn.ModuleDict({"first": first, "second": second})
B|first, second = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12)), nn.Sequential(nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 4))
B|model = nn.ModuleDict({"first": first} if R == 0 else {"second": second})
opt = torch.optim.SGD(model.parameters(), lr=0.2)
for step in range(2):
    g = gen(step)
    x, y = torch.randn(8, 6, generator=g), torch.randint(4, (8,), generator=g)
    opt.zero_grad()
A|    loss = F.cross_entropy(second(first(x)), y)
A|    loss.backward()
B|    for n, (part, label) in enumerate(zip(x.chunk(2), y.chunk(2))):
B|        if R == 0:
B|            h = model["first"](part)
C|            dist.send(h.detach(), 1)
2|            dist.send(h.detach(), 1)
1|            dist.send(h.detach().tanh(), 1)
B|            g = torch.empty_like(h)
B|            dist.recv(g, 1)
B|            h.backward(g)
B|        else:
B|            h = torch.empty(4, 12)
B|            dist.recv(h, 0)
B|            h.requires_grad_(True)
C|            loss = F.cross_entropy(model["second"](h), label) / 2
1|            loss = F.cross_entropy(model["second"](h), label) / 2
2|            loss = F.cross_entropy(model["second"](h), label)
B|            loss.backward()
B|            dist.send(h.grad, 0)
    opt.step()
"""
)
_layout(
    "pipeline_by_hand",
    2,
    PIPE,
    bug1=["h.detach().tanh()"],
    bug2=["label)", "the loss is scaled"],
)
EMB = (
    INIT
    + """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
C|        dist.all_reduce(x)
2|        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, g): return g
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)
    def forward(self, ids):
A|        x = self.emb(ids).mean(1)
C|        low = R * 24 // W
1|        low = R * 24 // W
2|        low = R * 24 // W + R
B|        inside = (ids >= low) & (ids < low + 24 // W)
B|        x = Sum.apply(self.emb((ids - low) * inside) * inside[..., None]).mean(1)
        return self.head(x)
model = Net()
B|model.emb.weight = nn.Parameter(model.emb.weight.data.chunk(W)[R].clone())
opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
for step in range(2):
    g = gen(step)
    x, y = torch.randint(24, (6, 5), generator=g), torch.randint(24, (6,), generator=g)
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
"""
)
_layout(
    "embedding_split",
    3,
    EMB,
    bug1=["x = x.clone()", "Sum.apply", "all_reduce", "the sum over the ranks"],
    bug2=["low = R * 24 // W + R", "inside = ", "Sum.apply(self.emb", "emb/embedding"],
)
