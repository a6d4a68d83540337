"""A tiny BERT classifier from a transformers config; its batches carry the labels."""

import torch

LENGTH, VOCABULARY = 24, 60


def sentences(count, seed):
    """1 where words above 34 are the majority; padded with zeros."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, VOCABULARY, (count, LENGTH), generator=g)
    ids[:, 0] = 1
    lengths = torch.randint(8, LENGTH + 1, (count, 1), generator=g)
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = ids * mask
    labels = ((ids > 34).sum(1) * 2 > mask.sum(1)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        num_labels=2,
    )
    net = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    for step in range(60):
        optimizer.zero_grad()
        net(**sentences(32, 100 + step)).loss.backward()
        optimizer.step()
    return net.eval()


def batches():
    return [sentences(16, seed) for seed in range(6)]


def held_out():
    return [sentences(16, 50 + seed) for seed in range(4)]
