"""A forward pass that looks for what the measured batches did not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from roundoff.formats import Format
from roundoff.ops import Call, float_tensors

if TYPE_CHECKING:
    from roundoff.budget.adjoint import SiteInfo


class Scan:
    """Runs each call as it is, and notices new sites and new overflows.

    Args:
        sites: those of the measured batches.
        formats: that are measured.
        wanted: the site whose output is the target; None for another target.
    """

    def __init__(
        self,
        sites: Mapping[str, SiteInfo],
        formats: Sequence[Format],
        wanted: str | None = None,
    ) -> None:
        self.sites = sites
        self.wanted = wanted
        self.wanted_output: Tensor | None = None
        self.limit = range_limit(formats)
        #: True once the batch shows something that the others did not
        self.surprise = False

    def before_write(self, tensor: Tensor) -> None:
        """Nothing is kept."""

    def call(self, call: Call) -> Any:
        """Run a call."""
        result = call.run()
        outputs = float_tensors(result)
        self.see(str(call.site), outputs)
        if str(call.site) == self.wanted and outputs and self.wanted_output is None:
            # a copy: what the model writes over it later does not count
            self.wanted_output = outputs[0].clone()
        return result

    def see(self, site: str, outputs: Sequence[Tensor]) -> None:
        """Look at what a call made."""
        if self.surprise or not outputs:
            return
        info = self.sites.get(site)
        if info is None:
            self.surprise = True
        elif self.limit and not info.exceeds:
            self.surprise = exceeds(outputs, self.limit)


def range_limit(formats: Sequence[Format]) -> float:
    """Return the largest number that all cast formats hold; 0 where bf16's range does."""
    limits = [
        fmt.max_finite
        for fmt in formats
        if fmt.execution is not None and fmt.execution.output and fmt.max_finite < 1e30
    ]
    return min(limits, default=0.0)


def exceeds(tensors: Sequence[Tensor], limit: float) -> bool:
    """Return True if some value is beyond the limit; NaN is not."""
    return any(
        float(tensor.detach().abs().max()) > limit
        for tensor in tensors
        if tensor.numel()
    )
