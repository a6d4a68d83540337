"""``roundoff.diagnose(workload, candidate=...)``: from a workload to the operator that makes its candidate differ.

Reference and candidate are recorded from equal weights, random states and batches, each twice, so that what does not
repeat itself is known before anything is blamed; then once more in fp64, which tells a bug from rounding; for a number
format the budget, the plan and its proof come with it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from roundoff.budget import Progress
from roundoff.compare import unstable
from roundoff.errors import InfeasibleError, RoundoffError, RunError
from roundoff.plan import Variant, double, values_kept, variant
from roundoff.preserve import preserve
from roundoff.record import Capture, Run, load, sibling
from roundoff.report import candidate_text
from roundoff.verbs.compare import Comparison, compare
from roundoff.verbs.diagnose import Diagnosis, diagnose
from roundoff.verbs.fp64_referee import decided, outputs_error
from roundoff.workload import Workload, named_tensors, user_code

Outputs = list[dict[str, Tensor]]


@dataclass(frozen=True)
class CandidateDiagnosis:
    """What ``diagnose`` with a candidate finds.

    Attributes:
        comparison: the two recorded runs, compared.
        unstable: rows of either side that differ when it is recorded again, with the column ``side``; empty where all is
            reproducible.
        higher_precision: ``site``, ``error``, ``error_fp64``, ``output_error``, ``output_error_fp64``, ``verdict``
            (``bug``, ``rounding`` or ``undecided``) and ``reason``; None where the two sides are equal.
        diagnosis: budget, plan and proof for a number format; None for other candidates.
        summary: all of it as plain data.
    """

    comparison: Comparison
    unstable: pl.DataFrame
    higher_precision: dict[str, Any] | None
    diagnosis: Diagnosis | None
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether no operator is blamed, fp64 finds no bug, and a plan, where there is one, meets its target."""
        bug = (self.higher_precision or {}).get("verdict") == "bug"
        return (
            self.comparison.agrees
            and not bug
            and (self.diagnosis is None or self.diagnosis.verification.met)
        )


