"""``roundoff.capture``: a recording of the steps that run inside a ``with`` block."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode

from roundoff.errors import RoundoffError, RunError, warn, wrong_type
from roundoff.files import as_path
from roundoff.foreign import without_secrets
from roundoff.ops import describe
from roundoff.record.disk.tensors import content_hash
from roundoff.record.disk.writer import Writer
from roundoff.record.dispatch import OpMode, ThreadMode
from roundoff.record.environment import environment
from roundoff.record.loop_events import FROZEN, LoopLog
from roundoff.record.module_paths import Paths, quiet
from roundoff.record.modules import ModuleRecording
from roundoff.record.nested_steps import is_part_of_a_step
from roundoff.record.noise import Noise
from roundoff.record.other_threads import followed
from roundoff.record.own_error import shadow as run_shadow
from roundoff.record.recorder import Recorder
from roundoff.record.set_up_log import FIRST, SetUpLog
from roundoff.record.source_files import imported_sources, script_source
from roundoff.record.statistics_kernel import compiled
from roundoff.record.step_log import EVERY
from roundoff.record.step_numbers import StepNumbers
from roundoff.record.tensor_keeper import LEAVES, Keeper
from roundoff.record.triton_kernels import TritonCalls
from roundoff.site import matches
from roundoff.unforeseen import OurPart

T = TypeVar("T")
LEVELS = ("op", "module")
KEEP = ("stats", "tensors", "sample", "hash")


class Capture:
    """Records every operator call or module output of the chosen steps into ``path``.

    Args:
        path: the folder of the run.
        model: names parameters and modules; without it, modules are found as they run.
        level: ``"op"``, every operator call, or ``"module"``, the outputs of modules.
        keep: ``"stats"``, or also the ``"tensors"``, a seeded ``"sample"`` of each, or
            a ``"hash"`` of its bits.
        leaves: MiB a step that its leaves may take beside ``"stats"``: parameters,
            buffers, data and random numbers, from which all else can be computed
            again. A step with more keeps none; 0 keeps none.
        steps: numbers and ranges, ``"0-1"``, ``"3:5,100"`` (the end belongs to it), or
            all of them.
        shadow: ``"fp64"`` runs every operator once more in fp64 on the inputs it
            received.
        sites: patterns ``module/operator`` of the calls to record.
        seed: of the samples.
        eager: run uncompiled what ``torch.compile`` compiled, so that its operators are
            seen.
        noise: a seed; moves the last bit of rounded results at random (see ``noise``),
            from the first step to the last of ``steps``.
        overwrite: replace a run in the folder.
        command: of the script, for the record.

    The numbers of the program do not change (with ``noise`` they do, which is its
    point), and nothing stays behind: hooks, modes and flags are as before when the
    block is left, also by an exception. A fault while recording (a full disk, a tensor
    that cannot be read) stops the recording with one warning, never the program. Raises
    ``RunError`` before anything runs for wrong arguments and for a folder that holds a
    run already (unless ``overwrite``).

    Example:
        >>> import torch, roundoff, tempfile
        >>> model = torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with roundoff.capture(folder + "/run", model) as run:
        ...         model(torch.ones(1, 3)).sum().backward()
        ...         run.step()
        ...     rows = roundoff.load(folder + "/run").ops.collect()
        >>> sorted(set(rows["phase"]))
        ['backward', 'forward']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        level: str = "op",
        keep: str = "stats",
        leaves: float = LEAVES,
        steps: str | Sequence[int] | None = None,
        shadow: str | None = None,
        sites: Sequence[str] = (),
        seed: int = 0,
        eager: bool = False,
        noise: int | None = None,
        overwrite: bool = False,
        command: Sequence[str] = (),
    ) -> None:
        _check_choice("level", level, LEVELS)
        _check_choice("keep", keep, KEEP)
        _check_choice("shadow", shadow, (None, "fp64"))
        _check_leaves(leaves)
        if shadow and level == "module":
            raise RunError(
                "a module has no fp64 twin",
                where="shadow",
                expected="level='op'",
                got="level='module'",
            )
        if noise is not None:
            check_noise(noise, level)
        self.path = as_path(path, "path", "the folder to write: capture(FOLDER, model)")
        self.model = _module_or_none(model)
        self.level = level
        self.keep = keep
        self.leaves = leaves if level == "op" else 0.0
        self.steps = StepNumbers.parse(steps)
        self.shadow = shadow
        self.sites = tuple(sites)
        self.seed = seed
        self.eager = eager
        self.noise = noise
        self.overwrite = overwrite
        self.command = list(command)
        self._script = script_source(self.command)
        #: the id of the run that this one repeats
        self.of: str | None = None
        #: of the step that runs now
        self.number = 0
        #: how many steps were recorded
        self.recorded = 0
        #: a call matched the sites to record
        self.matched = not self.sites
        #: why the recording stopped before the program
        self.stopped: str | None = None
        #: keeps faults of the recording from the program
        self.ours = OurPart("the recording", self._failed)
        self._stack = ExitStack()
        self._mode: OpMode | None = None
        self._modules: ModuleRecording | None = None
        #: the mode is on torch's stack
        self._is_on = False
        #: it has begun
        self._is_open = False
        #: the optimizers whose steps run, each inside the one before
        self._stepping: list[int] = []

    def __enter__(self) -> Capture:
        with self._stack as stack:
            try:
                self._enter(stack)
            except RoundoffError:
                raise
            except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
                self.ours.stopped = str(error)
                self._failed(error)
                return self
            self._stack = stack.pop_all()
            self._is_open = True
        return self

    def _enter(self, stack: ExitStack) -> None:
        self.rank = _rank()
        self.writer = Writer(
            self.path,
            rank=self.rank,
            overwrite=self.overwrite,
            about=self._description(),
        )
        for kernel in ("sums", "counts"):
            # built now if it never was, not in the first step
            compiled(kernel, torch.float32)
        if self.eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        self.paths = Paths(self.model, self.ours)
        self.paths.root_listeners.append(self._name_values)
        stack.enter_context(quiet())
        stack.enter_context(self.paths.follow())
        before = register_optimizer_step_pre_hook(self._before_optimizer)
        stack.callback(before.remove)
        after = register_optimizer_step_post_hook(self._after_optimizer)
        stack.callback(after.remove)
        self.keeper = Keeper(self.keep, self.writer, self.seed, self.leaves)
        self.recorder = self._new_recorder()
        self.set_up = SetUpLog(self.paths, self._paused)
        self.loop = LoopLog(lambda: self.recorder.calls, self.set_up.told, self.ours)
        stack.enter_context(self.loop.follow())
        stack.enter_context(self.set_up.follow())
        if self.level == "op":
            self._listen_to_operators(stack)
        else:
            self._listen_to_modules()
        self._begin()

    def _description(self) -> dict[str, Any]:
        """Return the fields of ``run.json`` at the start of a recording."""
        return {
            "ranks": _world_size(),
            "level": self.level,
            "keep": self.keep,
            "shadow": self.shadow,
            "steps": str(self.steps),
            "sites": list(self.sites),
            "seed": self.seed,
            "noise": self.noise,
            "of": self.of,
            "environment": [asdict(s) for s in environment(self.model)],
            "model": None if self.model is None else type(self.model).__name__,
            "command": without_secrets(self.command),
            "framework": f"torch {torch.__version__}",
            **_launch_identity(),
        }

    def _listen_to_operators(self, stack: ExitStack) -> None:
        self._mode = OpMode(
            self.recorder,
            self.paths,
            failed=self._failed,
            shadow=run_shadow if self.shadow else None,
            describe=describe,
            is_wanted=self._wants if self.sites else None,
            noise=None if self.noise is None else Noise(self.noise).of,
        )
        mode = self._mode
        stack.enter_context(followed(functools.partial(ThreadMode, mode), self.ours))
        self.paths.listeners.append(self._mode.compiled)
        self._triton = TritonCalls(self._mode.triton)
        stack.callback(self._triton.remove)

    def _listen_to_modules(self) -> None:
        self._modules = ModuleRecording(
            self.paths,
            failed=self._failed,
            is_wanted=self._wants if self.sites else None,
        )
        self.paths.listeners.append(self._modules.listen)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_open:
            return
        unfinished = self._attempt(self._end, kind is not None)
        self._attempt(self._leave_mode)
        self._attempt(self._end_set_up)
        self._attempt(self._stack.close)
        self._attempt(self._close, kind is None, unfinished)
        if kind is None and not self.stopped:
            self._check_recorded()

    def _attempt(self, work: Callable[..., T], *args: Any) -> T | None:
        """Do one part of the ending, also after others have failed."""
        return OurPart("the recording", self._failed)(work, *args)

    def _end(self, has_failed: bool) -> int | None:
        """Write the last step; return its number where the program failed in it."""
        if self._mode is not None:
            self._mode.in_chosen_step = False
        self._pause()
        # what follows the last step, an evaluation maybe, is no step
        is_step = has_failed or not self.number
        if not is_step or not self.recorder.rows or self.stopped:
            return None
        self._write()
        return self.number if has_failed else None

    def _close(self, has_ended_well: bool, unfinished: int | None) -> None:
        self.writer.close(
            complete=has_ended_well and self.stopped is None,
            coverage=self._coverage(),
            sources=imported_sources(self.command) | self._script,
            unfinished=unfinished,
        )
        if not has_ended_well:
            self.writer.fail()

    def _check_recorded(self) -> None:
        if not self.recorded or not self.matched:
            self.writer.fail()
        if self.sites and not self.matched:
            raise RunError(
                "no call matches the sites to record",
                where=str(self.path),
                expected=" or ".join(self.sites),
                got="none of the calls of the recorded steps",
                do="'roundoff show' on a run without --sites lists them",
            )
        if not self.recorded:
            raise RunError(
                "nothing was recorded",
                where=str(self.path),
                expected=f"an operator call in steps {self.steps}",
                got=f"{self.number} steps",
                do="check the steps, and that the model runs inside the block",
            )

    def step(self, **scalars: float | Tensor) -> None:
        """End a step; ``scalars`` (loss, loss_scale, grad_norm, lr) are stored with it."""
        self.ours(self._end_step, scalars)
        self.number += 1
        self.ours(self._begin)

    def _end_step(self, scalars: Mapping[str, float | Tensor]) -> None:
        self._pause()
        self._stepping.clear()
        if self.recorder.rows and not self.stopped:
            self._write()
        self.loop.take()
        self._end_of_set_up_step(scalars)
        if not self.stopped and self.number in self.steps:
            for name, value in scalars.items():
                if isinstance(value, Tensor):
                    value = value.detach()
                self.writer.scalar(self.number, name, value)

    @property
    def identity(self) -> str:
        """The run's id in ``run.json``, the same for all processes of one launch."""
        return str(self.writer.about["id"])

    @property
    def done(self) -> bool:
        """Return True if every chosen step has been recorded, or the recording has
        stopped."""
        return self.stopped is not None or self.number > self.steps.last

    def _new_recorder(self) -> Recorder:
        keeps_leaves = self.keep == "stats"
        keeps_none = keeps_leaves and self.keeper.gave_up
        keep = None if keeps_none else self.keeper.keep(self.number)
        return Recorder(
            keep,
            keeps_all=not keeps_leaves,
            name_of=self.paths.name_of,
            versions=self.level == "module",
            hash_of=content_hash if self.keep == "stats" else None,
        )

    def _begin(self) -> None:
        """Start the next step."""
        self.recorder = self._new_recorder()
        is_chosen = self.number in self.steps
        is_perturbed = self.noise is not None and not self.done
        if self._mode is not None:
            self._mode.in_chosen_step = is_chosen and not self.stopped
        if self.stopped or not (is_chosen or is_perturbed):
            return
        if self._modules is not None:
            self._modules.begin(self.recorder)
        if self._mode is None:
            return
        self._mode.begin(self.recorder)
        if is_chosen:
            self._triton.install()
        self._mode.active = is_chosen
        self._mode.between = not is_chosen
        is_home = threading.get_ident() == self._mode.turn.home
        if is_home and not self._is_on:
            self._enter_mode(self._mode)

    def _enter_mode(self, mode: OpMode) -> None:
        if _in_compile_wrapper():
            self._failed(
                RuntimeError(
                    "the step before it ended inside of what torch.compile wraps, "
                    "where a recording cannot begin; record from step 0 on, or with "
                    "eager"
                )
            )
            return
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True

    def _pause(self) -> None:
        """Leave the stack of modes where the mode is on top, so that steps that are not
        recorded cost nothing."""
        if self._modules is not None:
            self._modules.end()
        if self._mode is None:
            return
        self._mode.active = False
        self._mode.between = False
        self._leave_mode()

    def _leave_mode(self) -> None:
        mode = self._mode
        if mode is None or not self._is_on or _in_compile_wrapper():
            return
        if _get_current_dispatch_mode() is mode:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_on = False

    def _write(self) -> None:
        try:
            self._name_gradients()
            self.loop.add(FROZEN, names=self._frozen())
            if self.keep == "stats" and self.keeper.gave_up:
                self.recorder.forget_kept()
            self.writer.write_step(self.number, self.recorder.table(), self.loop.take())
            if self.writer.stopped:  # it has said so
                self.stopped = str(self.writer.about.get("stopped"))
                return
            self.recorded += 1
            self.matched = self.matched or self.recorder.has_calls
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self._failed(error)

    def _end_of_set_up_step(self, scalars: Mapping[str, float | Tensor]) -> None:
        log = self.set_up
        # in full after the first step, and when no more of its content is noted
        is_due = log.step in (0, FIRST - 1)
        if isinstance(scalars.get("loss"), int | float | Tensor):
            log.numbers.set("loss", scalars["loss"])
        log.end_step()
        if is_due or log.step % EVERY == 0:
            self._write_set_up(all_of_it=is_due)

    def _end_set_up(self) -> None:
        self.set_up.finish()
        self._write_set_up(all_of_it=True)

    def _write_set_up(self, *, all_of_it: bool) -> None:
        if self.stopped:
            return
        with self._paused():
            self.writer.numbers(self.set_up.numbers.take())
        if all_of_it:
            self.writer.set_up(self.set_up.content())

    def _paused(self) -> AbstractContextManager[None]:
        return nullcontext() if self._mode is None else self._mode.paused()

    def _failed(self, error: BaseException) -> None:
        """Stop the recording, with one warning."""
        if self.stopped is not None:
            return
        self.stopped = f"{type(error).__name__}: {error}"
        if self._mode is not None:
            self._mode.active = False
            self._mode.between = False
            self._mode.in_chosen_step = False
        if self._modules is not None:
            self._modules.recorder = None
        warn(
            f"roundoff: the recording in {self.path} stopped in step {self.number} "
            f"({self.stopped}); the program goes on"
        )

    def _wants(self, name: str) -> bool:
        return any(matches(pattern, name) for pattern in self.sites)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        return self.ours(self._prepare_update, optimizer, args, kwargs)

    def _prepare_update(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if is_part_of_a_step(optimizer):
            return None
        self._ends_stepping(optimizer)  # which an exception may have ended
        self._stepping.append(id(optimizer))
        if self._mode is None:
            self._name_gradients()
            return None
        with self._mode.paused():
            self._name_gradients()
        self._mode.phase = "optimizer"
        # What a closure runs, as LBFGS and Lightning's optimizers do, is forward.
        return tuple(map(self._forward, args)), {
            k: self._forward(v) for k, v in kwargs.items()
        }

    def _forward(self, value: Any) -> Any:
        mode = self._mode
        if mode is None or not callable(value):
            return value

        @functools.wraps(value)
        def closure(*args: Any, **kwargs: Any) -> Any:
            before = mode.phase
            mode.phase = "forward"
            try:
                return value(*args, **kwargs)
            finally:
                mode.phase = before

        return closure

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self.ours(self._end_update, optimizer)

    def _end_update(self, optimizer: Any) -> None:
        if is_part_of_a_step(optimizer):
            return
        self._ends_stepping(optimizer)
        mode = self._mode
        is_inside_of_another = bool(self._stepping)
        if mode is not None and not is_inside_of_another:
            mode.phase = "forward"

    def _ends_stepping(self, optimizer: Any) -> None:
        """Note that an optimizer steps no more, nor does what it made step."""
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]

    def _frozen(self) -> list[str]:
        """Return the names of the parameters that want no gradient."""
        parameters = (p for module in self.paths.modules() for p in module.parameters())
        names = (self.paths.name_of(p) for p in parameters if not p.requires_grad)
        return sorted({name for name in names if name is not None})

    def _name_values(self, root: nn.Module, _: str) -> None:
        """Name what was written to a model's parameters before its first call."""
        if self.stopped is not None:
            return
        try:
            with self._paused():
                self._name_all(root)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self._failed(error)

    def _name_all(self, root: nn.Module) -> None:
        for tensor in (*root.parameters(), *root.buffers()):
            name = self.paths.name_of(tensor)
            if name is not None:
                self.recorder.name(tensor, name)

    def _name_gradients(self) -> None:
        if not self.recorder.has_backward:
            return  # what stands in .grad is of another step
        for module in self.paths.modules():
            for parameter in module.parameters():
                name = self.paths.name_of(parameter)
                if name is None or not isinstance(parameter.grad, Tensor):
                    continue
                path = name.rpartition(".")[0]
                if not self.sites or self._wants(f"{path}/gradient"):
                    self.recorder.named_gradient(name, parameter.grad)

    def _coverage(self) -> dict[str, Any]:
        counts = {} if self._mode is None else dict(self._mode.call_counts)
        return {
            "steps": self.recorded,
            "calls": sum(counts.values()),
            "operators": counts,
            "other_threads": {} if self._mode is None else self._mode.calls_elsewhere,
            "stopped": self.stopped,
        }


