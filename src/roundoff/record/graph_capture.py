"""Is a CUDA graph being captured?

While it is, the kernels that a program launches are written down and do not run: their
results hold nothing yet, what is launched beside them would run at each replay, and
whoever waits for the device breaks the capture. A replay of the graph runs no operator
that could be seen. So nothing in between is read or recorded.
"""

from __future__ import annotations

import torch

WARNING = (
    "a CUDA graph is captured: its operators are not recorded, neither now nor when it "
    "is replayed. Record a run without the graph"
)


def in_graph_capture() -> bool:
    """Return True while a CUDA graph captures what this thread launches."""
    cuda = torch.cuda
    is_in_use: bool = cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_in_use and cuda.is_current_stream_capturing()
