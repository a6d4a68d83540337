import torch
from torch import nn
from torch.amp import autocast


class TextCNN(nn.Module):
    def __init__(self, vocab, classes):
        super().__init__()
        self.emb = nn.Embedding(vocab, 128)
        self.convs = nn.ModuleList([nn.Conv1d(128, 64, k) for k in (3, 4, 5)])
        self.out = nn.Linear(192, classes)

    def forward(self, ids):
        h = self.emb(ids).transpose(1, 2)
        pooled = [conv(h).relu().amax(-1) for conv in self.convs]
        return self.out(torch.cat(pooled, 1))


def train(model, loader, epochs, lr):
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        model.train()
        for ids, labels in loader:
            ids, labels = ids.cuda(), labels.cuda()
            optimizer.zero_grad()
            with autocast("cuda"):
                logits = model(ids)
                loss = criterion(logits, labels)
                scaler.scale(loss).backward()  # expect: RO201
            scaler.step(optimizer)
            scaler.update()


def train_half(model, loader, epochs):
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for ids, features, labels in loader:
            optimizer.zero_grad()
            with autocast("cuda", dtype=torch.float16):
                logits = model(ids.cuda(), features.cuda().half())  # expect: RO202
                loss = nn.functional.cross_entropy(logits, labels.cuda())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
