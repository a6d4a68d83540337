"""A second device without hardware, on which whatever is placed wrongly raises an error.

torch lets a program add a device (`PrivateUse1`). Its tensors are ordinary `torch.Tensor`
on host memory, and each of its operators runs the CPU's kernel. All above the kernels is
torch's own code: autograd with a thread of its own for the backward pass, views, `.to`,
`.cpu()`, modes. So is most of what it refuses: `tensor.numpy()` raises, and so does a
tensor made without `device=` beside one of the device, except a single value in an
elementwise operator.

What torch checks inside the kernels of a GPU is checked here, by torch's rules:

- all tensors of a call are on one device. Elementwise operators take CPU tensors without
  dimensions; indices may be on the CPU; lengths of sequences must be;
- a generator draws on its own device only, and the device has a random state of its own.

`waits` counts the calls at which a program waits for a GPU.

It has no sparse tensors, no autocast and no pinned memory, and no kernels that differ from
the CPU's: it shows where things stand, not what a GPU computes. An error that a hook of
saved tensors raises ends the process, as the guard of streams is written in Python.

A device is added for a whole process and for good: `install` is called in a process of its
own (see `conftest.py`).
"""

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

aten = torch.ops.aten

NAME = "privateuseone"
DEVICE_KEY = "PrivateUse1"

#: DLDeviceType of dlpack.h: kDLCPU and kDLExtDev.
HOST = 1
EXTENSION = 12
#: Where DLManagedTensor holds the device's type: behind the pointer to the values.
DEVICE_TYPE = 8

#: Operators whose result the host has to wait for on a GPU.
WAITING = frozenset(
    "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive "
    "equal".split()
)
#: Operators that move values from device to device.
MOVING = frozenset("_copy_from _copy_from_and_resize _to_copy copy_".split())
INDEXING = frozenset("index index_put index_put_ _index_put_impl_".split())
#: Arguments that may be on the CPU beside tensors of a GPU.
ON_THE_HOST = frozenset(
    "lengths input_lengths target_lengths batch_sizes indices".split()
)

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

#: What keeps the kernels registered.
_libraries: list[torch.library.Library] = []
_waits: list[Counter[str]] = []


def install() -> torch.device:
    """Add the device to this process, once, and return it."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
        library = torch.library.Library("_", "IMPL")
        library.fallback(_kernel, DEVICE_KEY)
        library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        kernels = torch.library.Library("aten", "IMPL")
        for name in ("convolution_overrideable", "convolution_backward_overrideable"):
            kernel = functools.partial(_kernel, getattr(aten, name).default)
            kernels.impl(name, kernel, DEVICE_KEY)
        for key in ("Conjugate", "Negative"):
            kernels.impl("_copy_from", torch.library.fallthrough_kernel, key)
        _libraries.extend((library, kernels))
        _raise_behind()
        # each kernel has ended when its call returns
        torch.accelerator.synchronize = lambda device=None: None
        _replace("Generator", _Generator)
        setattr(torch.storage._StorageBase, "clone", _cloned_storage)  # noqa: B010
    return torch.device(NAME, 0)


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count the calls at which a program would wait for a GPU, by operator."""
    counted: Counter[str] = Counter()
    _waits.append(counted)
    try:
        yield counted
    finally:
        _waits.remove(counted)


# ------------------------------------------------------------------ memory


def _seen_as(tensor: Tensor, device_type: int) -> Tensor:
    """The same memory on another device; it lives as long as the result."""
    capsule = torch._C._to_dlpack(tensor)
    place = _pointer(capsule, b"dltensor")
    ctypes.c_int.from_address(place + DEVICE_TYPE).value = device_type
    return torch._C._from_dlpack(capsule)


def on_host(tensor: Tensor) -> Tensor:
    """The memory of a tensor of the device as a tensor of the CPU."""
    return _seen_as(tensor, HOST)


