"""A small GPT-2 built from a transformers config (random weights, fixed seed); metric: top-1 agreement with fp32."""

import torch


def model() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=1024,
            n_positions=128,
            n_embd=128,
            n_layer=4,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
        return GPT2LMHeadModel(config).eval()


def batches() -> list[dict[str, torch.Tensor]]:
    """Random tokens: 32 sequences of 48."""
    tokens = torch.randint(
        0, 1024, (32, 48), generator=torch.Generator().manual_seed(1)
    )
    return [{"input_ids": part} for part in tokens.split(16)]


def forward(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits, shape (sequences, positions, vocabulary)."""
    return model(**batch).logits


def top1_agreement(outputs: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Share of positions whose most likely token is the same as in fp32."""
    same = [
        (o.argmax(-1) == r.argmax(-1)).double().flatten()
        for o, r in zip(outputs, reference, strict=True)
    ]
    return torch.cat(same).mean().item()


metric = top1_agreement
