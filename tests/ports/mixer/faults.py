"""Faulty ports of the mixer."""

from ..bank import Change

FAULTS = [
    Change("einsums", "epsilon", "mean * mean + 1e-5", "mean * mean + 1e-3"),
    Change("einsums", "mean is not squared", "square - mean * mean", "square - mean"),
    Change("einsums", "wrong constant", "0.7071067811865476", "0.70"),
    Change(
        "einsums",
        "residual of the first half left out",
        "return x + y",
        "return y",
        reference="self.channels(self.norm2",
    ),
    Change(
        "einsums",
        "bias on the wrong axis",
        'torch.einsum("btc,cd->btd", y, self.wc_in) + self.bc_in',
        'torch.einsum("btc,cd->btd", y, self.wc_in) + 0 * self.bc_in',
    ),
    Change(
        "einsums",
        "mean over channels",
        "x = x.sum(1) / x.shape[1]",
        "x = x.sum(1) / x.shape[2]",
    ),
    Change(
        "einsums", "patches", ".permute(0, 2, 4, 1, 3, 5)", ".permute(0, 2, 4, 1, 5, 3)"
    ),
    Change(
        "einsums",
        "scale and shift exchanged",
        "scale, shift = parameters",
        "shift, scale = parameters",
        at="return y * scale + shift",
    ),
    Change(
        "einsums",
        "weights of the first layer twice",
        'name = f"blocks.{i}."',
        'name = "blocks.0."',
        parameter="layers.1.ln_t|layers.1.wt_in|layers.1.wc_in",
    ),
    Change(
        "einsums",
        "kernel turned",
        'w["stem.weight"].reshape(16, 27).t()',
        'w["stem.weight"].transpose(2, 3).reshape(16, 27).t()',
        parameter="patch",
    ),
    Change(
        "convs",
        "no activation",
        "nn.Conv1d(9, 12, 1), nn.GELU(), nn.Conv1d(12, 9, 1)",
        "nn.Conv1d(9, 12, 1), nn.Identity(), nn.Conv1d(12, 9, 1)",
        at="x = x + self.spatial",
        reference="F.gelu",
    ),
    Change(
        "convs",
        "gelu by tanh",
        "nn.Conv1d(16, 40, 1), nn.GELU()",
        'nn.Conv1d(16, 40, 1), nn.GELU(approximate="tanh")',
        at="y = self.pointwise(y)",
    ),
    Change(
        "convs", "norm of the wrong half", "y = self.between(x)", "y = self.before(x)"
    ),
    Change(
        "convs", "maximum for mean", "F.adaptive_avg_pool1d", "F.adaptive_max_pool1d"
    ),
    Change(
        "convs",
        "mean before the norm",
        "x = self.final(x)\n        x = F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(-1)",
        "x = F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(-1)\n        x = self.final(x)",
        at="F.adaptive_avg_pool1d",
    ),
]
