"""Sentiment of short product reviews (bad, mixed, good): phrases, BiGRU, attention."""

import argparse
import math
import random
import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD, UNK = 0, 1
SPECIALS = ["<pad>", "<unk>"]
LABELS = ["bad", "mixed", "good"]

THINGS = "screen battery keyboard case charger sound hinge price cable fan".split()
OPINIONS = {
    "good": "great lovely sturdy quick bright superb".split(),
    "bad": "awful flimsy slow dim noisy broken".split(),
    "mixed": "okay decent average acceptable plain usual".split(),
}
FILLERS = "The and is but really, quite my after weeks of use! I think it this".split()

SETTINGS = {
    "seed": 37, "texts": 60, "held_out": 12, "epochs": 1, "batch_size": 8, "pool": 3,
    "max_len": 14, "min_count": 3, "dim": 20, "hidden": 16,
    "dropout": 0.15, "smoothing": 0.12, "lr": 4e-3, "embed_lr": 1e-2,
    "weight_decay": 0.02, "clip": 0.25, "warmup": 3,
}


def get_args():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value)
    return parser.parse_args()


def write_review(rng):
    label = rng.choices(range(3), weights=(2, 3, 5))[0]
    words = []
    for _ in range(rng.randint(1, 4)):
        opinion = label if rng.random() < 0.85 else rng.randrange(3)
        words += rng.choices(FILLERS, k=rng.randint(0, 4))
        words += [rng.choice(THINGS), rng.choice(OPINIONS[LABELS[opinion]])]
        if rng.random() < 0.3:
            words[-1] = words[-1].upper() + "!"
    return " ".join(words) + rng.choice(["", ".", "!"]), label


def tokenize(text):
    return re.findall(r"[a-z]+|[!.,]", text.lower())


class Vocab:
    def __init__(self, texts, min_count):
        counts = Counter(token for text in texts for token in tokenize(text))
        common = [w for w, n in counts.most_common() if n >= min_count]
        self.words = SPECIALS + common
        self.index = {word: i for i, word in enumerate(self.words)}

    def encode(self, text, max_len):
        ids = [self.index.get(token, UNK) for token in tokenize(text)]
        return ids[:max_len]


def read_vectors(dim):
    """Word vectors as they come from a file: in the order of the alphabet."""
    known = {w.strip(",!").lower() for w in THINGS + FILLERS}
    known |= {w for words in OPINIONS.values() for w in words}
    rng = torch.Generator().manual_seed(300)
    return {w: 0.3 * torch.randn(dim, generator=rng) for w in sorted(known)}


class BucketedBatches:
    """Texts of like length share a batch; the batches come in any order."""

    def __init__(self, examples, batch_size, pool, rng):
        self.examples, self.batch_size, self.rng = examples, batch_size, rng
        self.pool = pool * batch_size

    def __iter__(self):
        order = list(range(len(self.examples)))
        self.rng.shuffle(order)
        batches = []
        for start in range(0, len(order), self.pool):
            part = sorted(order[start : start + self.pool], key=self.length)
            for i in range(0, len(part), self.batch_size):
                batches.append(part[i : i + self.batch_size])
        self.rng.shuffle(batches)
        for rows in batches:
            yield self.collate(rows)

    def length(self, row):
        return len(self.examples[row][0])

    def collate(self, rows):
        lengths = torch.tensor([self.length(row) for row in rows])
        ids = torch.full((len(rows), int(lengths.max())), PAD)
        for i, row in enumerate(rows):
            ids[i, : lengths[i]] = torch.tensor(self.examples[row][0])
        labels = torch.tensor([self.examples[row][1] for row in rows])
        return ids, lengths, labels


class MaskedSoftmax(torch.autograd.Function):
    """Softmax over axis 1 of what the mask leaves; nought elsewhere."""

    @staticmethod
    def forward(ctx, scores, mask):
        top = scores.masked_fill(~mask, -math.inf).amax(1, keepdim=True)
        raised = (scores - top).exp() * mask
        shares = raised / raised.sum(1, keepdim=True)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx, grad):
        (shares,) = ctx.saved_tensors
        return shares * (grad - (grad * shares).sum(1, keepdim=True)), None


