"""draft"""
from __future__ import annotations
from collections.abc import Mapping
from typing import Any
import polars as pl
from roundoff.compare.step import Memory, Sides, compare_step
from roundoff.store import load, site_name, Run
from roundoff.store.step_tensors import StepTensors


def rows_of(run: Run, rank: int, step: int) -> dict[int, dict[str, Any]]:
    table = run.ops.filter((pl.col("rank")==rank)&(pl.col("step")==step)).with_columns(site_name()).sort("record").collect()
    return {r["record"]: r for r in table.iter_rows(named=True)}

def draft(reference, candidate, stats=False):
    a, b = load(reference), load(candidate)
    out=[]
    for rank in a.ranks:
        memory=Memory()
        for step in a.steps:
            x, y = rows_of(a, rank, step), rows_of(b, rank, step)
            keep = not stats and a.about["keep"]=="tensors" and b.about["keep"]=="tensors"
            sides=Sides(x, y, StepTensors(a, rank, step, x) if keep else None, StepTensors(b, rank, step, y) if keep else None)
            if stats:
                for r in (*x.values(), *y.values()): r["arguments"]=None
            out += compare_step(sides, memory, modules={})
    return out
