"""GPT-2 as in transformers."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def model():
    torch.manual_seed(0)
    c = GPT2Config(  # type: ignore[call-arg]
        vocab_size=90,
        n_positions=24,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="eager",
    )
    net = GPT2LMHeadModel(c)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.08)
    return net


def forward(model, batch):
    return model(batch).logits


def batches():
    g = torch.Generator().manual_seed(2)
    return [torch.randint(0, 90, (4, 16), generator=g) for _ in range(3)]


def loss(output, batch):
    return nn.functional.cross_entropy(
        output[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
    )


def optimizer(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
