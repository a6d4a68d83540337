"""A summary such as diagnose makes: 60 sites in 4 formats, with every odd thing a real one has."""

from __future__ import annotations

import copy
import math
import random

import pytest

FORMATS = ["bf16", "fp16", "fp8_e4m3fn", "int8"]
STEP_DB = {"bf16": 55.0, "fp16": 72.0, "fp8_e4m3fn": 33.0, "int8": 38.0}
TRICKY = [
    "<script>alert('x')&amp;</script>/linear",
    "[red]heads[/red].[0]/matmul#1",
    'tower["a"].&b/softmax',
]


def names(number: int) -> list[str]:
    parts = [
        "attention.self.query/linear",
        "attention.self.key/linear",
        "attention.self.value/linear",
        "attention.self/scaled_dot_product_attention",
        "attention.output.dense/linear",
        "attention.output.LayerNorm/layer_norm",
        "intermediate.dense/linear",
        "intermediate.intermediate_act_fn/gelu",
        "output.dense/linear",
        "output/add",
    ]
    found = TRICKY + [
        f"encoder.layer.{layer}.{part}"
        for layer in range(-(-number // 10))
        for part in parts
    ]
    return found[:number]


def ranking(sites: list[str], formats: list[str], chosen: dict[str, str]) -> list[dict]:
    generator = random.Random(7)
    rows = []
    for fmt in formats:
        noises = {
            site: 10 ** (-(STEP_DB[fmt] + generator.gauss(0, 5)) / 10) for site in sites
        }
        total = sum(noises.values())
        for site, noise in noises.items():
            split = [generator.random() for _ in range(3)]
            shares = [noise * part / sum(split) for part in split]
            dbs = [-10 * math.log10(part) for part in shares]
            if fmt not in ("bf16", "fp16"):
                dbs[2] = None
            rows.append(
                {
                    "rank": 0,
                    "site": site,
                    "operator": site.rpartition("/")[2].partition("#")[0],
                    "kind": "linear",
                    "format": fmt,
                    "sqnr_db": -10 * math.log10(noise),
                    "stderr_db": generator.uniform(0.02, 1.4),
                    "share": noise / total,
                    "activation_db": dbs[0],
                    "weight_db": None if "act_fn" in site else dbs[1],
                    "output_db": dbs[2],
                    "measured": "adjoint",
                    "chosen": chosen[site],
                    "note": "",
                }
            )
    exact = rows[-1]
    exact |= {
        "sqnr_db": None,
        "stderr_db": None,
        "share": 0.0,
        "activation_db": None,
        "weight_db": None,
        "output_db": None,
        "note": "exact",
    }
    if len(sites) > 3:
        lost = next(
            row
            for row in rows
            if row["format"] == "fp16" and "attention_" not in row["site"]
        )
        lost |= {
            "sqnr_db": None,
            "stderr_db": None,
            "share": 1.0,
            "activation_db": None,
            "weight_db": None,
            "output_db": None,
            "note": "overflow: 12 elements",
        }
        rows[5]["note"] = "overflow: 3 elements"

    def worst_first(row):
        if row["sqnr_db"] is None:
            return -math.inf if row["share"] else math.inf
        return row["sqnr_db"]

    rows.sort(key=worst_first)
    return [row | {"rank": rank} for rank, row in enumerate(rows, 1)]


def make_summary(number: int = 60) -> dict:
    sites = names(number)
    generator = random.Random(3)
    costs = (0.27, 0.29, 0.31, 0.36, 0.42, 0.5, 0.6, 0.72, 0.86, 0.99)
    chosen = {
        site: generator.choice(["int8", "int8", "bf16", "fp8_e4m3fn", "fp32"])
        for site in sites
    }
    rows = ranking(sites, FORMATS, chosen)
    counts = {
        f: sum(c == f for c in chosen.values())
        for f in ["int8", "fp8_e4m3fn", "fp32", "bf16"]
    }
    scatter = [
        {
            "site": r["site"],
            "format": r["format"],
            "predicted_db": r["sqnr_db"],
            "measured_db": r["sqnr_db"] + generator.gauss(0, 0.7),
        }
        for r in rows
        if r["sqnr_db"] is not None
        and r["format"] == r["chosen"].replace("fp32", "bf16")
    ][:48]
    return {
        "version": "0.1.0",
        "workload": "minilm",
        "formats": list(FORMATS),
        "probes": 16,
        "samples": 32,
        "environment": [
            {"name": "torch", "value": "2.8.0+cpu", "note": ""},
            {
                "name": "machine",
                "value": "x86_64 AVX512",
                "note": "vector width orders the sums",
            },
            {
                "name": "threads",
                "value": "2",
                "note": "another number splits reductions at other places",
            },
            {
                "name": "float32 matmul precision",
                "value": "high",
                "note": "fp32 products are computed in fewer bits",
            },
            {"name": "subnormals", "value": "kept", "note": ""},
        ],
        "target": {
            "asked": "0.5%",
            "sqnr_db": 30.0,
            "note": "spearman drops by 0.005 between 28 and 32 dB",
        },
        "coverage": {
            "calls": number + 17,
            "sites": number,
            "params": 103,
            "excluded": [
                {
                    "reason": "only moves or selects elements",
                    "operator": "view",
                    "count": 12,
                    "where": "not a site",
                    "examples": [
                        "encoder.layer.0.attention.self/view",
                        "encoder.layer.0.attention.self/transpose",
                    ],
                },
                {
                    "reason": "integer result",
                    "operator": "argmax<int>",
                    "count": 5,
                    "where": "not a site",
                    "examples": [],
                },
            ],
            "no_path": [
                "[bias]/add: its result is not used by the output",
                "pooler/tanh: its result is detached",
            ],
            "mixed": 0,
            "measured_batches": 0,
            "batches": 0,
        },
        "ranking": rows,
        "plan": {
            "sites": counts,
            "rules": 9,
            "target_db": 30.0,
            "predicted_db": 30.6,
            "note": "",
            "cost": {
                "model": "bytes",
                "unit": "MB",
                "plan": 31.4159,
                "fp32": 88.75,
                "lowest": 24.1,
                "lowest_format": "int8",
            },
        },
        "rounds": [
            {
                "round": 1,
                "predicted_db": 30.62,
                "measured_db": 28.34,
                "additive_db": 30.91,
                "metric_predicted": 0.8412,
                "metric_measured": 0.8377,
                "action": "linearised again around the rounded model, solved again",
            },
            {
                "round": 2,
                "predicted_db": 31.05,
                "measured_db": 31.27,
                "additive_db": 31.4,
                "metric_predicted": 0.84213,
                "metric_measured": 0.84255,
                "action": "accepted",
            },
        ],
        "result": {
            "target_db": 30.0,
            "predicted_db": 31.05,
            "measured_db": 31.27,
            "native_db": 31.19,
            "native_note": "22 calls with real casts, 31 simulated",
            "metric_name": "spearman",
            "metric_reference": 0.84512,
            "metric_predicted": 0.84213,
            "metric_predicted_std": 0.00121,
            "metric_measured": 0.84255,
            "met": True,
        },
        "pareto": [
            {
                "target_db": t,
                "predicted_db": t + 0.4,
                "cost": 88.75 * share,
                "relative_cost": share,
            }
            for t, share in zip(range(20, 66, 5), costs, strict=True)
        ],
        "scatter": scatter,
        "seconds": {"budget": 5.31, "plan": 0.22, "verify": 3.9},
    }


_SUMMARY = make_summary()


@pytest.fixture
def summary() -> dict:
    return copy.deepcopy(_SUMMARY)


@pytest.fixture
def one_site() -> dict:
    """One site, no metric, nothing predicted, nothing measured alone, a plan that misses its target."""
    made = make_summary(1)
    made["scatter"], made["pareto"] = [], []
    made["target"] |= {"asked": "30dB", "note": ""}
    made["result"] |= dict.fromkeys(
        [
            "metric_name",
            "metric_reference",
            "metric_predicted",
            "metric_predicted_std",
            "metric_measured",
            "native_db",
        ]
    )
    made["result"] |= {
        "native_note": "",
        "predicted_db": None,
        "measured_db": 12.34,
        "met": False,
    }
    made["rounds"] = [
        made["rounds"][0]
        | {
            "predicted_db": None,
            "measured_db": 12.34,
            "additive_db": None,
            "metric_predicted": None,
            "metric_measured": None,
            "action": "target missed",
        }
    ]
    return made


@pytest.fixture
def no_sites() -> dict:
    """A model whose calls are all left out."""
    made = make_summary(1)
    made["coverage"] |= {"sites": 0, "calls": 17, "params": 0, "no_path": []}
    made |= {"ranking": [], "scatter": [], "pareto": []}
    made["plan"] |= {"sites": {}, "rules": 0}
    made["plan"]["cost"] |= {
        "plan": 0.0,
        "fp32": 0.0,
        "lowest": 0.0,
        "lowest_format": "fp32",
    }
    exact = {"predicted_db": math.inf, "measured_db": math.inf}
    made["rounds"] = [made["rounds"][1] | exact | {"additive_db": math.inf}]
    made["result"] |= exact | {"native_db": None}
    return made
