"""The most bytes that torch's CPU allocator handed out while a function ran.

torch reports each allocation and release to whoever sits in the thread's debug
information (c10/core/Allocator.h); its own profiler keeps every one of them, which takes
an hour on a budget. This keeps the largest sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <algorithm>
#include <atomic>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

struct Peak : c10::MemoryReportingInfoBase {
  int64_t before = -1;
  std::atomic<int64_t> most{0};

  void reportMemoryUsage(void*, int64_t size, size_t total, size_t, c10::Device) override {
    if (before < 0) before = int64_t(total) - size;
    most = std::max(most.load(), int64_t(total) - before);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

int64_t peak(py::function work) {
  auto reported = std::make_shared<Peak>();
  c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reported);
  work();
  return reported->most;
}
"""


def allocated_peak(work: Callable[[], Any]) -> int:
    """Bytes allocated at the peak of ``work()`` above those allocated before it."""
    return int(_library().peak(work))


@functools.cache
def _library() -> Any:
    return load_inline("roundoff_allocated", cpp_sources=[SOURCE], functions=["peak"])
