"""Faulty ports of the network that names points."""

from ..bank import Change

FAULTS = [
    Change(
        "by_arrays",
        "the turn is not transposed",
        'seen = torch.einsum("nik,nkl->nil", seen, turn)',
        'seen = torch.einsum("nik,nlk->nil", seen, turn)',
    ),
    Change(
        "by_arrays",
        "mean for the largest",
        "far = torch.amax(far, 1)",
        "far = far.mean(1)",
    ),
    Change(
        "by_arrays",
        "no identity",
        "return y.reshape(-1, size, size) + torch.eye(size)",
        "return y.reshape(-1, size, size)",
    ),
    Change(
        "by_arrays",
        "variance of the first axis alone",
        "spread = rows.var(0, unbiased=False)",
        "spread = rows.var(0)",
    ),
    Change(
        "by_arrays",
        "no norm in the hidden layer",
        'y = self.step(f"{name}_hidden", y)',
        'y = torch.clamp(self.dense(f"{name}_hidden", y), min=0)',
    ),
    Change(
        "by_arrays",
        "far before near",
        "torch.cat((seen, far), -1)",
        "torch.cat((far, seen), -1)",
    ),
    Change(
        "by_arrays",
        "points of another batch",
        "points = x.permute(0, 2, 1)",
        "points = x.reshape(x.shape[0], x.shape[2], 3)",
    ),
    Change(
        "by_arrays",
        "norm of another layer",
        '"late_a": "late.1"',
        '"late_a": "align.points.4"',
        parameter="late_a_gain|late_a_shift",
    ),
    Change(
        "by_arrays",
        "matrix read by columns",
        'kernel = w[old + ".weight"].flatten(1).t()',
        'kernel = w[old + ".weight"].flatten(1).t()\n'
        '        if name == "first_matrix":\n'
        "            kernel = kernel.unflatten(1, (3, 3)).transpose(1, 2).flatten(1)",
        parameter="first_matrix_kernel",
        at="kernel = kernel.unflatten",
    ),
    Change(
        "by_arrays",
        "points aligned twice with the same matrix",
        'turn = self.square("second", seen)\n        seen =',
        'turn = self.square("second", seen)\n        turn = turn @ turn\n        seen =',
    ),
    Change(
        "by_arrays",
        "penalty is squared",
        "apart = torch.sqrt(((torch.eye(len(gram[0])) - gram) ** 2).sum((1, 2)))",
        "apart = ((torch.eye(len(gram[0])) - gram) ** 2).sum((1, 2))",
    ),
    Change(
        "by_arrays",
        "momentum as in the classical method",
        'p.sub_(group["lr"] * ahead)',
        'p.sub_(group["lr"] * state["speed"])',
        phase="optimizer",
    ),
    Change(
        "by_arrays",
        "running variance without correction",
        "lerp_(spread * count / (count - 1), 0.1)",
        "lerp_(spread, 0.1)",
    ),
    Change(
        "by_arrays",
        "the whole is the first point's",
        "far = torch.amax(far, 1)",
        "far = far[:, 0]",
    ),
]
