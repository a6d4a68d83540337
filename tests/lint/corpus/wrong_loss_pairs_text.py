import torch
import torch.nn as nn
import torch.nn.functional as F


class Intent(nn.Module):
    def __init__(self, vocab, intents):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, 128)
        self.fc = nn.Linear(128, intents)

    def forward(self, tokens, offsets):
        return self.fc(self.embed(tokens, offsets))


class Toxic(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, 64)
        self.fc = nn.Linear(64, 6)

    def forward(self, tokens, offsets):
        return torch.sigmoid(self.fc(self.embed(tokens, offsets)))


def train_intent(loader, epochs=4):
    model = Intent(20000, 40)
    criterion = nn.NLLLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    for _ in range(epochs):
        model.train()
        for labels, tokens, offsets in loader:
            optimizer.zero_grad()
            logits = model(tokens, offsets)
            loss = criterion(logits, labels)  # expect: RO503
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return model


def train_toxic(loader, epochs=4):
    model = Toxic(20000)
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(epochs):
        model.train()
        for labels, tokens, offsets in loader:
            optimizer.zero_grad()
            loss = criterion(model(tokens, offsets), labels.float())  # expect: RO505
            loss.backward()
            optimizer.step()
    return model


def auxiliary(logits, target):
    return F.nll_loss(F.softmax(logits, dim=1), target)  # expect: RO503


def agreement(student, teacher):
    log_p = F.log_softmax(student, dim=-1)
    q = F.softmax(teacher, dim=-1)
    return F.kl_div(log_p, q)  # expect: RO508
