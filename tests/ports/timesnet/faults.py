"""Faulty ports of the TimesNet."""

from ..bank import Change

_BLOCKS = range(2)


def _branches(layers, branches, kinds):
    """Return names of convolutions of the first port."""
    return "|".join(
        f"layers.{i}.inception_{part}.branches.{j}.{kind}"
        for i in layers
        for part in ("in", "out")
        for j in branches
        for kind in kinds
    )


def _biases(kernels):
    """Return names of biases of convolutions of the second port."""
    return "|".join(
        f"block_{i}/{part}/{kernel}/b"
        for i in _BLOCKS
        for part in ("widen", "narrow")
        for kernel in kernels
    )


FAULTS = [
    Change(
        "paddle_style",
        "rows and columns of the kernels change places",
        "        state[key] = value.contiguous()\n",
        "        if value.ndim == 4:\n"
        "            value = torch.permute(value, [0, 1, 3, 2])\n"
        "        state[key] = value.contiguous()\n",
        parameter=_branches(_BLOCKS, (1, 2), ["weight"]),
        at="return F.conv2d(x, self.weight, self.bias, padding=self.padding)",
    ),
    Change(
        "paddle_style",
        "the second block is loaded with the first",
        "        value = state[name]\n",
        '        value = state[name.replace("layers.1.", "layers.0.")]\n',
        parameter=_branches([1], range(3), ["weight", "bias"]),
        at="return F.conv2d(x, self.weight, self.bias, padding=self.padding)",
    ),
    Change(
        "paddle_style",
        "scale and shift of the norm change places",
        '    ("layer_norm.weight", "norm.scale"),\n    ("layer_norm.bias", "norm.shift"),\n',
        '    ("layer_norm.weight", "norm.shift"),\n    ("layer_norm.bias", "norm.scale"),\n',
        parameter="norm.scale|norm.shift",
        at="return x * self.scale + self.shift",
    ),
    Change(
        "paddle_style",
        "kernel of the tokens is turned round in time",
        '        if key.startswith("norm."):\n',
        '        if key.startswith("embed.value_embed."):\n'
        "            value = torch.flip(value, [2])\n"
        '        if key.startswith("norm."):\n',
        parameter="embed.value_embed.weight",
        at="return F.conv1d(x, self.weight)",
    ),
    Change(
        "paddle_style",
        "ends of the series are repeated, it is no ring",
        "before, after = x[:, :, -self.side :], x[:, :, : self.side]",
        "before, after = x[:, :, : self.side], x[:, :, -self.side :]",
        at="x = torch.concat([before, x, after], dim=2)|return F.conv1d(x, self.weight)",
    ),
    Change(
        "paddle_style",
        "kernels are summed, not averaged",
        "        return out / len(self.branches)\n",
        "        return out\n",
        at="out = out + branch(x)",
        reference="torch.stack([conv(x) for conv in self.kernels]",
    ),
    Change(
        "paddle_style",
        "zeros stand before the series where it is folded",
        "x = F.pad(x, [0, period - rest])",
        "x = F.pad(x, [period - rest, 0])",
        at="return torch.reshape(x, [x.shape[0], x.shape[1], -1, period])"
        "|line = torch.flatten(plane, start_dim=2)",
    ),
    Change(
        "paddle_style",
        "a row is as long as there are periods",
        "return torch.reshape(x, [x.shape[0], x.shape[1], -1, period])",
        "return torch.reshape(x, [x.shape[0], x.shape[1], period, -1])",
        at="plane = self.fold(x, period)",
    ),
    Change(
        "paddle_style",
        "variance of the history is the unbiased one",
        "var = torch.mean(torch.square(x - mean), dim=2, keepdim=True)",
        "var = torch.var(x, dim=2, keepdim=True)",
        at="stdev = torch.sqrt(var + self.epsilon)",
        reference="unbiased=False",
    ),
    Change(
        "paddle_style",
        "each row of the sine table has a rate of its own",
        "np.power(10000.0, (row // 2 * 2) / hidden_size)",
        "np.power(10000.0, row / hidden_size)",
        parameter="embed.pos_embed",
        at="table = np.where(row % 2 == 0|return torch.from_numpy(table"
        "|out = self.value_embed(x) + self.pos_embed",
    ),
    Change(
        "paddle_style",
        "months are counted from zero",
        "self.month_embed(x_mark[:, :, 0] - 1)",
        "self.month_embed(x_mark[:, :, 0])",
        at="return torch.index_select(self.weight, 0, x.flatten())",
        reference="self.month(month - 1)",
    ),
    Change(
        "paddle_style",
        "divided by the number of what was observed, not by its weights",
        "l1 = torch.sum(weight * torch.abs(diff)) / torch.sum(weight)",
        "l1 = torch.sum(weight * torch.abs(diff)) / torch.sum(mask)",
    ),
    Change(
        "paddle_style",
        "embeddings of the calendar decay",
        'NO_DECAY = ("bias", "norm.", "month_embed", "day_embed", "hour_embed")',
        'NO_DECAY = ("bias", "norm.")',
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "the table of the calendar begins with hours",
        '[sd[f"embedding.{name}.weight"] for name, _ in FIELDS]',
        '[sd[f"embedding.{name}.weight"] for name in ("hour", "weekday", "month")]',
        parameter="embed/calendar/table",
        at='dates = torch.sum(p["calendar"]["table"][calendar_rows(marks)]',
    ),
    Change(
        "jax_style",
        "all kernels have the bias of the first",
        'sd[f"{source}.bias"]',
        'sd[f"blocks.{i}.conv.{number}.kernels.0.bias"]',
        parameter=_biases(["3x3", "5x5"]),
        at='return torch.permute(y, (0, 2, 3, 1)) + p["b"]',
    ),
    Change(
        "jax_style",
        "weight of the readout is reshaped, not transposed",
        'sd["projection.weight"].T',
        'sd["projection.weight"].reshape(hp.width, -1)',
        parameter="readout/w",
        at='return torch.einsum("...i,io->...o", x, p["w"]) + p["b"]'
        '|y = linear(params["readout"]',
    ),
    Change(
        "jax_style",
        "gelu is the approximate one",
        "return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "cubic = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)\n"
        "    return 0.5 * x * (1.0 + torch.tanh(cubic))",
        at='plane = gelu(inception(p["widen"], plane))',
    ),
    Change(
        "jax_style",
        "epsilon of the norm is that of Keras",
        "def layer_norm(p, x, eps=1e-5):",
        "def layer_norm(p, x, eps=1e-3):",
        at='inv = torch.rsqrt(|return (x - mean) * inv|h = layer_norm(params["norm"], h)',
    ),
    Change(
        "jax_style",
        "softmax over the series of the batch",
        "    unnormalized = torch.exp(x - torch.amax(x, dim=-1, keepdim=True).detach())\n"
        "    return unnormalized / torch.sum(unnormalized, dim=-1, keepdim=True)\n",
        "    unnormalized = torch.exp(x - torch.amax(x, dim=0, keepdim=True).detach())\n"
        "    return unnormalized / torch.sum(unnormalized, dim=0, keepdim=True)\n",
        at='mixed = torch.einsum("kbtc,bk->btc"',
    ),
    Change(
        "jax_style",
        "mean comes back before the scale",
        "return y * scale + loc",
        "return (y + loc) * scale",
    ),
    Change(
        "jax_style",
        "norm stands behind the last block only",
        '        h = layer_norm(params["norm"], h)\n',
        '    h = layer_norm(params["norm"], h)\n',
        at='h = times_block(params[f"block_{i}"], h)|amp = amplitude(x)',
        reference="x = self.layer_norm(block(x))",
    ),
    Change(
        "jax_style",
        "tables of cosines and sines have no scale",
        "    norm = 1.0 / math.sqrt(n)\n",
        "    norm = 1.0\n",
        at="return (norm * torch.cos(angle)).float()"
        '|re = torch.einsum("ft,btc->bfc", cosine, x)'
        '|im = torch.einsum("ft,btc->bfc", sine, x)'
        "|return torch.sqrt(re * re + im * im)"
        "|cosine, sine = dft_tables(x.shape[1])",
    ),
    Change(
        "jax_style",
        "all sines of the table come before the cosines",
        "torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1)",
        "torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)",
        at="return pairs.reshape(length, width).float()"
        "|return tokens + dates + sine_table(hp.history, hp.width)",
    ),
    Change(
        "jax_style",
        "no gradient goes through the amplitudes",
        "return freqs.tolist(), mean_amp[:, freqs]",
        "return freqs.tolist(), mean_amp[:, freqs].detach()",
        at="mean_amp = torch.mean(amp, dim=2)|amp = amplitude(x)",
    ),
    Change(
        "jax_style",
        "what was not observed counts in the spectrum",
        'residual = torch.where(seen, output - batch["y"], 0.0)',
        'residual = output - batch["y"]',
        at="torch.mean(amplitude(residual))",
        reference='error = (output - batch["y"]) * observed',
    ),
    Change(
        "jax_style",
        "schedule is asked when the step is counted already",
        '        rate = cosine_schedule(self.adam["count"])\n'
        "        updates, self.adam = scale_by_adam(grads, self.adam)\n",
        "        updates, self.adam = scale_by_adam(grads, self.adam)\n"
        '        rate = cosine_schedule(self.adam["count"])\n',
        phase="optimizer",
    ),
]