def on_device(tensor: Tensor) -> Tensor:
    """The memory of a CPU tensor as a tensor of the device."""
    return _seen_as(tensor, EXTENSION)


def is_pretended(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _view(base: Tensor, like: Tensor, start: int) -> Tensor:
    """A view of the storage of ``base`` with dtype, shape and strides of ``like``.

    ``start`` is counted in bytes from the first value of ``base``.
    """
    whole = aten.alias(base)
    count = max(like.itemsize // base.itemsize, 1)
    whole.as_strided_((count,), (1,), base.storage_offset())
    if like.dtype != base.dtype:
        whole = aten.view.dtype(whole, like.dtype)
    offset = base.storage_offset() * base.itemsize + start
    return whole.as_strided_(like.shape, like.stride(), offset // like.itemsize)


# ------------------------------------------------------------------ the kernel of all


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    # what a mode of the program sees are the calls of the device, not those in here
    with torch._C.DisableTorchFunction():
        name = _facts(op).name
        named = _by_name(op, args, kwargs)
        _check_devices(op, name, named)
        _check_generators(op, named)
        for counted in _waits:
            if _waits_for_device(name, named):
                counted[name] += 1
        special = _SPECIAL.get(name)
        return _run(op, args, kwargs) if special is None else special(**named)


@dataclass(frozen=True)
class _Facts:
    """What the schema of an operator says."""

    name: str
    arguments: tuple[str, ...]
    tensors: tuple[str, ...]
    written: frozenset[str]
    #: Arguments that stand for a result.
    out: frozenset[str]
    is_random: bool
    is_pointwise: bool


@functools.cache
def _facts(op: Any) -> _Facts:
    arguments = op._schema.arguments
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return _Facts(
        name=op._schema.name.partition("::")[2],
        arguments=tuple(a.name for a in arguments),
        tensors=tuple(a.name for a in arguments if str(a.type) == "Tensor"),
        written=frozenset(a.name for a in arguments if a.is_write),
        out=frozenset(a.name for a in arguments if a.is_out),
        is_random=is_random and any(a.name == "generator" for a in arguments),
        is_pointwise=torch.Tag.pointwise in op.tags,
    )


def _by_name(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(_facts(op).arguments, args, strict=False)) | kwargs


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to each one in a list or tuple of an operator."""
    if isinstance(value, list | tuple):
        return type(value)([_each(function, item) for item in value])
    return function(value)


def _run(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the CPU's kernel on the same memory."""
    facts = _facts(op)
    twins: list[tuple[Tensor, Tensor]] = []

    def lowered(value: Any) -> Any:
        if is_pretended(value):
            twins.append((value, on_host(value)))
            return twins[-1][1]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def lowered_out(value: Any) -> Any:
        """Where a kernel may have to make room: no memory of another may be made larger."""
        if is_pretended(value) and not value.numel():
            twins.append((value, torch.empty(0, dtype=value.dtype)))
            return twins[-1][1]
        return lowered(value)

    host_args = _each(lowered, tuple(args))
    host_kwargs = {
        name: _each(lowered_out if name in facts.out else lowered, value)
        for name, value in kwargs.items()
    }
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = False
    if facts.is_random and host_kwargs.get("generator") is None:
        host_kwargs["generator"] = _device_generator
    try:
        result = _call(op, host_args, host_kwargs)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        for name in facts.out:  # room is made in memory of its own
            ours = kwargs[name]
            twins.append((ours, torch.empty(0, dtype=ours.dtype)))
            host_kwargs[name] = twins[-1][1]
        result = _call(op, host_args, host_kwargs)

    def lifted(value: Any) -> Any:
        return _lifted(value, twins) if isinstance(value, Tensor) else value

    return _each(lifted, result)


def _call(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator; a number in the place of a tensor picks the overload for it."""
    named = _by_name(op, args, kwargs)
    tensors = [named[name] for name in _facts(op).tensors if name in named]
    takes_number = any(isinstance(value, int | float) for value in tensors)
    return (op.overloadpacket if takes_number else op)(*args, **kwargs)


def _lifted(value: Tensor, twins: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What the device returns where the CPU returned ``value``."""
    for ours, theirs in twins:
        if theirs is value:
            if ours.shape != value.shape:  # a result for which room was made
                ours.data = on_device(value)
            return ours
    for ours, theirs in twins:
        start = value.data_ptr() - theirs.data_ptr()
        first = theirs.untyped_storage().data_ptr()
        if value.numel() and value.untyped_storage().data_ptr() == first:
            return _view(ours, value, start)
    return on_device(value)


# ------------------------------------------------------------------ what torch refuses


def _check_devices(op: Any, name: str, named: dict[str, Any]) -> None:
    if name in MOVING:
        return
    facts = _facts(op)
    written = facts.written
    takes_scalars = facts.is_pointwise or name.startswith("_foreach_")
    for argument, value in named.items():
        for leaf in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(leaf, Tensor) or is_pretended(leaf):
                continue
            is_scalar = leaf.is_cpu and not leaf.dim() and argument not in written
            if is_scalar and (takes_scalars or name in INDEXING):
                continue
            if is_scalar and argument in ("value", "source") and name == "masked_fill_":
                continue
            if leaf.is_cpu and argument in ON_THE_HOST and argument not in written:
                continue
            message = (
                "Expected all tensors to be on the same device, but found at least two "
                f"devices, {NAME}:0 and {leaf.device}! (argument {argument} of {name})"
            )
            raise RuntimeError(message)


def _check_generators(op: Any, named: dict[str, Any]) -> None:
    generator = named.get("generator")
    if generator is not None and generator._cdata not in _device_generators:
        message = (
            f"Expected a '{NAME}' device type for generator but found "
            f"'{generator.device.type}'"
        )
        raise RuntimeError(message)


def _waits_for_device(name: str, named: dict[str, Any]) -> bool:
    if name == "_copy_from":
        return bool(named["dst"].is_cpu)
    if name == "index" or name.startswith("index_put"):
        indices = [i for i in named["indices"] if i is not None]
        return any(i.dtype in (torch.bool, torch.uint8) for i in indices)
    return name in WAITING


# ------------------------------------------------------------------ kernels of their own


def _copy(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    target = on_host(dst) if is_pretended(dst) else dst
    target.copy_(_shown(self) if is_pretended(self) else self)
    return dst


def _shown(tensor: Tensor) -> Tensor:
    """A tensor of the device on the host, with its marks of conjugation and sign."""
    if tensor.is_conj():
        return _shown(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(_shown(torch._neg_view(tensor)))
    return on_host(tensor)


def _copy_and_resize(self: Tensor, dst: Tensor) -> Tensor:
    if dst.shape != self.shape:
        dst.resize_(self.shape)
    return _copy(self, dst)


def _as_strided(
    self: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    offset = self.storage_offset() if storage_offset is None else storage_offset
    result: Tensor = aten.alias(self)
    return result.as_strided_(size, stride, offset)


def _resize(self: Tensor, size: Sequence[int], memory_format: Any = None) -> Tensor:
    count = functools.reduce(int.__mul__, size, 1)
    needed = (self.storage_offset() + count) * self.itemsize
    contiguous = torch.empty(size, device="meta").stride()
    if needed > self.untyped_storage().nbytes():
        room = torch.zeros(needed // self.itemsize, dtype=self.dtype)
        held = self.untyped_storage().nbytes() // self.itemsize
        if held:
            room[:held] = on_host(_as_strided(self, (held,), (1,), 0))
        self.data = on_device(room)
    return self.as_strided_(size, contiguous)


def _set(
    self: Tensor,
    source: Any = None,
    storage_offset: int = 0,
    size: Sequence[int] | None = None,
    stride: Sequence[int] = (),
) -> Tensor:
    """Give a tensor the memory of a storage; the storage lives as long as the tensor."""
    if source is None:
        self.data = on_device(torch.empty(0, dtype=self.dtype))
        return self
    if isinstance(source, Tensor):
        self.data = source
        return self
    if size is None:  # the storage whole
        size = (source.nbytes() // self.itemsize,)
        stride = (1,)
    whole = _of_storage(source, self.dtype)
    self.data = _as_strided(whole, size, stride, storage_offset)
    return self


def _of_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    count = storage.nbytes() // dtype.itemsize
    memory = (ctypes.c_char * max(storage.nbytes(), 1)).from_address(storage.data_ptr())
    memory.owner = storage  # type: ignore[attr-defined]
    return on_device(torch.frombuffer(memory, dtype=dtype, count=count))


def _cloned_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
    if self.device.type == NAME:
        return on_device(
            on_host(_of_storage(self, torch.uint8)).clone()
        ).untyped_storage()
    return torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self)


def _on_host(function: Any, *args: Any) -> Any:
    """Run a function on host memory; its results are tensors of the device."""

    def lowered(value: Any) -> Any:
        return on_host(value) if is_pretended(value) else value

    def lifted(value: Any) -> Any:
        return on_device(value) if isinstance(value, Tensor) else value

    return _each(lifted, function(*_each(lowered, args)))


def _convolution(**named: Any) -> Tensor:
    result: Tensor = _on_host(aten.convolution, *named.values())
    return result


def _convolution_backward(*args: Any, **named: Any) -> Any:
    """Gradients by result, input and weight; then come the forward call's arguments."""
    gradient, values, weight, *options = [*args, *named.values()]
    is_transposed = options[3]
    channels = weight.shape[1] * options[5] if is_transposed else weight.shape[0]
    return _on_host(
        aten.convolution_backward, gradient, values, weight, [channels], *options
    )


def _sum_of_gates(*parts: Tensor | None) -> Tensor:
    kept = [part for part in parts if part is not None]
    return functools.reduce(torch.add, kept)


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    """One step of an LSTM, by the equations of `torch.nn.LSTM`: h, c and the gates."""

    def step(*parts: Tensor) -> Any:
        *gates, state = parts
        i, f, g, o = _sum_of_gates(*gates).chunk(4, 1)
        opened = [i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()]
        state = opened[1] * state + opened[0] * opened[2]
        return opened[3] * state.tanh(), state, torch.cat(opened, 1)

    return _on_host(step, input_gates, hidden_gates, input_bias, hidden_bias, cx)


def _lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> Any:
    """The gradients of the gates before their functions, of c, and of the biases."""

    def step(
        from_h: Tensor | None,
        from_c: Tensor | None,
        before: Tensor,
        after: Tensor,
        opened: Tensor,
    ) -> Any:
        i, f, g, o = opened.chunk(4, 1)
        slope = 1 - after.tanh().square()
        of_h = torch.zeros_like(after) if from_h is None else from_h
        of_c = of_h * o * slope + (0 if from_c is None else from_c)
        gates = [
            of_c * g * i * (1 - i),
            of_c * before * f * (1 - f),
            of_c * i * (1 - g.square()),
            of_h * after.tanh() * o * (1 - o),
        ]
        of_gates = torch.cat(gates, 1)
        return of_gates, of_c * f, of_gates.sum(0) if has_bias else None

    return _on_host(step, grad_hy, grad_cy, cx, cy, workspace)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    """One step of a GRU, by the equations of `torch.nn.GRU`: h and what its gradient needs."""

    def step(
        from_x: Tensor, from_h: Tensor, b: Tensor | None, c: Tensor | None, h: Tensor
    ) -> Any:
        of_x = from_x if b is None else from_x + b
        of_h = from_h if c is None else from_h + c
        r = (of_x.chunk(3, 1)[0] + of_h.chunk(3, 1)[0]).sigmoid()
        z = (of_x.chunk(3, 1)[1] + of_h.chunk(3, 1)[1]).sigmoid()
        inner = of_h.chunk(3, 1)[2]
        n = (of_x.chunk(3, 1)[2] + r * inner).tanh()
        return (1 - z) * n + z * h, torch.cat([r, z, n, h, inner], 1)

    return _on_host(step, input_gates, hidden_gates, input_bias, hidden_bias, hx)


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """The gradients of both kinds of gates, of h, and of the biases."""

    def step(of_h: Tensor, kept: Tensor) -> Any:
        r, z, n, h, inner = kept.chunk(5, 1)
        of_n = of_h * (1 - z) * (1 - n.square())
        of_z = of_h * (h - n) * z * (1 - z)
        of_r = of_n * inner * r * (1 - r)
        of_input = torch.cat([of_r, of_z, of_n], 1)
        of_hidden = torch.cat([of_r, of_z, of_n * r], 1)
        biases = [g.sum(0) if has_bias else None for g in (of_input, of_hidden)]
        return (of_input, of_hidden, of_h * z, *biases)

    return _on_host(step, grad_hy, workspace)


_SPECIAL = {
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_copy_from": _copy,
    "_copy_from_and_resize": _copy_and_resize,
    "as_strided": _as_strided,
    "resize_": _resize,
    "set_": _set,
}

# ------------------------------------------------------------------ random numbers


#: Those of the device by their address. They are kept: no other may get the same.
_device_generators: dict[int, torch.Generator] = {}


class PretendedGenerator(torch.Generator):
    """A generator that draws on the device."""

    def __init__(self) -> None:
        super().__init__()
        _device_generators[self._cdata] = self  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME, 0)


_REAL_GENERATOR = torch.Generator
_device_generator = PretendedGenerator()


class _MakesGenerators(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_GENERATOR)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        if torch.device(device).type == NAME:
            return PretendedGenerator()
        return _REAL_GENERATOR(device)


class _Generator(metaclass=_MakesGenerators):
    """Stands for `torch.Generator`."""


def _replace(name: str, value: Any) -> None:
    setattr(torch, name, value)


# ------------------------------------------------------------------ errors in hooks


_failures: list[BaseException] = []


def _raise_behind() -> None:
    """Raise an error of a hook behind the backward pass, not inside.

    The engine asks the guard of streams while an error is under way, and a guard of
    Python cannot answer then: the process would end.
    """
    register = torch.Tensor.register_hook
    run = torch.autograd.graph._engine_run_backward

    def registered(self: Tensor, hook: Any) -> Any:
        @functools.wraps(hook)
        def guarded(gradient: Tensor) -> Any:
            try:
                return None if _failures else hook(gradient)
            except Exception as error:  # noqa: BLE001 (raised again below)
                _failures.append(error)
                return None

        return register(self, guarded)

    @functools.wraps(run)
    def backward(*args: Any, **kwargs: Any) -> Any:
        _failures.clear()
        result = run(*args, **kwargs)
        if _failures:
            raise _failures[0]
        return result

    torch.Tensor.register_hook = registered  # type: ignore[method-assign]
    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = backward  # type: ignore[attr-defined]


class _Module(backend_registration._DummyBackendModule):
    """`torch.privateuseone`, as `torch.cuda` is of CUDA."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def default_generators(self) -> tuple[torch.Generator, ...]:
        return (_device_generator,)

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return _device_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        _device_generator.set_state(state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [_device_generator.get_state()]

    def set_rng_state_all(self, states: Sequence[Tensor]) -> None:
        _device_generator.set_state(states[0])

    def manual_seed(self, seed: int) -> None:
        _device_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        _device_generator.manual_seed(seed)

    def synchronize(self, device: Any = None) -> None:
        """Do nothing, since each kernel has ended when its call returns."""
