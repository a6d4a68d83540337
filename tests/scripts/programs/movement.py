# Movement pruning of a sequence classifier: the student starts as the dense model that
# was fine-tuned before, learns which weights to keep, and is held near the dense one.
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 23
VOCAB, PAD, CLS, LONGEST, CLASSES = 40, 0, 1, 14, 4
DIM, HEADS, HIDDEN, BLOCKS = 32, 4, 48, 2
BATCH, ACCUMULATE, STEPS = 12, 2, 3
LR, LR_SCORES, DECAY, CLIP = 4e-3, 3e-2, 0.05, 0.5
SOFT, TEMPERATURE, PENALTY = 0.6, 2.0, 0.4
KEEP_FIRST, KEEP_LAST = 0.9, 0.15  # shares of the weights that are kept
PRUNE_FROM, PRUNE_TO, TOTAL = 0, 8, 12


# ---- data


def make_corpus(n, gen):
    """Token lists; the label is the quarter of the vocabulary that is seen most."""
    corpus = []
    for _ in range(n):
        length = int(torch.randint(4, LONGEST, (), generator=gen))
        label = int(torch.randint(CLASSES, (), generator=gen))
        quarter = (VOCAB - 2) // CLASSES
        favoured = torch.randint(quarter, (length,), generator=gen) + label * quarter
        noise = torch.randint(VOCAB - 2, (length,), generator=gen)
        pick = torch.rand(length, generator=gen) < 0.6
        corpus.append((torch.where(pick, favoured, noise) + 2, label))
    return corpus


def pad(rows):
    """CLS first, padding last. Gives tokens, labels and what is not padding."""
    width = 1 + max(len(tokens) for tokens, _ in rows)
    batch = torch.full((len(rows), width), PAD)
    batch[:, 0] = CLS
    for i, (tokens, _) in enumerate(rows):
        batch[i, 1 : len(tokens) + 1] = tokens
    labels = torch.tensor([label for _, label in rows])
    return batch, labels, batch != PAD


def batches(corpus, gen):
    while True:
        order = torch.randperm(len(corpus), generator=gen).tolist()
        for i in range(0, len(order) - BATCH + 1, BATCH):
            yield pad([corpus[j] for j in order[i : i + BATCH]])


# ---- pruning


class TopK(torch.autograd.Function):
    """1 where a score is among the highest share, 0 elsewhere; straight through."""

    @staticmethod
    def forward(ctx, scores, share):
        kept = max(1, round(share * scores.numel()))
        mask = torch.zeros_like(scores)
        mask.view(-1)[scores.flatten().topk(kept).indices] = 1.0
        return mask

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class MaskedMatmul(torch.autograd.Function):
    """x (w * mask)^T. The weights hear from the kept ones only, the mask from all."""

    @staticmethod
    def forward(ctx, x, weight, mask):
        ctx.save_for_backward(x, weight, mask)
        return x @ (weight * mask).T

    @staticmethod
    def backward(ctx, grad):
        x, weight, mask = ctx.saved_tensors
        outer = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad @ (weight * mask), outer * mask, outer * weight


class MaskedLinear(nn.Module):
    def __init__(self, n_in, n_out, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) / math.sqrt(n_in))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None
        self.scores = nn.Parameter(torch.zeros(n_out, n_in))
        self.share = 1.0

    def forward(self, x):
        if self.share < 1.0:
            y = MaskedMatmul.apply(x, self.weight, TopK.apply(self.scores, self.share))
        else:
            y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def share_at(step):
    """Cubic from KEEP_FIRST down to KEEP_LAST."""
    done = (step - PRUNE_FROM + 1) / (PRUNE_TO - PRUNE_FROM)
    done = min(1.0, max(0.0, done))
    return KEEP_LAST + (KEEP_FIRST - KEEP_LAST) * (1 - done) ** 3


def set_share(model, share):
    for layer in masked_layers(model):
        layer.share = share


def masked_layers(model):
    return [m for m in model.modules() if isinstance(m, MaskedLinear)]


def score_penalty(model):
    """Mean over all weights of how much a score wants to stay."""
    layers = masked_layers(model)
    total = sum(torch.sigmoid(layer.scores).sum() for layer in layers)
    return total / sum(layer.scores.numel() for layer in layers)


