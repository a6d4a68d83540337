"""Faulty ports of the small Hyena."""

from ..bank import Change


def _each(names):
    """Return these names of parameters in each of the blocks."""
    return "|".join(f"block{i}/{name}" for i in range(3) for name in names.split())


FAULTS = [
    Change(
        "haiku_like",
        "streams stay in the order of storage",
        "rows.unflatten(0, (STREAMS, DIM)).flip(0)",
        "rows.unflatten(0, (STREAMS, DIM))",
        parameter=_each("mixer/streams/w mixer/streams/b mixer/taps/w mixer/taps/b"),
        at="value, *gates = streams.unbind(2)",
    ),
    Change(
        "haiku_like",
        "square matrix of the filters is not transposed",
        'stacked("implicit_filter.2.weight").transpose(1, 2)',
        'stacked("implicit_filter.2.weight")',
        parameter="filters/middle/w",
        at='h = torch.einsum("ltv,lvw->ltw"',
    ),
    Change(
        "haiku_like",
        "taps are those of a correlation",
        "[:, :, 0].flip(2)",
        "[:, :, 0]",
        parameter=_each("mixer/taps/w"),
        at="y = sum(shifted(x, by) * tap",
    ),
    Change(
        "haiku_like",
        "filters of the last layer come first",
        '[w[f"layers.{i}.mixer.filter_fn.{name}"] for i in range(LAYERS)]',
        '[w[f"layers.{i}.mixer.filter_fn.{name}"] for i in (2, 1, 0)]',
        # the window is that of every layer
        parameter="|".join(
            f"filters/{name}"
            for name in "enter/w enter/b middle/w middle/b leave/w omega skip".split()
        ),
    ),
    Change(
        "haiku_like",
        "present left out of the long convolution",
        "(lag >= 0)[:, :, None]",
        "(lag > 0)[:, :, None]",
        at='return matrix + torch.eye(|value = torch.einsum("ijd,bjd->bid"',
    ),
    Change(
        "haiku_like",
        "time as a share of all steps, not of the last",
        "time = steps[:, None] / (HORIZON - 1)",
        "time = steps[:, None] / HORIZON",
        at="return torch.cat([torch.cos(angle)",
    ),
    Change(
        "haiku_like",
        "filters brought to size before the window",
        "    h = h * (window + SHIFT)\n"
        "    size = torch.sum(torch.abs(h), dim=1, keepdim=True)\n"
        "    return h / size\n",
        "    size = torch.sum(torch.abs(h), dim=1, keepdim=True)\n"
        "    h = h / size\n"
        "    return h * (window + SHIFT)\n",
        at="size = torch.sum(",
    ),
    Change(
        "haiku_like",
        "size of a filter over the channels",
        "torch.sum(torch.abs(h), dim=1, keepdim=True)",
        "torch.sum(torch.abs(h), dim=-1, keepdim=True)",
        at="return h / size",
    ),
    Change(
        "haiku_like",
        "size of a filter carries no gradient",
        "return h / size",
        "return h / size.detach()",
        at="size = torch.sum(|h = h * (window + SHIFT)",
    ),
    Change(
        "haiku_like",
        "long convolution in half precision",
        'torch.einsum("ijd,bjd->bid", matrix, value) * gate',
        'torch.einsum("ijd,bjd->bid", matrix.half(), value.half()).to(gate) * gate',
    ),
    Change(
        "haiku_like",
        "residual of the normed",
        'return x + mlp(p, name + "/mlp", fed)',
        'return fed + mlp(p, name + "/mlp", fed)',
    ),
    Change(
        "haiku_like",
        "padding counts in the mean of the loss",
        "/ torch.sum(weights)",
        "/ weights.numel()",
    ),
    Change(
        "haiku_like",
        "filters learn at the rate of the rest",
        '"filter": 1e-3}',
        '"filter": 3e-3}',
        phase="optimizer",
    ),
    Change(
        "overlap_add",
        "norms of a layer exchanged",
        '(("norm_hyena", "norm1"), ("norm_ffn", "norm2"))',
        '(("norm_hyena", "norm2"), ("norm_ffn", "norm1"))',
        parameter="norm_hyena_g|norm_hyena_b|norm_ffn_g|norm_ffn_b",
    ),
    Change(
        "overlap_add",
        "biases of the matrices stay at zero",
        '            tensors[name + "_w"] = self.stack(key + ".weight")\n'
        '            tensors[name + "_b"] = self.stack(key + ".bias")\n',
        '            tensors[name + "_w"] = self.stack(key + ".weight")\n'
        '            tensors[name + "_b"] = torch.zeros_like(self.stack(key + ".bias"))\n',
        parameter="proj_out_b|ffn_up_b|ffn_down_b",
    ),
    Change(
        "overlap_add",
        "both orders have the first skip",
        '"filter_skip2": skip2',
        '"filter_skip2": skip1',
        parameter="filter_skip2",
    ),
    Change(
        "overlap_add",
        "window folded for one step more",
        "torch.exp(-deltas.abs() / (N_CTX - 1))",
        "torch.exp(-deltas.abs() / N_CTX)",
        parameter="window1|window2",
        at="window = ratio.unsqueeze(1) ** age",
        reference="decay = torch.exp(-t * self.deltas.abs())",
    ),
    Change(
        "overlap_add",
        "all cosines before all sines",
        ".unflatten(2, (2, N_BAND)).transpose(2, 3).flatten(2)",
        "",
        parameter="filter_in_w",
        at="rows += [torch.cos(angle)|return torch.stack(rows)",
    ),
    Change(
        "overlap_add",
        "epsilon of Keras",
        "NORM_EPS = 1e-5",
        "NORM_EPS = 1e-3",
        at="x = (x - mean) * torch.rsqrt(",
    ),
    Change(
        "overlap_add",
        "activation by a sigmoid",
        "    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)\n"
        "    return 0.5 * x * (1 + torch.tanh(inner))\n",
        "    return x * torch.sigmoid(1.702 * x)\n",
    ),
    Change(
        "overlap_add",
        "transform too short, so that ends come around",
        "size = CHUNK + n",
        "size = n",
        at="spectrum = torch.fft.rfft(|part = torch.fft.irfft(|total = total + ",
    ),
    Change(
        "overlap_add",
        "history is the first token again",
        "history = x.new_zeros(*x.shape[:2], 2)",
        "history = x[:, :, :1].expand(-1, -1, 2)",
        at='windows = torch.cat([history, x]|return torch.einsum("bctk,ck->bct"',
    ),
    Change(
        "overlap_add",
        "gates before the convolutions",
        "        v = g1 * LongConv.apply(v, taps1, self.filter_skip1[il].unsqueeze(1))\n"
        "        v = g2 * LongConv.apply(v, taps2, self.filter_skip2[il].unsqueeze(1))\n",
        "        v = LongConv.apply(v * g1, taps1, self.filter_skip1[il].unsqueeze(1))\n"
        "        v = LongConv.apply(v * g2, taps2, self.filter_skip2[il].unsqueeze(1))\n",
        reference="v = x_i * fftconv(",
    ),
    Change(
        "overlap_add",
        "gradient of the taps is a mean over the batch",
        "overlap_add(turned, signal).flip(-1).sum(0)",
        "overlap_add(turned, signal).flip(-1).mean(0)",
        at="v = g1 * LongConv.apply(|v = g2 * LongConv.apply(|return raw / raw.abs()",
    ),
    Change(
        "overlap_add",
        "labels are the tokens read, not the next",
        'targets = batch["input_ids"][:, 1:].reshape(-1)',
        'targets = batch["input_ids"][:, :-1].reshape(-1)',
        at="rows = output.reshape(|chosen = rows.gather(",
    ),
    Change(
        "overlap_add",
        "stacked biases decay as matrices do",
        'if name.endswith("_w")]',
        "if named[name].dim() >= 2]",
        phase="optimizer",
    ),
]
