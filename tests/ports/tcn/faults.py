"""Faulty ports of the temporal convolutional network."""

from ..bank import Change


def _blocks(names, form):
    """Return the names of parameters of all three blocks."""
    return "|".join(form.format(name=n, i=i) for n in names.split() for i in range(3))


def _lists(names):
    return _blocks(names, "{name}.{i}")


def _residuals(names):
    return _blocks(names, "residuals.{i}.{name}")


FAULTS = [
    Change(
        "numpy_style",
        "matrices of the residuals are not transposed",
        'arrays["res_w"] = [matrix.T for matrix in res]',
        'arrays["res_w"] = res',
        parameter=_lists("res_w"),
        at="out = x + (h @ self.res_w[i]",
    ),
    Change(
        "numpy_style",
        "taps are turned round, as np.convolve has them",
        "        v = torch.permute(v, (2, 1, 0))\n",
        "        v = torch.permute(v, (2, 1, 0)).flip(0)\n",
        parameter=_lists("value_v gate_v"),
        at="y = y + padded[:, first : first + steps] @ w[k]"
        "|return v * (gain / length)|value_w = unit_filters(|gate_w = unit_filters(",
    ),
    Change(
        "numpy_style",
        "first half of the filters taken for the gates",
        '        arrays["value_v"].append(v[..., :half])\n'
        '        arrays["gate_v"].append(v[..., half:])\n',
        '        arrays["gate_v"].append(v[..., :half])\n'
        '        arrays["value_v"].append(v[..., half:])\n',
        parameter=_lists("value_v gate_v"),
        at="length = torch.sqrt(torch.sum(v * v|return v * (gain / length)"
        "|value_w = unit_filters(|gate_w = unit_filters(",
    ),
    Change(
        "numpy_style",
        "all blocks read the skip biases of the first",
        '[sd[f"blocks.{i}.skip.bias"] for i in range(n_blocks)]',
        '[sd["blocks.0.skip.bias"] for i in range(n_blocks)]',
        parameter="skip_b.1|skip_b.2",
        at="skip = h @ self.skip_w[i] + self.skip_b[i]",
    ),
    Change(
        "numpy_style",
        "length of a filter is taken over the taps alone",
        "length = torch.sqrt(torch.sum(v * v, axis=(0, 1)))",
        "length = torch.sqrt(torch.sum(v * v, axis=0))",
        at="return v * (gain / length)",
    ),
    Change(
        "numpy_style",
        "zeros stand on both sides of the series",
        "    before = torch.zeros(n, (N_TAPS - 1) * dilation, channels)\n"
        "    padded = torch.cat([before, x], dim=1)\n",
        "    beside = torch.zeros(n, (N_TAPS - 1) * dilation // 2, channels)\n"
        "    padded = torch.cat([beside, x, beside], dim=1)\n",
        at="y = y + padded[:, first : first + steps] @ w[k]",
        reference="F.pad(x, (self.padding, 0))",
    ),
    Change(
        "numpy_style",
        "sum of the residual is not scaled down",
        "        out = out / math.sqrt(2.0)\n",
        "",
        at="out = x + (h @ self.res_w[i]",
        reference="(x + self.residual(h)) * 0.5**0.5",
    ),
    Change(
        "numpy_style",
        "averages already have the batch when it is compared with them",
        "        moved = self.shift_from_average(series, mu, sigma)\n"
        "        if self.training:\n"
        "            self.update_averages(series, mu, sigma)\n",
        "        if self.training:\n"
        "            self.update_averages(series, mu, sigma)\n"
        "        moved = self.shift_from_average(series, mu, sigma)\n",
        at="mu_avg = self.avg_mu[series]|sigma_avg = self.avg_sigma[series]"
        "|shift_mu = (mu - mu_avg)|shift_sigma = torch.log(sigma)",
    ),
    Change(
        "numpy_style",
        "affine map is undone in the order in which it was done",
        "        y = y - self.shift\n        y = y / self.stretch\n",
        "        y = y / self.stretch\n        y = y - self.shift\n",
    ),
    Change(
        "numpy_style",
        "calendar of the future begins at the last hour of the past",
        "torch.arange(N_PAST, N_PAST + N_FUTURE)",
        "torch.arange(N_PAST - 1, N_PAST + N_FUTURE - 1)",
        at="by_hour = self.hour_table[hours % 24]|by_day = self.day_table["
        "|return self.lookup(past), self.lookup(future)",
    ),
    Change(
        "numpy_style",
        "levels of the quantiles are evenly spaced",
        "QUANTILES = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])",
        "QUANTILES = torch.linspace(0.1, 0.9, 5)",
        at="cost = torch.where(over >= 0, q * over, (q - 1.0) * over)",
    ),
    Change(
        "numpy_style",
        "likelihood counts what was not observed",
        "    nll = torch.sum(nll * w) / torch.sum(w)\n",
        "    step_w = STEP_WEIGHTS[None, :, None].expand_as(nll)\n"
        "    nll = torch.sum(nll * step_w) / torch.sum(step_w)\n",
    ),
    Change(
        "numpy_style",
        "epsilon of the mean square stands below the root",
        "g / (torch.sqrt(ms) + self.eps)",
        "g / torch.sqrt(ms + self.eps)",
        phase="optimizer",
    ),
    Change(
        "mxnet_style",
        "skips come before residues in the fused projection",
        '[source[f"{prefix}residual.{kind}"], source[f"{prefix}skip.{kind}"]]',
        '[source[f"{prefix}skip.{kind}"], source[f"{prefix}residual.{kind}"]]',
        parameter=_residuals("proj.weight proj.bias"),
        at="u = self.proj(self.se(u))|return Convolution(x, self.weight, self.bias)",
    ),
    Change(
        "mxnet_style",
        "first arguments of the distribution are mu and sigma, as the class has them",
        'zip(("nu", "mu", "sigma"), args)',
        'zip(("mu", "sigma", "nu"), args)',
        parameter="|".join(
            f"distr_output.{arg}.{kind}"
            for arg in ("mu", "sigma", "nu")
            for kind in ("weight", "bias")
        ),
        at="sigma = Activation(self.sigma(x)|nu = Activation(self.nu(x)"
        "|return self.mu(x), sigma, nu",
    ),
    Change(
        "mxnet_style",
        "gains are the lengths of the directions",
        'source[weight_norm + "original0"].flatten()',
        'source[weight_norm + "original1"].flatten(1).norm(dim=1)',
        parameter=_residuals("conv.gamma"),
        at="weight = self.gamma[:, None, None] * L2Normalization(self.direction)",
    ),
    Change(
        "mxnet_style",
        "units of the quantiles go by levels first",
        "array = torch.unflatten(array, 0, (NUM_VARIABLES, len(QUANTILES)))\n",
        "array = torch.unflatten(array, 0, (len(QUANTILES), NUM_VARIABLES))\n"
        "        array = torch.swapaxes(array, 0, 1)\n",
        parameter="|".join(
            f"quantile_output.{part}.{kind}"
            for part in ("lowest", "steps")
            for kind in ("weight", "bias")
        ),
        at="lowest = self.lowest(x)[..., None]|steps = Activation(self.steps(x)",
    ),
    Change(
        "mxnet_style",
        "dilations grow by one, not by twice",
        "GatedResidue(n_residue, n_skip, n_reduced, kernel_size, 2**d)",
        "GatedResidue(n_residue, n_skip, n_reduced, kernel_size, d + 1)",
        at="ct = Convolution(data, weight, self.bias, self.dilation, self.padding)"
        "|return nn.functional.conv1d(",
        reference="self.conv(F.pad(x",
    ),
    Change(
        "mxnet_style",
        "cut off at the front, so that the future shows",
        "return slice_axis(ct, axis=2, begin=0, end=-self.padding)",
        "return slice_axis(ct, axis=2, begin=self.padding, end=None)",
    ),
    Change(
        "mxnet_style",
        "each skip goes through a relu before the sum",
        "            skip_outs.append(skip)\n",
        '            skip_outs.append(Activation(skip, "relu"))\n',
        at="y = torch.stack(skip_outs).sum(dim=0)",
    ),
    Change(
        "mxnet_style",
        "degrees of freedom begin at one",
        'nu = Activation(self.nu(x), "softrelu") + 2.0',
        'nu = Activation(self.nu(x), "softrelu") + 1.0',
    ),
    Change(
        "mxnet_style",
        "weekday stays that of the start",
        "day_of_week = torch.remainder(index // 24, 7)\n",
        "day_of_week = torch.remainder(start // 24, 7)\n"
        "        day_of_week = torch.unsqueeze(day_of_week, 1).expand_as(hour_of_day)\n",
        at="return torch.stack([hour_of_day, day_of_week], dim=-1)",
    ),
    Change(
        "mxnet_style",
        "momentum of the averages is the share of the new, as in torch",
        "momentum=0.9, minimum_variance=1e-5",
        "momentum=0.1, minimum_variance=1e-5",
        at="new = moving * self.momentum + (hot.T @ value)"
        "|moving.copy_(torch.where(in_batch, new, moving))"
        "|usual_loc, usual_scale = hot @ self.moving_loc",
        reference="lerp(",
        steps=2,
    ),
    Change(
        "mxnet_style",
        "size of the target has no discount along the horizon",
        "abs_target = torch.abs(y_true) * sample_weight",
        "abs_target = torch.abs(y_true)",
        at="return torch.sum(qt_loss) / torch.sum(abs_target)",
        reference="(target.abs() * weight)",
    ),
    Change(
        "mxnet_style",
        "no gradient goes from the distribution into the decoder",
        "mu, sigma, nu = self.distr_output(hidden)",
        "mu, sigma, nu = self.distr_output(hidden.detach())",
        at="hidden = self.decoder(",
    ),
    Change(
        "mxnet_style",
        "weight decay is left out for the biases alone",
        'trainer.set_wd_mult(r"(bias|beta|gamma)$", 0.0)',
        'trainer.set_wd_mult(r"bias$", 0.0)',
        phase="optimizer",
    ),
]
