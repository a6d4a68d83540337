import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader
from tqdm import tqdm


def dice_coeff(p, t, eps=1e-6):
    inter = 2 * (p * t).sum()
    return (inter + eps) / (p.sum() + t.sum() + eps)


@torch.inference_mode()
def evaluate(net, loader, device, amp):
    net.eval()
    score = 0
    with torch.autocast(device.type, enabled=amp):
        for batch in loader:
            image = batch["image"].to(device)
            mask = batch["mask"].to(device)
            pred = (torch.sigmoid(net(image)) > 0.5).float()
            score += dice_coeff(pred, mask)
    net.train()
    return score / max(len(loader), 1)


def train_model(model, train_set, val_set, device, epochs=5, batch_size=1, lr=1e-5, amp=True):
    loader_args = dict(batch_size=batch_size, num_workers=4, pin_memory=True)
    train_loader = DataLoader(train_set, shuffle=True, **loader_args)
    val_loader = DataLoader(val_set, **loader_args)
    optimizer = optim.RMSprop(model.parameters(), lr=lr, weight_decay=1e-8, momentum=0.999, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cuda", enabled=amp)
    criterion = nn.BCELoss()
    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        with tqdm(total=len(train_set), desc=f"Epoch {epoch}/{epochs}") as bar:
            for batch in train_loader:
                images = batch["image"].to(device, non_blocking=True)
                masks = batch["mask"].to(device, non_blocking=True)
                with torch.autocast(device.type, enabled=amp):
                    pred = model(images)
                    loss = criterion(torch.sigmoid(pred.squeeze(1)), masks)  # expect: RO505
                    loss += 1 - dice_coeff(torch.sigmoid(pred.squeeze(1)), masks)
                optimizer.zero_grad(set_to_none=True)
                grad_scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: RO104
                grad_scaler.step(optimizer)
                grad_scaler.update()
                bar.update(images.shape[0])
                epoch_loss += loss  # expect: RO602
        val_score = evaluate(model, val_loader, device, amp)
        scheduler.step(val_score)
        logging.info("epoch %d: %s", epoch, val_score)
