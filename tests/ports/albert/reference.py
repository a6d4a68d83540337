"""A small ALBERT: masked words and the order of two sentences, trained with LAMB."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 150
PAD, SEP, MASK = 0, 2, 3
LR, WARMUP, TOTAL = 2e-2, 2, 12
WEIGHT_DECAY, MAX_NORM, ACCUMULATION = 0.05, 1.0, 2


class Embeddings(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, width)
        self.position_embeddings = nn.Embedding(32, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(32), persistent=False)

    def forward(self, input_ids, token_type_ids):
        x = self.word_embeddings(input_ids)
        x = x + self.position_embeddings(self.position_ids[: input_ids.shape[1]])
        x = x + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(x)


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, mask):
        q, k, v = map(self.split, (self.query(x), self.key(x), self.value(x)))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        context = scores.softmax(dim=-1) @ v
        context = context.transpose(1, 2).flatten(2)
        return self.LayerNorm(x + self.dense(context))


class Layer(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.ffn = nn.Linear(hidden, inner)
        self.ffn_output = nn.Linear(inner, hidden)
        self.full_layer_layer_norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x, mask):
        x = self.attention(x, mask)
        y = self.ffn_output(F.gelu(self.ffn(x), approximate="tanh"))
        return self.full_layer_layer_norm(x + y)


class Encoder(nn.Module):
    """All layers have the same weights."""

    def __init__(self, width, hidden, heads, inner, depth):
        super().__init__()
        self.depth = depth
        self.embedding_hidden_mapping_in = nn.Linear(width, hidden)
        self.layer = Layer(hidden, heads, inner)

    def forward(self, x, mask):
        x = self.embedding_hidden_mapping_in(x)
        for _ in range(self.depth):
            x = self.layer(x, mask)
        return x


class WordHead(nn.Module):
    """Back to the width of the embeddings, and onto their table."""

    def __init__(self, width, hidden):
        super().__init__()
        self.dense = nn.Linear(hidden, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x, table):
        x = F.gelu(self.dense(x), approximate="tanh")
        return F.linear(self.LayerNorm(x), table, self.bias)


class AlbertForPreTraining(nn.Module):
    def __init__(self, width=16, hidden=48, heads=4, inner=80, depth=3):
        super().__init__()
        self.embeddings = Embeddings(width)
        self.encoder = Encoder(width, hidden, heads, inner, depth)
        self.pooler = nn.Linear(hidden, hidden)
        self.predictions = WordHead(width, hidden)
        self.sop_classifier = nn.Linear(hidden, 2)

    def forward(self, input_ids, token_type_ids, attention_mask):
        x = self.embeddings(input_ids, token_type_ids)
        x = self.encoder(x, attention_mask[:, None, None, :].bool())
        words = self.predictions(x, self.embeddings.word_embeddings.weight)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return words, self.sop_classifier(pooled)


def model():
    torch.manual_seed(1909)
    net = AlbertForPreTraining()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                p.uniform_(0.6, 1.4)
            elif p.ndim == 1:
                p.normal_(0, 0.2)
            elif "embeddings" in name:
                p.normal_(0, 0.4)
            else:
                nn.init.xavier_uniform_(p)
                p.mul_(1.4)
        for linear in (
            net.encoder.layer.attention.query,
            net.encoder.layer.attention.key,
        ):
            linear.weight.mul_(1.5)
    return net


def batches():
    """Two pieces of a walk through the words, sometimes in the wrong order.

    What the masking draws comes with the words: which are chosen, what befalls each, and
    another word for it.
    """
    generator = torch.Generator().manual_seed(11942)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    made = []
    for size in (5, 6, 5, 6):
        tokens = torch.zeros(size, 22, dtype=torch.long)
        chosen = torch.zeros(size, 22, dtype=torch.bool)
        order = draw(0, 2, size)
        for row in range(size):
            first, second = int(draw(5, 11, 1)), int(draw(4, 9, 1))
            walk = [int(draw(0, 146, 1))]
            for turn in draw(0, 3, first + second - 1).tolist():
                walk.append((3 * walk[-1] + 7 * turn + 1) % 146)
            pieces = [walk[:first], walk[first:]]
            if order[row]:
                pieces.reverse()
            text = [1, *(w + 4 for w in pieces[0]), 2, *(w + 4 for w in pieces[1]), 2]
            tokens[row, : len(text)] = torch.tensor(text)
            count = int(draw(2, 5, 1))
            places = torch.rand(22, generator=generator) * (tokens[row] > 3)
            chosen[row, places.topk(count).indices] = True
        dice = torch.rand(size, 22, generator=generator)
        made.append(
            {
                "tokens": tokens,
                "chosen": chosen,
                "dice": dice,
                "other": draw(4, 150, size, 22),
                "order": order,
            }
        )
    return made


def mask_tokens(batch):
    """Of the chosen words 80 % are masked, 10 % become another word, 10 % stay."""
    masked = batch["chosen"] & (batch["dice"] < 0.8)
    replaced = batch["chosen"] & (batch["dice"] >= 0.9)
    input_ids = batch["tokens"].masked_fill(masked, MASK)
    return torch.where(replaced, batch["other"], input_ids)


def forward(net, batch):
    attention_mask = (batch["tokens"] != PAD).long()
    separators = (batch["tokens"] == SEP).long()
    behind = separators.cumsum(dim=1) - separators
    token_type_ids = behind.clamp(max=1) * attention_mask
    words, order = net(mask_tokens(batch), token_type_ids, attention_mask)
    return {"words": words[batch["chosen"]], "order": order}


def loss(output, batch):
    labels = batch["tokens"][batch["chosen"]]
    masked_lm_loss = F.cross_entropy(output["words"], labels)
    sentence_order_loss = F.cross_entropy(output["order"], batch["order"])
    return masked_lm_loss + sentence_order_loss


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p], **group)

    def update(self, p, state, lr, betas, eps, weight_decay, **_):
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        beta1, beta2 = betas
        state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        square = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
        update = mean / (square.sqrt() + eps)
        if weight_decay > 0:
            update = update + weight_decay * p
            w_norm, u_norm = p.norm(), update.norm()
            both = (w_norm > 0) & (u_norm > 0)
            update = update * torch.where(both, w_norm / u_norm, 1.0)
        p.sub_(lr * update)


class AccumulatingLamb(Lamb):
    """Updates after every second call, from the mean of the gradients."""

    calls = 0

    def rate(self, done):
        if done < WARMUP:
            return LR * (done + 1) / WARMUP
        return LR * (TOTAL - done) / (TOTAL - WARMUP)

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        if self.calls % ACCUMULATION == 0:
            self.total = [torch.zeros_like(p) for p in params]
        for total, p in zip(self.total, params):
            total.add_(p.grad, alpha=1 / ACCUMULATION)
        self.calls += 1
        if self.calls % ACCUMULATION != 0:
            return

        for total, p in zip(self.total, params):
            p.grad = total
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        for group in self.param_groups:
            group["lr"] = self.rate(self.calls // ACCUMULATION - 1)
        super().step()


def optimizer(net):
    """Biases and norms do not decay."""
    named = [
        (p, name.endswith("bias") or "norm" in name.lower())
        for name, p in net.named_parameters()
    ]
    groups = [
        {"params": [p for p, spared in named if not spared]},
        {"params": [p for p, spared in named if spared], "weight_decay": 0.0},
    ]
    return AccumulatingLamb(groups, lr=LR, weight_decay=WEIGHT_DECAY)
