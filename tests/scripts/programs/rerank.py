"""Re-ranks the results of a shop's search: LambdaRank over lists of judged and drawn products."""

import math
import random
import zlib

import torch
from torch import nn
from torch.nn import functional as F

PAD = 0
CFG = dict(
    seed=71, queries=36, held_out=8, products=90, per_batch=6, negatives=3,
    buckets=40, dim=8, hidden=16, heads=2, dropout=0.1, sigma=1.4, listnet=0.3, max_weight=6.0,
    lr=4e-3, lr_tables=0.06, warmup=2, clip=0.25,
)
NOUNS = "Lamp chair Desk shelf rug Mirror vase clock Sofa bench stool Frame".split()
MANNERS = "oak Steel small tall Round blue white folding soft Outdoor modern old".split()


def make_shop(cfg, rng):
    """Products are (words, numbers), queries (words, numbers, {product: (grade, place)})."""
    gen = torch.Generator().manual_seed(cfg["seed"])
    products, queries = [], []
    for _ in range(cfg["products"]):
        words = rng.sample(MANNERS, rng.randint(0, 3)) + [rng.choice(NOUNS)]
        numbers = torch.randn(5, generator=gen)  # price, sales, stars, shipping, margin
        numbers[:2] = (0.9 * numbers[:2] + 3).exp()
        products.append((words, numbers))
    for _ in range(cfg["queries"]):
        words = rng.sample(MANNERS, rng.randint(0, 2)) + [rng.choice(NOUNS)]
        judged = {}
        for place, product in enumerate(rng.sample(range(cfg["products"]), rng.randint(3, 9))):
            title, numbers = products[product]
            fit = 1.3 * len(set(words) & set(title)) + 0.5 * numbers[2].item()
            judged[product] = min(4, max(0, round(fit + rng.gauss(0.6, 0.6)))), place
        queries.append((words, torch.randn(3, generator=gen), judged))
    return products, queries


def bucket(word, buckets):
    return 1 + zlib.crc32(word.lower().encode()) % (buckets - 1)


def standardised(rows):
    """Prices and sales as logarithms; everything with mean 0 and deviation 1."""
    rows = torch.cat([rows[:, :2].log1p(), rows[:, 2:]], 1)
    return (rows - rows.mean(0)) / rows.std(0)


class ListLoader:
    """Batches of lists, padded to the longest."""

    def __init__(self, queries, products, cfg, rng):
        self.queries, self.products, self.cfg, self.rng = queries, products, cfg, rng
        self.numbers = standardised(torch.stack([numbers for _, numbers in products]))
        self.titles = self.hashed([words for words, _ in products])
        propensity = (1 + torch.arange(10.0)) ** -0.7  # how likely a place is looked at
        self.weight = (1 / propensity).clamp(max=cfg["max_weight"])

    def hashed(self, texts):
        ids = torch.full((len(texts), 4), PAD)
        for row, words in enumerate(texts):
            ids[row, : len(words)] = torch.tensor([bucket(w, self.cfg["buckets"]) for w in words])
        return ids

    def make_list(self, judged):
        others = [n for n in range(len(self.products)) if n not in judged]
        drawn = self.rng.sample(others, self.cfg["negatives"])
        rows = [(n, grade, self.weight[place].item()) for n, (grade, place) in judged.items()]
        rows += [(n, 0, 1.0) for n in drawn]
        self.rng.shuffle(rows)
        return zip(*rows)

    def __iter__(self):
        order = self.rng.sample(self.queries, len(self.queries))
        for start in range(0, len(order), self.cfg["per_batch"]):
            yield self.collate(order[start : start + self.cfg["per_batch"]])

    def collate(self, queries):
        words, numbers, judged = zip(*queries)
        lengths = torch.tensor([len(j) + self.cfg["negatives"] for j in judged])
        size = (len(queries), int(lengths.max()))
        batch = {
            "mask": torch.arange(size[1]) < lengths[:, None],
            "query_ids": self.hashed(words),
            "query_numbers": torch.stack(numbers),
            "ids": torch.full((*size, 4), PAD),
            "numbers": torch.zeros(*size, 5),
            "grades": torch.zeros(size),
            "weight": torch.zeros(size),
        }
        for row, one in enumerate(judged):
            chosen, grades, weight = self.make_list(one)
            here = torch.tensor(chosen)
            batch["ids"][row, : len(here)] = self.titles[here]
            batch["numbers"][row, : len(here)] = self.numbers[here]
            batch["grades"][row, : len(here)] = torch.tensor(grades).float()
            batch["weight"][row, : len(here)] = torch.tensor(weight)
        return batch


class Pooled(torch.autograd.Function):
    """Mean of a table's rows over the last axis of ids; PAD is none of them."""

    @staticmethod
    def forward(ctx, table, ids):
        real = (ids != PAD).to(table.dtype)
        share = real / real.sum(-1, keepdim=True).clamp(min=1)
        ctx.save_for_backward(ids, share)
        ctx.shape = table.shape
        return (table[ids] * share.unsqueeze(-1)).sum(-2)

    @staticmethod
    def backward(ctx, grad):
        ids, share = ctx.saved_tensors
        rows = (grad.unsqueeze(-2) * share.unsqueeze(-1)).flatten(0, -2)
        return grad.new_zeros(ctx.shape).index_add_(0, ids.flatten(), rows), None


def dcg(gain, rank):
    return gain / torch.log2(rank + 2.0)


