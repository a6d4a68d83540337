"""What the tests of attribute share: tiny models whose exact answers torch.func gives, and one measured pass."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from roundoff.budget.adjoint import Probe, Way, measure_batch
from roundoff.budget.facts import MeasuredSite, Measurement
from roundoff.budget.noise_power import Term, power
from roundoff.budget.samples import divide, divisions
from roundoff.budget.table import TERM_SCHEMA, Budget
from roundoff.formats import parse_format
from roundoff.ops.calls import watch
from roundoff.plan.rounded_model import Plain
from roundoff.workload.outputs import target_tensors
from roundoff.workload.workload import preserve


class Perturbed(nn.Module):
    """A model whose site outputs can be moved: ``moved[site]`` is added to what the site returned."""

    def __init__(self):
        super().__init__()
        self.moved = {}

    def at(self, site, value):
        return value + self.moved[site] if site in self.moved else value

    def jacobian(self, site, x, shape):
        """The exact Jacobian of the output by what ``site`` returned: shape ``(output elements, *shape)``."""

        def output(move):
            self.moved = {site: move}
            try:
                return self(x).flatten()
            finally:
                self.moved = {}

        return torch.func.jacrev(output)(torch.zeros(shape, dtype=x.dtype))


class Tiny(Perturbed):
    """Every kind of use: a linear layer with bias, a value used twice, a matmul with a parameter, a product."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.a = nn.Parameter(torch.randn(5, 5))
        self.mean = False

    def forward(self, x):
        h = self.at("/tanh", torch.tanh(self.at("first/linear", self.first(x))))
        m = self.at("/matmul", h @ self.a)
        p = self.at("/mul", m * h)
        if self.mean:  # mixes the samples of the batch
            p = p - p.flip(0)
        return self.at("last/linear", self.last(p))

    def errors(self, x):
        """For each site, the parts of its own bf16 error in order, by torch's casts."""
        w1, b1, w2, b2, a = (
            self.first.weight,
            self.first.bias,
            self.last.weight,
            self.last.bias,
            self.a,
        )
        y = self.first(x)
        h = torch.tanh(y)
        m = h @ a
        p = m * h
        if self.mean:
            p = p - p.flip(0)

        def chain(*results):
            end = low(results[-1])
            parts = [("activation", results[1] - results[0])]
            if len(results) > 2:
                parts.append(("weight", results[2] - results[1]))
            return dict(
                [*parts, ("output", end - results[-1]), ("all", end - results[0])]
            )

        def linear(x, w, b):
            return x @ w.T + b

        with torch.no_grad():
            return {
                "first/linear": chain(
                    y, linear(low(x), w1, b1), linear(low(x), low(w1), low(b1))
                ),
                "/tanh": chain(h, torch.tanh(low(y))),
                "/matmul": chain(m, low(h) @ a, low(h) @ low(a)),
                "/mul": chain(m * h, low(m) * low(h)),
                "last/linear": chain(
                    linear(p, w2, b2),
                    linear(low(p), w2, b2),
                    linear(low(p), low(w2), low(b2)),
                ),
            }

    def exact(self, x):
        """Noise power ``|J e|^2 / |z|^2`` of each site and part in bf16, without any sampling."""
        found = {}
        with torch.no_grad():
            signal = float(self(x).square().sum())
        for site, parts in self.errors(x).items():
            shape = parts["all"].shape
            jacobian = (
                self.jacobian(site, x, shape).detach().reshape(-1, math.prod(shape))
            )
            found[site] = {
                name: float((jacobian @ e.flatten()).square().sum()) / signal
                for name, e in parts.items()
            }
        return found


def low(x):
    return x.to(torch.bfloat16).to(x.dtype)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def tiny():
    return Tiny().double().requires_grad_(False)


@pytest.fixture
def measure():
    """``measure(model, x)``: one forward pass, K probes; the ``Probe`` with what its hooks found."""

    def run(model, x, *, formats=("bf16",), probes=8, batched=True, seed=0, learn=True):
        anchor = torch.tensor(-0.0, requires_grad=True)
        probe = Probe([parse_format(f) for f in formats], {}, {}.get, anchor)
        with preserve(model), watch(model, Plain()) as mode:
            model.requires_grad_(False)
            measure_batch(
                mode,
                probe,
                lambda: list(target_tensors(model(x), None).values()),
                check=lambda: None,
                probes=lambda *_: probes,
                generator=torch.Generator().manual_seed(seed),
                divided=lambda targets: (
                    divisions(x, targets)
                    if learn
                    else [divide("rows of the target", x, targets)]
                ),
                way=Way.TOGETHER if batched else Way.ALONE,
                parameters=0,
            )
        return probe

    return run


class Made:
    """Collects sites and terms; ``budget()`` gives the Budget."""

    def __init__(self, formats, probes, batch_samples):
        self.formats, self.probes, self.batch_samples = formats, probes, batch_samples
        self.rows, self.sites = [], []

    def site(
        self,
        name,
        kind="linear",
        params=(),
        refused=None,
        no_path=None,
        elements=1e6,
        macs=1e6,
    ):
        sizes = {
            "activation_elements": elements,
            "weight_elements": elements if params else 0.0,
            "output_elements": elements,
            "macs": macs,
        }
        operator = name.rpartition("/")[2].partition("#")[0]
        self.sites.append(
            {
                "site": name,
                "operator": operator,
                "kind": kind,
                "params": list(params),
                "sizes": sizes,
                "refused": refused or {},
                "no_path": no_path,
                "batches": len(self.batch_samples),
            }
        )
        return self

    def term(
        self,
        site,
        fmt,
        part,
        values,
        *,
        operand=0,
        sources=(),
        pooled=False,
        overflow=0,
    ):
        """``values``: projections of shape (probes, samples), or (probes, batches) if pooled."""
        values = np.asarray(values, dtype=np.float32).reshape(self.probes, -1)
        term = Term(
            part, operand, tuple(sources), pooled, overflow, values.astype(np.float64)
        )
        noise, stderr = power([term])
        self.rows.append(
            (
                site,
                fmt,
                part,
                -1 if part == "output" else operand,
                list(sources),
                pooled,
                overflow,
                noise,
                stderr,
                values.ravel().tolist(),
                "adjoint",
            )
        )
        return self

    def budget(self, **about):
        samples = sum(self.batch_samples)
        base = {
            "version": "0",
            "workload": "made",
            "formats": self.formats,
            "probes": self.probes,
            "seed": 0,
            "samples": samples,
            "signal": 1.0,
            "batch_samples": self.batch_samples,
            "batch_signal": [n / samples for n in self.batch_samples],
            "sample_signal": [1 / samples] * samples,
            "target": {"name": "output", "tensors": {}},
            "around": {},
            "batched": True,
            "calls": len(self.sites),
            "excluded": [],
            "environment": [],
        }
        facts = {"sites": self.sites, "about": base | about}
        return Budget(
            pl.DataFrame(self.rows, schema=TERM_SCHEMA, orient="row"),
            tuple(MeasuredSite.from_dict(site) for site in facts["sites"]),
            Measurement.from_dict(facts["about"]),
        )


@pytest.fixture
def made():
    def start(formats=("bf16",), probes=2, batch_samples=(2,)):
        return Made(list(formats), probes, list(batch_samples))

    return start
