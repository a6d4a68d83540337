"""A tiny Mamba from a transformers config, on the slow path that runs on any CPU."""

import torch


def model():
    from transformers import MambaConfig, MambaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns that its CUDA kernels are missing
    torch.manual_seed(0)
    net = MambaForCausalLM(
        MambaConfig(
            vocab_size=40,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=8e-3)
    for step in range(30):
        ids = walks(32, 100 + step)
        optimizer.zero_grad()
        net(ids, labels=ids).loss.backward()
        optimizer.step()
    return net.eval()


def walks(count, seed):
    """Steps of +1 or -1 modulo 40; the direction changes at multiples of five."""
    g = torch.Generator().manual_seed(seed)
    here = torch.randint(0, 40, (count,), generator=g)
    step = torch.randint(0, 2, (count,), generator=g) * 2 - 1
    path = []
    for _ in range(12):
        path.append(here)
        step = torch.where(here % 5 == 0, -step, step)
        here = (here + step) % 40
    return torch.stack(path, 1)


def batches():
    return [walks(16, seed) for seed in range(5)]


def held_out():
    return [walks(16, seed) for seed in range(50, 54)]


def forward(model, ids):
    return model(ids).logits
