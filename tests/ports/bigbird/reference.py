"""A small BigBird: block-sparse attention, a pooler, a class and the masked tokens."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, TYPES, POSITIONS, CLASSES = 37, 2, 48, 3
HIDDEN, HEADS, LAYERS, INNER = 32, 4, 2, 48
HEAD_SIZE = HIDDEN // HEADS
BLOCK, BLOCKS, RANDOM = 4, 10, 2
PAD, IGNORE = 0, -100
PENALTY, NORM_EPS = -10000.0, 1e-12
TABLE_SEED = 62
CLASS_WEIGHT = 0.5
LR, BETAS, EPS, WEIGHT_DECAY = 5e-3, (0.9, 0.98), 1e-6, 0.1


def random_blocks(layer):
    """Blocks that a head's inner blocks see besides window and ends: [heads, inner, 2]."""
    generator = torch.Generator().manual_seed(TABLE_SEED + layer)
    table = torch.zeros(HEADS, BLOCKS - 2, RANDOM, dtype=torch.long)
    for head in range(HEADS):
        for row in range(1, BLOCKS - 1):
            far = [c for c in range(1, BLOCKS - 1) if abs(c - row) > 1]
            free = torch.tensor(far)
            order = torch.randperm(len(free), generator=generator)
            table[head, row - 1] = free[order[:RANDOM]]
    return table


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(TYPES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=NORM_EPS)

    def forward(self, input_ids, token_type_ids):
        positions = torch.arange(input_ids.shape[1])
        x = self.word_embeddings(input_ids)
        x = x + self.token_type_embeddings(token_type_ids)
        x = x + self.position_embeddings(positions)
        return self.norm(x)


class BlockSparseAttention(nn.Module):
    """Rows of blocks: the first, the second, those between, the last but one, the last.

    A bias of the keys would add the same to all scores of a query: there is none.
    """

    def __init__(self, layer):
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("rand_blocks", random_blocks(layer), persistent=False)

    def blocked(self, x):
        """(n, length, hidden) -> (n, heads, blocks, block, head size)."""
        return x.view(len(x), BLOCKS, BLOCK, HEADS, HEAD_SIZE).permute(0, 3, 1, 2, 4)

    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-1, -2) / HEAD_SIZE**0.5
        scores = scores + (1.0 - mask).unsqueeze(-2) * PENALTY
        return scores.softmax(dim=-1) @ v

    def forward(self, x, mask):
        q = self.blocked(self.query(x))
        k = self.blocked(self.key(x))
        v = self.blocked(self.value(x))
        m = mask.view(-1, 1, BLOCKS, BLOCK).expand(-1, HEADS, -1, -1)

        heads = torch.arange(HEADS)[:, None, None]
        rand_k = k[:, heads, self.rand_blocks].flatten(3, 4)
        rand_v = v[:, heads, self.rand_blocks].flatten(3, 4)
        rand_m = m[:, heads, self.rand_blocks].flatten(3, 4)

        def whole(row):
            return self.attend(
                q[:, :, row], k.flatten(2, 3), v.flatten(2, 3), m.flatten(2, 3)
            )

        def edge(row, near, rand_row):
            def seen(blocks, rand):
                return torch.cat([blocks[:, :, near].flatten(2, 3), rand], dim=2)

            return self.attend(
                q[:, :, row],
                seen(k, rand_k[:, :, rand_row]),
                seen(v, rand_v[:, :, rand_row]),
                seen(m, rand_m[:, :, rand_row]),
            )

        def middle(blocks, rand):
            inner = blocks[:, :, 2:-2]
            return torch.cat(
                [
                    blocks[:, :, :1].expand_as(inner),
                    blocks[:, :, 1:-3],
                    inner,
                    blocks[:, :, 3:-1],
                    rand[:, :, 1:-1],
                    blocks[:, :, -1:].expand_as(inner),
                ],
                dim=3,
            )

        first = whole(0).unsqueeze(2)
        second = edge(1, [0, 1, 2, -1], 0).unsqueeze(2)
        between = self.attend(
            q[:, :, 2:-2], middle(k, rand_k), middle(v, rand_v), middle(m, rand_m)
        )
        last_but_one = edge(-2, [0, -3, -2, -1], -1).unsqueeze(2)
        last = whole(-1).unsqueeze(2)
        context = torch.cat([first, second, between, last_but_one, last], dim=2)
        context = context.permute(0, 2, 3, 1, 4).reshape(x.shape)
        return context * mask.unsqueeze(-1)


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attention = BlockSparseAttention(layer)
        self.attention_output = nn.Linear(HIDDEN, HIDDEN)
        self.attention_norm = nn.LayerNorm(HIDDEN, eps=NORM_EPS)
        self.intermediate = nn.Linear(HIDDEN, INNER)
        self.output = nn.Linear(INNER, HIDDEN)
        self.output_norm = nn.LayerNorm(HIDDEN, eps=NORM_EPS)

    def forward(self, x, mask):
        context = self.attention_output(self.attention(x, mask))
        x = self.attention_norm(x + context)
        h = F.gelu(self.intermediate(x), approximate="tanh")
        return self.output_norm(x + self.output(h))


