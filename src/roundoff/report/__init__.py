"""What a person reads: the terminal, one HTML file, strict JSON; all made of records.

>>> import tempfile
>>> from pathlib import Path
>>> from rich.console import Console
>>> from roundoff.record import Setting
>>> row = RankingRow(rank=1, site="head/linear", format="int8", sqnr_db=41.26,
...     stderr_db=0.4, share=1.0, activation_db=43.1, weight_db=45.9, chosen="int8")
>>> cost = PlanCost(model="bytes", unit="MB", plan=2.0, fp32=8.0, lowest=2.0,
...     lowest_format="int8")
>>> result = VerifiedResult(target_db=40.0, predicted_db=41.3, measured_db=41.0,
...     native_db=None, native_note="", metric_name=None, metric_reference=None,
...     metric_predicted=None, metric_predicted_std=None, metric_measured=None, met=True)
>>> summary = DiagnosisSummary(version="0.1.0", workload="tiny", formats=("int8",),
...     probes=16, samples=8, environment=(Setting("threads", "2"),),
...     target=AskedTarget(asked="40dB", sqnr_db=40.0),
...     coverage=Coverage(calls=1, sites=1, params=2, excluded=(), no_path=()),
...     ranking=(row,), plan=PlanSummary(sites={"int8": 1}, rules=1, cost=cost),
...     rounds=(), result=result, pareto=(), scatter=(), seconds={"budget": 0.1})
>>> print_summary(summary, Console(width=100))
roundoff 0.1.0: tiny in int8 (16 probes, 8 samples)
<BLANKLINE>
The plan meets the target: 41.0 dB measured, 41.3 dB predicted, 40.0 dB asked. It takes 1 of...
>>> with tempfile.TemporaryDirectory() as folder:
...     write_html(summary, Path(folder) / "report.html")
...     (Path(folder) / "report.html").read_text(encoding="utf-8")[:15]
'<!doctype html>'
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
