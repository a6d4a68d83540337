"""Notes how a program is set up while it runs: seeds, data, modes, weights, optimizers.

What is dear, the content of batches and weights, is noted of the first steps alone; of
every step there are its loss, learning rates, clipping and loss scale.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from roundoff.record.graph_capture import in_graph_capture
from roundoff.record.graph_node import node_of
from roundoff.record.loader_log import LoaderLog
from roundoff.record.loss_log import LOSSES, LossLog, average_of
from roundoff.record.model_facts import (
    constant_buffers,
    mode_of,
    model_facts,
    named_parameters,
)
from roundoff.record.module_paths import Paths
from roundoff.record.optimizer_facts import optimizer_facts, without_optimizer
from roundoff.record.set_up import Batch, Fact, SetUp, TensorContent
from roundoff.record.set_up_environment import environment_facts
from roundoff.record.skipped_frames import skipped_by_compiler
from roundoff.record.source_lines import user_line
from roundoff.record.step_boundaries import patched
from roundoff.record.step_log import StepLog
from roundoff.record.tensor_content import content_of
from roundoff.record.unseen import unseen
from roundoff.unforeseen import OurPart

#: Steps, and batches of each source, whose content is noted.
FIRST = 8
#: Inputs of a batch that are noted.
MOST_INPUTS = 32
#: Results of modules that are known again where another module reads them.
RETURNED = 64
#: Parameters that are noted.
MOST_PARAMETERS = 20_000


class SetUpLog:
    """Gathers what there is to say of a program's set-up.

    Args:
        paths: names modules and parameters.
        paused: while it is open nothing that runs is recorded.
    """

    def __init__(
        self, paths: Paths, paused: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._paths = paths
        self._paused = paused
        self._facts: dict[tuple[str, str, str], Fact] = {}
        self._batches: list[Batch] = []
        self._parameters: dict[str, TensorContent] = {}
        self._noted: set[int] = set()
        self._losses = LossLog(self._add, self._add_batch)
        #: In the order of their first steps; what a program drops is dropped here too,
        #: or the steps of the others would wait for it.
        self._optimizers: list[weakref.ref[Any]] = []
        self._compiled: list[weakref.ref[nn.Module]] = []
        self._scaled: dict[int, Any] = {}
        self._received = 0
        self._returned: deque[weakref.ref[Tensor]] = deque(maxlen=RETURNED)
        self._is_begun = False
        self._kept = False
        self._mode = ""
        # what stopped it stands in the file, and is no reason to warn
        self._ours = OurPart("the notes of the set-up", lambda _: None)
        self._loaders = LoaderLog(self._add, self._add_batch, self._guarded)
        self.step = 0
        self.numbers = StepLog()

    def content(self) -> SetUp:
        """Return what was noted so far."""
        return SetUp(
            facts=tuple(self._facts.values()),
            batches=tuple(self._batches),
            parameters=tuple(self._parameters.values()),
            stopped=self._ours.stopped,
        )

    @property
    def is_early(self) -> bool:
        """True in the first steps, whose content is noted."""
        return self.step < FIRST

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Notice what the program sets while this is open."""
        with ExitStack() as stack:
            hook = register_module_forward_hook(self._forward, with_kwargs=True)
            stack.callback(_remove, hook)
            stack.enter_context(patched(*self._changes(), *self._loaders.changes()))
            yield

    def end_step(self) -> None:
        """End a step of the program."""
        if self.is_early:
            self._guarded(self._note_once)
        self.numbers.end(self.step)
        self.step += 1

    def finish(self) -> None:
        """Note what only the end can tell."""
        self._guarded(self._note_once)

    @skipped_by_compiler
    def told(self, what: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a call of the training loop says; see ``LoopLog``."""
        note = self._NOTES.get(what)
        if note is not None:
            self._guarded(lambda: note(self, args, kwargs, result))

    # -- the training loop -------------------------------------------------------------

    def _note_backward(self, args: Any, kwargs: Any, _: Any) -> None:
        self._begin()
        self._note_mode()
        tensors = args[0] if args else kwargs.get("tensors")
        if isinstance(tensors, list | tuple) and len(tensors) == 1:
            tensors = tensors[0]
        loss = self._scaled.pop(id(tensors), tensors)
        self.numbers.count("backward passes")
        self._kept = False
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.numbers.add("loss", loss)
        self._scaled.clear()

    def _before_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._kept and self.is_early and not torch.compiler.is_compiling():
            self._guarded(self._note_kept_gradients)
        return original(*args, **kwargs)

    def _note_kept_gradients(self) -> None:
        """Note whether gradients of the step before are added to."""
        self._kept = False
        parameters = (
            parameter
            for _, optimizer in self._living()
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        is_kept = any(_is_nonzero(parameter.grad) for parameter in parameters)
        self.numbers.set("gradients of the step before", float(is_kept))

    def _note_scale(self, args: Any, kwargs: Any, result: Any) -> None:
        outputs = args[1] if len(args) > 1 else kwargs.get("outputs")
        if isinstance(outputs, Tensor) and isinstance(result, Tensor):
            self._scaled[id(result)] = outputs

    def _note_optimizer(self, args: Any, _: Any, __: Any) -> None:
        self._begin()
        optimizer = args[0]
        of = f"optimizer {self._place(optimizer)}"
        self.numbers.count("optimizer steps")
        self._kept = True
        for place, group in enumerate(optimizer.param_groups):
            suffix = f", group {place}" if place else ""
            self.numbers.set(f"learning rate of {of}{suffix}", group.get("lr"))
        if self.is_early:
            self._note_parameters()
            if ("optimizer", of, "class") not in self._facts:
                for fact in optimizer_facts(of, optimizer):
                    self._put(fact)

    def _note_clip(self, kind: str, args: Any, kwargs: Any, result: Any) -> None:
        limit = args[1] if len(args) > 1 else kwargs.get(kind)
        self.numbers.count("clippings")
        self.numbers.set(f"{kind} of clipping", limit)
        after = self.numbers.counted("unscalings") > 0
        scaled = self.numbers.counted("scaled losses") > 0 or bool(self._scaled)
        if kind == "max_norm" and isinstance(result, Tensor):
            self.numbers.add("gradient norm", result)
        if scaled or after:
            self.numbers.set("clipped after unscaling", float(after))

    def _note_update(self, args: Any, _: Any, __: Any) -> None:
        scaler = args[0]
        if not scaler.is_enabled():
            return
        self.numbers.set("loss scale", scaler.get_scale())
        for name, value in sorted(scaler.state_dict().items()):
            if name not in ("scale", "_growth_tracker"):
                self._add("scaler", "", name.replace("_", " "), value)

    def _note_scaler_step(self, args: Any, _: Any, __: Any) -> None:
        if args[0].is_enabled():
            self.numbers.count("scaler steps")

    def _note_scaled(self, args: Any, kwargs: Any, result: Any) -> None:
        if args[0].is_enabled():
            self.numbers.count("scaled losses")
            self._note_scale(args, kwargs, result)

    def _note_unscale(self, *_: Any) -> None:
        self.numbers.count("unscalings")

    def _note_schedule(self, args: Any, _: Any, __: Any) -> None:
        self.numbers.count("schedule steps")
        if args and ("optimizer", "schedule", "class") not in self._facts:
            self._add("optimizer", "schedule", "class", type(args[0]).__name__)

    _NOTES: ClassVar[dict[str, Callable[..., None]]] = {
        "backward": _note_backward,
        "optimizer.step": _note_optimizer,
        "clip_grad_norm_": lambda self, *a: self._note_clip("max_norm", *a),
        "clip_grad_value_": lambda self, *a: self._note_clip("clip_value", *a),
        "scaler.scale": _note_scaled,
        "scaler.unscale_": _note_unscale,
        "scaler.step": _note_scaler_step,
        "scaler.update": _note_update,
        "scheduler.step": _note_schedule,
    }

    # -- the model ---------------------------------------------------------------------

    def _forward(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The hook of every module's forward; what the outermost received is noted."""
        if torch.compiler.is_compiling() or self._received >= FIRST:
            return
        if self._paths.position.path or self._ours.stopped is not None:
            return
        if torch.is_grad_enabled():
            self._guarded(lambda: self._note_inputs(args, kwargs))
            self._guarded(lambda: self._note_output(output))

    def _note_output(self, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._returned.extend(map(weakref.ref, tensors))

    def _is_computed(self, leaf: Any) -> bool:
        """Return True for what another module has computed, detached perhaps: no data."""
        if not isinstance(leaf, Tensor):
            return False
        alive = (reference() for reference in self._returned)
        return node_of(leaf) is not None or any(
            tensor is not None and _share_memory(leaf, tensor) for tensor in alive
        )

    def _note_inputs(self, args: Any, kwargs: Any) -> None:
        self._begin()
        arguments = {**dict(enumerate(args)), **kwargs}
        if any(self._is_computed(leaf) for leaf in tree_leaves(arguments)):
            return
        if any(_as_tensor(leaf) is not None for leaf in tree_leaves(arguments)):
            self._add_batch("model", self._received, (), arguments)
            self._received += 1

    def _begin(self) -> None:
        """Note the state of the generators before the first forward is over."""
        if self._is_begun:
            return
        self._is_begun = True
        self._add("seed", "torch", "initial seed", torch.initial_seed())
        state = torch.get_rng_state().numpy().tobytes()
        self._add("seed", "torch", "state", xxhash.xxh3_64_hexdigest(state))
        cuda: Any = torch.cuda
        if cuda.is_available() and cuda.is_initialized():
            self._add("seed", "torch.cuda", "initial seed", cuda.initial_seed())

    def _modules(self) -> list[nn.Module]:
        """Return the models; those compiled in place where no call of one was seen."""
        compiled = [reference() for reference in self._compiled]
        there = [module for module in compiled if module is not None]
        return self._paths.modules() or there

    def _note_mode(self) -> None:
        mode = mode_of(self._modules())
        if mode == self._mode:
            return
        at = "" if not self._mode else f"from step {self.step}"
        self._mode = mode
        self._add("mode", at, "mode", mode)

    def _note_parameters(self) -> None:
        for module in self._modules():
            for name, parameter in named_parameters(module, self._paths):
                is_new = name not in self._parameters
                if is_new and len(self._parameters) < MOST_PARAMETERS:
                    self._parameters[name] = content_of(name, parameter)
                    self._noted.add(id(parameter))
            for name, buffer in constant_buffers(module):
                if name not in self._parameters:
                    self._parameters[name] = content_of(name, buffer)
        for place, optimizer in self._living():
            self._note_loose(place, optimizer)

    def _note_loose(self, place: int, optimizer: Any) -> None:
        """Note the parameters of an optimizer that no module holds."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            name = f"parameter {number} of optimizer {place}"
            is_noted = id(parameter) in self._noted or name in self._parameters
            if not is_noted and len(self._parameters) < MOST_PARAMETERS:
                self._parameters[name] = content_of(name, parameter)

    def _note_once(self) -> None:
        """Note what holds for the whole program, as it is now."""
        if self.step:
            return
        self._begin()
        for fact in environment_facts():
            self._put(fact)
        if not self._mode:
            self._note_mode()
        modules = self._modules()
        for fact in model_facts(modules, self._paths):
            self._put(fact)
        if not self._parameters:
            self._note_parameters()
        optimizers = [optimizer for _, optimizer in self._living()]
        if optimizers:
            left = without_optimizer(modules, self._paths, optimizers)
            self._add("optimizer", "", "parameters in no optimizer", left)

    # -- what the program calls --------------------------------------------------------

    def _changes(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        yield random, "seed", self._seeding("python")
        yield np.random, "seed", self._seeding("numpy")
        for place in (torch, torch.random):
            yield place, "manual_seed", self._seeding("torch")
        yield torch, "compile", self._compiling
        yield torch.amp.autocast_mode.autocast, "__init__", self._autocasting
        yield torch.autograd, "backward", self._before_backward
        yield AveragedModel, "__init__", self._averaging
        for name in LOSSES:
            yield torch.nn.functional, name, self._computing_loss(name)

    def _computing_loss(self, name: str) -> Callable[..., Any]:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self.is_early:
                return original(*args, **kwargs)
            is_training = torch.is_grad_enabled()
            result = original(*args, **kwargs)
            if is_training:
                self._guarded(lambda: self._losses.note(name, original, args, kwargs))
            return result

        return around

    def _averaging(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        self._guarded(
            lambda: self._add("average", "", "average of weights", average_of(args[0]))
        )

    def _seeding(self, of: str) -> Callable[..., Any]:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            values = [*args, *kwargs.values()]
            if self.is_early and not torch.compiler.is_compiling():
                value = _plain_text(values[0]) if values else "none"
                self._guarded(lambda: self._add("seed", of, "seed", value))
            return result

        return around

    def _compiling(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        settings = {key: _plain_text(kwargs[key]) for key in sorted(kwargs)}
        words = settings.pop("backend", "inductor")
        settings.pop("model", None)
        more = ", ".join(f"{key}={value}" for key, value in settings.items())
        text = f"{words} ({more})" if more else words
        function = args[0] if args else kwargs.get("model")
        module = getattr(function, "__self__", function)
        if isinstance(module, nn.Module):
            self._compiled.append(weakref.ref(module))
        self._guarded(lambda: self._add("compile", "", "torch.compile", text))
        return original(*args, **kwargs)

    def _autocasting(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self.is_early and not torch.compiler.is_compiling():
            self._guarded(lambda: self._note_autocast(args[0]))
        return result

    def _note_autocast(self, context: Any) -> None:
        device = str(getattr(context, "device", "") or "")
        dtype = str(getattr(context, "fast_dtype", "")).removeprefix("torch.")
        enabled = bool(getattr(context, "_enabled", True))
        value = dtype if enabled else f"{dtype}, not enabled"
        self._add("autocast", device, "asked for", value)

    # -- all of them -------------------------------------------------------------------

    def _tensors(self, values: Any) -> tuple[TensorContent, ...]:
        leaves, _ = tree_flatten_with_path(values)
        contents = []
        for path, leaf in leaves[:MOST_INPUTS]:
            tensor = _as_tensor(leaf)
            if tensor is not None:
                contents.append(content_of(_path_name(path), tensor, entries=True))
        return tuple(contents)

    def _add_batch(
        self, source: str, number: int, indexes: tuple[int, ...], values: Any
    ) -> None:
        tensors = self._tensors(values)
        batch = Batch(
            source=source,
            number=number,
            indexes=indexes,
            tensors=tensors,
            step=self.step,
        )
        self._batches.append(batch)

    def _add(self, group: str, of: str, name: str, value: Any) -> None:
        fact = Fact(group=group, of=of, name=name, value=str(value), line=user_line(2))
        self._put(fact)

    def _put(self, fact: Fact) -> None:
        self._facts[fact.group, fact.of, fact.name] = fact

    def _place(self, optimizer: Any) -> int:
        """Return the number of an optimizer, in the order of their first steps."""
        for place, known in self._living():
            if known is optimizer:
                return place
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1

    def _living(self) -> Iterator[tuple[int, Any]]:
        """Yield the optimizers that the program still holds, with their numbers."""
        for place, reference in enumerate(self._optimizers):
            optimizer = reference()
            if optimizer is not None:
                yield place, optimizer

    @skipped_by_compiler
    def _guarded(self, work: Callable[[], None]) -> None:
        """Do what must never stop the program; after a fault nothing more is noted."""
        if not torch._C._is_tracing() and not in_graph_capture():
            self._ours(self._quietly, work)

    def _quietly(self, work: Callable[[], None]) -> None:
        with torch.no_grad(), self._paused(), unseen():
            work()


def _remove(hook: Any) -> None:
    """Remove a hook of every module; torch itself leaves a part of it behind."""
    hook.remove()
    left: Any = getattr(
        torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {}
    )
    left.pop(hook.id, None)


def _as_tensor(leaf: Any) -> Tensor | None:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub" and leaf.size:
        return torch.from_numpy(np.ascontiguousarray(leaf))
    return leaf if isinstance(leaf, Tensor) else None


def _is_nonzero(gradient: Tensor | None) -> bool:
    if gradient is None or gradient.is_sparse:
        return gradient is not None
    return bool(gradient.any())


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    if tensor.layout != torch.strided or other.layout != torch.strided:
        return tensor is other
    address = tensor.untyped_storage().data_ptr()
    return address != 0 and address == other.untyped_storage().data_ptr()


def _path_name(path: Any) -> str:
    keys = [getattr(key, "key", getattr(key, "idx", key)) for key in path]
    return ".".join(map(str, keys))


def _plain_text(value: Any) -> str:
    """Return plain values as text, of others the name of their class or function."""
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)[:100]
    return str(getattr(value, "__name__", type(value).__name__))
