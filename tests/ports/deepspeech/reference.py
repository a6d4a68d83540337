"""A small Deep Speech 2: convolutions over spectrograms, recurrence both ways, CTC."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BINS, CLASSES, HIDDEN = 16, 8, 12
CEILING = 2.0
LR, MOMENTUM, DECAY, MAX_NORM = 0.02, 0.9, 5e-3, 1.0


class ConvBlock(nn.Module):
    """Frames behind an utterance's end are zero before and after the norm."""

    def __init__(self, inp, out, kernel, stride):
        super().__init__()
        padding = tuple(k // 2 for k in kernel)
        self.conv = nn.Conv2d(inp, out, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x, lengths):
        x = self.conv(x)
        outside = torch.arange(x.shape[3]) >= lengths[:, None]
        outside = outside[:, None, None]
        x = self.norm(x.masked_fill(outside, 0.0))
        x = F.hardtanh(x, 0.0, CEILING)
        return x.masked_fill(outside, 0.0)


class RecurrentBlock(nn.Module):
    def __init__(self, inp, norm):
        super().__init__()
        self.norm = nn.BatchNorm1d(inp) if norm else None
        self.gru = nn.GRU(inp, HIDDEN, bidirectional=True)

    def forward(self, packed):
        if self.norm is not None:
            packed = packed._replace(data=self.norm(packed.data))
        return self.gru(packed)[0]


class DeepSpeech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = ConvBlock(1, 6, (7, 5), (2, 2))
        self.conv2 = ConvBlock(6, 8, (5, 3), (2, 1))
        self.rnn1 = RecurrentBlock(8 * BINS // 4, norm=False)
        self.rnn2 = RecurrentBlock(2 * HIDDEN, norm=True)
        self.head = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x, lengths):
        """x: (batch, bins, frames); lengths: frames that come out of the first layer."""
        x = self.conv1(x.unsqueeze(1), lengths)
        x = self.conv2(x, lengths)
        x = x.flatten(1, 2).permute(2, 0, 1)
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        packed = self.rnn2(self.rnn1(packed))
        x, _ = pad_packed_sequence(packed)
        return F.log_softmax(self.head(x), dim=-1)


def model():
    torch.manual_seed(2015)
    net = DeepSpeech()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.weight.uniform_(0.7, 1.5)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
        net.head.weight.mul_(2)
    return net


def batches():
    """Tones that last some frames each; some letters come twice."""
    generator = torch.Generator().manual_seed(1512)
    made = []
    kinds = ([(24, 4), (30, 6), (11, 2), (17, 3)], [(19, 4), (26, 5), (13, 2)])
    for kind in kinds:
        frames, sizes = torch.tensor(kind).unbind(1)
        labels = torch.randint(
            1, 8, (len(sizes), int(sizes.max())), generator=generator
        )
        labels[:, 1] = labels[:, 0]
        labels = labels * (torch.arange(labels.shape[1]) < sizes[:, None])
        sound = torch.rand(len(sizes), 16, int(frames.max()), generator=generator)
        for i, (n, size) in enumerate(kind):
            for j, label in enumerate(labels[i, :size].tolist()):
                start, stop = j * n // size, (j + 1) * n // size
                sound[i, 2 * label - 1 : 2 * label + 1, start:stop] *= 20
        sound = sound * (torch.arange(sound.shape[2]) < frames[:, None, None])
        made.append(
            {"sound": sound, "frames": frames, "labels": labels, "sizes": sizes}
        )
    return made


def features(batch):
    """Logarithms, with mean 0 and deviation 1 over each utterance."""
    x = torch.log1p(batch["sound"])
    normed = torch.zeros_like(x)
    for i, n in enumerate(batch["frames"].tolist()):
        utterance = x[i, :, :n]
        normed[i, :, :n] = (utterance - utterance.mean()) / utterance.std()
    return normed


def output_lengths(batch):
    return (batch["frames"] - 1) // 2 + 1


def forward(net, batch):
    return net(features(batch), output_lengths(batch))


def loss(output, batch):
    return F.ctc_loss(output, batch["labels"], output_lengths(batch), batch["sizes"])


class ClippedSGD(torch.optim.SGD):
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in net.parameters() if p.ndim == 1]},
    ]
    return ClippedSGD(groups, lr=LR, momentum=MOMENTUM, nesterov=True)
