"""Two ways to run one training that are both right."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..bank import write
from ..program import Program, train
from . import rewrites
from .models import NAMES, program

Folder = str | os.PathLike[str]
Change = Callable[[Program], Program]
#: Gradients of fp16 are kept from vanishing by this factor.
LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Pair:
    """Two recordings; ``network`` is one of ``models.NAMES``.

    ``sites`` is empty for a right one.
    """

    name: str
    network: str
    reference: Callable[[Folder], None]
    candidate: Callable[[Folder], None]
    sites: tuple[str, ...] = ()

    @property
    def apart(self) -> bool:
        """True for the quarter that is measured at the end alone."""
        return zlib.crc32(f"{self.network} {self.name}".encode()) % 4 == 0


def pairs() -> list[Pair]:
    """All pairs: the clean ones, and then those with a bug."""
    listed = [
        _pair(*item, name)
        for name in NAMES
        for item in CHANGES.items()
        if (name, item[0]) not in IMPOSSIBLE
    ]
    images = ("cnn", "digits", "mixer", "unet")
    listed += [_pair("channels last", _channels_last, name) for name in images]
    halves = ("encoder", "digits", "mixer", "gpt", "tagger", "unet")
    listed += [_pair("the batch in two halves", _in_halves, name) for name in halves]
    pure = ("gpt", "digits", "mixer", "unet")
    listed += [_pair("gradients by torch.func", _functional, name) for name in pure]
    listed += [_pair(*rewrite) for rewrite in rewrites.REWRITES]
    listed += [_pair(*other) for other in OTHERS]
    return listed + [_pair(*wrong) for wrong in (*rewrites.WRONG, *WRONG)]


def _pair(name: str, change: Change, network: str, sites: str = "") -> Pair:
    around = AROUND.get(name, nullcontext)
    steps = 2 if name in TWO_STEPS else 1
    return Pair(
        name,
        network,
        _recorded(network, REFERENCES.get(name, _same), steps),
        _recorded(network, change, steps, around),
        tuple(sites.split()),
    )


def _recorded(
    network: str,
    change: Change,
    steps: int,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Callable[[Folder], None]:
    def record(folder: Folder) -> None:
        with around():
            write(lambda: change(program(network)), folder, steps)

    return record


def _same(p: Program) -> Program:
    return p


def _compiled(p: Program) -> Program:
    torch.compiler.reset()
    return replace(p, model=torch.compile(p.model, backend="aot_eager"))


def _channels_last(p: Program) -> Program:
    p.model.to(memory_format=torch.channels_last)
    form = torch.channels_last
    batches = [
        tuple(t.contiguous(memory_format=form) if t.ndim == 4 else t for t in batch)
        for batch in p.batches
    ]
    return replace(p, batches=batches)


def _adamw(**options: bool) -> Change:
    def change(p: Program) -> Program:
        parameters = p.model.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **options)
        return replace(p, optimizer=optimizer)

    return change


def _autocast(p: Program) -> Program:
    def loss(*args: object) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return p.loss(*args)

    return replace(p, loss=loss)


def _scaled(p: Program) -> Program:
    """fp16 as the manual has it: scale, backward, unscale and step, update."""
    scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)

    def step(p: Program, number: int) -> None:
        p.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = p.loss(p.model, *p.batches[number])
        scaler.scale(loss).backward()
        scaler.step(p.optimizer)
        scaler.update()

    return replace(p, step=step)


def _scaled_by_hand(p: Program) -> Program:
    def step(p: Program, number: int) -> None:
        p.optimizer.zero_grad()
        loss = p.loss(p.model, *p.batches[number]) * LOSS_SCALE
        loss.backward()
        for parameter in p.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(LOSS_SCALE)
        p.optimizer.step()

    return replace(p, step=step)


def _checkpointed(p: Program) -> Program:
    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        return p.loss(
            lambda *args: checkpoint(model, *args, use_reentrant=False), *batch
        )

    return replace(p, loss=loss)


def _in_halves(p: Program) -> Program:
    """Gradients of two halves of the batch are added, each of half the loss."""

    def step(p: Program, number: int) -> None:
        p.optimizer.zero_grad()
        for half in zip(*(t.chunk(2) for t in p.batches[number]), strict=True):
            (p.loss(p.model, *half) / 2).backward()
        p.optimizer.step()

    return replace(p, step=step)


class Nested(nn.Module):
    """The network one level deeper, as wrappers have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args)


def _nested(p: Program) -> Program:
    return replace(p, model=Nested(p.model))


def _renamed(p: Program) -> Program:
    """Every module has another name; the code reads the old attributes still."""
    for module in list(p.model.modules()):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            continue  # their numbers are their order
        for name, child in list(module._modules.items()):
            del module._modules[name]
            module._modules[f"my_{name}"] = child
            object.__setattr__(module, name, child)
    return p


