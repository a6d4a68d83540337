"""CRNN: reads a line of digits. Convolutions, a BiLSTM along the line, CTC."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

DIGITS = 4


class BidirectionalLSTM(nn.Module):
    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.rnn = nn.LSTM(n_in, n_hidden, bidirectional=True)
        self.embedding = nn.Linear(n_hidden * 2, n_out)

    def forward(self, x):
        recurrent, _ = self.rnn(x)
        steps, b, h = recurrent.size()
        output = self.embedding(recurrent.view(steps * b, h))
        return output.view(steps, b, -1)


class CRNN(nn.Module):
    def __init__(self, n_class=11, n_hidden=32):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(True),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.MaxPool2d((2, 1), (2, 1)),
            nn.Conv2d(32, 48, (2, 1)),
            nn.ReLU(True),
        )
        self.rnn = BidirectionalLSTM(48, n_hidden, n_class)

    def forward(self, image):
        conv = self.cnn(image)
        if conv.size(2) != 1:
            raise ValueError("the height of the features must be 1")
        conv = conv.squeeze(2).permute(2, 0, 1)  # (width, batch, channels)
        return F.log_softmax(self.rnn(conv), dim=2)


def lines(count, seed):
    """Images (count, 1, 8, 32) of four digits, and the digits."""
    digits = load_digits()
    g = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, 1797, (count, DIGITS), generator=g)
    images = torch.tensor(digits.images, dtype=torch.float32)[pick] / 8 - 1
    text = torch.tensor(digits.target)[pick]
    return images.permute(0, 2, 1, 3).reshape(count, 1, 8, 8 * DIGITS), text


def loss(output, batch):
    steps, count, _ = output.shape
    return F.ctc_loss(
        output, batch[1] + 1, [steps] * count, [DIGITS] * count, zero_infinity=True
    )


def model():
    torch.manual_seed(0)
    net = CRNN()
    optimizer = torch.optim.Adam(net.parameters(), lr=1.2e-2)
    for step in range(100):
        batch = lines(32, 100 + step)
        optimizer.zero_grad()
        loss(net(batch[0]), batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
    return net.eval()


def forward(model, batch):
    return model(batch[0])


def batches():
    return [lines(16, seed) for seed in range(6)]


def held_out():
    return [lines(16, seed) for seed in range(50, 54)]
