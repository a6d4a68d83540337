"""What msprobe's overflow_check finds in one of the planted cases of tests/train/scaling/planted.py.

    PEER_PYTHON benchmarks/peer_skip.py NUMBER

Run by the Python of an environment that has mindstudio-probe and torch; roundoff is not needed there. Printed is one JSON
object: the name of the first finding, and the modules it lies in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.train.scaling.planted import CASES, build

SCALE = 2.0**14


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, loss = build(CASES[int(sys.argv[1])])
    from msprobe.pytorch import PrecisionDebugger

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        about = {
            "task": "statistics",
            "level": "mix",
            "dump_path": folder + "/dump",
            "rank": [],
            "step": [],
        }
        config.write_text(json.dumps(about))
        debugger = PrecisionDebugger(config_path=str(config))
        debugger.start(model)
        (loss() * SCALE).backward()
        debugger.stop()
        debugger.step()
        tool = str(Path(sys.executable).with_name("msprobe"))
        command = [
            tool,
            "overflow_check",
            "-i",
            folder + "/dump/step0",
            "-o",
            folder + "/out",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list(Path(folder, "out").glob("*.json"))
        if not files:
            print(
                json.dumps(
                    {
                        "name": None,
                        "where": [],
                        "said": (done.stdout + done.stderr)[-300:],
                    }
                )
            )
            return
        first = next(iter(json.loads(files[0].read_text()).values()))[0]
        print(json.dumps({"name": first["op_name"], "where": first["construct_info"]}))


if __name__ == "__main__":
    main()
