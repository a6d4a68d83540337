"""Faulty ports of the S4D."""

from ..bank import Change


def _blocks(names, blocks=range(3)):
    """Return names of variables in blocks of the Keras port."""
    return "|".join(f"blocks.{i}.{name}" for i in blocks for name in names.split())


def _layers(names):
    """Return names of variables in each layer of the JAX port."""
    return "|".join(f"params.layers_{i}.{n}" for i in range(3) for n in names.split())


FAULTS = [
    Change(
        "keras_style",
        "norms of all blocks read the weights of the first",
        'load_norm(block.norm, state, f"layers.{i}.norm")',
        'load_norm(block.norm, state, "layers.0.norm")',
        parameter=_blocks("norm.gamma norm.beta", (1, 2)),
        at="return self.gamma * (centered /|x = self.norm(inputs)",
    ),
    Change(
        "keras_style",
        "values and gates are taken to alternate in the rows of the kernel",
        '    kernel = state[f"{name}.weight"].reshape(2, UNITS, UNITS)\n',
        '    kernel = state[f"{name}.weight"].reshape(UNITS, 2, UNITS).transpose(0, 1)\n',
        parameter=_blocks("projection.kernel"),
        at="return torch.einsum(self.equation, inputs, self.kernel) + self.bias"
        "|projected = self.projection(inputs)",
    ),
    Change(
        "keras_style",
        "real and imaginary part of C are swapped",
        "        c_real=c[..., 0],\n        c_imag=c[..., 1],\n",
        "        c_real=c[..., 1],\n        c_imag=c[..., 0],\n",
        parameter=_blocks("ssm.c_real ssm.c_imag"),
        at="c_re, c_im = complex_multiply(",
    ),
    Change(
        "keras_style",
        "logarithms of the steps are loaded once more as skips",
        'skip=state[f"{name}.D"]',
        'skip=state[f"{name}.kernel.log_dt"]',
        parameter=_blocks("ssm.skip"),
        at="return outputs + self.skip * inputs",
    ),
    Change(
        "keras_style",
        "epsilon of Keras in the norms",
        "def __init__(self, epsilon=1e-5):",
        "def __init__(self, epsilon=1e-3):",
        at="return self.gamma * (centered /|x = self.norm(inputs)"
        "|return self.head(self.pooling(self.final_norm(x), mask))",
    ),
    Change(
        "keras_style",
        "the conjugates are forgotten",
        "return 2.0 * torch.sum(envelope * wave, dim=-1)",
        "return torch.sum(envelope * wave, dim=-1)",
        reference='return 2 * torch.einsum("hn,hnl->hl"',
    ),
    Change(
        "keras_style",
        "gain of the hold is not divided by the pole",
        "return rate, angle, complex_divide(grown, pole)",
        "return rate, angle, grown",
        at="rate, angle, gain = self.discretized(pole, step)"
        "|c_re, c_im = complex_multiply(",
        reference="(torch.exp(dtA) - 1.0) / A",
    ),
    Change(
        "keras_style",
        "the other half is the gate",
        "return projected[:, :, 0] * torch.sigmoid(projected[:, :, 1])",
        "return projected[:, :, 1] * torch.sigmoid(projected[:, :, 0])",
    ),
    Change(
        "keras_style",
        "skip goes around the activation",
        "        return outputs + self.skip * inputs\n",
        "        return gelu(outputs) + self.skip * inputs\n",
        at="x = gelu(x)",
    ),
    Change(
        "keras_style",
        "impulse response begins one step late",
        "t = torch.arange(timesteps, dtype=torch.float32)[:, None, None]",
        "t = torch.arange(1, timesteps + 1, dtype=torch.float32)[:, None, None]",
        at="envelope = torch.exp(t * rate)|wave = c_re * torch.cos(t * angle)",
    ),
    Change(
        "keras_style",
        "mask lets one more step in",
        "return torch.arange(maxlen)[None, :] < lengths[:, None]",
        "return torch.arange(maxlen)[None, :] <= lengths[:, None]",
        at="mask = sequence_mask(|mask = mask[..., None].to("
        "|return torch.sum(inputs * mask, dim=1) /",
    ),
    Change(
        "keras_style",
        "deviations are given where variances are asked for",
        "(2.25, 0.64, 6.25)",
        "(1.5, 0.8, 2.5)",
        at="return (inputs - self.mean) / torch.sqrt(self.variance)",
    ),
    Change(
        "keras_style",
        "C of the state spaces is with the fast ones and decays",
        'return ".ssm." in name and not name.endswith("skip")',
        'return name.endswith(("log_step", "log_decay", "frequency"))',
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "C is loaded as its conjugate",
        '"C_im": C_im.T,',
        '"C_im": -C_im.T,',
        parameter=_layers("seq.C_im"),
        at='y = torch.sum(p["C_re"] * x.real - p["C_im"] * x.imag, dim=1)',
    ),
    Change(
        "jax_style",
        "frequencies are reshaped, not transposed",
        'state[name + ".kernel.A_imag"].T',
        'state[name + ".kernel.A_imag"].reshape(-1, len(C_re))',
        parameter=_layers("seq.Lambda_im"),
        at='Lambda = torch.complex(-torch.exp(p["log_neg_Lambda_re"]), p["Lambda_im"])',
    ),
    Change(
        "jax_style",
        "biases of the two projections are swapped",
        'bias, bias2 = torch.chunk(state[name + ".bias"], 2)',
        'bias2, bias = torch.chunk(state[name + ".bias"], 2)',
        parameter=_layers("out.bias out2.bias"),
        at='x = dense(p["out"], x) * torch.sigmoid('
        '|return torch.einsum("...i,io->...o", x, p["kernel"]) + p["bias"]',
    ),
    Change(
        "jax_style",
        "last norm is loaded from that of the last layer",
        'return params | {"norm": norm("norm"),',
        'return params | {"norm": norm(f"layers.{N_LAYERS - 1}.norm"),',
        parameter="params.norm.scale|params.norm.bias",
        at='return (x - mean) * mul + p["bias"]'
        '|mul = torch.rsqrt(|x = layer_norm(params["norm"], x)',
    ),
    Change(
        "jax_style",
        "gelu is approximate, as is the default there",
        "def gelu(x, approximate=False):",
        "def gelu(x, approximate=True):",
        at="cubic = x + 0.044715|return 0.5 * x * (1.0 + torch.tanh(|x = gelu(x)",
    ),
    Change(
        "jax_style",
        "bilinear in place of a hold",
        "    Lambda_bar = torch.exp(Lambda * step)\n"
        "    B_bar = (Lambda_bar - 1.0) / Lambda\n",
        "    half = 1.0 / (1.0 - 0.5 * step * Lambda)\n"
        "    Lambda_bar = half * (1.0 + 0.5 * step * Lambda)\n"
        "    B_bar = half * step\n",
        at="Lambda_bar, B_bar = discretize_zoh(|x = Lambda_bar * x + B_bar * u",
        reference="(torch.exp(dtA) - 1.0) / A",
    ),
    Change(
        "jax_style",
        "a layer begins with the state in which the one before ended",
        '        carry = initial_carry(p["seq"], len(x))\n',
        '        if i == 0:\n            carry = initial_carry(p["seq"], len(x))\n',
        at="carry, x = sequence_layer(p, carry, x)|x = Lambda_bar * x + B_bar * u"
        "|carry, ys = scan(",
    ),
    Change(
        "jax_style",
        "output is read before the state moves",
        "        x = Lambda_bar * x + B_bar * u[:, None, :]\n"
        '        y = torch.sum(p["C_re"] * x.real - p["C_im"] * x.imag, dim=1)\n',
        '        y = torch.sum(p["C_re"] * x.real - p["C_im"] * x.imag, dim=1)\n'
        "        x = Lambda_bar * x + B_bar * u[:, None, :]\n",
        at="x = Lambda_bar * x + B_bar * u|y = torch.sum(|return x, 2.0 * y",
    ),
    Change(
        "jax_style",
        "shortcut begins behind the norm",
        '    skip = x\n    x = layer_norm(p["norm"], x)\n',
        '    x = layer_norm(p["norm"], x)\n    skip = x\n',
        at="return carry, skip + x",
    ),
    Change(
        "jax_style",
        "sums are divided by the longest length",
        "weights = (steps[None, :] < lengths[:, None]) / lengths[:, None]",
        "weights = (steps[None, :] < lengths[:, None]) / x.shape[1]",
        at='return torch.einsum("blh,bl->bh", x, weights)',
        reference="lengths.unsqueeze(-1)",
    ),
    Change(
        "jax_style",
        "what was smoothed away goes to the other classes alone",
        "return (1.0 - alpha) * labels + alpha / labels.shape[-1]",
        "return (1.0 - alpha) * labels + alpha / (labels.shape[-1] - 1) * (1.0 - labels)",
        at="return -torch.sum(labels * torch.log_softmax(|return torch.mean(softmax_cross",
    ),
    Change(
        "jax_style",
        "no gradient goes to the step through the hold of the input",
        "    B_bar = (Lambda_bar - 1.0) / Lambda\n",
        "    B_bar = ((Lambda_bar - 1.0) / Lambda).detach()\n",
        at="Lambda_bar = torch.exp(Lambda * step)|x = Lambda_bar * x + B_bar * u",
    ),
    Change(
        "jax_style",
        "second moments are not corrected for their start",
        "nu_hat = nu / (1.0 - b2**count)",
        "nu_hat = nu",
        phase="optimizer",
    ),
]
