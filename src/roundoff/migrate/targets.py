"""What mixed precision is written as: torch's fp16 with a scaler, bf16, or a plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

To = Literal["amp", "bf16", "roundoff"]


@dataclass(frozen=True)
class Target:
    """How the parts of mixed precision are written.

    Attributes:
        to: which of the three.
        scales: the loss is scaled.
        plan: of ``roundoff``: the file of the plan.
        library: what torch, or roundoff, is called in the script.
    """

    to: To
    scales: bool
    plan: str
    library: str

    def autocast(self, device: str, model: str, switch: str = "") -> str:
        """Return the line that opens a region of mixed precision."""
        if self.to == "roundoff":
            return f"with {self.library}.autocast({json.dumps(self.plan)}, {model}):"
        dtype = "float16" if self.to == "amp" else "bfloat16"
        return (
            f"with {self.library}.amp.autocast(device_type={device}, "
            f"dtype={self.library}.{dtype}{_enabled(switch)}):"
        )

    def scaler(self, device: str, model: str, switch: str = "") -> str:
        """Return the expression that makes a scaler."""
        if self.to == "roundoff":
            return f"{self.library}.LossScaler({model})"
        return f"{self.library}.amp.GradScaler({device}{_enabled(switch)})"

    def backward(self, scaler: str, loss: str, arguments: str) -> str:
        """Return the backward pass of the scaled loss."""
        if self.to == "roundoff":
            beside = f", {arguments}" if arguments else ""
            return f"{scaler}.backward({loss}{beside})"
        return f"{scaler}.scale({loss}).backward({arguments})"

    @property
    def unscale(self) -> str:
        """The name of the method that divides gradients by the scale."""
        return "unscale" if self.to == "roundoff" else "unscale_"


def _enabled(switch: str) -> str:
    return f", enabled={switch}" if switch else ""
