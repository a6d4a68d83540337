"""The devices of these tests: the CPU, a GPU where there is one, or a pretended device.

The pretended device belongs to a process of its own: `PRETEND=1 pytest tests/devices`,
which `tests/test_devices.py` runs.
"""

import os

import pytest

PRETENDS = os.environ.get("PRETEND") == "1"


def _devices() -> list[str]:
    import torch

    if PRETENDS:
        from .pretended import install

        return [str(install())]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on CUDA; the hook sees the tests of all folders."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        device = parameters.get("device")
        if isinstance(device, str) and device == "cuda":
            item.add_marker(pytest.mark.gpu)
