"""Names in ships' logs: a token classifier tuned from a small pretrained encoder.

Words are cut into pieces and only the first piece of a word carries its label. A
linear-chain CRF reads the labels off; attacks on the embeddings steady the tuning.
"""

import contextlib
import itertools
import logging
import math
from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Sampler

logger = logging.getLogger("ner")
args = Namespace(seed=39, sentences=70, pool=20, batch=5, accumulate=2, steps=4)
vars(args).update(hidden=24, heads=3, inner=40, layers=2, positions=34)
vars(args).update(lr=4e-3, head_lr=2e-2, layer_decay=0.6, decay=0.05, clip=3.6)
vars(args).update(horizon=10, warmup=3, epsilon=0.8, adv=0.7, aux=0.5, beta=0.97)
PARTS = {
    "SHIP": ("HMS", "storm sea grey north", "gull star bell"),
    "PORT": ("Port", "mar tol bren hal sker", "wick ness ford by"),
    "CAPT": ("Old Mad", "har ed ros wil tol", "den lock mund"),
}
LABELS = ["O", *(f"{edge}-{kind}" for kind in PARTS for edge in "BI")]
TEMPLATES = (
    "{CAPT} sailed the {SHIP} from {PORT} to {PORT} with salt",
    "the {SHIP} anchored near {PORT} at dawn",
    "reached {PORT} in 1804 under captain {CAPT}",
    "passed {SHIP}",
    "cargo of tea for {PORT} and the {SHIP}",
    "captain {CAPT} of the {SHIP} passed {PORT} with cargo of salt and tea at dawn",
)
WHOLE = "the from to with near at dawn in under captain of tea for and salt cargo port"
ENDS = "##ed ##gull ##star ##bell ##wick ##ness ##ford ##by ##den ##lock ##mund"
STEMS = "hms sail anchor reach pass old mad storm sea grey north mar tol bren hal sker"
VOCAB = f"[PAD] [UNK] [CLS] [SEP] {WHOLE} {STEMS} har ed ros wil {ENDS}".split()
PAD, UNK, CLS, SEP = range(4)


def draw(choices, rng):
    return choices[torch.randint(len(choices), (), generator=rng)]


def write_logs(rng):
    """Sentences as words, and a label for each."""
    for _ in range(args.sentences):
        words, tags = [], []
        for word in draw(TEMPLATES, rng).split():
            name, kind = [word], word.strip("{}")
            if kind in PARTS:
                titles, stems, ends = (part.split() for part in PARTS[kind])
                known = [draw(titles, rng)] * (torch.rand((), generator=rng) < 0.5)
                name = [*known, (draw(stems, rng) + draw(ends, rng)).capitalize()]
            words += name
            within = [f"I-{kind}"] * (len(name) - 1)
            tags += [f"B-{kind}", *within] if kind in PARTS else ["O"]
        yield words, [LABELS.index(tag) for tag in tags]


def cut(word, ids):
    """Pieces of a word, the longest known ones first."""
    pieces, start = [], 0
    while start < len(word):
        rest = ("##" if start else "") + word[start:]
        known = [rest[:end] for end in range(1, len(rest) + 1) if rest[:end] in ids]
        if not known:
            return [UNK]
        pieces.append(ids[known[-1]])
        start += len(known[-1].removeprefix("##"))
    return pieces


def tokenize(words, tags, ids):
    """A row: the pieces, where each word's first one is, and the labels."""
    pieces, first = [CLS], []
    for word in words:
        first.append(len(pieces))
        pieces += cut(word.lower(), ids)
    return {"pieces": [*pieces, SEP], "first": first, "labels": tags}


def collate(rows):
    batch = {}
    for key, fill in {"pieces": PAD, "first": 0, "labels": -100}.items():
        wide = itertools.zip_longest(*(row[key] for row in rows), fillvalue=fill)
        batch[key] = torch.tensor(list(wide)).T
    return batch


class Buckets(Sampler):
    """Batches of similar length: sorted within pools, shuffled across them."""

    def __init__(self, rows, rng):
        self.lengths = [len(row["pieces"]) for row in rows]
        self.rng = rng

    def __iter__(self):
        batches = []
        order = torch.randperm(len(self.lengths), generator=self.rng)
        for pool in order.split(args.pool):
            rows = sorted(pool.tolist(), key=lambda row: self.lengths[row])
            while rows:
                batches.append([rows.pop() for _ in range(args.batch) if rows])
        for at in torch.randperm(len(batches), generator=self.rng).tolist():
            yield batches[at]


