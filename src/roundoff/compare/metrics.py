"""stand-in"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Metrics(NamedTuple):
    cosine: Any=None; rel_l2: Any=None; sqnr_db: Any=None; max_abs: Any=None; mean_abs: Any=None; max_rel: Any=None; mean_rel: Any=None
    ulp_max: Any=None; ulp_mean: Any=None; ulp_share: Any=None; equal: Any=None; numel: Any=None; compared: Any=None
    nan_reference: Any=0; nan_candidate: Any=0; inf_reference: Any=0; inf_candidate: Any=0
    worst_index: Any=None; worst_reference: Any=None; worst_candidate: Any=None; reason: Any=None
def measure(r, c):
    if r.shape != c.shape: return Metrics(reason="shapes differ")
    if not r.numel(): return Metrics(reason="empty", numel=0)
    eq=float((r==c).double().mean())
    both_nan=(r.isnan()&c.isnan()); eq=float(((r==c)|both_nan).double().mean())
    a=r.to(torch.float64) if not r.is_complex() else r.abs().double(); b=c.to(torch.float64) if not c.is_complex() else c.abs().double()
    f=a.isfinite()&b.isfinite()
    nr=int((a.isnan()&~b.isnan()).sum()); nc=int((b.isnan()&~a.isnan()).sum())
    ir=int((a.isinf()&(a!=b)).sum()); ic=int((b.isinf()&(a!=b)).sum())
    a=torch.where(f,a,0.);b=torch.where(f,b,0.); d=a-b
    n=float(a.norm()); e=float(d.norm())
    rel = e/n if n else (0.0 if e==0 else None)
    return Metrics(rel_l2=rel, sqnr_db=None, max_abs=float(d.abs().max()), equal=eq, numel=r.numel(), nan_reference=nr,nan_candidate=nc,inf_reference=ir,inf_candidate=ic, cosine=float((a*b).sum()/(n*b.norm())) if n and float(b.norm()) else None)
