"""Faulty ports of the flow."""

from ..bank import Change

FAULTS = [
    Change(
        "arrays",
        "activation norm subtracts its log",
        'return x, ldj + self.norm["logs"].sum() + self.lu',
        'return x, ldj - self.norm["logs"].sum() + self.lu',
    ),
    Change(
        "arrays",
        "scale and shift exchanged",
        'self.to_scale = tree({"kernel": kernel[:, :H], "bias": bias[:H]})\n        self.to_shift = tree({"kernel": kernel[:, H:], "bias": bias[H:]})',
        'self.to_shift = tree({"kernel": kernel[:, :H], "bias": bias[:H]})\n        self.to_scale = tree({"kernel": kernel[:, H:], "bias": bias[H:]})',
        parameter="|".join(
            f"steps.{k}.{head}.{part}"
            for k in range(3)
            for head in ("to_scale", "to_shift")
            for part in ("kernel", "bias")
        ),
    ),
    Change(
        "arrays",
        "permuted the other way",
        'w[at + "order"].argmax(1)',
        'w[at + "order"].argmax(0)',
        at="y[:, self.rows]",
        parameter="steps.0.rows|steps.1.rows|steps.2.rows",
    ),
    Change(
        "arrays",
        "scale is not bounded the same way",
        "s = 4 * torch.sigmoid(s) - 2",
        "s = 2 * torch.sigmoid(s) - 1",
    ),
    Change(
        "arrays",
        "square kernel is not transposed",
        'kernel = w[at + f"{k}.weight"].t()',
        'kernel = w[at + f"{k}.weight"]\n            kernel = kernel.t() if k == 0 else kernel',
        parameter="steps.0.inner.1.kernel|steps.1.inner.1.kernel|steps.2.inner.1.kernel",
    ),
    Change(
        "arrays",
        "no correction of the first moment",
        'm = s["m"] / (1 - b1 ** s["t"])',
        'm = s["m"]',
        phase="optimizer",
    ),
    Change(
        "arrays", "natural logarithm", "nll.mean() / np.log(2) / D", "nll.mean() / D"
    ),
    Change(
        "arrays",
        "lower factor with its diagonal",
        'torch.tril(self.lu["l"], diagonal=-1)',
        'torch.tril(self.lu["l"], diagonal=0)',
    ),
    Change(
        "masked",
        "log of the determinant over the batch",
        "return x, full_s.sum(dim=1)",
        "return x, full_s.sum(dim=0)[: len(x)]",
    ),
    Change(
        "masked",
        "masks do not alternate",
        "mask = first if k % 2 == 0 else 1 - first",
        "mask = first",
        at="x[:, seen]|mask = first",
        parameter="5.mask",
    ),
    Change(
        "masked",
        "no activation inside",
        "self.fc3(self.act(self.fc2(h)))",
        "self.fc3(self.fc2(h))",
    ),
    Change(
        "masked",
        "shift after the scale",
        "(x + self.bias) * torch.exp(self.logs)",
        "x * torch.exp(self.logs) + self.bias",
    ),
    Change(
        "masked",
        "prior is averaged",
        ".log_prob(z).sum(dim=1)",
        ".log_prob(z).mean(dim=1)",
    ),
]
