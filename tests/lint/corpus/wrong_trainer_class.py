import torch
from torch import nn
from torch.utils.data import DataLoader


class Classifier(nn.Module):
    def __init__(self, vocab, dim, classes):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.enc = nn.GRU(dim, dim, batch_first=True)
        self.fc = nn.Linear(dim, classes)

    def forward(self, ids):
        h, _ = self.enc(self.emb(ids))
        scores = self.fc(h[:, -1])
        probs = torch.softmax(scores, dim=-1)
        return {"probs": probs, "hidden": h}


class Runner:
    def __init__(self, dataset, val, epochs=5):
        self.net = Classifier(10000, 128, 5).cuda()
        self.loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2, pin_memory=True)
        self.val = DataLoader(val, batch_size=64, num_workers=2, pin_memory=True)
        self.criterion = nn.CrossEntropyLoss()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler()
        self.epochs = epochs

    def fit(self):
        for epoch in range(self.epochs):
            self._epoch()
            acc = self._validate()
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "epoch": epoch}, "ck.pt")  # expect: RO108
            print(epoch, acc)

    def _epoch(self):
        self.net.train()
        for ids, y in self.loader:
            self.opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = self.net(ids.cuda(non_blocking=True))
                loss = self.criterion(out["probs"], y.cuda(non_blocking=True))  # expect: RO501
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()

    def _validate(self):
        hits = n = 0
        with torch.no_grad():
            for ids, y in self.val:
                with torch.autocast("cuda", dtype=torch.float16):
                    out = self.net(ids.cuda(non_blocking=True))
                hits += (out["probs"].argmax(-1).cpu() == y).sum().item()
                n += y.numel()
        return hits / n
