"""A tiny Mixtral from a transformers config: sparse experts in a causal language model."""

import torch
from torch.nn.functional import cross_entropy


def model():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    net = MixtralForCausalLM(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-3)
    for seed in range(40):
        ids = periodic(32, 100 + seed)
        optimizer.zero_grad()
        loss(forward(net, ids), ids).backward()
        optimizer.step()
    return net.eval()


def periodic(count, seed):
    """Sequences of 16 that repeat four tokens."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (count, 4), generator=g).repeat(1, 4)


def forward(model, ids):
    return model(input_ids=ids).logits


def loss(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches():
    return [periodic(16, seed) for seed in range(5)]


def held_out():
    return [periodic(16, seed) for seed in range(50, 54)]
