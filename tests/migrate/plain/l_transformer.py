# A tiny character model, trained with a while loop over an iterator.
import itertools

import torch
from torch import nn

torch.manual_seed(0)
text = "the quick brown fox jumps over the lazy dog. " * 8
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Model(nn.Module):
    def __init__(self, size, width=16):
        super().__init__()
        self.embedding = nn.Embedding(size, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, size)

    def forward(self, tokens):
        return self.out(self.block(self.embedding(tokens)))


def batches():
    for start in itertools.cycle(range(0, 300, 30)):
        yield torch.stack([codes[start + i : start + i + 13] for i in range(8)])


model = Model(len(letters)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
stream = batches()
step = 0
losses = []
while step < 30:
    batch = next(stream).to(device)
    logits = model(batch[:, :-1])
    loss = criterion(logits.flatten(0, 1), batch[:, 1:].flatten())

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    losses.append(loss.item())
    step += 1
