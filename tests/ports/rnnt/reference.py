"""A small RNN transducer: LSTMs over log-mel frames, one over tokens, a joint network."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BINS, STACK = 16, 2
VOCAB, BLANK = 13, 0  # the blank, which also starts a sentence, and twelve tokens
ENCODER_DIM, EMBED_DIM, PREDICTOR_DIM, JOINT_DIM = 64, 24, 56, 48
LOG_GUARD, STD_GUARD = 1e-3, 1e-5
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.98), 1e-6, 0.2
WARMUP, MAX_NORM = 2, 5.0


class Encoder(nn.Module):
    """Two layers of LSTM, each with a layer norm behind; nothing comes from padding."""

    def __init__(self):
        super().__init__()
        sizes = (BINS * STACK, ENCODER_DIM)
        self.lstms = nn.ModuleList([nn.LSTM(size, ENCODER_DIM) for size in sizes])
        self.norms = nn.ModuleList([nn.LayerNorm(ENCODER_DIM) for _ in sizes])

    def forward(self, x, lengths):
        packed = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        for lstm, norm in zip(self.lstms, self.norms):
            packed, _ = lstm(packed)
            packed = packed._replace(data=norm(packed.data))
        x, _ = pad_packed_sequence(packed, batch_first=True)
        return x


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, EMBED_DIM)
        self.lstm = nn.LSTM(EMBED_DIM, PREDICTOR_DIM, batch_first=True)

    def forward(self, labels):
        tokens = F.pad(labels, (1, 0), value=BLANK)
        x, _ = self.lstm(self.embed(tokens))
        return x


class Joiner(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc_proj = nn.Linear(ENCODER_DIM, JOINT_DIM)
        self.pred_proj = nn.Linear(PREDICTOR_DIM, JOINT_DIM, bias=False)
        self.out = nn.Linear(JOINT_DIM, VOCAB)

    def forward(self, enc, pred):
        enc = self.enc_proj(enc).unsqueeze(2)
        pred = self.pred_proj(pred).unsqueeze(1)
        return self.out(torch.tanh(enc + pred))


class Transducer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.predictor = Predictor()
        self.joiner = Joiner()

    def forward(self, x, lengths, labels):
        """Return logits (batch, steps, labels + 1, vocabulary)."""
        return self.joiner(self.encoder(x, lengths), self.predictor(labels))


def model():
    """As after some training: forget gates are open, norms have gains of their own."""
    torch.manual_seed(2012)
    net = Transducer()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LSTM):
                for name, p in module.named_parameters():
                    p.mul_(1.6)
                    if "bias" in name:
                        p.chunk(4)[1].add_(0.4)
            elif isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear):
                module.weight.mul_(1.8)
        net.predictor.embed.weight.mul_(0.8)
    return net


def batches():
    """Each token is a chord of two bins that lasts some frames; zeros behind the end."""
    generator = torch.Generator().manual_seed(1211)
    kinds = (
        [(23, 4), (17, 3), (29, 6), (12, 2)],
        [(19, 4), (25, 5), (14, 3), (22, 2)],
        [(27, 5), (16, 4), (13, 1), (20, 6)],
    )
    made = []
    for kind in kinds:
        frames, sizes = torch.tensor(kind).unbind(1)
        labels = torch.randint(1, 13, (4, int(sizes.max())), generator=generator)
        labels = labels * (torch.arange(labels.shape[1]) < sizes[:, None])
        mel = torch.rand(4, int(frames.max()), 16, generator=generator) ** 3
        for i, (n, size) in enumerate(kind):
            for j, label in enumerate(labels[i, :size].tolist()):
                start, stop = j * n // size, (j + 1) * n // size
                mel[i, start:stop, label] *= 30
                mel[i, start:stop, (5 * label + 3) % 16] *= 12
            silent = int(torch.randint(1, n - 1, (), generator=generator))
            mel[i, silent] = 0.0
        mel = mel * (torch.arange(mel.shape[1]) < frames[:, None])[:, :, None]
        made.append({"mel": mel, "frames": frames, "labels": labels, "sizes": sizes})
    return made


def features(batch):
    """Logarithms, each bin with mean 0 and deviation 1 over its utterance."""
    x = torch.log(batch["mel"] + LOG_GUARD)
    normed = torch.zeros_like(x)
    for i, n in enumerate(batch["frames"].tolist()):
        utterance = x[i, :n]
        mean, std = utterance.mean(dim=0), utterance.std(dim=0)
        normed[i, :n] = (utterance - mean) / (std + STD_GUARD)
    return normed


def stacked(x):
    """Two frames become one; a zero frame goes with the last where it is alone."""
    x = F.pad(x, (0, 0, 0, x.shape[1] % STACK))
    return x.reshape(x.shape[0], -1, STACK * BINS)


def steps(frames):
    return (frames + STACK - 1) // STACK


def forward(net, batch):
    return net(stacked(features(batch)), steps(batch["frames"]), batch["labels"])


def log_likelihood(logits, labels, lengths, sizes):
    """The forward algorithm; what lies behind an utterance's corner is not asked for."""
    log_probs = F.log_softmax(logits, dim=-1)
    blank = log_probs[..., BLANK]
    index = labels[:, None, :, None].expand(-1, logits.shape[1], -1, -1)
    emit = log_probs[:, :, :-1].gather(3, index).squeeze(3)

    alpha = []
    for t in range(blank.shape[1]):
        row = []
        for u in range(blank.shape[2]):
            if t == 0 and u == 0:
                row.append(torch.zeros_like(blank[:, 0, 0]))
            elif t == 0:
                row.append(row[u - 1] + emit[:, t, u - 1])
            elif u == 0:
                row.append(alpha[t - 1][u] + blank[:, t - 1, u])
            else:
                stay = alpha[t - 1][u] + blank[:, t - 1, u]
                move = row[u - 1] + emit[:, t, u - 1]
                row.append(torch.logaddexp(stay, move))
        alpha.append(row)
    lattice = torch.stack([torch.stack(row, dim=1) for row in alpha], dim=1)

    corner = torch.arange(len(sizes)), lengths - 1, sizes
    return lattice[corner] + blank[corner]


def loss(output, batch):
    """Over all labels of the batch."""
    lengths, sizes = steps(batch["frames"]), batch["sizes"]
    total = -log_likelihood(output, batch["labels"], lengths, sizes).sum()
    return total / sizes.sum()


class WarmupAdamW(torch.optim.AdamW):
    """Clips by norm; the rate rises in a line, then falls with the root of the step."""

    done = 0

    def rate(self):
        step = self.done + 1
        return LR * min(step / WARMUP, (WARMUP / step) ** 0.5)

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.done += 1
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    """Neither biases nor norms decay."""
    params = list(net.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    return WarmupAdamW(groups, lr=LR, betas=BETAS, eps=EPS)
