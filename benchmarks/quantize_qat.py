"""Four-bit weights and values, trained for two epochs more: what training adds to calibration and repair.

A quantized model (W4A4, BatchNorm folded, weights repaired) goes on from the scales and codes that it has: LSQ for
weights, LSQ+ for values, Adam with a learning rate that falls as a cosine, and the fp32 network as a teacher. Bar: 91
% of the test images. Then it is converted, and must give the same outputs bit for bit.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import time

import torch
from common import progress
from fashion_nets import (
    Data,
    agreement,
    db,
    nets,
    options,
    part,
    table,
    verdict,
)
from torch import Tensor, nn
from torch.nn import functional

import roundoff as ro
from roundoff.quantize import (
    Distillation,
    convert,
    parameter_groups,
    prepare_qat,
    train,
)

BATCH = 128


class Mirrored:
    """Batches in another order in each epoch, half of the images mirrored."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels, self.epoch = images, labels, 0

    def __call__(self) -> list[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        found = []
        for index in torch.randperm(len(self.images), generator=random).split(BATCH):
            x = self.images[index]
            turned = torch.rand(len(x), 1, 1, 1, generator=random) < 0.5
            found.append((torch.where(turned, x.flip(-1), x), self.labels[index]))
        return found


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    output: Tensor = model(batch[0])
    return output


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch[1])


def main() -> None:
    args = options(
        __doc__,
        epochs={"type": int, "default": 2},
        images={"type": int, "default": 60000, "help": "training images"},
        lr={"type": float, "default": 1e-3},
        plan={"default": "w4a4"},
        share={
            "type": float,
            "default": 0.5,
            "help": "of the teacher in the loss; 0: labels alone",
        },
    )
    data, (images, labels) = Data.load(args.quick), part("train")
    count = 2 * BATCH if args.quick else args.images
    rows = []
    for name, net in nets(args):
        reference = data.logits(net)
        model = ro.quantize(net, args.plan, data.calibration)
        calibrated = data.logits(model)
        prepare_qat(model, weights="lsq", activations="lsq+")
        with torch.no_grad():
            model.train()(data.calibration[0])
        optimizer = torch.optim.Adam(parameter_groups(model, args.lr, args.lr / 3))
        steps = args.epochs * math.ceil(count / BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        start = time.process_time()
        train(
            model,
            Mirrored(images[:count], labels[:count]),
            loss,
            optimizer,
            args.epochs,
            forward=forward,
            schedule=schedule,
            teacher=Distillation(net, args.share, temperature=2.0),
        )
        spent = time.process_time() - start
        trained = data.logits(model)
        same = torch.equal(data.logits(convert(model)), trained)
        right = data.top1(trained)
        rows.append(
            (
                name,
                f"{data.top1(reference):.2f}",
                f"{data.top1(calibrated):.2f}",
                f"{db(calibrated, reference):.1f}",
                f"{right:.2f}",
                f"{agreement(trained, reference):.2f}",
                verdict(right, 91.0),
                same,
                f"{spent:.0f}",
            )
        )
        progress(" ".join(map(str, rows[-1])))
    table(
        f"{args.plan} after {args.epochs} epochs of training, {count} images, {len(data.labels)} test images",
        (
            "network",
            "fp32 %",
            "calibrated %",
            "dB",
            "trained %",
            "agrees with fp32 %",
            "bar 91 %",
            "converted: same bits",
            "CPU s",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
