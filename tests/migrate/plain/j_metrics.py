import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(12, 1)

    def forward(self, batch):
        return self.head(self.body(batch)).squeeze(-1)


net = Classifier()
net.to(device)
opt = torch.optim.Adam(net.parameters(), lr=0.02)
bce = nn.BCEWithLogitsLoss()
features = torch.randn(80, 6)
truth = (features[:, 0] > 0).float()


def validate():
    net.eval()
    scores, labels = [], []
    running = 0.0
    with torch.inference_mode():
        for begin in range(0, 80, 20):
            batch = features[begin : begin + 20].to(device)
            label = truth[begin : begin + 20].to(device)
            logits = net(batch)
            running += bce(logits, label).item()
            scores.append(logits.sigmoid().cpu().numpy())
            labels.append(label.cpu().numpy())
    net.train()
    right = (np.concatenate(scores) > 0.5) == (np.concatenate(labels) > 0.5)
    return running / 4, right.mean()


losses = []
for epoch in range(8):
    for begin in range(0, 80, 20):
        batch = features[begin : begin + 20].to(device)
        label = truth[begin : begin + 20].to(device)
        opt.zero_grad()
        logits = net(batch)
        loss = bce(logits, label)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    validation_loss, accuracy = validate()
