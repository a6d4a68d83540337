"""Faulty ports of the small N-BEATS."""

from ..bank import Change

_OUT = "return inputs * inverse"
_STATE = "self.moving_mean.|self.moving_variance.|unbiased = "

FAULTS = [
    Change(
        "keras_like",
        "epsilon of Keras",
        "epsilon=1e-5",
        "epsilon=1e-3",
        at="inverse = self.gamma / ",
    ),
    Change(
        "keras_like",
        "momentum the other way round",
        "momentum=0.9",
        "momentum=0.1",
        at=_STATE,
    ),
    Change(
        "keras_like",
        "moving variance is biased",
        "unbiased = variance * (n / (n - 1))",
        "unbiased = variance",
        at="self.moving_variance.add_(|variance = ((",
        reference="x = norm(F.relu(layer(x)))",
    ),
    Change(
        "keras_like",
        "statistics of the loader in training",
        "        if self.training:\n",
        "        if not self.training:\n",
        at="inverse = |" + _OUT,
    ),
    Change(
        "keras_like",
        "norm before the activation",
        "hidden = norm(torch.maximum(dense(hidden), torch.tensor(0.0)))",
        "hidden = torch.maximum(norm(dense(hidden)), torch.tensor(0.0))",
        at="mean = inputs.mean(0)|variance = ((inputs",
    ),
    Change(
        "keras_like",
        "last step is in the trend",
        "np.linspace(0, 1, length, endpoint=False)",
        "np.linspace(0, 1, length)",
        parameter="blocks.0.backward_basis|blocks.0.forward_basis",
        at="return back @ self.backward_basis",
    ),
    Change(
        "keras_like",
        "highest power first",
        "np.vander(t, degree, increasing=True)",
        "np.vander(t, degree)",
        parameter="blocks.0.backward_basis|blocks.0.forward_basis",
        at="return back @ self.backward_basis",
    ),
    Change(
        "keras_like",
        "past of the season runs forward",
        "(season(-np.arange(20)), season(np.arange(6)))",
        "(season(np.arange(20)), season(np.arange(6)))",
        parameter="blocks.1.backward_basis",
        at="return back @ self.backward_basis",
    ),
    Change(
        "keras_like",
        "sines first",
        "np.concatenate([np.cos(turns), np.sin(turns)])",
        "np.concatenate([np.sin(turns), np.cos(turns)])",
        parameter="blocks.1.backward_basis|blocks.1.forward_basis",
        at="return back @ self.backward_basis",
    ),
    Change(
        "keras_like",
        "one forecast of a block is taken for two",
        "        return back @ self.backward_basis, ahead @ self.forward_basis\n",
        "        return back @ self.backward_basis, back @ self.forward_basis\n",
    ),
    Change(
        "keras_like",
        "kernel of the second layers is not transposed",
        'self.kernel = nn.Parameter(sd[name + ".weight"].t().contiguous())',
        'kernel = sd[name + ".weight"]\n'
        "        square = kernel.shape[0] == kernel.shape[1]\n"
        "        self.kernel = nn.Parameter(kernel if square else kernel.t().contiguous())",
        parameter="|".join(
            f"blocks.{block}.dense.{layer}.kernel"
            for block in range(4)
            for layer in (1, 2)
        ),
    ),
    Change(
        "keras_like",
        "all norms of a block are the first",
        'BatchNormalization(sd, f"{at}norms.{i}") for i in range(3)',
        'BatchNormalization(sd, f"{at}norms.0") for i in range(3)',
        parameter="|".join(
            f"blocks.{block}.norm.{layer}.{name}"
            for block in range(4)
            for layer in (1, 2)
            for name in ("gamma", "beta", "moving_mean", "moving_variance")
        ),
    ),
    Change(
        "keras_like",
        "masked times are explained too",
        "            left = torch.subtract(left, back) * valid\n",
        "            left = torch.subtract(left, back)\n",
        reference="residuals = (residuals - backcast) * input_mask",
    ),
    Change(
        "keras_like",
        "mask in the order of time",
        "valid = torch.flip(mask, [1])",
        "valid = mask",
        at="* valid",
    ),
    Change(
        "keras_like",
        "forecast starts at the first value",
        "total = left[:, :1]",
        "total = left[:, -1:]",
        at="total = torch.add(total, ahead)",
    ),
    Change(
        "keras_like",
        "scale of the mean",
        "largest = torch.max(torch.abs(series), 1, keepdim=True).values",
        "largest = torch.mean(torch.abs(series), 1, keepdim=True)",
    ),
    Change(
        "keras_like",
        "forecast keeps the scale",
        "        return total * largest\n",
        "        return total\n",
        reference="return forecast * scale",
        at="total = torch.add(",
    ),
    Change(
        "keras_like",
        "mean of the known targets",
        "(share * weights).sum() / weights.numel()",
        "(share * weights).sum() / weights.sum()",
    ),
    Change(
        "keras_like",
        "denominator is halved",
        "share = torch.abs(y - output) / (torch.abs(y) + torch.abs(output))",
        "share = torch.abs(y - output) / ((torch.abs(y) + torch.abs(output)) / 2)",
    ),
    Change(
        "keras_like",
        "percentages of the targets",
        "(torch.abs(y) + torch.abs(output))",
        "(2 * torch.abs(y))",
    ),
]