class SmoothedLoss(torch.autograd.Function):
    """Cross entropy with smoothed labels; an example weighs as its class does."""

    @staticmethod
    def forward(ctx, logits, labels, class_weight, smoothing):
        logp = logits - logits.logsumexp(1, keepdim=True)
        classes = logits.shape[1]
        target = torch.full_like(logits, smoothing / classes)
        target[torch.arange(len(labels)), labels] += 1 - smoothing
        weight = class_weight[labels]
        weight = weight / weight.sum()
        ctx.save_for_backward(logp, target, weight)
        return -(weight * (target * logp).sum(1)).sum()

    @staticmethod
    def backward(ctx, grad):
        logp, target, weight = ctx.saved_tensors
        return grad * weight[:, None] * (logp.exp() - target), None, None, None


class SentimentNet(nn.Module):
    def __init__(self, vocab_size, dim, hidden, dropout):
        super().__init__()
        self.scale = math.sqrt(dim)
        self.embed = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.phrase = nn.Conv1d(dim, dim, 3, padding=1)
        self.gru = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.key = nn.Linear(2 * hidden, hidden)
        self.query = nn.Linear(hidden, 1, bias=False)
        self.norm = nn.LayerNorm(2 * hidden + dim)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(2 * hidden + dim, len(LABELS))

    @torch.no_grad()
    def init(self, vocab, vectors, counts):
        for word, vector in vectors.items():
            if word in vocab.index:
                self.embed.weight[vocab.index[word]] = vector
        for name, weight in self.gru.named_parameters():
            if name.startswith("weight_hh"):
                for row in range(0, len(weight), weight.shape[1]):
                    nn.init.orthogonal_(weight[row : row + weight.shape[1]])
        self.out.bias.copy_((counts / counts.sum()).log())

    def forward(self, ids, lengths):
        mask = ids != PAD
        x = self.embed(ids) * self.scale
        x = x + F.gelu(self.phrase(x.mT)).mT
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        scores = self.query(torch.tanh(self.key(states))).squeeze(2)
        shares = MaskedSoftmax.apply(scores, mask)
        attended = (shares[:, :, None] * states).sum(1)
        average = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        features = self.norm(torch.cat([attended, average], 1))
        return self.out(self.drop(features))


def build_optimizer(model, args):
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": model.embed.parameters(), "lr": args.embed_lr},
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": plain},
    ]
    return torch.optim.Adam(groups, lr=args.lr, betas=(0.9, 0.98), eps=1e-6)


def cosine(step, warmup, total):
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    right = seen = 0
    for ids, lengths, labels in batches:
        right += (model(ids, lengths).argmax(1) == labels).sum().item()
        seen += len(labels)
    return right / seen


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    reviews = [write_review(rng) for _ in range(args.texts)]
    train, held_out = reviews[args.held_out :], reviews[: args.held_out]
    vocab = Vocab([text for text, _ in train], args.min_count)
    examples, unseen = (
        [(vocab.encode(text, args.max_len), label) for text, label in part]
        for part in (train, held_out)
    )
    batches = BucketedBatches(examples, args.batch_size, args.pool, rng)
    check = BucketedBatches(unseen, args.batch_size, 1, random.Random(0))
    counts = torch.bincount(torch.tensor([label for _, label in examples])).float()
    class_weight = counts.sum() / (len(LABELS) * counts)

    model = SentimentNet(len(vocab.words), args.dim, args.hidden, args.dropout)
    model.init(vocab, read_vectors(args.dim), counts)
    optimizer = build_optimizer(model, args)
    total = args.epochs * math.ceil(len(examples) / args.batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine(step, args.warmup, total)
    )
    print(f"{len(vocab.words)} words, before training {evaluate(model, check):.2f}")
    for epoch in range(args.epochs):
        model.train()
        for ids, lengths, labels in batches:
            logits = model(ids, lengths)
            loss = SmoothedLoss.apply(logits, labels, class_weight, args.smoothing)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            print(f"loss {loss.item():.4f} norm {norm:.3f} width {ids.shape[1]}")
        print(f"epoch {epoch}: accuracy {evaluate(model, check):.2f}")


if __name__ == "__main__":
    main()
