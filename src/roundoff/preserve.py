"""Keep a model and the process as they are, whatever happens inside a block."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "preserve",
    "process_kept",
    "random_states",
    "same_draws",
    "set_random_states",
]

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

_Flag = tuple[Callable[[], Any], Callable[[Any], Any]]


@contextmanager
def preserve(model: nn.Module) -> Iterator[None]:
    """Restore ``model`` and torch's global state at the end of the block, however it ends.

    Restored are, for ``model`` and every submodule: the training flag and all other
    attributes, the registered parameters, buffers, submodules and hooks; of parameters:
    ``requires_grad``, ``.grad``, tensor hooks, and dtype and device (``model.half()``
    inside the block is undone); of buffers: the values, bit by bit. For the process:
    the random states of torch (CPU and every CUDA device), numpy's global generator and
    ``random``; grad mode, default dtype, autocast, deterministic mode, thread count;
    and the ``torch.backends`` flags that change numbers (TF32, reduced-precision
    reductions, cuDNN, oneDNN, attention kernels).

    Inside the block every ``.grad`` starts as ``None``, so that a backward pass cannot
    add to the user's gradients. Parameter *values* are not copied (they can be large):
    code in the block must not write to them. Not restored, since torch cannot read it
    back: ``torch.set_flush_denormal``.

    Args:
        model: any module, of any dtype and device. NaN and Inf in buffers are kept like
            other values.

    Example:
        >>> model = torch.nn.BatchNorm1d(2)
        >>> with preserve(model):
        ...     _ = model.eval()
        ...     model.running_mean.fill_(7.0)
        ...     torch.manual_seed(0) is None
        tensor([7., 7.])
        False
        >>> model.training, model.running_mean
        (True, tensor([0., 0.]))
    """
    # one callback per part: each is run even if another one raises
    with ExitStack() as stack:
        _preserve_flags(stack)
        _preserve_random_states(stack)
        for module in model.modules():
            _preserve_module(stack, module)
        _preserve_global_hooks(stack)
        for buffer in model.buffers():
            # Written through an alias, whatever happens to the buffer's own storage; a
            # sparse tensor has several storages, and operators replace them.
            alias = buffer.detach() if buffer.layout is torch.strided else buffer
            stack.callback(_restore_values, alias, buffer.detach().clone())
            _preserve_tensor(stack, buffer)
        for parameter in model.parameters():
            _preserve_gradient(stack, parameter)
            _preserve_tensor(stack, parameter)
        yield


@contextmanager
def process_kept() -> Iterator[None]:
    """Restore the settings and random states of the process at the end of the block."""
    with ExitStack() as stack:
        _preserve_flags(stack)
        _preserve_random_states(stack)
        yield


@contextmanager
def same_draws() -> Iterator[None]:
    """Draw the same random numbers in every such block; the states are restored after it.

    Two runs can be compared so whose model draws in its forward pass, a latent or
    dropout that stays on. It holds for torch (CPU and every accelerator), numpy's global
    generator and ``random``; a generator of the model's own goes on as it is.

    Example:
        >>> with same_draws():
        ...     first = torch.rand(3)
        >>> with same_draws():
        ...     print(torch.equal(first, torch.rand(3)))
        True
    """
    with ExitStack() as stack:
        _preserve_random_states(stack)
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        yield


def _preserve_module(stack: ExitStack, module: nn.Module) -> None:
    attributes = vars(module)
    stack.callback(_restore_container, attributes, dict(attributes))
    # A hook's handle points at the very dict it was put in, so these are restored in
    # place, not replaced.
    for name, value in attributes.items():
        is_registry = name in _REGISTRIES or name.endswith("_hooks")
        if isinstance(value, (dict, set)) and is_registry:
            stack.callback(_restore_container, value, value.copy())
    # Not in the attributes: the flag of a scripted module, and the class (parametrizing
    # swaps it).
    stack.callback(_restore_attribute, module, "training", module.training)
    stack.callback(_restore_attribute, module, "__class__", type(module))


def _preserve_global_hooks(stack: ExitStack) -> None:
    for name, value in vars(torch.nn.modules.module).items():
        is_registry = name.startswith("_global_") and name.endswith("_hooks")
        if isinstance(value, dict) and is_registry:
            stack.callback(_restore_container, value, value.copy())


def _restore_attribute(module: nn.Module, name: str, value: object) -> None:
    if getattr(module, name) != value:
        setattr(module, name, value)


def _restore_container(container: Any, saved: Any) -> None:
    is_dict = isinstance(container, dict)
    if _same_items(container, saved) if is_dict else container == saved:
        return
    container.clear()
    container.update(saved)


def _same_items(container: dict[Any, Any], saved: dict[Any, Any]) -> bool:
    # By identity and in order: values may be tensors, and the order of hooks and
    # submodules is the order of running.
    if list(container) != list(saved):
        return False
    return all(container[key] is saved[key] for key in saved)


def _preserve_tensor(stack: ExitStack, tensor: Tensor) -> None:
    stack.callback(_restore_tensor, tensor, tensor.detach(), tensor.requires_grad)


def _restore_tensor(tensor: Tensor, alias: Tensor, requires_grad: bool) -> None:
    # model.half() and model.to(device) swap the storage under a parameter that stays
    # the same.
    if not _same_storage(tensor, alias):
        tensor.data = alias
    if tensor.grad_fn is not None and not tensor._is_view():
        tensor.detach_()  # a buffer that was written in place with values that have a gradient
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _same_storage(tensor: Tensor, alias: Tensor) -> bool:
    if tensor.dtype != alias.dtype or tensor.device != alias.device:
        return False
    if tensor.layout != alias.layout:
        return False
    return tensor.layout is not torch.strided or tensor.is_set_to(alias)


def _restore_values(buffer: Tensor, saved: Tensor) -> None:
    # Written only when changed, since a write would invalidate a graph that saved the
    # buffer for its backward pass.
    if not _same_bits(buffer, saved):
        with torch.no_grad():
            buffer.copy_(saved)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.layout is not torch.strided:
        return False
    # As bytes, because as numbers NaN differs from itself and -0 does not differ from 0.
    return torch.equal(as_bytes(left), as_bytes(right))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as its bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _preserve_gradient(stack: ExitStack, parameter: nn.Parameter) -> None:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name, None)
        saved = None if hooks is None else hooks.copy()
        stack.callback(_restore_tensor_hooks, parameter, name, saved)
    stack.callback(setattr, parameter, "grad", parameter.grad)
    parameter.grad = None


def _restore_tensor_hooks(
    parameter: nn.Parameter, name: str, saved: dict[Any, Any] | None
) -> None:
    hooks = getattr(parameter, name, None)
    if hooks is not None:
        _restore_container(hooks, saved or {})


def _preserve_random_states(stack: ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    stack.callback(np.random.set_state, np.random.get_state(legacy=False))
    stack.callback(set_random_states, random_states())


def random_states() -> tuple[Tensor, ...]:
    """Return the states of torch's generators: the CPU's, then each of an accelerator.

    An accelerator that nothing has used yet is left out: asking would start it.
    """
    states = [torch.get_rng_state()]
    module = _accelerator_in_use()
    if module is not None:
        states += module.get_rng_state_all()
    return tuple(states)


def set_random_states(states: Sequence[Tensor]) -> None:
    """Set the states of torch's generators as ``random_states`` gave them."""
    torch.set_rng_state(states[0])
    module = _accelerator_in_use()
    if module is not None and len(states) > 1:
        module.set_rng_state_all(list(states[1:]))


