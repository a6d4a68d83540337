"""Words to words: a GRU in both directions, additive attention, a GRU cell."""

import torch
from torch import nn
from torch.nn import functional as F


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8, padding_idx=0)
        self.rnn = nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(12, 10)

    def forward(self, words):
        states, last = self.rnn(self.embed(words))
        return states, torch.tanh(self.bridge(torch.cat([last[0], last[1]], -1)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(10, 9, bias=False)
        self.key = nn.Linear(12, 9)
        self.score = nn.Linear(9, 1, bias=False)

    def forward(self, state, states, is_word):
        energy = torch.tanh(self.query(state)[:, None] + self.key(states))
        scores = self.score(energy).squeeze(-1).masked_fill(~is_word, -1e9)
        weights = F.softmax(scores, -1)
        return torch.bmm(weights[:, None], states).squeeze(1)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.attention = Attention()
        self.embed = nn.Embedding(28, 8)
        self.cell = nn.GRUCell(20, 10)
        self.out = nn.Linear(30, 28)

    def forward(self, words, previous):
        states, state = self.encoder(words)
        outputs = []
        for step in range(previous.shape[1]):
            word = self.embed(previous[:, step])
            context = self.attention(state, states, words != 0)
            state = self.cell(torch.cat([word, context], -1), state)
            outputs.append(self.out(torch.cat([state, context, word], -1)))
        return torch.stack(outputs, 1)


def model():
    torch.manual_seed(40)
    return Translator()


def batches():
    generator = torch.Generator().manual_seed(41)
    words = torch.randint(1, 30, (4, 7), generator=generator)
    words[1, 5:] = 0
    words[3, 3:] = 0
    target = torch.randint(1, 28, (4, 6), generator=generator)
    target[2, 4:] = 0
    return [{"words": words, "target": target}]


def forward(net, batch):
    return net(batch["words"], batch["target"][:, :-1])


def loss(output, batch):
    target = batch["target"][:, 1:].reshape(-1)
    return F.cross_entropy(
        output.flatten(0, 1), target, ignore_index=0, label_smoothing=0.1
    )


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=2e-3)
