"""What tests of advice share: warnings of torch that are no fault of it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)