def _accelerator_in_use() -> Any | None:
    """Return torch's module of this machine's accelerator (``torch.cuda``, ...).

    None where there is none, nothing has used it, or it keeps no states of its own.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module: Any = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", None)
    if not module.is_available() or (is_initialized and not is_initialized()):
        return None
    return module if hasattr(module, "get_rng_state_all") else None


def _preserve_flags(stack: ExitStack) -> None:
    # Callbacks run last in, first out, so push in reverse: the order of _flags() is the
    # order of restoring.
    flags = [(read, write, _read(read)) for read, write in _flags()]
    for read, write, value in reversed(flags):
        stack.callback(_restore_flag, read, write, value)


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        # torch refuses to read the legacy TF32 flags once fp32_precision (torch >= 2.9)
        # has been set. Then the legacy flag has no meaning, and the rows of
        # fp32_precision hold the state.
        return None


def _restore_flag(
    read: Callable[[], Any], write: Callable[[Any], Any], value: Any
) -> None:
    # Written only when changed: writing an inherited fp32_precision would pin it.
    if value is not None and _read(read) != value:
        write(value)


def _flags() -> Iterator[_Flag]:
    """(read, write) of every setting that changes numbers; general and legacy ones first."""
    yield from _general_flags()
    yield from _kernel_flags()
    yield from _precision_flags()


def _general_flags() -> Iterator[_Flag]:
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    for device in ("cpu", "cuda"):
        yield (
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        yield (
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        )


def _kernel_flags() -> Iterator[_Flag]:
    backends: Any = torch.backends
    cuda = backends.cuda
    yield backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled
    yield torch._C._get_nnpack_enabled, backends.nnpack.set_flags
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        read = getattr(cuda, f"{kernel}_sdp_enabled")
        yield read, getattr(cuda, f"enable_{kernel}_sdp")
    yield (
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
    )


def _precision_flags() -> Iterator[_Flag]:
    backends: Any = torch.backends
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    for owner, names in (
        (
            backends.cuda.matmul,
            (
                "allow_tf32",
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
                "allow_fp16_accumulation",
            ),
        ),
        (backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (backends.mkldnn, ("enabled", "deterministic", "allow_tf32")),
        (backends.opt_einsum, ("enabled", "strategy")),
    ):
        for name in names:
            yield _attribute(owner, name)
    if hasattr(backends, "fp32_precision"):  # torch >= 2.9
        # Not mkldnn.fp32_precision itself: its setter writes the generic flag (torch 2.13).
        for owner in (
            backends,
            backends.cudnn,
            backends.cuda.matmul,
            backends.cudnn.conv,
            backends.mkldnn.matmul,
            backends.mkldnn.conv,
            backends.mkldnn.rnn,
        ):
            yield _attribute(owner, "fp32_precision")


def _attribute(owner: object, name: str) -> _Flag:
    return partial(getattr, owner, name, None), partial(setattr, owner, name)
