#!/usr/bin/env python3
import argparse
import logging
import os
import time
from collections import OrderedDict
from contextlib import suppress
from functools import partial

import torch
import torch.nn as nn

_logger = logging.getLogger('train')
parser = argparse.ArgumentParser()
parser.add_argument('--amp', action='store_true')
parser.add_argument('--clip-grad', type=float, default=None)
parser.add_argument('--grad-accum-steps', type=int, default=1)
parser.add_argument('--device', default='cuda')
parser.add_argument('--epochs', type=int, default=10)
parser.add_argument('--resume', default='')


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device='cuda'):
        self._scaler = torch.amp.GradScaler(device=device)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


def main():
    args = parser.parse_args()
    device = torch.device(args.device)
    model = create_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp_autocast = suppress
    loss_scaler = None
    if args.amp:
        amp_autocast = partial(torch.autocast, device_type=device.type, dtype=torch.float16)
        loss_scaler = NativeScaler(device.type)
    loader_train, loader_eval = create_loaders(args)
    train_loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, loader_train, optimizer, train_loss_fn, args, amp_autocast, loss_scaler)
        metrics = validate(model, loader_eval, nn.CrossEntropyLoss(), args, amp_autocast)
        _logger.info(metrics)
        state = dict(epoch=epoch, state_dict=model.state_dict(), optimizer=optimizer.state_dict())
        if loss_scaler is not None:
            state[loss_scaler.state_dict_key] = loss_scaler.state_dict()
        torch.save(state, 'last.pth')


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, amp_autocast=suppress, loss_scaler=None):
    device = torch.device(args.device)
    accum_steps = args.grad_accum_steps
    model.train()
    optimizer.zero_grad()
    for batch_idx, (inp, target) in enumerate(loader):
        need_update = (batch_idx + 1) % accum_steps == 0
        inp, target = inp.to(device), target.to(device)
        with amp_autocast():
            output = model(inp)
            loss = loss_fn(output, target)
        if accum_steps > 1:
            loss /= accum_steps
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters(), need_update=need_update)
        else:
            loss.backward()
            if need_update:
                if args.clip_grad is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
                optimizer.step()
        if not need_update:
            continue
        optimizer.zero_grad()
    return OrderedDict(loss=loss.item())


def validate(model, loader, loss_fn, args, amp_autocast=suppress):
    device = torch.device(args.device)
    model.eval()
    total, seen = 0.0, 0
    with torch.inference_mode():
        for inp, target in loader:
            inp, target = inp.to(device), target.to(device)
            with amp_autocast():
                output = model(inp)
                loss = loss_fn(output, target)
            total += loss.item() * inp.size(0)
            seen += inp.size(0)
    return OrderedDict(loss=total / seen)


if __name__ == '__main__':
    main()
