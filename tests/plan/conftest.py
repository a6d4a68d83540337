"""What the tests of plan share: budgets made by hand, so that every number in them is known."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from roundoff.budget.facts import MeasuredSite, Measurement
from roundoff.budget.noise_power import Term, power
from roundoff.budget.table import TERM_SCHEMA, Budget


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
