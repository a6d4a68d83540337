"""A tagger: embedding, LSTM of two layers, linear."""

import torch
from torch import nn
from torch.nn import functional as F


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 10)
        self.lstm = nn.LSTM(10, 12, num_layers=2, batch_first=True)
        self.hidden2tag = nn.Linear(12, 6)

    def forward(self, words):
        x = self.embedding(words)
        x, _ = self.lstm(x)
        return F.log_softmax(self.hidden2tag(x), dim=-1)


def model():
    torch.manual_seed(8)
    return Tagger()


def batches():
    generator = torch.Generator().manual_seed(9)
    words = torch.randint(0, 30, (3, 6), generator=generator)
    tags = torch.randint(0, 6, (3, 6), generator=generator)
    return [{"words": words, "tags": tags}]


def forward(net, batch):
    return net(batch["words"])


def loss(output, batch):
    return F.nll_loss(output.reshape(-1, 6), batch["tags"].reshape(-1))


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)
