"""Word-level language model with an LSTM."""
import math
import time

import torch
import torch.nn as nn


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.5):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.ntoken = ntoken

    def forward(self, tokens, hidden):
        emb = self.drop(self.encoder(tokens))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return nn.functional.log_softmax(decoded, dim=1), hidden


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def get_batch(source, i, bptt=35):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


criterion = nn.NLLLoss()


def evaluate(model, data_source):
    model.eval()
    total_loss = 0.0
    hidden = None
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, 35):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(model, train_data, lr, clip, log_interval=200):
    model.train()
    total_loss = 0.0
    start = time.time()
    hidden = None
    for batch, i in enumerate(range(0, train_data.size(0) - 1, 35)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        if hidden is not None:
            hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % log_interval == 0 and batch > 0:
            cur = total_loss / log_interval
            print(f"{batch:5d} | ms {1000 * (time.time() - start):5.2f} | loss {cur:5.2f} | ppl {math.exp(cur):8.2f}")
            total_loss = 0
            start = time.time()


def main(corpus):
    torch.manual_seed(1111)
    train_data = batchify(corpus.train, 20)
    val_data = batchify(corpus.valid, 10)
    model = RNNModel(len(corpus.dictionary), 200, 200, 2)
    lr = 20.0
    best = None
    for epoch in range(1, 41):
        train(model, train_data, lr, 0.25)
        val_loss = evaluate(model, val_data)
        if not best or val_loss < best:
            torch.save(model.state_dict(), "model.pt")
            best = val_loss
        else:
            lr /= 4.0
