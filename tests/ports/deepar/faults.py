"""Faulty ports of the DeepAR."""

from ..bank import Change

_GLUON = "out = torch.matmul(data, torch.swapaxes(weight, 0, 1))"
_KERAS_GATES = "z0, z1, z2, z3 = torch.chunk("


def _cells(names):
    """Return the names of variables in both cells of the Keras port."""
    return "|".join(f"lstm{i}.cell.{n}" for i in (1, 2) for n in names.split())


FAULTS = [
    Change(
        "mxnet_style",
        "columns of the first layer keep the order of the reference",
        'reorder_inputs(i2h) if number == 1 else i2h,\n        prefix + "h2h',
        'i2h,\n        prefix + "h2h',
        parameter="rnn.cells.0.i2h_weight",
        at="i2h = FullyConnected(|" + _GLUON,
    ),
    Change(
        "mxnet_style",
        "rows of the Student head are read in the order of the arguments here",
        '("nu", "mu", "sigma")',
        '("mu", "sigma", "nu")',
        parameter="|".join(
            f"student.proj.{n}.{p}"
            for n in ("mu", "sigma", "nu")
            for p in ("weight", "bias")
        ),
        at="return self.distr(**{n: p(x)|self.mu = mu * scale"
        '|self.sigma = Activation(sigma, "softrelu")|self.nu = Activation(nu'
        "|" + _GLUON + "|return out if bias is None else out + bias"
        "|return FullyConnected(x, self.weight, self.bias)",
    ),
    Change(
        "mxnet_style",
        "each gate's matrix from state to state is transposed",
        'prefix + "h2h_weight": src[source + "weight_hh"],',
        'prefix + "h2h_weight": src[source + "weight_hh"]\n'
        "        .unflatten(0, (4, -1))\n"
        "        .transpose(1, 2)\n"
        "        .flatten(0, 1),",
        parameter="rnn.cells.0.h2h_weight|rnn.cells.1.base_cell.h2h_weight",
        at="h2h = FullyConnected(|" + _GLUON,
    ),
    Change(
        "mxnet_style",
        "lags are shorter by one and the first shows the value itself",
        "        begin_index = -lag_index - subsequences_length\n"
        "        end_index = -lag_index\n",
        "        begin_index = 1 - lag_index - subsequences_length\n"
        "        end_index = 1 - lag_index if lag_index > 1 else None\n",
        at="slice_axis(sequence, axis=0|return torch.narrow(data, axis"
        "|return torch.cat(lagged_values, dim=-1)"
        "|lags = get_lagged_subsequences(|indicators = get_lagged_subsequences(",
    ),
    Change(
        "mxnet_style",
        "scale is that of the whole history, not of the context",
        "            slice_axis(past, 0, -context_length, None),\n"
        "            slice_axis(past_observed, 0, -context_length, None),\n",
        "            past,\n            past_observed,\n",
        at="scale = self.scaler(|num_observed = torch.sum(|sum_observed = torch.sum("
        "|torch.abs(data) * observed_indicator",
    ),
    Change(
        "mxnet_style",
        "missing values count in the mean of a series",
        "        denominator = torch.clamp(num_observed, min=1.0)\n",
        "        denominator = torch.full_like(num_observed, data.shape[0])\n",
        at="scale = sum_observed / denominator",
        reference="scale = torch.where(count > 0, total / count",
    ),
    Change(
        "mxnet_style",
        "shortcut adds the state of the step before, not the input",
        "        output, states = self.base_cell(inputs, states)\n"
        "        return output + inputs, states\n",
        "        output, new_states = self.base_cell(inputs, states)\n"
        "        return output + states[0], new_states\n",
        reference="outputs.append(h1 + h2)",
    ),
    Change(
        "mxnet_style",
        "cell's state goes out without its tanh",
        'next_h = out_gate * Activation(next_c, "tanh")',
        "next_h = out_gate * next_c",
    ),
    Change(
        "mxnet_style",
        "width of the Student distribution is not scaled back",
        'self.sigma = Activation(sigma, "softrelu") * scale',
        'self.sigma = Activation(sigma, "softrelu")',
        at="part1 = 1.0 / nu * torch.square(|- torch.log(sigma)",
        reference="F.softplus(sigma) * scale",
    ),
    Change(
        "mxnet_style",
        "dispersion is divided by the scale, not by its root",
        'Activation(alpha, "softrelu") / torch.sqrt(scale)',
        'Activation(alpha, "softrelu") / scale',
        at="alpha_inv = 1.0 / self.alpha|alpha_times_mu = self.alpha * self.mu",
        reference="alpha / scale.sqrt()",
    ),
    Change(
        "mxnet_style",
        "mean over the steps of each series, then over the series",
        "        return weighted_average(loss, weights) + self.regularization(outputs, mask)\n",
        "        pairs = zip(loss.unbind(1), weights.unbind(1))\n"
        "        averages = [weighted_average(x, w) for x, w in pairs]\n"
        "        average = torch.mean(torch.stack(averages))\n"
        "        return average + self.regularization(outputs, mask)\n",
        at="return torch.sum(weighted) / torch.clamp(",
    ),
    Change(
        "mxnet_style",
        "change is taken from series to series, as if the batch came first",
        "        later, sooner = outputs[1:], outputs[:-1]\n"
        "        squares = torch.mean(torch.square(later - sooner), dim=-1, keepdim=True)\n"
        "        temporal = weighted_average(squares, mask[:-1])\n",
        "        later, sooner = outputs[:, 1:], outputs[:, :-1]\n"
        "        squares = torch.mean(torch.square(later - sooner), dim=-1, keepdim=True)\n"
        "        temporal = weighted_average(squares, mask[:, 1:] * mask[:, :-1])\n",
        at="squares = torch.mean(torch.square(later - sooner)"
        "|return alpha_reg * activation",
    ),
    Change(
        "mxnet_style",
        "forecast begins with empty states",
        "        decoded, _ = self.rnn.unroll(\n",
        "        state = self.rnn.begin_state(scale.shape[1])\n"
        "        decoded, _ = self.rnn.unroll(\n",
        at="h2h = FullyConnected(|next_c = forget_gate * states[1]"
        "|return [torch.zeros(batch_size, self.hidden_size)"
        "|return [s for cell in self.cells",
    ),
    Change(
        "tfp_style",
        "gates are sorted as in TensorFlow's older cell",
        "    return kernel, recurrent_kernel, bias\n\n\n",
        "    found = []\n"
        "    for value in (kernel, recurrent_kernel, bias):\n"
        "        i, f, c, o = torch.chunk(value, 4, dim=-1)\n"
        "        found.append(torch.cat([i, c, f, o], dim=-1))\n"
        "    return found\n\n\n",
        parameter=_cells("kernel recurrent_kernel bias")
        + "|lstm1.cell.constants_kernel",
        at="z = torch.matmul(inputs, self.kernel)"
        "|z = z + torch.matmul(h_tm1, self.recurrent_kernel)"
        "|z = z + torch.matmul(constants, self.constants_kernel)|" + _KERAS_GATES,
    ),
    Change(
        "tfp_style",
        "row of the scale stays behind those of the categories",
        '"lstm1.cell.constants_kernel": torch.cat([log_scale, embedded])',
        '"lstm1.cell.constants_kernel": torch.cat([embedded, log_scale])',
        parameter="lstm1.cell.constants_kernel",
        at="z = z + torch.matmul(constants, self.constants_kernel)",
    ),
    Change(
        "tfp_style",
        "table of the weekdays is turned the other way",
        'torch.roll(src["weekday.weight"], 1, dims=0)',
        'torch.roll(src["weekday.weight"], -1, dims=0)',
        parameter="weekday.embeddings",
        at="weekday = self.weekday(|return self.embeddings[inputs]",
    ),
    Change(
        "tfp_style",
        "states move on where the mask is off",
        "            states = [torch.where(keep, n, s) for n, s in zip(new_states, states)]\n",
        "            states = new_states\n",
        at="z = z + torch.matmul(h_tm1|c = f * c_tm1 + i * torch.tanh(z2)"
        "|new_output, new_states = self.cell(",
        reference="h.where(keep",
    ),
    Change(
        "tfp_style",
        "gates have the hard sigmoid of older Keras",
        "constants=0, recurrent_activation=sigmoid",
        "constants=0, recurrent_activation=hard_sigmoid",
        at="i = self.recurrent_activation(z0)|f = self.recurrent_activation(z1)"
        "|o = self.recurrent_activation(z3)|return torch.clamp(0.2 * x + 0.5",
    ),
    Change(
        "tfp_style",
        "masks of the lagged values are those of the step itself",
        "lags, seen = make_lags(series), make_lags(weights)",
        "lags = make_lags(series)\n"
        "        seen = torch.stack([weights[:, -NUM_STEPS:]] * len(LAG_INDICES), dim=2)",
        at="return torch.cat([known, weekday, age, lags, seen], dim=2)",
        reference="flags = lagged(observed.float())",
    ),
    Change(
        "tfp_style",
        "one is missing in the power of the Student density",
        "-0.5 * (df + 1.0) * torch.log1p(y**2 / df)",
        "-0.5 * df * torch.log1p(y**2 / df)",
        at="return log_unnormalized_prob - log_normalization",
    ),
    Change(
        "tfp_style",
        "logits are those of a failure",
        "logits = torch.log(mean) - torch.log(total_count)",
        "logits = torch.log(total_count) - torch.log(mean)",
        at="self.total_count * log_sigmoid(|value * log_sigmoid(",
    ),
    Change(
        "tfp_style",
        "activity is averaged over masked steps too",
        "activity = masked_mean(torch.mean(h**2, dim=2), mask)",
        "activity = torch.mean(h**2)",
        at="return ACTIVITY_L2 * activity",
        reference="activity = h[valid].square().mean()",
    ),
    Change(
        "tfp_style",
        "scale goes in without its logarithm",
        "return torch.cat([torch.log(scale), *embedded], dim=1)",
        "return torch.cat([scale, *embedded], dim=1)",
        reference="scale.log().unsqueeze(1)",
    ),
    Change(
        "tfp_style",
        "density of the scaled value is not divided by the scale",
        "return self.distribution.log_prob(x) + ildj",
        "return self.distribution.log_prob(x)",
    ),
    Change(
        "tfp_style",
        "features are divided by their variances",
        "torch.sqrt(self.variance).clamp(min=1e-7)",
        "self.variance.clamp(min=1e-7)",
        at="known = self.normalization(",
    ),
    Change(
        "tfp_style",
        "floor is added to the scale",
        "return torch.maximum(scale, torch.tensor(MIN_SCALE))",
        "return scale + MIN_SCALE",
        at="scale = context_scale(",
        reference="return scale.clamp(min=SCALE_FLOOR)",
    ),
]
