import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertModel


class BertClassifier(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.bert = BertModel.from_pretrained("bert-base-cased")
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(self.bert.config.hidden_size, n_classes)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, input_ids, attention_mask):
        pooled = self.bert(input_ids, attention_mask).pooler_output
        output = self.drop(pooled)
        return self.softmax(self.out(output))


def train_epoch(model, data_loader, loss_fn, optimizer, scheduler, device):
    model = model.train()
    losses = []
    correct = 0
    for d in data_loader:
        input_ids = d["input_ids"].to(device)
        attention_mask = d["attention_mask"].to(device)
        targets = d["targets"].to(device)
        outputs = model(input_ids, attention_mask)
        loss = loss_fn(outputs, targets)  # expect: RO501
        losses.append(loss.item())
        loss.backward()  # expect: RO601
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
    return sum(losses) / len(losses)


def eval_model(model, data_loader, loss_fn, device):
    correct = 0
    with torch.no_grad():
        for d in data_loader:
            outputs = model(d["input_ids"].to(device), d["attention_mask"].to(device))  # expect: RO603
            correct += (outputs.argmax(1).cpu() == d["targets"]).sum()
    return correct.item()


def main(train_ds, val_ds):
    device = torch.device("cuda:0")
    torch.manual_seed(42)
    train_dl = DataLoader(train_ds, batch_size=16, shuffle=True, num_workers=4, pin_memory=True)
    val_dl = DataLoader(val_ds, batch_size=16, num_workers=4, pin_memory=True)
    model = BertClassifier(3).to(device)
    optimizer = AdamW(model.parameters(), lr=2e-5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(train_dl) * 10)
    loss_fn = nn.CrossEntropyLoss().to(device)  # the pairing is judged where it is called
    for epoch in range(10):
        print(epoch, train_epoch(model, train_dl, loss_fn, optimizer, scheduler, device))
        print(eval_model(model, val_dl, loss_fn, device))


class Small(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.fc = nn.Linear(768, n)
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, h, y):
        p = torch.softmax(self.fc(h), dim=-1)
        return self.loss_fn(p, y)  # expect: RO501
