"""A small CRNN: convolutions over a line of text, recurrence both ways, CTC."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

HEIGHT, CLASSES, BLANK = 16, 11, 0  # the blank and ten signs
HIDDEN = 48
LR, RHO, EPS = 1.5, 0.95, 1e-6
WEIGHT_DECAY, MAX_NORM = 0.01, 3.0
WARMUP, TOTAL, POWER = 2, 12, 0.9


class ConvBlock(nn.Module):
    def __init__(self, inp, out, kernel_size=3, padding=1):
        super().__init__()
        self.conv = nn.Conv2d(inp, out, kernel_size, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class BidirectionalLSTM(nn.Module):
    def __init__(self, inp, hidden, out):
        super().__init__()
        self.rnn = nn.LSTM(inp, hidden, bidirectional=True)
        self.embedding = nn.Linear(2 * hidden, out)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], total_length=len(x))
        return self.embedding(y)


class CRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            ConvBlock(16, 32),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            ConvBlock(32, 48),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            ConvBlock(48, 64, kernel_size=2, padding=0),
        )
        self.rnn = nn.ModuleList(
            [
                BidirectionalLSTM(64, HIDDEN, HIDDEN),
                BidirectionalLSTM(HIDDEN, HIDDEN, CLASSES),
            ]
        )

    def forward(self, x, lengths):
        """(lines, 1, height, width) -> (steps, lines, classes)"""
        x = self.cnn(x)
        x = x.squeeze(2).permute(2, 0, 1)
        for layer in self.rnn:
            x = layer(x, lengths)
        return x


def model():
    """As after some training: with statistics, and a forget gate that is open."""
    torch.manual_seed(1507)
    net = CRNN()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2.0)
            elif isinstance(module, nn.LSTM):
                for name, p in module.named_parameters():
                    p.mul_(1.5)
                    if "bias" in name:
                        p[HIDDEN : 2 * HIDDEN].add_(0.4)
            elif isinstance(module, nn.Linear):
                module.weight.mul_(2)
    return net


def batches():
    """Lines of made-up signs in ink on paper, zeros behind; one is cut off too early."""
    generator = torch.Generator().manual_seed(1705)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    signs = (rand(11, 4, 2) < 0.55).repeat_interleave(2, 1).repeat_interleave(2, 2)
    texts = (
        ([3, 7, 7, 1, 10, 4], [5, 9], [2, 2, 8, 6], [1, 4, 6, 9, 3], [8, 10, 5]),
        ([6, 1, 1], [9, 4, 2, 2, 7, 10, 5], [3, 8], [7, 5, 10, 6]),
        ([4, 4, 9], [10, 3, 1, 8, 5, 6], [2, 7, 7, 9], [6, 8]),
    )
    cuts = ({3: 7}, {}, {1: 9})
    made = []
    for lines, cut in zip(texts, cuts):
        drawn = []
        for number, text in enumerate(lines):
            line = torch.zeros(16, 6 * len(text) + 2 + int(3 * rand(1)))
            for i, sign in enumerate(text):
                top, left = 2 + int(4 * rand(1)), 1 + 6 * i + int(2 * rand(1))
                line[top : top + 8, left : left + 4] += signs[sign]
            ink = 150 + 80 * rand(1)
            line = 235 - ink * line + 14 * torch.randn(line.shape, generator=generator)
            drawn.append(line[:, : cut.get(number, line.shape[1])])
        width = torch.tensor([line.shape[1] for line in drawn])
        longest = int(width.max()) // 2 * 2 + 2
        image = torch.zeros(len(drawn), 16, longest)
        for i, line in enumerate(drawn):
            image[i, :, : line.shape[1]] = line
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "width": width,
                "text": torch.tensor([sign for text in lines for sign in text]),
                "length": torch.tensor([len(text) for text in lines]),
            }
        )
    return made


def steps(width):
    """How many steps the convolutions give for a line."""
    return width // 2 + 1


def forward(net, batch):
    """Pixels from -1 to 1, and 0 behind a line."""
    image, width = batch["image"].unsqueeze(1), batch["width"]
    x = (image.float() / 255 - 0.5) / 0.5
    behind = torch.arange(x.shape[3]) >= width.view(-1, 1, 1, 1)
    return net(x.masked_fill(behind, 0.0), steps(width))


def loss(output, batch):
    """The sum over the lines by their number; a line too short for its text costs nothing."""
    log_probs = F.log_softmax(output, dim=2)
    total = F.ctc_loss(
        log_probs,
        batch["text"],
        steps(batch["width"]),
        batch["length"],
        blank=BLANK,
        reduction="sum",
        zero_infinity=True,
    )
    return total / len(batch["width"])


class WarmupAdadelta(torch.optim.Adadelta):
    """Clips by norm; the rate rises in a line, then falls as a power."""

    done = 0

    def rate(self):
        if self.done < WARMUP:
            return LR * (self.done + 1) / WARMUP
        return LR * (1 - (self.done - WARMUP) / (TOTAL - WARMUP)) ** POWER

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.done += 1
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    """Norms and biases do not decay."""
    params = list(net.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    return WarmupAdadelta(groups, lr=LR, rho=RHO, eps=EPS)