def diagnose_candidate(
    workload: Workload,
    candidate: str | Path,
    *,
    output: str | Path | None = None,
    steps: int = 1,
    noise: int = 0,
    backend: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> CandidateDiagnosis:
    """What makes ``candidate`` differ from ``workload``; see ``roundoff.diagnose``, which is the way to call it."""
    if steps < 1 or noise < 0:
        raise RunError(
            "a number that cannot be",
            where="diagnose",
            expected="steps of at least 1, noise of at least 0",
            got=f"steps={steps}, noise={noise}",
        )
    reference = Variant(workload.name, workload)
    other = variant(workload, candidate, steps=steps, backend=backend)
    with ExitStack() as stack:
        folder = (
            Path(output)
            if output is not None
            else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        folder.mkdir(parents=True, exist_ok=True)
        stages = 7 + noise
        done = 0

        def stage() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress("compare", done, stages)

        sides = [
            Side(folder / "reference", reference, steps, stage),
            Side(folder / "candidate", other, steps, stage),
        ]
        ours, theirs = sides
        for seed in range(1, noise + 1):
            ours.again("noise", seed)
        shaky = pl.concat(
            [
                side.unstable.with_columns(pl.lit(side.path.name).alias("side"))
                for side in sides
            ]
        )
        found = compare(reference=str(ours.path), candidate=str(theirs.path))
        stage()
        higher = _higher(
            found, ours, theirs, other.unit or _unit(workload), not shaky.is_empty()
        )
        plan, why = _planned(workload, other, options, progress)
        said = candidate_text.verified(higher, plan.summary if plan else None)
        found = replace(found, about=replace(found.about, verified=said))
        found.save(folder / "comparison")
    result = CandidateDiagnosis(found, shaky, higher, plan)
    notes = [*other.notes, *([f"no plan: {why}"] if why else [])]
    result.summary.update(_summary(result, workload, other, notes, steps))
    return result


class Side:
    """One side: its run, a second one that shows what does not repeat itself, and the outputs of the first."""

    def __init__(
        self, path: Path, variant: Variant, steps: int, stage: Callable[[], None]
    ) -> None:
        self.path, self.variant, self.steps, self.stage = path, variant, steps, stage
        for kind, number in [("repeat", 1), *(("noise", n) for n in range(1, 100))]:
            if sibling(path, kind, number).is_dir():
                shutil.rmtree(sibling(path, kind, number))
        self.outputs = record(variant, path, steps)
        self.run = load(str(path))
        stage()
        self.repeat = self.again("repeat", 1)
        self.unstable = unstable(self.run, [self.repeat])
        if self.unstable.is_empty():
            shutil.rmtree(sibling(path, "repeat", 1))

    def again(self, kind: str, number: int) -> Run:
        """Record it again, unchanged or with noise in the last bits, beside its run."""
        path = sibling(self.path, kind, number)
        record(
            self.variant,
            path,
            self.steps,
            of=self.run.about.id,
            noise=number if kind == "noise" else None,
        )
        self.stage()
        return load(str(path))


def record(
    variant: Variant,
    path: Path,
    steps: int,
    *,
    fp64: bool = False,
    of: str | None = None,
    noise: int | None = None,
) -> Outputs:
    """Record ``steps`` steps of a variant into ``path``, with tensors; gives the outputs of each step, on the CPU.

    A step is a batch: forward; with a loss also backward, with an optimizer also its step. The model is in the mode that
    the workload gave it; it and the process are as before afterwards, also after an exception.
    """
    original = variant.workload
    raw: list[Any] = []
    with values_kept(original.model), preserve(original.model):
        workload = variant.change(double(original) if fp64 else original)
        where = str(workload.path or workload.name)

        def user(what: str) -> Any:
            return user_code(what, where, path=workload.path)

        around = nullcontext if fp64 else variant.around
        recording = Capture(
            path, original.model, keep="tensors", noise=noise, overwrite=True
        )
        recording.of = of
        training = workload.loss is not None
        with torch.set_grad_enabled(training), recording as run:
            optimizer = None
            if training and workload.optimizer is not None:
                with user("optimizer(model)"):
                    optimizer = workload.optimizer(original.model)
            for step in range(steps):
                batch, scalars = workload.batches[step % len(workload.batches)], {}
                with around():
                    output = workload.run(batch)
                    if workload.loss is not None:
                        with user("loss(output, batch)"):
                            scalars["loss"] = workload.loss(output, batch)
                if training:
                    with user("the backward pass of the loss"):
                        scalars["loss"].backward()  # type: ignore[no-untyped-call]
                if optimizer is not None:
                    with user("the optimizer's step"):
                        optimizer.step()
                run.step(**scalars)
                if training:
                    original.model.zero_grad(set_to_none=True)
                raw.append(output)
        if recording.stopped:
            raise RunError(
                "the recording stopped", where=str(path), got=recording.stopped
            )
        return [
            {
                name: t.detach().cpu().clone()
                for name, t in named_tensors(output).items()
            }
            for output in raw
        ]


def _higher(
    found: Comparison, ours: Side, theirs: Side, unit: float, shaky: bool
) -> dict[str, Any] | None:
    """Both sides once more in fp64; None where there is nothing to decide."""
    error = outputs_error(ours.outputs, theirs.outputs)
    if not error and found.divergence is None:
        return None
    high: Comparison | str
    stays = None
    with tempfile.TemporaryDirectory(dir=ours.path.parent) as folder:
        try:
            paths = [Path(folder) / name for name in ("reference", "candidate")]
            sides = zip((ours, theirs), paths, strict=True)
            outputs = [
                record(side.variant, path, side.steps, fp64=True)
                for side, path in sides
            ]
            high = compare(reference=str(paths[0]), candidate=str(paths[1]))
            stays = outputs_error(*outputs)
        except (
            RoundoffError,
            RuntimeError,
            TypeError,
        ) as failed:  # no fp64 on this device, or in this program
            got = (
                failed.got
                if isinstance(failed, RoundoffError) and failed.got
                else str(failed)
            )
            high = got.partition("\n")[0]
    result = decided(found, high, error, stays, unit)
    if shaky and result["verdict"] == "bug" and found.divergence is None:
        reason = (
            "the program does not repeat itself, so neither does what stays in fp64"
        )
        result |= {"verdict": "undecided", "reason": reason}
    return result


def _planned(
    workload: Workload,
    other: Variant,
    options: dict[str, Any],
    progress: Progress | None,
) -> tuple[Diagnosis | None, str]:
    """Budget, plan and proof for the candidate's format, or why there are none."""
    if other.format is None:
        return None, ""
    try:
        return diagnose(workload, [other.format], progress=progress, **options), ""
    except InfeasibleError:
        raise
    except (
        RoundoffError
    ) as error:  # no gradients through this model, say: the comparison stands
        return None, error.what


def _unit(workload: Workload) -> float:
    """Unit roundoff of the widest format of the model's parameters; of fp32 without any."""
    found = [
        torch.finfo(p.dtype).eps / 2
        for p in workload.model.parameters()
        if p.is_floating_point()
    ]
    return min(found, default=2.0**-24)


def _summary(
    result: CandidateDiagnosis,
    workload: Workload,
    other: Variant,
    notes: Sequence[str],
    steps: int,
) -> dict[str, Any]:
    rows = result.unstable.select(
        "side", "site", "phase", "line", "step", "difference", "reason", "note"
    ).to_dicts()
    ranking = result.diagnosis.summary["ranking"] if result.diagnosis else []
    comparison = result.comparison.to_dict()
    comparison["culprits"] = [
        _plain(culprit, ranking) for culprit in comparison["culprits"]
    ]
    comparison["divergence"] = comparison["divergence"] and _plain(
        comparison["divergence"], ranking
    )
    return {
        "reference": workload.name,
        "candidate": other.name,
        "steps": steps,
        "agrees": result.agrees,
        "notes": list(notes),
        "unstable": rows,
        "higher_precision": result.higher_precision,
        "comparison": comparison,
        "rounding": [
            {k: row[k] for k in ("site", "share", "sqnr_db", "chosen")}
            for row in ranking
        ],
        "plan": result.diagnosis.summary if result.diagnosis else None,
    }


def _plain(
    culprit: dict[str, Any], ranking: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A culprit as plain data, with ``share``: of the output's noise, by the adjoint, where the budget has one site in its
    module, so that there is no doubt which one it is."""
    sites = [
        row for row in ranking if row["site"].rpartition("/")[0] == culprit["module"]
    ]
    return {
        **culprit,
        "ranks": sorted(culprit["ranks"]),
        "steps": sorted(culprit["steps"]),
        "share": sites[0]["share"] if len(sites) == 1 else None,
    }
