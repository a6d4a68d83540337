"""What each setting is called, how much it matters, why, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundoff.check.findings import CHANGES, NOTE, ROUNDING

#: The groups of the checklist, in the order in which a first cause is looked for.
PROCESSES = "processes"
SEEDS = "seeds"
DATA = "data"
HYPER_PARAMETERS = "hyper-parameters"
FLOW = "training flow"
WEIGHTS = "initial weights"
PRECISION = "mixed precision"
SCALING = "loss scaling"
ENVIRONMENT = "environment"
GROUPS = (
    PROCESSES,
    SEEDS,
    HYPER_PARAMETERS,
    FLOW,
    DATA,
    WEIGHTS,
    PRECISION,
    SCALING,
    ENVIRONMENT,
)
#: In place of the name of a cause: any other difference that changes the training.
ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a setting is judged.

    Attributes:
        group: of the checklist.
        name: in words, in place of the recorded name.
        severity: of a difference.
        why: what it does to numbers.
        fix: what to do.
        follows: names of settings, or groups, whose difference explains one of this;
            ``ANY`` for all that change the training.
    """

    group: str
    name: str = ""
    severity: str = CHANGES
    why: str
    fix: str
    follows: tuple[str, ...] = ()


_OPTIMIZER = Rule(
    group=HYPER_PARAMETERS,
    why="every update of the weights is another",
    fix="give both optimizers the same setting",
    follows=("optimizer", "parameters in no optimizer", "groups of parameters"),
)
_ENVIRONMENT = Rule(
    group=ENVIRONMENT,
    severity=ROUNDING,
    why="another version or setting may choose other kernels, which round otherwise",
    fix="run both in the same environment",
)
#: Why, and what to do, where another network is trained.
OTHER_MODEL = "the models compute something else"
SAME_MODEL = "build the same model in both programs"
_DRAWN = "initial weights, orders of data and dropout are drawn from it"
_FLAG = "set the same flag in both programs"


def _environment(name: str, why: str, *, severity: str = ROUNDING) -> Rule:
    return Rule(group=ENVIRONMENT, name=name, severity=severity, why=why, fix=_FLAG)


def _optimizer(name: str, why: str, *, severity: str = CHANGES) -> Rule:
    fix = "give both optimizers the same " + name
    return replace(_OPTIMIZER, name=name, severity=severity, why=why, fix=fix)


def _computing(name: str) -> Rule:
    why = "the same update is computed by another kernel, which rounds otherwise"
    return _optimizer(name, why, severity=ROUNDING)


def _data(
    name: str, why: str, *, severity: str = CHANGES, follows: tuple[str, ...] = ()
) -> Rule:
    return Rule(
        group=DATA,
        name=name,
        severity=severity,
        why=why,
        fix="give both loaders the same " + name,
        follows=follows,
    )


_OTHER_SAMPLES = "each step trains on other samples"
_SIZES = ("batch size", "sampler", "samples", "drop_last", "processes")

