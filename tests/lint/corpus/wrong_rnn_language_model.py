import torch
import torch.nn as nn
import torch.nn.functional as F


class CharRNN(nn.Module):
    def __init__(self, chars, hidden=256):
        super().__init__()
        self.embed = nn.Embedding(chars, 64)
        self.gru = nn.GRU(64, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, chars)

    def forward(self, x, h=None):
        out, h = self.gru(self.embed(x), h)
        return F.softmax(self.fc(out), dim=-1), h


def main(text):
    chars = sorted(set(text))
    index = {c: i for i, c in enumerate(chars)}
    data = torch.tensor([index[c] for c in text])
    model = CharRNN(len(chars))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    history = []
    for epoch in range(20):
        model.train()
        for start in range(0, len(data) - 101, 100):
            x = data[start : start + 100].unsqueeze(0)
            y = data[start + 1 : start + 101].unsqueeze(0)
            probs, _ = model(x)
            loss = criterion(probs.transpose(1, 2), y)  # expect: RO501
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss)  # expect: RO602
        print(epoch, history[-1].item())
    torch.save(model.state_dict(), "char.pt")
    return model, chars


def sample(model, chars, start, length, temperature=0.8):
    model.eval()
    index = {c: i for i, c in enumerate(chars)}
    x = torch.tensor([[index[start]]])
    h = None
    out = [start]
    with torch.no_grad():
        for _ in range(length):
            probs, h = model(x, h)
            weights = probs[0, -1].pow(1 / temperature)
            x = torch.multinomial(weights, 1).unsqueeze(0)
            out.append(chars[x.item()])
    return "".join(out)
