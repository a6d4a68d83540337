import torch
import torch.nn.functional as F

ACCUM = 8


def train(model, loader, optimizer, scheduler, device):
    scaler = torch.cuda.amp.GradScaler()  # expect: RO101 RO115
    model.train()
    for step, batch in enumerate(loader):
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.cuda.amp.autocast():  # expect: RO209
            outputs = model(batch["input_ids"], batch["attention_mask"])
            loss = F.cross_entropy(outputs, batch["labels"])
        scaler.scale(loss).backward()  # expect: RO113
        if (step + 1) % ACCUM == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def evaluate(model, loader, device):
    model.eval()
    hits = 0
    with torch.no_grad():
        for batch in loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.cuda.amp.autocast():  # expect: RO209
                outputs = model(batch["input_ids"], batch["attention_mask"])
            hits += (outputs.argmax(-1) == batch["labels"]).sum()
    return int(hits)


def fit(model, train_loader, test_loader, epochs=5):
    device = torch.device("cuda:0")
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        train(model, train_loader, optimizer, scheduler, device)
        scheduler.step()
        print(epoch, evaluate(model, test_loader, device))