#: Group and name of a fact -> how it is judged. An empty name is of all others.
RULES: dict[tuple[str, str], Rule] = {
    ("seed", "seed"): Rule(
        group=SEEDS,
        name="seed",
        why=_DRAWN,
        fix="give both programs the same seed",
    ),
    ("seed", "initial seed"): Rule(
        group=SEEDS,
        name="initial seed",
        why=_DRAWN,
        fix="call torch.manual_seed with the same number in both programs",
        follows=("seed",),
    ),
    ("seed", "state"): Rule(
        group=SEEDS,
        name="state of the random generator",
        why="more or fewer numbers were drawn before the first step: what is drawn "
        "later, such as dropout, is another",
        fix="draw as often in both programs before the first step, or seed again there",
        follows=(ANY,),
    ),
    ("optimizer", "class"): Rule(
        group=HYPER_PARAMETERS,
        name="optimizer",
        why="every update of the weights is another",
        fix="use the same optimizer in both programs",
    ),
    ("optimizer", "groups"): _optimizer(
        "groups of parameters", "parameters may get other settings"
    ),
    ("optimizer", "holds"): Rule(
        group=HYPER_PARAMETERS,
        name="number of parameters",
        why="parameters that one of them lacks are never updated there",
        fix="give both optimizers the same parameters",
        follows=(
            "frozen parameters",
            "parameters in no optimizer",
            "groups of parameters",
            "modules",
            "names of parameters",
            "shapes of parameters",
            "parameters that modules share",
        ),
    ),
    ("optimizer", "parameters in no optimizer"): Rule(
        group=FLOW,
        name="parameters in no optimizer",
        why="they keep their initial values for the whole training",
        fix="give all parameters that should train to the optimizer",
    ),
    ("optimizer", "weight_decay"): _optimizer(
        "weight decay", "the weights shrink by another share at every step"
    ),
    ("optimizer", "eps"): _optimizer(
        "eps", "updates of parameters with small gradients have another size"
    ),
    ("optimizer", "betas"): _optimizer(
        "betas", "the running means of gradients forget at another rate"
    ),
    ("optimizer", "momentum"): _optimizer(
        "momentum", "earlier gradients count more or less in every update"
    ),
    ("optimizer", "foreach"): _computing("foreach"),
    ("optimizer", "fused"): _computing("fused"),
    ("optimizer", "capturable"): _computing("capturable"),
    ("optimizer", "differentiable"): _computing("differentiable"),
    ("optimizer", ""): _OPTIMIZER,
    ("data", "batch size"): _data(
        "batch size",
        "gradients are means over another number of samples, and a learning rate "
        "belongs to a batch size",
    ),
    ("data", "samples"): _data("samples", "the data sets are not the same size"),
    ("data", "data set"): _data("data set", "the data are read by another class"),
    ("data", "shuffle"): _data("shuffle", "the samples come in another order"),
    ("data", "sampler"): _data("sampler", _OTHER_SAMPLES),
    ("data", "batch sampler"): _data("batch sampler", _OTHER_SAMPLES),
    ("data", "seed of the order"): _data(
        "seed of the order",
        "the samples come in another order",
        follows=("seed", "sampler", "shuffle"),
    ),
    ("data", "drop_last"): _data(
        "drop_last", "the last, smaller batch is trained on in one of them"
    ),
    ("data", "transform"): _data("transform", "the samples are preprocessed otherwise"),
    ("data", "collate function"): _data(
        "collate function", "batches are put together otherwise", severity=ROUNDING
    ),
    ("data", "workers"): _data(
        "workers",
        "random transforms draw from a generator for each worker",
        severity=NOTE,
    ),
    ("data", "batches of an epoch"): _data(
        "batches of an epoch",
        "epochs, and schedules that count them, have other lengths",
        follows=_SIZES,
    ),
    ("data", ""): _data(
        "",
        _OTHER_SAMPLES,
        follows=(
            "sampler",
            "samples",
            "shuffle",
            "batch size",
            "order of the data",
            "first samples",
        ),
    ),
    ("mode", "mode"): Rule(
        group=FLOW,
        name="mode",
        why="in evaluation mode dropout does nothing, and normalisation uses its "
        "running statistics and does not update them",
        fix="call model.train() before training, and again after each evaluation",
    ),
    ("model", "frozen parameters"): Rule(
        group=FLOW,
        name="frozen parameters",
        why="frozen parameters are never updated",
        fix="compare requires_grad in the two programs",
    ),
    ("model", "parameters"): Rule(
        group=FLOW,
        name="number of weights",
        why="the models are not the same",
        fix=SAME_MODEL,
        follows=(
            "modules",
            "names of parameters",
            "shapes of parameters",
            "parameters that modules share",
        ),
    ),
    ("model", "tied parameters"): Rule(
        group=FLOW,
        name="parameters that modules share",
        why="what is one parameter in one of them is two in the other, which train apart",
        fix="share the same parameters in both programs",
    ),
    ("average", "average of weights"): Rule(
        group=HYPER_PARAMETERS,
        name="average of weights",
        why="the averaged weights follow the trained ones at another rate",
        fix="average with the same function and decay in both programs",
    ),
    ("loss", ""): Rule(
        group=HYPER_PARAMETERS,
        why="the training makes another number small",
        fix="give both loss functions the same settings",
        follows=("modules",),
    ),
    ("optimizer", "schedule"): Rule(
        group=HYPER_PARAMETERS,
        name="class of the schedule",
        why="learning rates change by another rule",
        fix="use the same schedule in both programs",
    ),
    ("data", "samples of the subset"): _data("samples of the subset", _OTHER_SAMPLES),
    ("model", "parameter dtypes"): Rule(
        group=PRECISION,
        name="dtype of the parameters",
        why="weights and updates are rounded to another format",
        fix="make both models in the same dtype; with autocast the weights stay fp32",
        follows=("default dtype",),
    ),
    ("model", "class"): Rule(
        group=FLOW,
        name="class of the model",
        severity=NOTE,
        why="a name alone; settings and weights are compared by themselves",
        fix="nothing, where modules and weights agree",
    ),
    ("compile", "torch.compile"): Rule(
        group=ENVIRONMENT,
        name="torch.compile",
        severity=ROUNDING,
        why="compiled kernels fuse operators and round less often, or in another order",
        fix="compile both or none while you compare",
    ),
    ("autocast", "asked for"): Rule(
        group=PRECISION,
        name="autocast that was asked for",
        severity=ROUNDING,
        why="operators run in low precision only where autocast is on for their device",
        fix="use the same autocast, of the device that the tensors are on",
        follows=("operators in low precision",),
    ),
    ("scaler", ""): Rule(
        group=SCALING,
        why="the loss scale moves otherwise, so other steps are skipped",
        fix="give both GradScalers the same settings",
    ),
    ("environment", "float32 matmul precision"): _environment(
        "float32 matmul precision",
        "products of fp32 tensors keep 24 bits, 10 or 7, depending on it",
    ),
    ("environment", "TF32 of matmul"): _environment(
        "TF32 of matmul", "with TF32 a GPU keeps 10 bits of each factor, not 23"
    ),
    ("environment", "TF32 of cuDNN"): _environment(
        "TF32 of cuDNN", "with TF32 a GPU keeps 10 bits of each factor, not 23"
    ),
    ("environment", "threads"): _environment(
        "number of threads", "sums are split at other places, and rounded otherwise"
    ),
    ("environment", "deterministic algorithms"): _environment(
        "deterministic algorithms",
        "other kernels run, and without it the same program may not repeat itself",
    ),
    ("environment", "machine"): Rule(
        group=ENVIRONMENT,
        name="machine",
        severity=ROUNDING,
        why="other vector widths add in another order",
        fix="run both on the same kind of processor",
        follows=("ATEN_CPU_CAPABILITY",),
    ),
    ("environment", "default dtype"): _environment(
        "default dtype", "new tensors are of another format", severity=CHANGES
    ),
    ("environment", "cuDNN benchmark"): _environment(
        "cuDNN benchmark", "kernels are chosen by time, which may differ every run"
    ),
    ("environment", "python"): _environment(
        "Python", "it computes no tensors", severity=NOTE
    ),
    ("environment", "threads between operators"): _environment(
        "threads between operators", "each operator adds as before", severity=NOTE
    ),
    ("environment", "anomaly detection"): _environment(
        "anomaly detection", "it costs time alone", severity=NOTE
    ),
    ("environment", ""): _ENVIRONMENT,
}
#: Flags that do nothing without a GPU.
OF_GPUS = (
    "TF32 of matmul",
    "TF32 of cuDNN",
    "cuDNN",
    "cuDNN benchmark",
    "cuDNN deterministic",
    "fp16 sums in reduced precision",
    "bf16 sums in reduced precision",
    "memory-efficient attention",
)


def rule_of(group: str, name: str) -> Rule | None:
    """Return how a fact is judged; None for one that is not compared by itself."""
    return RULES.get((group, name)) or RULES.get((group, ""))
