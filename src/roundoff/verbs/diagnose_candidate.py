"""``roundoff.diagnose(workload, candidate=...)``: which operator makes them differ.

Reference and candidate are recorded from equal weights, random states and batches, each
twice, so that what does not repeat itself is known before anything is blamed; then once
more in fp64, which tells a bug from rounding; for a number format the budget, the plan
and its proof come with it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from roundoff.budget import Goal, Progress
from roundoff.compare import Culprit, CulpritWithShare, unstable
from roundoff.errors import InfeasibleError, RoundoffError, RunError
from roundoff.plan import Variant, double, values_kept, variant
from roundoff.preserve import preserve
from roundoff.record import LEAVES, Capture, Run, load, sibling
from roundoff.report import (
    AnsweredComparison,
    CandidateSummary,
    HigherPrecision,
    RankingRow,
    RoundingShare,
    UnstableValue,
    candidate_sentences,
)
from roundoff.verbs.candidate_data import candidate_data
from roundoff.verbs.compare import Comparison, compare
from roundoff.verbs.diagnose import Diagnosis, Sampling, diagnose_workload
from roundoff.verbs.fp64_casts import CastsToFp64
from roundoff.verbs.fp64_referee import cleared, decided, outputs_error
from roundoff.workload import Workload, named_tensors, user_code

#: Output tensors of each step, by name, on the CPU.
Outputs = list[dict[str, Tensor]]

#: Stages of a comparison without noise.
STAGES = 7
#: Recordings with noise that an earlier comparison may have left.
MOST_NOISE = 100


@dataclass(frozen=True)
class CandidateDiagnosis:
    """What ``diagnose`` with a candidate finds.

    Attributes:
        comparison: the two recorded runs, compared.
        unstable: rows of either side that differ when it is recorded again, with the
            column ``side``; empty where all is reproducible.
        higher_precision: bug or rounding; None where the two sides are equal.
        diagnosis: budget, plan and proof for a number format; None for others.
        summary: all of it, as reports show it.
    """

    comparison: Comparison
    unstable: pl.DataFrame
    higher_precision: HigherPrecision | None
    diagnosis: Diagnosis | None
    summary: CandidateSummary

    @property
    def agrees(self) -> bool:
        """True if no operator is blamed, fp64 finds no bug, and the plan is met."""
        return self.summary.agrees


def _agrees(
    comparison: Comparison,
    higher: HigherPrecision | None,
    diagnosis: Diagnosis | None,
) -> bool:
    is_bug = higher is not None and higher.verdict == "bug"
    is_met = diagnosis is None or diagnosis.verification.met
    return comparison.agrees and not is_bug and is_met


def diagnose_candidate(
    workload: Workload,
    candidate: str | Path,
    goal: Goal,
    sampling: Sampling | None = None,
    *,
    output: str | Path | None = None,
    steps: int = 1,
    noise: int = 0,
    backend: str | None = None,
    progress: Progress | None = None,
) -> CandidateDiagnosis:
    """Find what makes ``candidate`` differ from ``workload``.

    ``roundoff.diagnose`` is the way to call it, and describes the arguments.
    """
    if steps < 1 or noise < 0:
        raise RunError(
            "a number that cannot be",
            where="diagnose",
            expected="steps of at least 1, noise of at least 0",
            got=f"steps={steps}, noise={noise}",
        )
    reference = Variant(workload.name, workload)
    other = variant(workload, candidate, steps=steps, backend=backend)
    causes, notes_on_data = candidate_data(workload, other)
    with ExitStack() as stack:
        if output is None:
            output = stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        stage = _counter(progress, STAGES + noise)
        ours = Side(folder / "reference", reference, steps, stage)
        theirs = Side(folder / "candidate", other, steps, stage)
        for seed in range(1, noise + 1):
            ours.again("noise", seed)
        shaky = pl.concat([_unstable_rows(side) for side in (ours, theirs)])
        compared = compare(reference=str(ours.path), candidate=str(theirs.path))
        stage()
        unit = other.unit or _unit(workload)
        higher = _higher(compared, ours, theirs, unit, not shaky.is_empty())
        if higher is not None and higher.verdict == "rounding":
            compared = cleared(compared, higher, unit)
        diagnosis, reason = _planned(workload, other, goal, sampling, progress)
        plan = diagnosis.summary if diagnosis else None
        sentences = candidate_sentences(higher, plan)
        if causes and compared.agrees:
            sentences.append("On the same data the runs agree.")
        causes += compared.about.causes
        about = replace(compared.about, verified=sentences, causes=causes)
        compared = replace(compared, about=about)
        compared.save(folder / "comparison")
    ranking = diagnosis.summary.ranking if diagnosis else ()
    summary = CandidateSummary(
        reference=workload.name,
        candidate=other.name,
        steps=steps,
        agrees=_agrees(compared, higher, diagnosis),
        notes=(
            *other.notes,
            *notes_on_data,
            *([f"no plan: {reason}"] if reason else []),
        ),
        unstable=_unstable_values(shaky),
        higher_precision=higher,
        comparison=_with_shares(compared, ranking),
        rounding=tuple(
            RoundingShare(
                site=row.site,
                share=row.share,
                sqnr_db=row.sqnr_db,
                chosen=row.chosen,
            )
            for row in ranking
        ),
        plan=plan,
    )
    return CandidateDiagnosis(compared, shaky, higher, diagnosis, summary)


def _counter(progress: Progress | None, stages: int) -> Callable[[], None]:
    """Return what is called after each stage of the comparison."""
    done = 0

    def stage() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("compare", done, stages)

    return stage


class Side:
    """One side: its run, a second one that shows what does not repeat itself.

    ``outputs`` are those of the first.
    """

    def __init__(
        self, path: Path, variant: Variant, steps: int, stage: Callable[[], None]
    ) -> None:
        self.path = path
        self.variant = variant
        self.steps = steps
        self.stage = stage
        self._forget_siblings()
        self.outputs = record(variant, path, steps)
        self.run = load(str(path))
        stage()
        self.repeat = self.again("repeat", 1)
        self.unstable = unstable(self.run, [self.repeat])
        if self.unstable.is_empty():
            shutil.rmtree(sibling(path, "repeat", 1))

    def _forget_siblings(self) -> None:
        """Delete what an earlier comparison recorded beside this run."""
        noisy = [sibling(self.path, "noise", n) for n in range(1, MOST_NOISE)]
        for path in (sibling(self.path, "repeat", 1), *noisy):
            if path.is_dir():
                shutil.rmtree(path)

    def again(self, kind: str, number: int) -> Run:
        """Record it again, unchanged or with noise in the last bits, beside its run."""
        path = sibling(self.path, kind, number)
        noise = number if kind == "noise" else None
        record(self.variant, path, self.steps, of=self.run.about.id, noise=noise)
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
    keep: str = "tensors",
    leaves: float = LEAVES,
) -> Outputs:
    """Record ``steps`` steps of a variant into ``path``; ``keep`` and ``leaves``: see ``capture``.

    A step is a batch: forward; with a loss also backward, with an optimizer also its
    step. The model is in the mode that the workload gave it; it and the process are as
    before afterwards, also after an exception.

    Returns:
        The outputs of each step, on the CPU.
    """
    original = variant.workload
    with values_kept(original.model), preserve(original.model):
        workload = variant.change(double(original) if fp64 else original)
        around = CastsToFp64 if fp64 else variant.around
        recording = Capture(
            path,
            original.model,
            keep=keep,
            leaves=leaves,
            noise=noise,
            overwrite=True,
        )
        recording.of = of
        raw = _recorded_steps(workload, original.model, steps, recording, around)
        if recording.stopped:
            raise RunError(
                "the recording stopped", where=str(path), got=recording.stopped
            )
        return [_on_cpu(output) for output in raw]


def _recorded_steps(
    workload: Workload,
    model: torch.nn.Module,
    steps: int,
    recording: Capture,
    around: Callable[[], Any],
) -> list[Any]:
    """Run the steps of a workload under a recording, and return their outputs."""
    where = str(workload.path or workload.name)

    def user(stage: str) -> Any:
        return user_code(stage, where, path=workload.path)

    is_training = workload.loss is not None
    outputs = []
    with torch.set_grad_enabled(is_training), recording as run:
        optimizer = None
        if is_training and workload.optimizer is not None:
            with user("optimizer(model)"):
                optimizer = workload.optimizer(model)
        for step in range(steps):
            batch = workload.batches[step % len(workload.batches)]
            scalars = {}
            with around():
                output = workload.run(batch)
                if workload.loss is not None:
                    with user("loss(output, batch)"):
                        scalars["loss"] = workload.loss(output, batch)
            if is_training:
                with user("the backward pass of the loss"):
                    scalars["loss"].backward()  # type: ignore[no-untyped-call]
            if optimizer is not None:
                with user("the optimizer's step"):
                    optimizer.step()
            run.step(**scalars)
            if is_training:
                model.zero_grad(set_to_none=True)
            outputs.append(output)
    return outputs


def _on_cpu(output: Any) -> dict[str, Tensor]:
    tensors = named_tensors(output)
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _higher(
    compared: Comparison, ours: Side, theirs: Side, unit: float, shaky: bool
) -> HigherPrecision | None:
    """Run both sides once more in fp64; None where there is nothing to decide."""
    error = outputs_error(ours.outputs, theirs.outputs)
    if not error and compared.divergence is None:
        return None
    high: Comparison | str
    stays = None
    try:
        high, stays = _compared_in_fp64(ours, theirs)
    except (RoundoffError, RuntimeError, TypeError) as failure:
        # no fp64 on this device, or in this program
        high = _first_line(failure)
    result = decided(compared, high, error, stays, unit)
    if shaky and result.verdict == "bug" and compared.divergence is None:
        reason = (
            "the program does not repeat itself, so neither does what stays in fp64"
        )
        return replace(result, verdict="undecided", reason=reason)
    return result


def _compared_in_fp64(ours: Side, theirs: Side) -> tuple[Comparison, float | None]:
    """Return the comparison in fp64, and how far its outputs are apart."""
    with tempfile.TemporaryDirectory(dir=ours.path.parent) as folder:
        reference = Path(folder) / "reference"
        candidate = Path(folder) / "candidate"
        reference_outputs = record(ours.variant, reference, ours.steps, fp64=True)
        candidate_outputs = record(theirs.variant, candidate, theirs.steps, fp64=True)
        high = compare(reference=str(reference), candidate=str(candidate))
        return high, outputs_error(reference_outputs, candidate_outputs)


def _first_line(failure: Exception) -> str:
    text = failure.got if isinstance(failure, RoundoffError) else ""
    return (text or str(failure)).partition("\n")[0]


def _planned(
    workload: Workload,
    other: Variant,
    goal: Goal,
    sampling: Sampling | None,
    progress: Progress | None,
) -> tuple[Diagnosis | None, str]:
    """Return the diagnosis for the candidate's format, or why there is none."""
    if other.format is None:
        return None, ""
    try:
        diagnosis = diagnose_workload(
            workload, [other.format], goal, sampling, progress
        )
    except InfeasibleError:
        raise
    except RoundoffError as error:
        # no gradients through this model, say: the comparison stands
        return None, error.what
    return diagnosis, ""


