"""Faulty ports of the latent ODE."""

from ..bank import Change

FAULTS = [
    Change(
        "by_tableau",
        "shares of another method",
        "SHARES = (1 / 6, 1 / 3, 1 / 3, 1 / 6)",
        "SHARES = (1 / 8, 3 / 8, 3 / 8, 1 / 8)",
        at="total = sum(",
    ),
    Change(
        "by_tableau",
        "third stage at the start",
        "STAGES = ((), (0.5,), (0.0, 0.5)",
        "STAGES = ((), (0.5,), (0.5, 0.0)",
        at="inside = inside + a * dt * k|f(inside, t + node * dt)",
    ),
    Change(
        "by_tableau",
        "time of the interval",
        "t = times[n] + step * dt",
        "t = times[n] + 0 * step * dt",
    ),
    Change(
        "by_tableau",
        "series read forwards",
        "for t in reversed(range(series.shape[1])):",
        "for t in range(series.shape[1]):",
        at="x = series[:, t]|for t in range(series.shape[1]):|self.gru(torch.cat(",
    ),
    Change(
        "by_tableau",
        "variance for deviation",
        "torch.sqrt(torch.exp(logvar)) * eps",
        "torch.exp(logvar) * eps",
    ),
    Change(
        "by_tableau",
        "divergence is averaged",
        "0.5 * torch.sum(mu.square() + logvar.exp() - logvar - 1, dim=1)",
        "0.5 * torch.mean(mu.square() + logvar.exp() - logvar - 1, dim=1)",
    ),
    Change(
        "by_tableau",
        "update the wrong way round",
        "h = n + z * (h - n)",
        "h = h + z * (n - h)",
    ),
    Change(
        "by_tableau",
        "constant of the likelihood missing",
        " - 0.5 * np.log(2 * np.pi)",
        "",
    ),
    Change(
        "by_tableau",
        "gates in torch's order",
        "torch.cat([zh, rh]).T",
        "torch.cat([rh, zh]).T",
        parameter="gru.U_zr",
    ),
    Change(
        "by_tableau",
        "epsilon inside the root",
        '(state["square"].sqrt() + group["epsilon"])',
        '(state["square"] + 1e-3).sqrt()',
        phase="optimizer",
    ),
    Change(
        "by_tableau",
        "halves of the statistics exchanged",
        'mean, logvar = w["stats.weight"].chunk(2)',
        'logvar, mean = w["stats.weight"].chunk(2)',
        parameter="mu_w|logvar_w",
    ),
    Change(
        "by_tableau",
        "all values count",
        'torch.einsum("ntc,ntc->n", log_p, batch["mask"])',
        "log_p.sum((1, 2))",
    ),
]