class PredictionHead(nn.Module):
    """The decoder's weight is the table of the words."""

    def __init__(self):
        super().__init__()
        self.transform = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=NORM_EPS)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x, table):
        x = F.gelu(self.transform(x), approximate="tanh")
        return F.linear(self.norm(x), table, self.bias)


class BigBird(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList([Layer(i) for i in range(LAYERS)])
        self.pooler = nn.Linear(HIDDEN, HIDDEN)
        self.classifier = nn.Linear(HIDDEN, CLASSES)
        self.predictions = PredictionHead()

    def forward(self, input_ids, token_type_ids, attention_mask):
        length = input_ids.shape[1]
        missing = BLOCK * BLOCKS - length
        input_ids = F.pad(input_ids, (0, missing), value=PAD)
        token_type_ids = F.pad(token_type_ids, (0, missing))
        mask = F.pad(attention_mask, (0, missing)).float()

        x = self.embeddings(input_ids, token_type_ids)
        for layer in self.layers:
            x = layer(x, mask)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        table = self.embeddings.word_embeddings.weight
        return {
            "class_logits": self.classifier(pooled),
            "token_logits": self.predictions(x[:, :length], table),
        }


def model():
    torch.manual_seed(2007)
    net = BigBird()
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.3)
            elif isinstance(module, nn.Linear):
                gain = 1.4 if name.endswith(("query", "key")) else 1.0
                module.weight.normal_(0, gain * module.in_features**-0.5)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
        net.predictions.bias.normal_(0, 0.3)
    return net


def batches():
    """Two walks through the words; the class is how the second goes on."""
    generator = torch.Generator().manual_seed(2062)
    made = []
    for size, length in ((4, 38), (3, 37)):
        label = torch.randint(0, 3, (size,), generator=generator)
        input_ids = torch.zeros(size, length, dtype=torch.long)
        token_type_ids = torch.zeros_like(input_ids)
        for row in range(size):
            first, second = torch.randint(9, 18, (2,), generator=generator).tolist()
            start = torch.randint(0, 33, (2,), generator=generator)
            stride = torch.stack([torch.tensor(2), 3 + 2 * label[row]])
            walks = (start[:, None] + stride[:, None] * torch.arange(18)) % 33 + 4
            end = first + second + 3
            input_ids[row, 0] = 1
            input_ids[row, 1 : first + 1] = walks[0, :first]
            input_ids[row, first + 1] = 2
            input_ids[row, first + 2 : end - 1] = walks[1, :second]
            input_ids[row, end - 1] = 2
            token_type_ids[row, first + 2 : end] = 1
        chosen = torch.rand(size, length, generator=generator) < 0.2
        chosen = chosen & (input_ids > 3)
        made.append(
            {
                "input_ids": input_ids.where(~chosen, 3),
                "token_type_ids": token_type_ids,
                "attention_mask": (input_ids != 0).long(),
                "token_labels": input_ids.where(chosen, -100),
                "label": label,
            }
        )
    return made


def forward(net, batch):
    return net(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])


def loss(output, batch):
    tokens = F.cross_entropy(
        output["token_logits"].flatten(0, 1),
        batch["token_labels"].flatten(),
        ignore_index=IGNORE,
    )
    return tokens + CLASS_WEIGHT * F.cross_entropy(
        output["class_logits"], batch["label"]
    )


def optimizer(net):
    """Biases and norms do not decay."""
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
