"""A small BiDAF: words and characters, attention both ways, pointers to both ends."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD, UNK = 0, 1
WORDS, CHARS = 48, 28
HIDDEN = 10
LR, EMBED_SCALE, RHO = 1.0, 0.4, 0.95
WARMUP, DECAY, MAX_NORM = 2, 0.8, 2.0
EMA_DECAY = 0.99


def masked_softmax(logits, mask, dim):
    return F.softmax(logits.masked_fill(~mask, -1e9), dim=dim)


class CharCNN(nn.Module):
    def __init__(self, dim, channels, width):
        super().__init__()
        self.embed = nn.Embedding(CHARS, dim, padding_idx=PAD)
        self.conv = nn.Conv1d(dim, channels, width)

    def forward(self, chars):
        b, n, letters = chars.shape
        x = self.embed(chars.view(b * n, letters))
        x = F.relu(self.conv(x.transpose(1, 2)))
        return x.amax(dim=2).view(b, n, -1)


class Highway(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.transforms = nn.ModuleList([nn.Linear(dim, dim) for _ in range(layers)])
        self.gates = nn.ModuleList([nn.Linear(dim, dim) for _ in range(layers)])

    def forward(self, x):
        for transform, gate in zip(self.transforms, self.gates):
            g = torch.sigmoid(gate(x))
            x = g * F.relu(transform(x)) + (1 - g) * x
        return x


class Encoder(nn.Module):
    """The second bias only opens the forget gates; it is not trained."""

    def __init__(self, input_size, layers=1):
        super().__init__()
        self.rnn = nn.LSTM(
            input_size, HIDDEN, layers, batch_first=True, bidirectional=True
        )
        for name, p in self.rnn.named_parameters():
            if "bias_hh" in name:
                p.requires_grad_(False)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        packed, _ = self.rnn(packed)
        x, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return x


class BiAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.c_weight = nn.Parameter(torch.empty(dim))
        self.q_weight = nn.Parameter(torch.empty(dim))
        self.cq_weight = nn.Parameter(torch.empty(dim))

    def similarity(self, c, q):
        s = torch.bmm(c * self.cq_weight, q.transpose(1, 2))
        return s + (c @ self.c_weight).unsqueeze(2) + (q @ self.q_weight).unsqueeze(1)

    def forward(self, c, q, c_mask, q_mask):
        s = self.similarity(c, q).masked_fill(~q_mask.unsqueeze(1), -1e9)
        c2q = torch.bmm(F.softmax(s, dim=2), q)
        b = masked_softmax(s.amax(dim=2), c_mask, dim=1)
        q2c = torch.bmm(b.unsqueeze(1), c)
        g = torch.cat([c, c2q, c * c2q, c * q2c], dim=2)
        return g * c_mask.unsqueeze(2)


class BiDAF(nn.Module):
    def __init__(self, word_dim=16, char_dim=6, char_channels=12):
        super().__init__()
        dim, two = word_dim + char_channels, 2 * HIDDEN
        self.word_embed = nn.Embedding(WORDS, word_dim, padding_idx=PAD)
        self.char_cnn = CharCNN(char_dim, char_channels, 3)
        self.highway = Highway(dim, 2)
        self.encoder = Encoder(dim)
        self.attention = BiAttention(two)
        self.modelling = Encoder(4 * two, layers=2)
        self.end_encoder = Encoder(7 * two)
        self.start = nn.Linear(5 * two, 1, bias=False)
        self.end = nn.Linear(5 * two, 1, bias=False)

    def encode(self, words, chars, lengths):
        words = words.masked_fill(words >= WORDS, UNK)
        x = torch.cat([self.word_embed(words), self.char_cnn(chars)], dim=2)
        return self.encoder(self.highway(x), lengths)

    def forward(self, passage, passage_chars, question, question_chars):
        c_mask, q_mask = passage != PAD, question != PAD
        lengths = c_mask.sum(1)
        c = self.encode(passage, passage_chars, lengths)
        q = self.encode(question, question_chars, q_mask.sum(1))

        g = self.attention(c, q, c_mask, q_mask)
        m = self.modelling(g, lengths)
        start = self.start(torch.cat([g, m], dim=2)).squeeze(2)

        p = masked_softmax(start, c_mask, dim=1)
        guess = torch.bmm(p.unsqueeze(1), m).expand_as(m)
        m2 = self.end_encoder(torch.cat([g, m, guess, m * guess], dim=2), lengths)
        end = self.end(torch.cat([g, m2], dim=2)).squeeze(2)
        return start, end


class EMA(nn.Module):
    """Shadows of what is trained; the average is fast at the start."""

    def __init__(self, net):
        super().__init__()
        self.num_updates = 0
        for name, p in net.named_parameters():
            if p.requires_grad:
                self.register_buffer(name.replace(".", "_"), p.detach().clone())

    @torch.no_grad()
    def update(self, net):
        self.num_updates += 1
        decay = min(EMA_DECAY, (1 + self.num_updates) / (10 + self.num_updates))
        for name, p in net.named_parameters():
            if p.requires_grad:
                shadow = getattr(self, name.replace(".", "_"))
                shadow.mul_(decay).add_(p, alpha=1 - decay)


def model():
    torch.manual_seed(1611)
    net = BiDAF()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "bias_hh" in name:
                p.zero_()
                p[HIDDEN : 2 * HIDDEN] = 1
            elif "embed" in name:
                p[1:].normal_(0, 0.7)
            elif "attention" in name:
                p.normal_(0, 1.5)
            elif p.ndim == 1:
                p.normal_(0, 0.2)
            else:
                nn.init.xavier_uniform_(p)
                p.mul_(3.0 if "rnn" in name else 1.8)
    net.ema = EMA(net)
    return net


def batches():
    """A question repeats words from around the answer; some passages have none.

    Offsets are the characters of each token, from and to; some tokens touch.
    """
    generator = torch.Generator().manual_seed(1614)
    letters = torch.randint(2, 9, (64, 1), generator=generator)
    spelling = torch.randint(1, 28, (64, 8), generator=generator)
    spelling = spelling * (torch.arange(8) < letters)
    spelling[0] = 0
    made = []
    for lengths in ((13, 17, 9, 15), (12, 8, 16), (10, 18, 14, 7, 11)):
        size, longest = len(lengths), max(lengths)
        passage = torch.zeros(size, longest, dtype=torch.long)
        question = torch.zeros(size, 7, dtype=torch.long)
        offsets = torch.zeros(size, longest, 2, dtype=torch.long)
        answer = torch.full((size, 2), -1)
        for n, length in enumerate(lengths):
            words = 2 + 61 * torch.rand(length, generator=generator) ** 1.5
            passage[n, :length] = words.long()
            long = letters[passage[n, :length], 0]
            spaces = (torch.rand(length, generator=generator) < 0.4).long()
            ends = torch.cumsum(long + spaces, 0) - spaces
            offsets[n, :length] = torch.stack([ends - long, ends], 1)

            first = int(torch.randint(1, length - 4, (), generator=generator))
            last = first + int(torch.randint(1, 4, (), generator=generator))
            asked = int(torch.randint(3, 8, (), generator=generator))
            near = torch.arange(asked) + max(0, min(first - 2, length - asked))
            new = torch.randint(2, 48, (asked,), generator=generator)
            mixed = torch.rand(asked, generator=generator) < 0.6
            question[n, :asked] = torch.where(mixed, passage[n, near], new)
            if n != size - 2:
                answer[n] = torch.stack([offsets[n, first, 0], offsets[n, last, 1]])
        made.append(
            {
                "passage": passage,
                "passage_chars": spelling[passage],
                "question": question,
                "question_chars": spelling[question],
                "offsets": offsets,
                "answer": answer,
            }
        )
    return made


def forward(net, batch):
    start, end = net(
        batch["passage"],
        batch["passage_chars"],
        batch["question"],
        batch["question_chars"],
    )
    return {"start": start, "end": end}


def token_span(offsets, answer):
    """First and last token of the answer, -1 where there is none."""
    inside = (offsets[..., 0] < answer[:, 1:]) & (offsets[..., 1] > answer[:, :1])
    first = inside.int().argmax(dim=1)
    last = inside.shape[1] - 1 - inside.int().flip(1).argmax(dim=1)
    found = inside.any(dim=1)
    return first.masked_fill(~found, -1), last.masked_fill(~found, -1)


def loss(output, batch):
    padding = batch["passage"] == PAD
    first, last = token_span(batch["offsets"], batch["answer"])
    start = output["start"].masked_fill(padding, -1e9)
    end = output["end"].masked_fill(padding, -1e9)
    start_loss = F.cross_entropy(start, first, ignore_index=-1)
    end_loss = F.cross_entropy(end, last, ignore_index=-1)
    return start_loss + end_loss


class AveragedAdadelta(torch.optim.Adadelta):
    """Clips by norm; the rate rises and decays; the average follows each step."""

    def __init__(self, groups, net):
        super().__init__(groups, lr=LR, rho=RHO, eps=1e-6)
        self.net = net
        self.done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        self.done += 1
        rate = LR * min(1, self.done / WARMUP) * DECAY ** max(0, self.done - WARMUP)
        for group in self.param_groups:
            group["lr"] = rate * group["lr_scale"]
        result = super().step(closure)
        self.net.ema.update(self.net)
        return result


def optimizer(net):
    """Embeddings learn slowly."""
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    slow = [p for name, p in trained if "embed" in name]
    fast = [p for name, p in trained if "embed" not in name]
    groups = [
        {"params": slow, "lr_scale": EMBED_SCALE},
        {"params": fast, "lr_scale": 1.0},
    ]
    return AveragedAdadelta(groups, net)