class LambdaRank(torch.autograd.Function):
    """Logistic loss of pairs; a pair weighs what its exchange would do to NDCG."""

    @staticmethod
    def forward(ctx, scores, grades, weight, mask, sigma):
        gain = (2**grades - 1) * mask
        order = scores.masked_fill(~mask, -math.inf).argsort(1, descending=True)
        rank = order.argsort(1)
        best = dcg(gain.sort(1, descending=True).values, torch.arange(gain.shape[1])).sum(1)
        discount = dcg(torch.ones_like(gain), rank)
        swap = (gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])
        pairs = (grades[:, :, None] > grades[:, None]) & mask[:, :, None] & mask[:, None]
        worth = pairs * weight[:, :, None] * swap.abs() / best.clamp(min=1.0)[:, None, None]
        margin = sigma * (scores[:, :, None] - scores[:, None])
        ctx.save_for_backward(worth, margin)
        ctx.sigma = sigma
        return (worth * F.softplus(-margin)).sum((1, 2)).mean()

    @staticmethod
    def backward(ctx, grad):
        worth, margin = ctx.saved_tensors
        push = -ctx.sigma * worth * torch.sigmoid(-margin)
        by_scores = (push.sum(2) - push.sum(1)) / len(worth)
        return grad * by_scores, None, None, None, None


class Reranker(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden, self.heads = cfg["hidden"], cfg["heads"]
        self.title_table = nn.Embedding(cfg["buckets"], cfg["dim"], padding_idx=PAD)
        self.query_table = nn.Embedding(cfg["buckets"], cfg["dim"], padding_idx=PAD)
        self.join = nn.Linear(3 * cfg["dim"] + 8, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.merge = nn.Linear(hidden, hidden)
        self.drop = nn.Dropout(cfg["dropout"])
        last = nn.Linear(hidden, 1, bias=False)
        self.score = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.SiLU(), last)

    def attend(self, x, mask):
        """Each product looks at the others of its list."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        logits = logits.masked_fill(~mask[:, None, None], -1e9)
        return self.merge((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, batch):
        mask = batch["mask"]
        title = Pooled.apply(self.title_table.weight, batch["ids"])
        query = Pooled.apply(self.query_table.weight, batch["query_ids"])
        query = torch.cat([query, batch["query_numbers"]], 1)[:, None].expand(-1, mask.shape[1], -1)
        match = title * query[:, :, : title.shape[2]]
        x = F.silu(self.join(torch.cat([title, match, query, batch["numbers"]], 2)))
        x = x + self.drop(self.attend(self.norm(x), mask))
        whole = (x * mask[:, :, None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.score(torch.cat([x, x - whole], 2)).squeeze(2)


def click_vectors(cfg):
    """Last season's tables in eight bits; they had no row for padding."""
    gen = torch.Generator().manual_seed(70)
    rows, saved = cfg["buckets"] - 1, {}
    for name in ("title_table", "query_table"):
        codes = torch.randint(256, (rows, cfg["dim"]), generator=gen, dtype=torch.uint8)
        zero = torch.randint(100, 156, (rows, 1), generator=gen)
        saved[name] = codes, zero, 0.004 + 0.004 * torch.rand(rows, 1, generator=gen)
    return saved


class Trainer:
    def __init__(self, cfg, model):
        self.cfg, self.model = cfg, model
        tables = [model.title_table.weight, model.query_table.weight]
        self.rest = [p for name, p in model.named_parameters() if "table" not in name]
        self.adagrad = torch.optim.Adagrad(tables, cfg["lr_tables"], initial_accumulator_value=1e-3)
        self.adam = torch.optim.Adam(self.rest, cfg["lr"], betas=(0.9, 0.98))
        start = 1 / (cfg["warmup"] + 1)
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.adam, start, total_iters=cfg["warmup"])

    def step(self, batch):
        mask, grades = batch["mask"], batch["grades"]
        scores = self.model(batch)
        ranking = LambdaRank.apply(scores, grades, batch["weight"], mask, self.cfg["sigma"])
        # ListNet: cross entropy of what the grades choose first and what the scores do
        chosen = grades.masked_fill(~mask, -1e9).softmax(1)
        told = scores.masked_fill(~mask, -1e9).log_softmax(1)
        loss = ranking - self.cfg["listnet"] * (chosen * told).sum(1).mean()
        self.adam.zero_grad()
        self.adagrad.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.rest, self.cfg["clip"])
        self.adam.step()
        self.adagrad.step()
        self.warmup.step()
        return loss.item(), norm.item()

    @torch.no_grad()
    def ndcg(self, loader, top=5):
        self.model.eval()
        values = []
        for batch in loader:
            scores = self.model(batch).masked_fill(~batch["mask"], -math.inf)
            gain = 2 ** batch["grades"] - 1
            ours = gain.gather(1, scores.argsort(1, descending=True))[:, :top]
            ours, best = (dcg(x, torch.arange(top)).sum(1) for x in (ours, gain.topk(top).values))
            values.append(ours / best.clamp(min=1.0))
        return torch.cat(values).mean().item()


torch.manual_seed(CFG["seed"])
rng = random.Random(CFG["seed"])
products, queries = make_shop(CFG, rng)
check = ListLoader(queries[: CFG["held_out"]], products, CFG, random.Random(3))
loader = ListLoader(queries[CFG["held_out"] :], products, CFG, rng)
model = Reranker(CFG)
with torch.no_grad():
    for name, (codes, zero, scale) in click_vectors(CFG).items():
        getattr(model, name).weight[1:] = (codes.float() - zero) * scale
trainer = Trainer(CFG, model)
print(f"ndcg@5 before training {trainer.ndcg(check):.3f}")
model.train()
for batch in loader:
    loss, norm = trainer.step(batch)
    print(f"loss {loss:.4f} norm {norm:.3f}")
print(f"ndcg@5 after an epoch {trainer.ndcg(check):.3f}")
