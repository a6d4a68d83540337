"""A small TextCNN: words, subwords and letters, four widths of windows, a highway layer."""

import torch
from torch import nn
from torch.nn import functional as F

PAD, UNK = 0, 1
VOCAB, BUCKETS, ALPHABET = 64, 240, 97
MIN_N, MAX_N = 3, 4
WIDTHS, FILTERS, CLASSES = (2, 3, 4, 5), 14, 5
CLASS_WEIGHTS = (0.6, 1.0, 1.7, 0.8, 1.4)
SMOOTHING = 0.1
LR, WARMUP, TOTAL_STEPS = 2e-2, 2, 12
WEIGHT_DECAY, MAX_NORM, MAX_ROW = 0.2, 2.0, 2.0


def fnv1a(grams):
    """(..., n) bytes -> hashes of 32 bits, of signed chars as in fastText."""
    h = torch.full(grams.shape[:-1], 2166136261)
    for byte in grams.unbind(-1):
        byte = torch.where(byte < 128, byte, byte + 0xFFFFFF00)
        h = ((h ^ byte) * 16777619) & 0xFFFFFFFF
    return h


def subwords(letters):
    """Buckets of all n-grams of <word>, and where each word (n, w) begins in them."""
    upper = (letters >= ord("A")) & (letters <= ord("Z"))
    marked = F.pad(torch.where(upper, letters + 32, letters), (1, 1))
    marked[:, 0] = ord("<")
    marked.scatter_(1, (letters != 0).sum(1, keepdim=True) + 1, ord(">"))
    ids, valid = [], []
    for n in range(MIN_N, MAX_N + 1):
        grams = marked.unfold(1, n, 1)
        ids.append(fnv1a(grams) % BUCKETS)
        valid.append(grams[..., -1] != 0)
    inside = torch.cat(valid, 1)
    counts = inside.sum(1)
    return torch.cat(ids, 1)[inside], counts.cumsum(0) - counts


class CharCNN(nn.Module):
    def __init__(self, dim, channels):
        super().__init__()
        self.embed = nn.Embedding(ALPHABET, dim, padding_idx=PAD)
        self.conv = nn.Conv1d(dim, channels, 3, padding=1)

    def forward(self, letters):
        index = (letters - 30).clamp(min=PAD).masked_fill(letters > 126, UNK)
        x = torch.tanh(self.conv(self.embed(index).transpose(1, 2)))
        x = x.masked_fill((letters == 0).unsqueeze(1), float("-inf"))
        return x.amax(dim=2)


