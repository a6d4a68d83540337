import argparse

import torch
from torch import nn
from torch.amp import GradScaler, autocast

from mylib import build_loaders, build_model


class ScaledStep:
    def __init__(self):
        self._scaler = GradScaler('cuda')

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()  # expect: RO113
        if update_grad:
            if clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)  # expect: RO104
            self._scaler.step(optimizer)
            self._scaler.update()


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument('--epochs', default=90, type=int)
    p.add_argument('--clip', default=1.0, type=float)
    p.add_argument('--accum', default=4, type=int)
    return p.parse_args()


def main(args):
    model = build_model().cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    crit = nn.CrossEntropyLoss().cuda()
    step = ScaledStep()
    train_loader, val_loader = build_loaders()
    for epoch in range(args.epochs):
        model.train()
        opt.zero_grad(set_to_none=True)
        for i, (images, labels) in enumerate(train_loader):
            images = images.cuda()
            labels = labels.cuda()
            with autocast('cuda', dtype=torch.float16):
                loss = crit(model(images), labels)
            do_update = (i + 1) % args.accum == 0
            step(loss, opt, clip_grad=args.clip, parameters=model.parameters(), update_grad=do_update)
            if do_update:
                opt.zero_grad(set_to_none=True)
        model.eval()
        correct = 0
        count = 0
        with torch.no_grad():
            for images, labels in val_loader:
                with autocast('cuda', dtype=torch.float16):
                    out = model(images.cuda())
                correct += (out.argmax(1).cpu() == labels).sum().item()
                count += len(labels)
        print(epoch, correct / count)


if __name__ == '__main__':
    main(get_args())
