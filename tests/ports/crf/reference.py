"""BiLSTM-CRF sequence tagger."""

import torch
from torch import nn


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.start = nn.Parameter(torch.randn(tags) * 0.3)
        self.stop = nn.Parameter(torch.randn(tags) * 0.3)
        self.trans = nn.Parameter(torch.randn(tags, tags) * 0.3)

    def score(self, emit, tags):
        total = self.start[tags[:, 0]] + emit[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emit.size(1)):
            total = total + self.trans[tags[:, t - 1], tags[:, t]]
            total = total + emit[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
        return total + self.stop[tags[:, -1]]

    def partition(self, emit):
        alpha = self.start + emit[:, 0]
        for t in range(1, emit.size(1)):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.trans, dim=1) + emit[:, t]
        return torch.logsumexp(alpha + self.stop, dim=1)


class Tagger(nn.Module):
    def __init__(self, words=31, chars=13, tags=5):
        super().__init__()
        self.words = nn.Embedding(words, 10)
        self.chars = nn.Embedding(chars, 6)
        self.char_cnn = nn.Conv1d(6, 8, 3, padding=1)
        self.lstm = nn.LSTM(18, 9, bidirectional=True, batch_first=True)
        self.norm = nn.LayerNorm(18)
        self.emit = nn.Linear(18, tags)
        self.crf = CRF(tags)

    def forward(self, words, chars):
        b, t, c = chars.shape
        letters = self.chars(chars).view(b * t, c, -1).transpose(1, 2)
        letters = torch.tanh(self.char_cnn(letters)).max(dim=2).values.view(b, t, -1)
        h, _ = self.lstm(torch.cat([self.words(words), letters], dim=-1))
        return self.emit(self.norm(h))


def model():
    torch.manual_seed(15)
    net = Tagger()
    nn.init.uniform_(net.norm.weight, 0.6, 1.4)
    nn.init.normal_(net.norm.bias, 0, 0.2)
    return net


def batches():
    g = torch.Generator().manual_seed(16)
    return [
        {
            "words": torch.randint(0, 31, (3, 7), generator=g),
            "chars": torch.randint(0, 13, (3, 7, 5), generator=g),
            "tags": torch.randint(0, 5, (3, 7), generator=g),
        }
    ]


def forward(net, batch):
    emit = net(batch["words"], batch["chars"])
    return net.crf.partition(emit) - net.crf.score(emit, batch["tags"])


def loss(output, batch):
    return output.mean()


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.05)
