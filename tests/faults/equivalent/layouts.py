"""One process against several that share its work: right, and with one thing wrong.

Each process of ``launch`` records its part of a layout into a folder of its name.
The whole batch is in every process; what of it a process reads is part of its layout.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.forked import side_by_side
from torch import Tensor, nn

import roundoff

from ..program import replace as with_methods
from .models import LENGTH, Gpt, causal, gpt_batch, gpt_loss

RATE = 0.1


@dataclass(frozen=True)
class Layout:
    """``run`` is called in each of ``world`` processes with the network and the batch.

    ``sites`` is empty for a right one; ``steps`` are recorded.
    """

    name: str
    run: Callable[..., object]
    world: int
    sites: tuple[str, ...] = ()
    trains: bool = True
    steps: int = 1

    @property
    def apart(self) -> bool:
        """True for the quarter that is measured at the end alone."""
        return zlib.crc32(self.name.encode()) % 4 == 0


LAYOUTS: list[Layout] = []


def layout(
    world: int, sites: str = "", *, trains: bool = True, steps: int = 1
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Enters the decorated function as a layout; with ``sites`` it has a bug there."""

    def enter(run: Callable[..., object]) -> Callable[..., object]:
        LAYOUTS.append(
            Layout(run.__name__, run, world, tuple(sites.split()), trains, steps)
        )
        return run

    return enter


