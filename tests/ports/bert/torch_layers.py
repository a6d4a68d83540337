"""BERT on torch's own encoder layers, weights carried over from the transformers model."""

from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


class Tower(nn.Module):
    def __init__(self, vocab=120, width=32, depth=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width, padding_idx=0)
        self.where = nn.Parameter(torch.zeros(20, width))
        self.segment = nn.Parameter(torch.zeros(2, width))
        self.start = nn.LayerNorm(width, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            64,
            dropout=0.0,
            activation="gelu",
            layer_norm_eps=1e-12,
            batch_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(width, 5)

    def forward(self, ids, mask):
        x = self.tokens(ids) + self.where[: ids.shape[1]] + self.segment[0]
        x = self.encoder(self.start(x), src_key_padding_mask=mask == 0)
        keep = mask.unsqueeze(-1).float()
        pooled = (x * keep).sum(dim=1) / keep.sum(dim=1)
        return self.out(pooled)


def model():
    net = Tower()
    w = torch.load(HERE / "weights.pt")

    def g(n):
        return w["bert." + n]

    s = {
        "tokens.weight": g("embeddings.word_embeddings.weight"),
        "where": g("embeddings.position_embeddings.weight"),
        "segment": g("embeddings.token_type_embeddings.weight"),
        "start.weight": g("embeddings.LayerNorm.weight"),
        "start.bias": g("embeddings.LayerNorm.bias"),
        "out.weight": w["head.weight"],
        "out.bias": w["head.bias"],
    }
    for i in range(2):
        a, b = f"encoder.layer.{i}.", f"encoder.layers.{i}."
        for kind in ("weight", "bias"):
            s[b + f"self_attn.in_proj_{kind}"] = torch.cat(
                [g(a + f"attention.self.{n}.{kind}") for n in ("query", "key", "value")]
            )
            s[b + f"self_attn.out_proj.{kind}"] = g(
                a + f"attention.output.dense.{kind}"
            )
            s[b + f"norm1.{kind}"] = g(a + f"attention.output.LayerNorm.{kind}")
            s[b + f"linear1.{kind}"] = g(a + f"intermediate.dense.{kind}")
            s[b + f"linear2.{kind}"] = g(a + f"output.dense.{kind}")
            s[b + f"norm2.{kind}"] = g(a + f"output.LayerNorm.{kind}")
    net.load_state_dict(s)
    return net


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[2])


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def forward(model, batch):
    return model(*batch[:2])