def _as_functions(p: Program) -> Program:
    """Linear layers and layer norms are functions of their parent's parameters."""
    for module in list(p.model.modules()):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        for name, child in list(module._modules.items()):
            function = _function_of(child)
            if function is None:
                continue
            del module._modules[name]
            for kind, parameter in child.named_parameters():
                module.register_parameter(f"{name}_{kind}", parameter)
            object.__setattr__(module, name, function)
    return p


def _function_of(module: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    if type(module) is nn.Linear:
        return lambda x: F.linear(x, module.weight, module.bias)
    if type(module) is nn.LayerNorm:
        return lambda x: F.layer_norm(
            x, module.normalized_shape, module.weight, module.bias, module.eps
        )
    return None


def _functional(p: Program) -> Program:
    """Gradients of a pure function of the parameters, as torch.func computes them."""

    def step(p: Program, number: int) -> None:
        named = dict(p.model.named_parameters())

        def loss(values: dict[str, Tensor]) -> Tensor:
            def model(*args: Tensor) -> Tensor:
                return torch.func.functional_call(p.model, values, args)

            return p.loss(model, *p.batches[number])

        gradients = torch.func.grad(loss)({n: v.detach() for n, v in named.items()})
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        p.optimizer.step()

    return replace(p, step=step)


def _blocks_checkpointed(*, reentrant: bool, cut: bool = False) -> Change:
    """Every block is computed again in the backward pass, not the whole network."""

    def change(p: Program) -> Program:
        for block in p.model.blocks:
            _checkpoint_forward(block, reentrant, cut)
        return p

    return change


def _checkpoint_forward(block: nn.Module, reentrant: bool, cut: bool) -> None:
    forward = block.forward

    def checkpointed(x: Tensor, *args: object) -> object:
        x = x.detach() if cut else x
        return checkpoint(forward, x, *args, use_reentrant=reentrant)

    block.forward = checkpointed


def _parts_checkpointed(p: Program) -> Program:
    """Convolutions and activations again in the backward pass; no running statistics."""
    for module in p.model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.ReLU | nn.GELU):
            _checkpoint_forward(module, False, False)
    return p


def _optimizer_in_hooks(left_out: str = "") -> Change:
    """Every parameter has an optimizer, which runs as soon as its gradient is there."""

    def change(p: Program) -> Program:
        for name, parameter in p.model.named_parameters():
            if name == left_out:
                continue
            optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1)

            def update(parameter: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)

        def step(p: Program, number: int) -> None:
            p.loss(p.model, *p.batches[number]).backward()

        return replace(p, step=step)

    return change


