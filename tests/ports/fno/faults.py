"""Faulty ports of the Fourier neural operator."""

from ..bank import Change

_BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "padded_block")


def _spectral(*kinds):
    """Return names of spectral weights of all blocks of the Paddle port."""
    return "|".join(f"{block}.spectral.{kind}" for block in _BLOCKS for kind in kinds)


FAULTS = [
    Change(
        "jax_style",
        "spectral kernels have outputs before inputs",
        'torch.permute(state[name + ".weights"], (2, 0, 1))',
        'torch.permute(state[name + ".weights"], (2, 1, 0))',
        parameter="blocks/spectral|last/spectral",
        at='coeffs = torch.einsum("bmi,mio->bmo"',
    ),
    Change(
        "jax_style",
        "spectral kernels are conjugated",
        "return torch.complex(weights.real, weights.imag)",
        "return torch.complex(weights.real, -weights.imag)",
        parameter="blocks/spectral|last/spectral",
        at='coeffs = torch.einsum("bmi,mio->bmo"',
    ),
    Change(
        "jax_style",
        "pointwise kernels are not transposed",
        'return state[name + ".weight"][:, :, 0].T',
        'return state[name + ".weight"][:, :, 0]',
        parameter="blocks/w|last/w",
        at="return torch.tensordot(x, kernel, dims=1) + bias"
        "|return spectral_conv(x, kernel) + dense(x, w, b)",
    ),
    Change(
        "jax_style",
        "statistics of the output are those of the input",
        'stats[name] = state[f"{field}_norm.{kind}"]',
        'stats[name] = state[f"a_norm.{kind}"]',
        parameter="u_mean|u_std",
        at='return y * (stats["u_std"] + 1e-5) + stats["u_mean"]',
    ),
    Change(
        "jax_style",
        "transform back divides by the number of points once more",
        'torch.fft.irfft(coeffs, n=x.shape[1], dim=1, norm="forward")',
        "torch.fft.irfft(coeffs, n=x.shape[1], dim=1)",
    ),
    Change(
        "jax_style",
        "modes start behind the constant one",
        'torch.fft.rfft(x, dim=1, norm="forward")[:, :modes]',
        'torch.fft.rfft(x, dim=1, norm="forward")[:, 1 : modes + 1]',
        at='coeffs = torch.einsum("bmi,mio->bmo"',
    ),
    Change(
        "jax_style",
        "gelu is approximate",
        "def gelu(x, approximate=False):",
        "def gelu(x, approximate=True):",
        at="inner = 0.7978845608|return 0.5 * x * (1.0 + torch.tanh(inner))"
        '|x = gelu(fourier_layer(x, *layer))|x = gelu(dense(x, params["head/w1"]',
    ),
    Change(
        "jax_style",
        "zeros stand before the domain, and its end is cut off",
        "torch.nn.functional.pad(x, (0, 0, 0, PAD))",
        "torch.nn.functional.pad(x, (0, 0, PAD, 0))",
        at="return x[:, :n]",
    ),
    Change(
        "jax_style",
        "padded layer has an activation too",
        "    return x[:, :n]\n",
        "    return gelu(x[:, :n])\n",
        at="return 0.5 * x * (1.0 + torch.erf(",
    ),
    Change(
        "jax_style",
        "coordinates leave out the end of the interval",
        "position = torch.linspace(0.0, 1.0, a.shape[1])",
        "position = torch.arange(a.shape[1]) / a.shape[1]",
    ),
    Change(
        "jax_style",
        "coarse points are the odd ones",
        "return field[:, ::STRIDE]",
        "return field[:, STRIDE - 1 :: STRIDE]",
    ),
    Change(
        "jax_style",
        "error is relative to the targets of the whole batch",
        "    error = torch.sum(torch.square(output - target), dim=-1)\n"
        "    size = torch.sum(torch.square(target), dim=-1)\n",
        "    error = torch.sum(torch.square(output - target))\n"
        "    size = torch.sum(torch.square(target))\n",
        at="return torch.mean(torch.sqrt(error / size))",
    ),
    Change(
        "jax_style",
        "second moment of a complex kernel is of its absolute value",
        "SplitRealAndImaginary(ScaleByAdam())",
        "ScaleByAdam()",
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "real and imaginary weights have changed places",
        '        "spectral.weight_real": weights.real,\n'
        '        "spectral.weight_imag": weights.imag,\n',
        '        "spectral.weight_real": weights.imag,\n'
        '        "spectral.weight_imag": weights.real,\n',
        parameter=_spectral("weight_real", "weight_imag"),
        at="out_real = self.weight_real @ real|out_imag = self.weight_real @ imag",
    ),
    Change(
        "paddle_style",
        "shortcut of each block is that of the first",
        'convert_block(state, f"convs.{i}", f"ws.{i}")',
        'convert_block(state, f"convs.{i}", "ws.0")',
        parameter="blocks.1.skip.weight|blocks.1.skip.bias"
        "|blocks.2.skip.weight|blocks.2.skip.bias",
        at="return F.conv1d(x, self.weight, self.bias)|out = out + self.skip(x)",
    ),
    Change(
        "paddle_style",
        "lifting has the value before the coordinate",
        '    parts["lifting"]["weight"] = parts["lifting"]["weight"].flip(0)\n',
        "",
        parameter="lifting.weight",
        at="return torch.matmul(x, self.weight) + self.bias"
        "|x = self.lifting(torch.stack([coords, value], dim=2))",
    ),
    Change(
        "paddle_style",
        "product with the imaginary weights has a wrong sign",
        "out_imag = self.weight_real @ imag + self.weight_imag @ real",
        "out_imag = self.weight_real @ imag - self.weight_imag @ real",
    ),
    Change(
        "paddle_style",
        "shortcut is added behind the activation",
        "        out = out + self.skip(x)\n"
        "        return out if self.act is None else self.act(out)\n",
        "        out = out if self.act is None else self.act(out)\n"
        "        return out + self.skip(x)\n",
        at="return x * 0.5 * torch.erfc(",
    ),
    Change(
        "paddle_style",
        "padding is cut off at the wrong end",
        "x = x[:, :, :num_points]",
        "x = x[:, :, domain_padding:]",
    ),
    Change(
        "paddle_style",
        "shortcuts have no bias",
        "return F.conv1d(x, self.weight, self.bias)",
        "return F.conv1d(x, self.weight)",
        at="out = out + self.skip(x)",
    ),
    Change(
        "paddle_style",
        "constant mode counts twice, as others do",
        "        share[0] = 1.0 / length\n",
        "",
        parameter="|".join(f"{block}.spectral.share" for block in _BLOCKS),
        at="share = torch.full((modes,), 2.0 / length)"
        "|points = torch.matmul(real * share, cos.T)|return Synthesis.apply(",
    ),
    Change(
        "paddle_style",
        "waves of the padded block have the length of the domain without padding",
        "angle = 2.0 * math.pi * torch.outer(x, k) / length",
        "angle = 2.0 * math.pi * torch.outer(x, k) / num_points",
        parameter="padded_block.spectral.cos|padded_block.spectral.sin",
        at="torch.cos(angle)|torch.sin(angle)|real = torch.matmul(x, self.cos)"
        "|imag = -torch.matmul(x, self.sin)",
    ),
    Change(
        "paddle_style",
        "coordinates go from -1 to 1",
        "coords = torch.arange(num_points) / (num_points - 1)",
        "coords = 2.0 * torch.arange(num_points) / (num_points - 1) - 1.0",
        parameter="coords",
        at="coords = self.coords.unsqueeze(0)"
        "|x = self.lifting(torch.stack([coords, value], dim=2))",
    ),
    Change(
        "paddle_style",
        "gradient of the imaginary coefficients has the sign of the real ones",
        "imag = torch.matmul(grad, sin) * -share",
        "imag = torch.matmul(grad, sin) * share",
        at="return Synthesis.apply(",
        reference="torch.fft.irfft(",
    ),
    Change(
        "paddle_style",
        "decay is decoupled from the moments",
        "        return p.grad + self.weight_decay * p\n",
        "        p.mul_(1.0 - self.scheduler.last_lr * self.weight_decay)\n"
        "        return p.grad\n",
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "power of the second beta stays where it was",
        '            acc["beta2_pow"] *= self.beta2\n',
        "",
        phase="optimizer",
        steps=2,
    ),
]