# ---- model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = MaskedLinear(DIM, 3 * DIM, bias=False)
        self.out = MaskedLinear(DIM, DIM)

    def forward(self, x, real):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / math.sqrt(DIM // HEADS)
        logits = logits.masked_fill(~real[:, None, None, :], -1e9)
        mixed = logits.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, t, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.inner, self.outer = MaskedLinear(DIM, HIDDEN), MaskedLinear(HIDDEN, DIM)

    def forward(self, x, real):
        x = x + self.attention(self.norm1(x), real)
        return x + self.outer(F.gelu(self.inner(self.norm2(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.register_buffer("place", sinusoids(LONGEST + 1))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)
        self.classes = nn.Linear(DIM, CLASSES)

    def forward(self, tokens, real):
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, real)
        x = self.norm(x) * real[:, :, None]
        pooled = x.sum(1) / real.sum(1, keepdim=True)
        return self.classes(pooled)


def sinusoids(n):
    angle = torch.arange(n)[:, None] * torch.logspace(0, -3, DIM // 2)
    return torch.cat([angle.sin(), angle.cos()], 1)


def dense_checkpoint(gen):
    """Stands for the file of the fine-tuned model: its names, weights as [in, out]."""
    file = {"wte": 0.5 * torch.randn(VOCAB, DIM, generator=gen)}
    for i in range(BLOCKS):
        shapes = {"q": (DIM, DIM), "k": (DIM, DIM), "v": (DIM, DIM), "o": (DIM, DIM)}
        shapes |= {"fc1": (DIM, HIDDEN), "fc2": (HIDDEN, DIM)}
        for name, (n_in, n_out) in shapes.items():
            weight = torch.randn(n_in, n_out, generator=gen) / math.sqrt(n_in)
            file[f"h{i}.{name}.w"] = 1.3 * weight
            file[f"h{i}.{name}.b"] = 0.1 * torch.randn(n_out, generator=gen)
        for name in ("ln1", "ln2"):
            file[f"h{i}.{name}.g"] = 1 + 0.2 * torch.randn(DIM, generator=gen)
    file["cls.w"] = torch.randn(DIM, CLASSES, generator=gen) / math.sqrt(DIM)
    return file


@torch.no_grad()
def load_dense(model, file):
    model.token.weight.copy_(file["wte"])
    model.token.weight[PAD] = 0.0
    for i, block in enumerate(model.blocks):
        parts = [file[f"h{i}.{name}.w"].T for name in ("q", "k", "v")]
        block.attention.qkv.weight.copy_(torch.cat(parts))
        for layer, name in (
            (block.attention.out, "o"),
            (block.inner, "fc1"),
            (block.outer, "fc2"),
        ):
            layer.weight.copy_(file[f"h{i}.{name}.w"].T)
            layer.bias.copy_(file[f"h{i}.{name}.b"])
        block.norm1.weight.copy_(file[f"h{i}.ln1.g"])
        block.norm2.weight.copy_(file[f"h{i}.ln2.g"])
    model.classes.weight.copy_(file["cls.w"].T)


@torch.no_grad()
def start_scores(model):
    """Before anything has moved, large weights are the ones to keep."""
    for layer in masked_layers(model):
        size = layer.weight.abs()
        layer.scores.copy_(0.2 * (size / size.mean() - 1))


# ---- training


def soft_loss(student, teacher):
    """KL from the softened teacher, scaled back by the temperature squared."""
    log_p = F.log_softmax(student / TEMPERATURE, 1)
    q = F.softmax(teacher / TEMPERATURE, 1)
    return F.kl_div(log_p, q, reduction="batchmean") * TEMPERATURE**2


torch.manual_seed(SEED)
gen = torch.Generator().manual_seed(SEED)
corpus = make_corpus(120, gen)
file = dense_checkpoint(gen)

teacher = Classifier().eval().requires_grad_(False)
load_dense(teacher, file)
student = Classifier()
load_dense(student, file)
start_scores(student)

scores = [layer.scores for layer in masked_layers(student)]
known = {id(p) for p in scores}
weights = [p for p in student.parameters() if id(p) not in known]
opt = torch.optim.AdamW(
    [
        {"params": weights, "lr": LR, "weight_decay": DECAY},
        {"params": scores, "lr": LR_SCORES, "weight_decay": 0.0},
    ],
    eps=1e-4,
)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / TOTAL)

feed = batches(corpus, gen)
for step in range(STEPS):
    share = share_at(step)
    set_share(student, share)
    opt.zero_grad()
    seen = 0.0
    for _ in range(ACCUMULATE):
        tokens, labels, real = next(feed)
        logits = student(tokens, real)
        with torch.no_grad():
            wanted = teacher(tokens, real)
        hard = F.cross_entropy(logits, labels)
        loss = (1 - SOFT) * hard + SOFT * soft_loss(logits, wanted)
        loss = (loss + PENALTY * score_penalty(student)) / ACCUMULATE
        loss.backward()
        seen += loss.item()
    norm = nn.utils.clip_grad_norm_(student.parameters(), CLIP)
    opt.step()
    sched.step()
    print(f"step {step} share {share:.3f} loss {seen:.4f} norm {norm:.3f}")