def _accumulated_in_hooks(*, keep: bool = True) -> Change:
    """Gradients of two halves of the batch are gathered by hooks, as wrappers do."""

    def change(p: Program) -> Program:
        gathered: dict[Tensor, Tensor] = {}

        def gather(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if parameter in gathered and keep:
                gathered[parameter] += gradient / 2
            else:
                gathered[parameter] = gradient / 2
            parameter.grad = None

        for parameter in p.model.parameters():
            parameter.register_post_accumulate_grad_hook(gather)

        def step(p: Program, number: int) -> None:
            gathered.clear()
            p.optimizer.zero_grad()
            for half in zip(*(t.chunk(2) for t in p.batches[number]), strict=True):
                p.loss(p.model, *half).backward()
            for parameter, gradient in gathered.items():
                parameter.grad = gradient
            p.optimizer.step()

        return replace(p, step=step)

    return change


def _optimizer(kind: Any, **options: Any) -> Change:
    def change(p: Program) -> Program:
        return replace(p, optimizer=kind(p.model.parameters(), **options))

    return change


def _fused_on_lists(p: Program) -> Program:
    """Queries, keys and values of one layer; all updates on lists of parameters."""
    rewrites.fuse(p.model)
    return _adamw(foreach=True)(p)


def _clipped(**options: bool) -> Change:
    def change(p: Program) -> Program:
        def step(p: Program, number: int) -> None:
            p.optimizer.zero_grad()
            p.loss(p.model, *p.batches[number]).backward()
            torch.nn.utils.clip_grad_norm_(p.model.parameters(), 0.5, **options)
            p.optimizer.step()

        return replace(p, step=step)

    return change


def _clipped_by_hand(p: Program) -> Program:
    def step(p: Program, number: int) -> None:
        p.optimizer.zero_grad()
        p.loss(p.model, *p.batches[number]).backward()
        gradients = [q.grad for q in p.model.parameters() if q.grad is not None]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
        p.optimizer.step()

    return replace(p, step=step)


def _compiled_loss(p: Program) -> Program:
    torch.compiler.reset()
    compiled = torch.compile(p.loss, backend="aot_eager")
    return replace(p, loss=compiled)


def _compiled_blocks(p: Program) -> Program:
    torch.compiler.reset()
    for block in p.model.blocks:
        block.compile(backend="aot_eager")
    return p


def _deterministic(p: Program) -> Program:
    def step(p: Program, number: int) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            train(p, number)
        finally:
            torch.use_deterministic_algorithms(False)

    return replace(p, step=step)


@contextmanager
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            yield


#: What the candidate does in another way, in every network.
CHANGES: dict[str, Change] = {
    "compiled": _compiled,
    "two threads": _same,
    "without oneDNN": _same,
    "AdamW tensor by tensor, on lists": _adamw(foreach=True),
    "AdamW tensor by tensor, fused": _adamw(fused=True),
    "bf16 autocast": _autocast,
    "fp16 with a loss scaler": _scaled,
    "a loss scale by hand": _scaled_by_hand,
    "checkpointed": _checkpointed,
    "nested": _nested,
    "renamed": _renamed,
    "layers as functions": _as_functions,
}
#: What the candidate does in another way in some networks: name, change, network.
OTHERS: list[tuple[str, Change, str]] = [
    *[
        ("blocks checkpointed", _blocks_checkpointed(reentrant=False), name)
        for name in ("gpt", "encoder", "decoder", "llama")
    ],
    *[
        ("blocks checkpointed, reentrant", _blocks_checkpointed(reentrant=True), name)
        for name in ("gpt", "llama")
    ],
    *[
        ("parts checkpointed", _parts_checkpointed, name)
        for name in ("cnn", "unet", "mixer")
    ],
    *[
        ("the optimizer in hooks", _optimizer_in_hooks(), name)
        for name in ("gpt", "cnn", "tagger", "unet")
    ],
    *[
        ("accumulated in hooks", _accumulated_in_hooks(), name)
        for name in ("gpt", "digits", "encoder")
    ],
    *[
        (f"{kind}, on lists", change, name)
        for kind, change in (
            ("SGD", _optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
            ("RMSprop", _optimizer(torch.optim.RMSprop, lr=1e-3, foreach=True)),
            ("NAdam", _optimizer(torch.optim.NAdam, lr=1e-3, foreach=True)),
        )
        for name in ("gpt", "unet")
    ],
    *[
        (f"{kind}, fused", change, name)
        for kind, change in (
            ("SGD", _optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)),
            ("Adam", _optimizer(torch.optim.Adam, lr=1e-2, amsgrad=True, fused=True)),
        )
        for name in ("gpt", "lstm")
    ],
    *[("clipped on lists", _clipped(foreach=True), name) for name in ("gpt", "cnn")],
    *[("clipped by hand", _clipped_by_hand, name) for name in ("gpt", "cnn", "graph")],
    *[("the loss compiled", _compiled_loss, name) for name in ("digits", "llama")],
    *[("blocks compiled", _compiled_blocks, name) for name in ("gpt", "llama")],
    ("fused projections, updated on lists", _fused_on_lists, "gpt"),
    *[("deterministic", _deterministic, name) for name in ("cnn", "graph")],
]
#: The same with a bug, and where.
WRONG: list[tuple[str, Change, str, str]] = [
    (
        "blocks checkpointed, the gradient cut",
        _blocks_checkpointed(reentrant=False, cut=True),
        "gpt",
        "*/detach* blocks*",
    ),
    (
        "the optimizer in hooks, one left out",
        _optimizer_in_hooks("head.weight"),
        "gpt",
        "head.weight*",
    ),
    (
        "accumulated in hooks, the first half lost",
        _accumulated_in_hooks(keep=False),
        "digits",
        "*.grad */gradient* first* second* hidden* head* /div* */div*",
    ),
    # running statistics are updated again as they are computed again
    ("checkpointed", _checkpointed, "cnn", "norm* fine*"),
]
REFERENCES: dict[str, Change] = {
    "SGD, on lists": _optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "RMSprop, on lists": _optimizer(torch.optim.RMSprop, lr=1e-3, foreach=False),
    "NAdam, on lists": _optimizer(torch.optim.NAdam, lr=1e-3, foreach=False),
    "SGD, fused": _optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "Adam, fused": _optimizer(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=False),
    "fused projections, updated on lists": _adamw(foreach=True),
    "clipped on lists": _clipped(foreach=False),
    "clipped by hand": _clipped(foreach=False),
    "AdamW tensor by tensor, on lists": _adamw(foreach=False),
    "AdamW tensor by tensor, fused": _adamw(foreach=False),
}
#: torch has no LSTM in fp16 on a CPU, and in bf16 on few.
IMPOSSIBLE = {
    ("lstm", "fp16 with a loss scaler"),
    ("lstm", "bf16 autocast"),
    # updates the running statistics of its norms twice: see ``WRONG``
    ("cnn", "checkpointed"),
}
AROUND = {"two threads": _two_threads, "without oneDNN": _without_onednn}
TWO_STEPS = frozenset(
    (
        "SGD, on lists",
        "NAdam, on lists",
        "Adam, fused",
        "the optimizer in hooks",
        "accumulated in hooks",
        "blocks checkpointed, reentrant",
        "AdamW tensor by tensor, on lists",
        "AdamW tensor by tensor, fused",
        "fp16 with a loss scaler",
        "the batch in two halves",
    )
)
