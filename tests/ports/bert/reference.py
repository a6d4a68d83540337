"""A BERT of transformers, and a classifier on the mean of its tokens."""

import torch
from torch import nn
from transformers import BertConfig, BertModel


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        c = BertConfig(
            vocab_size=120,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=20,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(c, add_pooling_layer=False)
        self.head = nn.Linear(32, 5)

    def forward(self, ids, mask):
        h = self.bert(ids, attention_mask=mask).last_hidden_state
        m = mask[..., None].to(h.dtype)
        return self.head((h * m).sum(1) / m.sum(1))


def model():
    torch.manual_seed(0)
    net = Classifier()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.05)
    return net


def batches():
    g = torch.Generator().manual_seed(2)
    out = []
    for _ in range(3):
        ids = torch.randint(1, 120, (6, 12), generator=g)
        lengths = torch.randint(5, 13, (6,), generator=g)
        mask = (torch.arange(12)[None] < lengths[:, None]).long()
        out.append((ids, mask, torch.randint(0, 5, (6,), generator=g)))
    return out


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[2])


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def forward(model, batch):
    return model(*batch[:2])
