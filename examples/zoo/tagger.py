"""A bidirectional GRU that tags the words of padded sentences."""

import torch
from torch import nn

VOCABULARY, TAGS, PAD = 200, 6, 0


class Tagger(nn.Module):
    def __init__(self, embedding_dim=32, hidden=40):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, embedding_dim, padding_idx=PAD)
        self.dropout = nn.Dropout(0.2)
        self.rnn = nn.GRU(
            embedding_dim, hidden, num_layers=2, batch_first=True, bidirectional=True
        )
        self.classifier = nn.Linear(2 * hidden, TAGS)

    def forward(self, tokens):
        states, _ = self.rnn(self.dropout(self.embed(tokens)))
        return self.classifier(self.dropout(states))


def sentences(count, seed):
    """A word's tag follows from the word and from the one before it."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (count, 20), generator=g)
    lengths = torch.randint(8, 21, (count, 1), generator=g)
    tokens[torch.arange(20) >= lengths] = PAD
    before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    tags = (tokens % 3) + 3 * (before > 100)
    tags[tokens == PAD] = -100
    return {"tokens": tokens, "tags": tags}


def model():
    torch.manual_seed(0)
    tagger = Tagger()
    optimizer = torch.optim.Adam(tagger.parameters(), lr=1e-2)
    for step in range(50):
        batch = sentences(32, step)
        optimizer.zero_grad()
        loss(forward(tagger, batch), batch).backward()
        nn.utils.clip_grad_norm_(tagger.parameters(), 1.0)
        optimizer.step()
    return tagger.eval()


def forward(model, batch):
    return model(batch["tokens"])


def loss(output, batch):
    return nn.functional.cross_entropy(
        output.view(-1, TAGS), batch["tags"].view(-1), ignore_index=-100
    )


def batches():
    return [sentences(16, 1000 + i) for i in range(6)]


def held_out():
    return [sentences(16, 2000 + i) for i in range(4)]


def metric(outputs, batches):
    right = total = 0
    for output, batch in zip(outputs, batches):
        word = batch["tags"] >= 0
        right += (output.argmax(-1) == batch["tags"])[word].sum().item()
        total += word.sum().item()
    return right / total
