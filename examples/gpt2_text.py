"""A small GPT-2 from a transformers config, trained from nothing on a play, character by character, for `roundoff bench`;
metric: minus the bits per character on the last tenth of the play, which training never sees.

    roundoff bench examples/gpt2_text.py --configs fp32,bf16

as_you_like_it.txt says on its first line where it is from.
"""

import math
from functools import cache
from pathlib import Path

import torch
from torch import nn

LENGTH, BATCH, HELD_OUT = 128, 8, 8

Batch = dict[str, torch.Tensor]


@cache
def text() -> str:
    """The play, without the line about its origin."""
    whole = (Path(__file__).parent / "as_you_like_it.txt").read_text(encoding="ascii")
    return whole.partition("\n")[2]


@cache
def characters() -> str:
    return "".join(sorted(set(text())))


def tokens(part: str) -> torch.Tensor:
    number = {character: index for index, character in enumerate(characters())}
    return torch.tensor([number[character] for character in part])


def sequences(part: str, size: int) -> list[Batch]:
    """Batches of `size` sequences of 129 characters: what a position predicts is the next one."""
    found = tokens(part)
    whole = len(found) // (LENGTH + 1) * (LENGTH + 1)
    rows = found[:whole].view(-1, LENGTH + 1)
    return [
        {"input_ids": rows[i : i + size]} for i in range(0, len(rows) - size + 1, size)
    ]


def model() -> nn.Module:
    """Weights as the random state gives them: each seed of a bench has its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(characters()),
        n_positions=LENGTH,
        n_embd=256,
        n_layer=4,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def batches() -> list[Batch]:
    """The first nine tenths of the play: 109 batches of 8 sequences."""
    return sequences(text()[: len(text()) * 9 // 10], BATCH)


def held_out() -> list[Batch]:
    return sequences(text()[len(text()) * 9 // 10 :], 4 * BATCH)[:HELD_OUT]


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The logits, shape (sequences, 128, characters)."""
    return model(input_ids=batch["input_ids"][:, :-1]).logits


def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Cross entropy of the next character, in nats."""
    return nn.functional.cross_entropy(
        output.flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def minus_bits_per_character(
    outputs: list[torch.Tensor], batches: list[Batch]
) -> float:
    """Minus the mean cross entropy in bits: higher is better."""
    nats = [
        loss(output.float(), batch).item()
        for output, batch in zip(outputs, batches, strict=True)
    ]
    return -sum(nats) / len(nats) / math.log(2)


metric = minus_bits_per_character
