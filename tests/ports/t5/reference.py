"""A T5 as in transformers."""

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration


def model():
    torch.manual_seed(0)
    c = T5Config(  # type: ignore[call-arg]
        vocab_size=70,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        use_cache=False,
        decoder_start_token_id=0,
    )
    net = T5ForConditionalGeneration(c)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for n, p in net.named_parameters():
            if p.dim() > 1 and "shared" not in n:
                p.mul_(2)
            p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return net


def forward(model, batch):
    source, mask, target, _ = batch
    return model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits


def batches():
    g = torch.Generator().manual_seed(2)
    out = []
    for _ in range(3):
        source = torch.randint(1, 70, (4, 11), generator=g)
        lengths = torch.randint(5, 12, (4,), generator=g)
        mask = (torch.arange(11)[None] < lengths[:, None]).long()
        target = torch.randint(1, 70, (4, 7), generator=g)
        target[:, 0] = 0
        out.append((source, mask, target, torch.randint(1, 70, (4, 7), generator=g)))
    return out


def loss(output, batch):
    return nn.functional.cross_entropy(
        output.flatten(0, 1), batch[3].flatten(), label_smoothing=0.1
    )


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