def _unit(workload: Workload) -> float:
    """Unit roundoff of the widest format of the parameters; of fp32 without any."""
    parameters = workload.model.parameters()
    types = {p.dtype for p in parameters if p.is_floating_point()}
    return min((torch.finfo(dtype).eps / 2 for dtype in types), default=2.0**-24)


def _unstable_rows(side: Side) -> pl.DataFrame:
    return side.unstable.with_columns(pl.lit(side.path.name).alias("side"))


def _unstable_values(rows: pl.DataFrame) -> tuple[UnstableValue, ...]:
    columns = [field.name for field in fields(UnstableValue)]
    return tuple(UnstableValue(**row) for row in rows.select(columns).to_dicts())


def _with_shares(
    comparison: Comparison, ranking: Sequence[RankingRow]
) -> AnsweredComparison:
    """Return a comparison as ``to_dict`` has it, its culprits with their share."""
    summary = comparison.summary(rows=20)
    divergence = summary.divergence
    if divergence is not None:
        divergence = _with_share(divergence, ranking)
    culprits = [_with_share(culprit, ranking) for culprit in summary.culprits]
    return AnsweredComparison(
        answer=comparison.answer,
        summary=replace(summary, culprits=culprits, divergence=divergence),
    )


def _with_share(culprit: Culprit, ranking: Sequence[RankingRow]) -> CulpritWithShare:
    """Return a culprit with its share of the output's noise.

    By the adjoint, where the budget has one site in its module, so that there is no
    doubt which one it is.
    """
    rows = [row for row in ranking if row.site.rpartition("/")[0] == culprit.module]
    fields_of_culprit = {f.name: getattr(culprit, f.name) for f in fields(culprit)}
    return CulpritWithShare(
        **fields_of_culprit, share=rows[0].share if len(rows) == 1 else None
    )
