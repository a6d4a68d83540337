"""A tiny Llama from a transformers config, trained to count: grouped queries, RMSNorm, SwiGLU."""

import torch


def sequences(count, seed):
    """Numbers modulo 64 that rise in steps of 1 to 5."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 64, (count, 1), generator=g)
    step = torch.randint(1, 6, (count, 1), generator=g)
    return {"input_ids": (start + step * torch.arange(24)) % 64}


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    net = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for i in range(50):
        batch = sequences(32, 100 + i)
        optimizer.zero_grad()
        net(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    return net.eval()


def batches():
    return [sequences(16, seed) for seed in range(5)]


def held_out():
    return [sequences(16, 50 + seed) for seed in range(4)]


def loss(output, batch):
    logits, ids = output.logits[:, :-1], batch["input_ids"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
