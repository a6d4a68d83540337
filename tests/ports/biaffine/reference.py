"""A small biaffine parser: words and letters, a BiLSTM, scores of arcs, labels and directions."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD, UNK, ROOT = 0, 1, 2
KNOWN, WORDS, LETTERS, LABELS = 41, 61, 27, 9
WORD_DIM, LETTER_DIM, LETTER_OUT, KERNEL = 20, 10, 14, 3
HIDDEN, LAYERS = 18, 2
ARC_DEP, ARC_HEAD = 22, 24
LABEL_DEP, LABEL_HEAD = 15, 12
ORDER_DEP, ORDER_HEAD = 8, 5
SLOPE = 0.1
LABEL_WEIGHT, ORDER_WEIGHT = 0.7, 0.5
LR, BETAS, EPS, CLIP_NORM = 2e-3, (0.9, 0.9), 1e-6, 1.0
DECAY, DECAY_STEPS = 0.75, 50


class LetterCNN(nn.Module):
    """A vector for each word from its letters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, LETTER_DIM, padding_idx=PAD)
        self.conv = nn.Conv1d(LETTER_DIM, LETTER_OUT, KERNEL, padding=KERNEL // 2)

    def forward(self, letters):
        n, length, size = letters.shape
        letters = letters.flatten(0, 1)
        x = self.embed(letters).transpose(1, 2)
        x = torch.tanh(self.conv(x))
        x = x.masked_fill(letters.eq(PAD).unsqueeze(1), -1e4).amax(dim=2)
        x = x.masked_fill(letters.eq(PAD).all(dim=1, keepdim=True), 0.0)
        return x.view(n, length, -1)


class BiLSTM(nn.Module):
    """The states before the first word and behind the last one are learned.

    The second bias only opens the forget gates; it is not trained.
    """

    def __init__(self, inputs):
        super().__init__()
        self.lstm = nn.LSTM(
            inputs, HIDDEN, LAYERS, batch_first=True, bidirectional=True
        )
        for name, p in self.lstm.named_parameters():
            if "bias_hh" in name:
                p.requires_grad_(False)
        self.h_init = nn.Parameter(torch.zeros(2 * LAYERS, 1, HIDDEN))
        self.c_init = nn.Parameter(torch.zeros(2 * LAYERS, 1, HIDDEN))

    def forward(self, x, lengths):
        n, length, _ = x.shape
        state = [s.expand(-1, n, -1).contiguous() for s in (self.h_init, self.c_init)]
        x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = self.lstm(x, tuple(state))
        return pad_packed_sequence(x, batch_first=True, total_length=length)[0]


class MLP(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.linear = nn.Linear(inp, out)

    def forward(self, x):
        return F.leaky_relu(self.linear(x), SLOPE)


class Biaffine(nn.Module):
    """[n, d, dep], [n, h, head] -> [n, d, h, out]."""

    def __init__(self, dep, head, out, bias_head=True):
        super().__init__()
        self.bias_head = bias_head
        self.weight = nn.Parameter(torch.zeros(out, dep + 1, head + bias_head))

    def forward(self, dep, head):
        dep = torch.cat([dep, torch.ones_like(dep[..., :1])], dim=-1)
        if self.bias_head:
            head = torch.cat([head, torch.ones_like(head[..., :1])], dim=-1)
        return torch.einsum("ndi,oij,nhj->ndho", dep, self.weight, head)


class Parser(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(KNOWN, WORD_DIM, padding_idx=PAD)
        self.register_buffer("pretrained", torch.zeros(WORDS, WORD_DIM))
        self.letters = LetterCNN()
        self.norm = nn.LayerNorm(WORD_DIM + LETTER_OUT)
        self.encoder = BiLSTM(WORD_DIM + LETTER_OUT)
        self.arc_dep = MLP(2 * HIDDEN, ARC_DEP)
        self.arc_head = MLP(2 * HIDDEN, ARC_HEAD)
        self.label_dep = MLP(2 * HIDDEN, LABEL_DEP)
        self.label_head = MLP(2 * HIDDEN, LABEL_HEAD)
        self.order_dep = MLP(2 * HIDDEN, ORDER_DEP)
        self.order_head = MLP(2 * HIDDEN, ORDER_HEAD)
        self.arcs = Biaffine(ARC_DEP, ARC_HEAD, 1, bias_head=False)
        self.labels = Biaffine(LABEL_DEP, LABEL_HEAD, LABELS)
        self.order = Biaffine(ORDER_DEP, ORDER_HEAD, 1)

    def embed(self, words, letters):
        known = words.masked_fill(words >= KNOWN, UNK)
        x = self.words(known) + F.embedding(words, self.pretrained)
        return self.norm(torch.cat([x, self.letters(letters)], dim=-1))

    def forward(self, words, letters):
        """A positive order says that the head stands behind its dependent."""
        x = self.encoder(self.embed(words, letters), words.ne(PAD).sum(dim=1))
        arcs = self.arcs(self.arc_dep(x), self.arc_head(x)).squeeze(-1)
        arcs = arcs / ARC_HEAD**0.5
        labels = self.labels(self.label_dep(x), self.label_head(x))
        order = self.order(self.order_dep(x), self.order_head(x)).squeeze(-1)
        place = torch.arange(words.shape[1])
        side = torch.sign(place[None, :] - place[:, None])
        arcs = arcs + F.logsigmoid(order * side).detach()
        return {"arcs": arcs, "labels": labels, "order": order}


def model():
    torch.manual_seed(1611)
    net = Parser()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if name == "norm.weight":
                value.uniform_(0.6, 1.4)
            elif "bias_hh" in name:
                value.zero_()
                value[HIDDEN : 2 * HIDDEN] = 0.8
            elif "bias" in name:
                value.normal_(0, 0.2)
            elif name.endswith("_init"):
                value.normal_(0, 0.5)
            elif "lstm" in name:
                value.normal_(0, 1.3 * value.shape[1] ** -0.5)
            elif name.endswith("linear.weight"):
                nn.init.kaiming_normal_(value)
            elif isinstance(net.get_submodule(name.rpartition(".")[0]), Biaffine):
                value.normal_(0, 0.25)
        net.words.weight.mul_(0.2)
        net.pretrained.normal_(0, 0.2)
        net.letters.embed.weight.mul_(1.5)
    return net


def batches():
    """Sentences behind a root; words near each other are more often tied."""
    generator = torch.Generator().manual_seed(1612)
    made = []
    for size, length, letters in ((4, 12, 7), (3, 11, 5)):
        lengths = length - 2 * torch.randperm(size, generator=generator)
        place = torch.arange(length)
        mask = place < lengths[:, None]
        words = torch.randint(3, 61, (size, length), generator=generator) * mask
        words[:, 0] = 2
        spelled = torch.randint(2, letters + 1, (size, length), generator=generator)
        spelled[:, 0] = 1
        chars = torch.randint(1, 27, (size, length, letters), generator=generator)
        inside = (torch.arange(letters) < spelled[..., None]) & mask[..., None]
        away = (place[:, None] - place).abs()
        odds = torch.exp(-0.4 * away) * (away > 0) * mask[:, None]
        heads = torch.multinomial(odds.flatten(0, 1), 1, generator=generator)
        heads = heads.view(size, length) * mask
        heads[:, 0] = 0
        labels = (words + 2 * (heads > place)) % 9
        made.append(
            {
                "words": words,
                "letters": chars * inside,
                "heads": heads,
                "labels": labels,
            }
        )
    return made


def forward(net, batch):
    return net(batch["words"], batch["letters"])


def loss(output, batch):
    """Neither the root nor padding has a head; a word is not its own head."""
    words, heads = batch["words"], batch["heads"]
    inside = words.ne(PAD)
    keep = inside & words.ne(ROOT)
    itself = torch.eye(words.shape[1], dtype=torch.bool)
    arcs = output["arcs"].masked_fill(~inside.unsqueeze(1) | itself, -torch.inf)
    gold = heads[keep]
    row = torch.arange(len(gold))
    arc_loss = F.cross_entropy(arcs[keep], gold)
    label_loss = F.cross_entropy(
        output["labels"][keep][row, gold], batch["labels"][keep]
    )
    behind = (heads > torch.arange(words.shape[1]))[keep].float()
    order = output["order"][keep][row, gold]
    order_loss = F.binary_cross_entropy_with_logits(order, behind)
    return arc_loss + LABEL_WEIGHT * label_loss + ORDER_WEIGHT * order_loss


class AnnealedAdam(torch.optim.Adam):
    """Clips the gradients; the rate falls by a quarter every so many steps, smoothly."""

    done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        for group in self.param_groups:
            group["lr"] = LR * DECAY ** (self.done / DECAY_STEPS)
        self.done += 1
        return super().step(closure)


def optimizer(net):
    return AnnealedAdam(net.parameters(), lr=LR, betas=BETAS, eps=EPS)