def _in_compile_wrapper() -> bool:
    """Return True if a caller is what ``torch.compile`` wraps around a function.

    When it is left it puts back whether there are modes, and torch fails where that is
    no longer true.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame is not None


def _check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        words = ", ".join("none" if a is None else a for a in allowed)
        raise RunError(f"unknown {name}", where=f"{name}={value!r}", expected=words)


def _check_leaves(leaves: Any) -> None:
    if not isinstance(leaves, int | float) or not 0 <= leaves < math.inf:
        raise RunError(
            "not a size",
            where=f"leaves={leaves!r}",
            expected="a number of MiB, 0 for none",
        )


def check_noise(seed: Any, level: str) -> None:
    """Raise ``RunError`` for what is no seed, and for a level without results of
    operators to add noise to."""
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise RunError(
            "no seed",
            where=f"noise={seed!r}",
            expected="a whole number from 0 on, or None for no noise",
        )
    if level == "module":
        raise RunError(
            "noise is added to the results of operators",
            where="noise",
            expected="level='op'",
            got="level='module'",
        )


_LAUNCH_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _launch_identity() -> dict[str, str]:
    """Return an id that the processes of one launch have in common, so that they write into
    one folder and another launch does not."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return {}
    parts = [os.environ.get(name, "") for name in _LAUNCH_VARIABLES]
    # one machine: one parent process
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        parts.append(str(os.getppid()))
    return {"id": "-".join(parts)}


def _rank() -> int:
    if _is_distributed():
        return int(torch.distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    if _is_distributed():
        return int(torch.distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _module_or_none(model: object) -> nn.Module | None:
    if model is None or isinstance(model, nn.Module):
        return model
    raise wrong_type("model", model, "a torch.nn.Module: capture(FOLDER, model)")
