"""How much wider than calibration asks for should ranges of values be?

Three networks on Fashion-MNIST in int8, calibrated on 512 training images, for some values of ``Rounding.room``. The room is
chosen on the last 5,000 training images, by the mean SQNR over the networks; test images only say what the choice is worth.
The networks were trained on all training images, on which values differ less from those of calibration than on others, so
that the choice errs on the side of too little room.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import progress
from fashion_nets import Data, db, nets, options, table

import roundoff as ro
from roundoff.quantize import Rounding

ROOMS = (1.0, 1.01, 1.02, 1.03, 1.05, 1.08)


def main() -> None:
    args = options(__doc__)
    validation, test = Data.validation(args.quick), Data.load(args.quick)
    rooms = ROOMS[::3] if args.quick else ROOMS
    reached: dict[float, list[float]] = {room: [] for room in rooms}
    rows = []
    for name, net in nets(args):
        for room in rooms:
            model = ro.quantize(
                net, "int8", validation.calibration, rounding=Rounding(room=room)
            )
            chosen_on, reported = [
                db(data.logits(model), data.logits(net)) for data in (validation, test)
            ]
            reached[room].append(chosen_on)
            rows.append((name, room, f"{chosen_on:.2f}", f"{reported:.2f}"))
            progress(f"{name} {room}: {chosen_on:.2f} {reported:.2f}")
    best = max(rooms, key=lambda room: sum(reached[room]))
    table(
        f"Room of ranges; best on validation images: {best}, the default {Rounding().room}",
        ("network", "room", "SQNR dB, validation", "SQNR dB, test"),
        rows,
    )


if __name__ == "__main__":
    main()