def network() -> Gpt:
    torch.manual_seed(0)
    return Gpt(width=16, heads=4, depth=2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


# -- the reference --------------------------------------------------------------------


def one_process(folder: Path, *, trains: bool, steps: int) -> None:
    """Record the whole work in this process."""
    model = network()
    optimizer = sgd(model)
    with roundoff.capture(folder, model, keep="tensors") as run:
        for number in range(steps):
            (ids,) = gpt_batch(number)
            if trains:
                optimizer.zero_grad()
                gpt_loss(model, ids).backward()
                optimizer.step()
            else:
                with torch.no_grad():
                    model(ids)
            run.step()


# -- several processes ----------------------------------------------------------------


def launch(folder: Path, names: Sequence[str]) -> None:
    """Record layouts into folders of their names, in as many processes as they need."""
    chosen = [layout for layout in LAYOUTS if layout.name in names]
    world = max(layout.world for layout in chosen)
    with tempfile.TemporaryDirectory() as stores:
        side_by_side(
            work,
            [str(folder), stores, tuple(names)],
            [{"RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(world)],
        )


def work(folder: str, stores: str, names: Sequence[str]) -> None:
    """What one of the processes does."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    for layout in LAYOUTS:
        if layout.name not in names or rank >= layout.world:
            continue
        os.environ["WORLD_SIZE"] = str(layout.world)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{stores}/{layout.name}",
            rank=rank,
            world_size=layout.world,
        )
        _record(layout, Path(folder, layout.name))
        dist.barrier()
        dist.destroy_process_group()


def _record(layout: Layout, folder: Path) -> None:
    model = network()
    steps = layout.run(model)
    with roundoff.capture(folder, model, keep="tensors") as run:
        for number in range(layout.steps):
            steps(*gpt_batch(number))
            run.step()


def _part(x: Tensor, dim: int = 0) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def _whole_step(model: Any, optimizer: Any, part: Callable[[Tensor], Tensor]) -> Any:
    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        gpt_loss(model, part(ids)).backward()
        optimizer.step()

    return step


# -- data parallel --------------------------------------------------------------------


def _ddp(model: nn.Module) -> Any:
    model = nn.parallel.DistributedDataParallel(model)
    return _whole_step(model, sgd(model), _part)


@layout(2)
def ddp(model):
    return _ddp(model)


@layout(4, steps=2)
def ddp_of_four(model):
    return _ddp(model)


def _averaged(model, *, part=_part, divide=True, left_out=()):
    optimizer = sgd(model)

    def step(ids):
        optimizer.zero_grad()
        gpt_loss(model, part(ids)).backward()
        for name, parameter in model.named_parameters():
            if name in left_out:
                continue
            dist.all_reduce(parameter.grad)
            if divide:
                parameter.grad /= dist.get_world_size()
        optimizer.step()

    return step


@layout(2, steps=2)
def averaged_by_hand(model):
    return _averaged(model)


@layout(2)
def averaged_in_one_bucket(model):
    optimizer = sgd(model)

    def step(ids):
        optimizer.zero_grad()
        gpt_loss(model, _part(ids)).backward()
        gradients = [p.grad for p in model.parameters()]
        bucket = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size()
        dist.all_reduce(bucket)
        start = 0
        for gradient in gradients:
            end = start + gradient.numel()
            gradient.copy_(bucket[start:end].view_as(gradient))
            start = end
        optimizer.step()

    return step


@layout(2, trains=False)
def inference_of_parts(model):
    def step(ids):
        with torch.no_grad():
            model(_part(ids))

    return step


@layout(2, steps=2)
def sharded_optimizer(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=RATE, momentum=0.9
    )
    return _whole_step(model, optimizer, _part)


@layout(4, steps=2)
def sharded_optimizer_of_four(model):
    return sharded_optimizer(model)


@layout(2, steps=2)
def sharded_optimizer_in_buckets(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        parameters_as_bucket_view=True,
        lr=RATE,
        momentum=0.9,
    )
    return _whole_step(model, optimizer, _part)


def _shards_of_all(model, *, shift=0):
    """Every process updates a stretch of all parameters, one after the other."""
    world, rank = dist.get_world_size(), dist.get_rank()
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    size = -(-len(flat) // world)
    padded = nn.functional.pad(flat, (0, size * world - len(flat)))
    shard = nn.Parameter(padded.chunk(world)[rank].clone())
    optimizer = torch.optim.SGD([shard], lr=RATE, momentum=0.9)

    def step(ids):
        model.zero_grad()
        gpt_loss(model, _part(ids)).backward()
        gradients = torch.cat([p.grad.flatten() for p in parameters]) / world
        gradients = nn.functional.pad(gradients, (0, size * world - len(gradients)))
        dist.all_reduce(gradients)
        shard.grad = gradients.roll(shift).chunk(world)[rank].clone()
        optimizer.step()
        parts = [torch.empty_like(shard) for _ in range(world)]
        dist.all_gather(parts, shard.detach())
        whole = torch.cat(parts)
        start = 0
        with torch.no_grad():
            for parameter in parameters:
                end = start + parameter.numel()
                parameter.copy_(whole[start:end].view_as(parameter))
                start = end

    return step


@layout(2, steps=2)
def stretches_of_all(model):
    return _shards_of_all(model)


@layout(4, steps=2)
def stretches_of_all_in_four(model):
    return _shards_of_all(model)


@layout(2, steps=2)
def averaged_in_hooks(model):
    optimizer = sgd(model)

    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return _whole_step(model, optimizer, _part)


def _accumulated(model, *, last_is_sent=True):
    """Every process adds the gradients of two halves of its part, and sends the sum."""
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = sgd(model)

    def step(ids):
        optimizer.zero_grad()
        first, last = _part(ids).chunk(2)
        with model.no_sync():
            (gpt_loss(model, first) / 2).backward()
            if not last_is_sent:
                (gpt_loss(model, last) / 2).backward()
        if last_is_sent:
            (gpt_loss(model, last) / 2).backward()
        optimizer.step()

    return step


@layout(2, steps=2)
def ddp_accumulated(model):
    return _accumulated(model)


def _updates_in_turn(model, send, memory=lambda parameter: parameter):
    """Each process updates every other parameter and sends it to the others."""
    parameters = list(model.parameters())
    mine = parameters[dist.get_rank() :: dist.get_world_size()]
    optimizer = torch.optim.SGD(mine, lr=RATE, momentum=0.9)

    def step(ids):
        model.zero_grad()
        gpt_loss(model, _part(ids)).backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        with torch.no_grad():
            for number, parameter in enumerate(parameters):
                if send(number):
                    sender = number % dist.get_world_size()
                    dist.broadcast(memory(parameter), sender)

    return step


@layout(2, steps=2)
def updates_in_turn(model):
    return _updates_in_turn(model, lambda number: True)


@layout(2, steps=2)
def updates_in_turn_of_data(model):
    return _updates_in_turn(model, lambda number: True, lambda p: p.data)


@layout(2)
def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return _whole_step(model, sgd(model), _part)


@layout(4, steps=2)
def blocks_fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _whole_step(model, sgd(model), _part)


# -- tensor parallel ------------------------------------------------------------------


class Enter(torch.autograd.Function):
    """The same value in every process; gradients are added over the processes."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """Values are added over the processes; the gradient is the same in every process."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Column(nn.Module):
    """A slice of the outputs of a linear layer."""

    def __init__(self, layer: nn.Linear, rank: int | None = None, enter=Enter.apply):
        super().__init__()
        rank = dist.get_rank() if rank is None else rank
        size = dist.get_world_size()
        self.weight = nn.Parameter(layer.weight.detach().chunk(size)[rank].clone())
        self.bias = nn.Parameter(layer.bias.detach().chunk(size)[rank].clone())
        self.enter = enter

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.enter(x), self.weight, self.bias)


class Row(nn.Module):
    """A slice of the inputs of a linear layer."""

    def __init__(self, layer: nn.Linear, leave=Leave.apply, bias_inside: bool = False):
        super().__init__()
        self.weight = nn.Parameter(_part(layer.weight.detach(), 1).clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.leave = leave
        self.bias_inside = bias_inside

    def forward(self, x: Tensor) -> Tensor:
        if self.bias_inside:
            return self.leave(nn.functional.linear(x, self.weight, self.bias))
        return self.leave(nn.functional.linear(x, self.weight)) + self.bias


def _tensor_parallel(model: Gpt, blocks: Sequence[int] = (0, 1)) -> None:
    for number in blocks:
        block = model.blocks[number]
        attention = block.attention
        attention.heads //= dist.get_world_size()
        for name in ("query", "key", "value"):
            setattr(attention, name, Column(getattr(attention, name)))
        attention.out = Row(attention.out)
        block.up = Column(block.up)
        block.down = Row(block.down)


def _all(ids: Tensor) -> Tensor:
    return ids


def _trained_whole(model):
    return _whole_step(model, sgd(model), _all)


def _inferred(model):
    def step(ids):
        with torch.no_grad():
            model(ids)

    return step


@layout(2)
def columns_and_rows(model):
    _tensor_parallel(model)
    return _trained_whole(model)


@layout(4, trains=False)
def columns_and_rows_of_four(model):
    _tensor_parallel(model)
    return _inferred(model)


@layout(2)
def feed_forward_by_the_library(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(
            block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return _trained_whole(model)


class Vocabulary(nn.Module):
    """A slice of the rows of an embedding; others are added over the processes."""

    def __init__(self, layer: nn.Embedding, shift: int = 0):
        super().__init__()
        self.weight = nn.Parameter(_part(layer.weight.detach()).clone())
        self.start = dist.get_rank() * len(self.weight) + shift * dist.get_rank()

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        outside = (local < 0) | (local >= len(self.weight))
        rows = nn.functional.embedding(local.masked_fill(outside, 0), self.weight)
        return Leave.apply(rows.masked_fill(outside[..., None], 0.0))


@layout(2)
def vocabulary_in_two(model):
    model.tokens = Vocabulary(model.tokens)
    return _trained_whole(model)


@layout(2, trains=False)
def head_in_two(model):
    model.head = Column(model.head)
    return _inferred(model)


# -- the sequence in parts ------------------------------------------------------------


def _gathered(x: Tensor, dim: int, order: int = 1) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts[::order], dim)


def _sequence_parallel(model, *, places=True, order=1, mask=True):
    """Every process has a part of the places, and gathers keys and values."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = LENGTH // world
    start = rank * size

    def attention_forward(self, x, mask, cache):
        q = self.split(self.query(x))
        k = _gathered(self.split(self.key(x)), 2, order)
        v = _gathered(self.split(self.value(x)), 2, order)
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))

    for block in model.blocks:
        block.attention.forward = attention_forward.__get__(block.attention)

    def step(ids):
        numbers = torch.arange(start if places else 0, (start if places else 0) + size)
        rows = causal(LENGTH, LENGTH)
        seen = rows[start : start + size] if mask else rows[:size]
        with torch.no_grad():
            model(_part(ids, 1), numbers, seen)

    return step


@layout(2, trains=False)
def sequence_in_two(model):
    return _sequence_parallel(model)


@layout(4, trains=False)
def sequence_in_four(model):
    return _sequence_parallel(model)


@layout(2, trains=False)
def stages(model):
    """The first block in one process, the second in the other."""
    rank = dist.get_rank()

    def step(ids):
        mask = causal(LENGTH, LENGTH)
        with torch.no_grad():
            if rank == 0:
                x = model.tokens(ids) + model.places(torch.arange(LENGTH))
                dist.send(model.blocks[0](x, mask, None), 1)
            else:
                x = torch.empty(len(ids), LENGTH, 16)
                dist.recv(x, 0)
                model.head(model.norm(model.blocks[1](x, mask, None)))

    return step


# -- wrong ----------------------------------------------------------------------------


@layout(2, "blocks.0.down/* blocks.0/add*", trains=False)
def sum_missing(model):
    _tensor_parallel(model)
    model.blocks[0].down.leave = lambda x: x
    return _inferred(model)


@layout(4, "blocks.1.attention.out/* blocks.1/add*", trains=False)
def sum_missing_in_attention(model):
    _tensor_parallel(model)
    model.blocks[1].attention.out.leave = lambda x: x
    return _inferred(model)


@layout(2, "blocks.0.down/*", trains=False)
def mean_for_sum(model):
    _tensor_parallel(model)

    def mean(x):
        dist.all_reduce(x)
        return x / dist.get_world_size()

    model.blocks[0].down.leave = mean
    return _inferred(model)


@layout(2, "blocks.0.down/*", trains=False)
def largest_for_sum(model):
    _tensor_parallel(model)

    def largest(x):
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    model.blocks[0].down.leave = largest
    return _inferred(model)


@layout(2, "blocks.1.down/*", trains=False)
def bias_of_every_rank(model):
    _tensor_parallel(model)
    model.blocks[1].down.bias_inside = True
    return _inferred(model)


@layout(2, "blocks.0.up* blocks.0.up/*", trains=False)
def shard_of_rank_zero(model):
    up = model.blocks[0].up
    _tensor_parallel(model)
    model.blocks[0].up = Column(up, rank=0)
    return _inferred(model)


@layout(2, "blocks.1.attention.query* blocks.1.attention.query/*", trains=False)
def shards_exchanged(model):
    query = model.blocks[1].attention.query
    _tensor_parallel(model)
    model.blocks[1].attention.query = Column(query, rank=1 - dist.get_rank())
    return _inferred(model)


@layout(2, "blocks.1.up/* blocks.1.norm2/* blocks.1.norm2*")
def gradient_of_input_not_summed(model):
    up = model.blocks[1].up
    _tensor_parallel(model)
    model.blocks[1].up = Column(up, enter=lambda x: x)
    return _trained_whole(model)


@layout(2, "*.grad */c10d::allreduce* /c10d::allreduce* */gradient* ")
def gradients_summed(model):
    return _averaged(model, divide=False)


@layout(2, "norm.weight* norm/* /add_* norm.weight.grad")
def one_gradient_left_out(model):
    return _averaged(model, left_out=("norm.weight",))


@layout(2, "tokens/* tokens* /input* /slice* /split* /narrow*")
def the_same_part_twice(model):
    return _averaged(model, part=lambda ids: ids.chunk(2)[0])


@layout(2, "tokens* tokens/*", trains=False)
def vocabulary_shifted(model):
    model.tokens = Vocabulary(model.tokens, shift=1)
    return _inferred(model)


@layout(2, "blocks.0.attention/*", trains=False)
def gathered_in_reverse(model):
    return _sequence_parallel(model, order=-1)


@layout(2, "places/* /add*", trains=False)
def places_of_rank_zero(model):
    return _sequence_parallel(model, places=False)


@layout(2, "blocks.0.attention/*", trains=False)
def mask_of_rank_zero(model):
    return _sequence_parallel(model, mask=False)


@layout(2, "blocks* tokens* head* */add_* /add_*", steps=2)
def update_not_sent(model):
    return _updates_in_turn(model, lambda number: number != 6)


@layout(2, "blocks* tokens* head* */add_* /add_*")
def update_of_data_not_sent(model):
    return _updates_in_turn(model, lambda number: number != 8, lambda p: p.data)


@layout(2, "*.grad */gradient* /add_* */add_* tokens* places* blocks* norm* head*")
def accumulated_and_not_sent(model):
    return _accumulated(model, last_is_sent=False)


@layout(2, "/add_* /copy_* tokens* places* blocks* norm* head* /cat* /roll*")
def stretches_of_other_gradients(model):
    return _shards_of_all(model, shift=1)


@layout(2, "*.grad */nll* /nll* /mul* /cross*")
def loss_counted_twice(model):
    optimizer = sgd(model)

    def step(ids):
        optimizer.zero_grad()
        (gpt_loss(model, _part(ids)) * dist.get_world_size()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()

    return step


@layout(2, "head/* head*", trains=False)
def head_gathered_in_reverse(model):
    head = Column(model.head)
    model.head = head

    def forward(self, x):
        return _gathered(nn.functional.linear(x, self.weight, self.bias), -1, -1)

    with_methods(head, forward=forward)
    return _inferred(model)