class Highway(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.transform = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        g = torch.sigmoid(self.gate(x))
        return g * F.relu(self.transform(x)) + (1 - g) * x


class TextCNN(nn.Module):
    def __init__(self, dim=16, char_dim=8, char_channels=12):
        super().__init__()
        self.word_embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.subword_embed = nn.EmbeddingBag(BUCKETS, dim, mode="mean")
        self.char_cnn = CharCNN(char_dim, char_channels)
        self.convs = nn.ModuleList(
            [nn.Conv1d(2 * dim + char_channels, FILTERS, width) for width in WIDTHS]
        )
        self.highway = Highway(FILTERS * len(WIDTHS))
        self.fc = nn.Linear(FILTERS * len(WIDTHS), CLASSES)

    def embed(self, words, letters):
        b, n = words.shape
        letters = letters.flatten(0, 1)
        subword = self.subword_embed(*subwords(letters)).view(b, n, -1)
        char = self.char_cnn(letters).view(b, n, -1)
        x = torch.cat([self.word_embed(words), subword, char], dim=2)
        return x.masked_fill((words == PAD).unsqueeze(2), 0.0)

    def forward(self, words, letters):
        words = words.masked_fill(words >= VOCAB, UNK)
        lengths = (words != PAD).sum(1)
        x = self.embed(words, letters.long()).transpose(1, 2)
        pooled = []
        for conv, width in zip(self.convs, WIDTHS):
            y = F.relu(conv(x))
            # A sentence shorter than the window has one, which ends in padding.
            windows = (lengths - width + 1).clamp(min=1)
            outside = torch.arange(y.shape[2]) >= windows.unsqueeze(1)
            y = y.masked_fill(outside.unsqueeze(1), float("-inf"))
            pooled.append(y.amax(dim=2))
        return self.fc(self.highway(torch.cat(pooled, dim=1)))


def model():
    torch.manual_seed(1408)
    net = TextCNN()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "embed" in name:
                p[0 if "subword" in name else 1 :].normal_(0, 0.7)
            elif p.ndim == 1:
                p.normal_(0, 0.2)
            else:
                nn.init.xavier_uniform_(p)
                p.mul_(1.5)
        net.highway.gate.bias.sub_(0.5)
    return net


def batches():
    """Made-up words, each topic with its own; the vocabulary is what occurs most often."""
    generator = torch.Generator().manual_seed(1746)

    def draw(high, count):
        return torch.randint(0, high, (count,), generator=generator).tolist()

    syllables = "ba ce dü fo gé hi ka lo nu pa ri so tu va an er".split()
    lexicon = ["a", "o", "y"]
    for size in draw(4, 140):
        lexicon.append("".join(syllables[i] for i in draw(16, size + 1)))
    sentences = []
    for number in range(54):
        topic, length = number * 3 % 5, 2 + draw(13, 1)[0]
        rank = torch.rand(length, generator=generator) ** 2 * 60
        own = torch.rand(length, generator=generator) < 0.5
        index = torch.where(own, 18 * topic + 35 + rank * 0.5, rank).long()
        sentences.append([lexicon[i] for i in index.tolist()])

    corpus = [word for sentence in sentences for word in sentence]
    common = sorted(set(corpus), key=lambda word: (-corpus.count(word), word))
    ids = {word: 2 + i for i, word in enumerate(common)}
    made = []
    for numbers in (range(7), range(7, 13), range(13, 21)):
        texts = [sentences[number] for number in numbers]
        longest = max(map(len, texts)) // 4 * 4 + 4
        words = torch.zeros(len(texts), longest, dtype=torch.long)
        letters = torch.zeros(len(texts), longest, 8, dtype=torch.uint8)
        for row, text in enumerate(texts):
            words[row, : len(text)] = torch.tensor([ids[word] for word in text])
            for i, word in enumerate([text[0].capitalize(), *text[1:]]):
                code = torch.tensor(list(word.encode("latin-1")), dtype=torch.uint8)
                letters[row, i, : len(word)] = code
        label = torch.tensor([number * 3 % 5 for number in numbers])
        made.append({"words": words, "letters": letters, "label": label})
    return made


def forward(net, batch):
    return net(batch["words"], batch["letters"])


def loss(output, batch):
    weight = output.new_tensor(CLASS_WEIGHTS)
    return F.cross_entropy(
        output, batch["label"], weight=weight, label_smoothing=SMOOTHING
    )


class WarmupAdamW(torch.optim.AdamW):
    """Clips by norm; the rate rises and falls in lines; rows of the last layer stay short."""

    done = 0

    def __init__(self, groups, last):
        super().__init__(groups, lr=LR, betas=(0.9, 0.98), eps=1e-8)
        self.last = last

    def rate(self):
        if self.done < WARMUP:
            return LR * (self.done + 1) / WARMUP
        return LR * (TOTAL_STEPS - self.done) / (TOTAL_STEPS - WARMUP)

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.done += 1
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        result = super().step(closure)
        with torch.no_grad():
            norm = self.last.norm(dim=1, keepdim=True)
            self.last.mul_((MAX_ROW / norm).clamp(max=1))
        return result


def optimizer(net):
    """Neither biases nor embeddings decay."""
    named = list(net.named_parameters())
    plain = [p for name, p in named if p.ndim == 1 or "embed" in name]
    decays = [p for name, p in named if p.ndim > 1 and "embed" not in name]
    groups = [
        {"params": decays, "weight_decay": WEIGHT_DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    return WarmupAdamW(groups, net.fc.weight)