class LogPartition(torch.autograd.Function):
    """Logarithm of the sum over all paths, by sentence; slopes are the marginals."""

    @staticmethod
    def forward(ctx, emissions, mask, trans, start, end):
        alphas = [start + emissions[:, 0]]
        for t in range(1, emissions.shape[1]):
            alpha = (alphas[-1][:, :, None] + trans).logsumexp(1) + emissions[:, t]
            alphas.append(torch.where(mask[:, t, None], alpha, alphas[-1]))
        total = (alphas[-1] + end).logsumexp(1)
        ctx.save_for_backward(emissions, mask, trans, end, total, *alphas)
        return total

    @staticmethod
    def backward(ctx, grad):
        emissions, mask, trans, end, total, *alphas = ctx.saved_tensors
        beta = end.expand_as(alphas[-1])
        last = (alphas[-1] + beta - total[:, None]).exp() * grad[:, None]
        unary, pairs = torch.zeros_like(emissions), torch.zeros_like(trans)
        for t in range(emissions.shape[1] - 1, -1, -1):
            on = mask[:, t, None]
            unary[:, t] = (alphas[t] + beta - total[:, None]).exp() * on * grad[:, None]
            if t > 0:
                later = trans + (emissions[:, t] + beta)[:, None, :]
                joint = (alphas[t - 1][:, :, None] + later - total[:, None, None]).exp()
                pairs += (joint * (on * grad[:, None])[:, :, None]).sum(0)
                beta = torch.where(on, later.logsumexp(2), beta)
        return unary, None, pairs, unary[:, 0].sum(0), last.sum(0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(args.hidden, 3 * args.hidden, bias=False)
        self.out = nn.Linear(args.hidden, args.hidden, bias=False)
        self.norm1 = nn.LayerNorm(args.hidden)
        self.up = nn.Linear(args.hidden, args.inner)
        self.down = nn.Linear(args.inner, args.hidden)
        self.norm2 = nn.LayerNorm(args.hidden)

    def forward(self, x, seen):
        q, k, v = self.qkv(x).unflatten(2, (3, args.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~seen[:, None, None, :], -1e4)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Tagger(nn.Module):
    def __init__(self, class_weight, bigrams):
        super().__init__()
        self.words = nn.Embedding(len(VOCAB), args.hidden)
        self.places = nn.Embedding(args.positions, args.hidden)
        self.norm = nn.LayerNorm(args.hidden)
        self.layers = nn.ModuleList(Layer() for _ in range(args.layers))
        self.head = nn.Linear(args.hidden, len(LABELS))
        self.bigram = nn.Parameter(bigrams.log())
        self.start = nn.Parameter(0.3 * torch.randn(len(LABELS)))
        self.end = nn.Parameter(0.3 * torch.randn(len(LABELS)))
        self.register_buffer("class_weight", class_weight)

    def forward(self, pieces, first):
        x = self.norm(self.words(pieces) + self.places.weight[: pieces.shape[1]])
        for layer in self.layers:
            x = layer(x, pieces != PAD)
        return self.head(x.gather(1, first[:, :, None].expand(-1, -1, args.hidden)))

    def gold(self, emissions, mask, labels):
        """Score of the paths that are right."""
        said = emissions.gather(2, labels[:, :, None]).squeeze(2)
        moved = self.bigram[labels[:, :-1], labels[:, 1:]]
        final = labels.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)
        path = (said * mask).sum(1) + (moved * mask[:, 1:]).sum(1)
        return path + self.start[labels[:, 0]] + self.end[final]

    def loss(self, batch):
        emissions = self(batch["pieces"], batch["first"])
        labels, mask = batch["labels"], batch["labels"] >= 0
        log_z = LogPartition.apply(emissions, mask, self.bigram, self.start, self.end)
        missed = log_z - self.gold(emissions, mask, labels.clamp(min=0))
        chain = missed.sum() / mask.sum()
        aux = F.cross_entropy(emissions[mask], labels[mask], weight=self.class_weight)
        return chain + args.aux * aux


def count_labels(rows):
    """Class weights by the effective number of samples, and smoothed transitions."""
    counts, bigrams = torch.ones(len(LABELS)), torch.full([len(LABELS)] * 2, 0.5)
    for row in rows:
        counts += torch.tensor(row["labels"]).bincount(minlength=len(LABELS))
        for tag, following in itertools.pairwise(row["labels"]):
            bigrams[tag, following] += 1
    weight = (1 - args.beta) / (1 - args.beta**counts)
    return weight / weight.mean(), bigrams / bigrams.sum(1, keepdim=True)


def download(rng):
    """The encoder as its makers keep it: sorted pieces, weights as [in, out]."""
    d, inner = args.hidden, args.inner
    shapes = {"attn": (d, 3 * d), "proj": (d, d)}
    shapes |= {"fc": (d, inner), "fc_proj": (inner, d)}
    saved = {"pieces": sorted(VOCAB), "wte": torch.randn(len(VOCAB), d, generator=rng)}
    saved["wpe"] = 0.5 * torch.randn(args.positions + 2, d, generator=rng)
    for n, key in itertools.product(range(args.layers), shapes):
        weight = torch.randn(shapes[key], generator=rng)
        saved[f"h{n}.{key}.w"] = 1.2 * weight / math.sqrt(len(weight))
        saved[f"h{n}.{key}.b"] = 0.1 * torch.randn(shapes[key][1], generator=rng)
    for n in range(2 * args.layers + 1):
        saved[f"ln_{n}"] = 0.2 * torch.randn(2, d, generator=rng)
    return saved


@torch.no_grad()
def adopt(model, saved):
    """Put the saved encoder into ours; two places in front are the makers' own."""
    order = [saved["pieces"].index(piece) for piece in VOCAB]
    model.words.weight.copy_(saved["wte"][order])
    model.places.weight.copy_(saved["wpe"][2:])
    norms = [model.norm]
    for n, layer in enumerate(model.layers):
        for key, linear in {"fc": layer.up, "fc_proj": layer.down}.items():
            linear.weight.copy_(saved[f"h{n}.{key}.w"].T)
            linear.bias.copy_(saved[f"h{n}.{key}.b"])
        layer.qkv.weight.copy_(saved[f"h{n}.attn.w"].T)
        layer.out.weight.copy_(saved[f"h{n}.proj.w"].T)
        norms += [layer.norm1, layer.norm2]
    for n, norm in enumerate(norms):
        norm.weight.copy_(1 + saved[f"ln_{n}"][0])  # kept as the distance from one
        norm.bias.copy_(saved[f"ln_{n}"][1])


def group_parameters(model):
    """A group for each parameter: lower layers learn slower, vectors do not decay."""
    for name, p in model.named_parameters():
        depth = int(name.split(".")[1]) + 1 if name.startswith("layers.") else 0
        rate = args.lr * args.layer_decay ** (args.layers - depth)
        if name.startswith(("head", "bigram", "start", "end")):
            rate = args.head_lr
        yield {"params": [p], "lr": rate, "weight_decay": args.decay * (p.ndim > 1)}


@contextlib.contextmanager
def attacked(weight):
    """Fast gradient method: the weight moved where the loss grows, and put back."""
    kept, slope = weight.detach().clone(), weight.grad
    weight.data.add_(args.epsilon * slope / (slope.norm() + 1e-8))
    yield
    weight.data.copy_(kept)


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed + 1)
    ids = {piece: number for number, piece in enumerate(VOCAB)}
    rows = [tokenize(words, tags, ids) for words, tags in write_logs(rng)]
    loader = DataLoader(rows, batch_sampler=Buckets(rows, rng), collate_fn=collate)
    model = Tagger(*count_labels(rows))
    adopt(model, download(rng))
    optimizer = torch.optim.AdamW(group_parameters(model), betas=(0.9, 0.98), eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / args.warmup, 1 - n / args.horizon)
    )
    kept = AveragedModel(model, avg_fn=lambda ours, new, n: ours.lerp(new, 2 / (n + 2)))
    for n, batch in enumerate(itertools.islice(loader, args.steps * args.accumulate)):
        if n % args.accumulate == 0:
            optimizer.zero_grad()
        loss = model.loss(batch)
        (loss / args.accumulate).backward()
        with attacked(model.words.weight):
            worse = model.loss(batch)
            (args.adv * worse / args.accumulate).backward()
        logger.info("batch %d: loss %.4f, attacked %.4f", n, loss.item(), worse.item())
        if (n + 1) % args.accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            kept.update_parameters(model)
            scheduler.step()
    batch = collate(rows)
    with torch.no_grad():
        guess = kept(batch["pieces"], batch["first"]).argmax(2)
    right = (guess == batch["labels"])[batch["labels"] >= 0].float().mean()
    logger.info("right %.3f", right.item())


if __name__ == "__main__":
    main()
