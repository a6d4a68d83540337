"""Faulty ports of the denoiser."""

from ..bank import Change

FAULTS = [
    Change(
        "keras_style",
        "sine before cosine",
        "[torch.cos(angles), torch.sin(angles)]",
        "[torch.sin(angles), torch.cos(angles)]",
    ),
    Change(
        "keras_style",
        "rates divided by one less",
        "-np.arange(4) / 4",
        "-np.arange(4) / 3",
        parameter="rates",
        at="* self.rates",
    ),
    Change(
        "keras_style",
        "epsilon of Keras",
        "epsilon=1e-6",
        "epsilon=1e-3",
        at="self.epsilon)",
    ),
    Change(
        "keras_style",
        "scale without one",
        "y = y + y * gamma + beta",
        "y = y * gamma + beta",
    ),
    Change(
        "keras_style",
        "shift before scale",
        "gamma = film[:, None, None, :half]\n        beta = film[:, None, None, half:]",
        "beta = film[:, None, None, :half]\n        gamma = film[:, None, None, half:]",
        at="beta|gamma",
    ),
    Change(
        "keras_style",
        "attention not scaled",
        " * float(1 / np.sqrt(c))",
        "",
        at="score.reshape(n, h, w, h * w)|torch.softmax(score",
    ),
    Change(
        "keras_style",
        "query and key exchanged",
        '("query", "key", "value")',
        '("key", "query", "value")',
        parameter="attention.query.kernel|attention.key.kernel|attention.query.bias|attention.key.bias",
    ),
    Change(
        "keras_style",
        "keys averaged, not queries",
        '"nhwHW,nHWc->nhwc"',
        '"nHWhw,nHWc->nhwc"',
    ),
    Change(
        "keras_style",
        "groups interleaved",
        "a.reshape(n, h * w, self.groups, c // self.groups)",
        "a.reshape(n, h * w, c // self.groups, self.groups).transpose(2, 3)",
        at="a.reshape(n, h * w|mean =|variance =|g = ",
    ),
    Change(
        "keras_style",
        "skip connection first",
        "torch.cat([a, kept], -1)",
        "torch.cat([kept, a], -1)",
    ),
    Change(
        "keras_style",
        "kernel rows for columns",
        "permute(2, 3, 1, 0)",
        "permute(3, 2, 1, 0)",
        parameter="conv_in.kernel",
    ),
    Change(
        "keras_style",
        "time not activated in the block",
        "self.time_dense(swish(e))",
        "self.time_dense(e)",
    ),
    Change(
        "keras_style",
        "same padding on the other side",
        "y = torch.conv2d(a, k, stride=self.strides, padding=1)",
        "pad = (0, 2, 0, 2) if self.strides > 1 else (1, 1, 1, 1)\n        y = torch.conv2d(torch.nn.functional.pad(a, pad), k, stride=self.strides)",
    ),
    Change(
        "keras_style",
        "residual of the normed",
        "return a + self.proj_out(y)",
        "return self.norm(a) + self.proj_out(y)",
    ),
]
