"""Rounding where the values are, whatever device the scale and the generator are on."""

import pytest
import torch

from roundoff.errors import FormatError
from roundoff.formats import (
    QParams,
    RoundingMode,
    fake_quantize,
    parse_format,
    round_tensor,
)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3fn", "int8"])
def test_a_generator_of_the_cpu_draws_for_every_device(device, name):
    """The same draws as on the CPU, since the generator is the same."""
    x = torch.linspace(-1, 1, 101)
    mode = RoundingMode.STOCHASTIC
    fmt = parse_format(name)

    def rounded(values):
        generator = torch.Generator().manual_seed(3)
        if name == "bf16":
            return round_tensor(values, fmt, rounding=mode, generator=generator)
        scale = QParams(torch.tensor(0.0625, device=values.device))
        return fake_quantize(values, scale, fmt, rounding=mode, generator=generator)

    result = rounded(x.to(device))
    assert result.device.type == torch.device(device).type
    assert torch.equal(result.cpu(), rounded(x))


def test_a_scale_of_another_device_is_named_as_such(device):
    if torch.device(device).type == "cpu":
        pytest.skip("there is one device")
    x = torch.ones(2, 3, device=device)
    with pytest.raises(FormatError, match="different devices"):
        fake_quantize(x, QParams(torch.ones(3)), parse_format("int8"))


def test_a_scale_of_another_shape_is_named_as_such(device):
    x = torch.ones(2, 3, device=device)
    with pytest.raises(FormatError, match="does not fit the tensor"):
        fake_quantize(x, QParams(torch.ones(4, device=device)), parse_format("int8"))
