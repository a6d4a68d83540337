"""How many singular values of a matrix are more than noise: the analytic solution of
variational Bayes.

Nakajima, Sugiyama, Babacan and Tomioka, "Global Analytic Solution of Fully-observed
Variational Bayesian Matrix Factorization", JMLR 14 (2013) 1-37: the empirical Bayes
estimate of ``V = B Aᵀ + noise`` keeps exactly the singular values above a threshold
(their theorem 2 and corollary 2), and the noise variance is the minimum of a function
of one variable (theorem 3).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar

from roundoff.errors import QuantizationError

Values = NDArray[np.float64]


def evbmf_rank(
    singular: Values, rows: int, columns: int, *, noise: float | None = None
) -> int:
    """The rank that empirical variational Bayes keeps of a matrix with these singular values.

    Args:
        singular: all ``min(rows, columns)`` of them, in any order, at least 0.
        rows: of the matrix.
        columns: of the matrix.
        noise: variance of the noise of one element; estimated when None.

    Returns:
        0 to ``len(singular)``; 0 for a matrix of zeros.

    Raises:
        QuantizationError: another number of singular values, or one that is negative,
            NaN or infinite.

    Example:
        >>> matrix = np.random.default_rng(0).normal(size=(60, 100))
        >>> matrix[:, :50] += 10 * np.outer(np.linspace(-1, 1, 60), np.linspace(1, 2, 50))
        >>> evbmf_rank(np.linalg.svd(matrix, compute_uv=False), 60, 100)
        1
    """
    small, large = sorted((rows, columns))
    values = np.sort(np.asarray(singular, np.float64))[::-1]
    if len(values) != small or not np.isfinite(values).all() or (values < 0).any():
        raise QuantizationError(
            "not the singular values of a matrix",
            expected=f"{small} finite values of at least 0",
            got=f"{len(values)} values",
        )
    if small == 0 or values[0] == 0.0:
        return 0
    alpha = small / large
    tau = _tau_low(alpha)
    # the whole estimate scales with the matrix: unit scale keeps the search well
    # conditioned
    unit = values / values[0]
    variance = (
        _noise(unit, large, alpha, tau) if noise is None else noise / values[0] ** 2
    )
    threshold = math.sqrt(large * variance * (1 + tau) * (1 + alpha / tau))
    return int((unit > threshold).sum())


def _tau_low(alpha: float) -> float:
    """The zero of Φ(τ) + Φ(τ/α), Φ(z) = log(z+1)/z - 1/2 (theorem 2)."""

    def phi(z: float) -> float:
        return math.log1p(z) / z - 0.5

    # Φ falls, has its zero at 2.5129, and τ/α >= τ: the zero of the sum is in [α,
    # 2.5129]·√α's neighbourhood
    return float(brentq(lambda t: phi(t) + phi(t / alpha), 1e-9 * alpha, 3.0))


def _noise(values: Values, large: int, alpha: float, tau: float) -> float:
    """The noise variance that minimises Ω of theorem 3, within its bounds."""
    small = len(values)
    x_low = (1 + tau) * (1 + alpha / tau)
    highest = min(math.ceil(small / (1 + alpha)) - 1, small - 1)
    squares = values**2
    upper = squares.sum() / (small * large)
    rest = squares[highest:]
    lower = max(squares[highest] / (large * x_low), rest.sum() / (large * len(rest)))
    lower = max(lower, upper * 1e-12)  # an exact low rank: no noise at all

    def omega(log_variance: float) -> float:
        x = squares / (large * math.exp(log_variance))
        with np.errstate(divide="ignore"):
            free = x - np.log(np.maximum(x, 1e-300))
        above = x[x > x_low]
        t = 0.5 * (
            above - (1 + alpha) + np.sqrt((above - (1 + alpha)) ** 2 - 4 * alpha)
        )
        return float(
            free.sum() + (np.log(t + 1) + alpha * np.log(t / alpha + 1) - t).sum()
        )

    if lower >= upper:
        return float(upper)
    # Ω has kinks where a singular value crosses the threshold: the best of a grid,
    # refined between its neighbours
    grid = np.linspace(math.log(lower), math.log(upper), 200)
    at = int(np.argmin([omega(g) for g in grid]))
    left = grid[max(at - 1, 0)]
    right = grid[min(at + 1, len(grid) - 1)]
    return math.exp(
        float(minimize_scalar(omega, bounds=(left, right), method="bounded").x)
    )
