"""Fewer weights: masks, N:M structure, removed channels, low rank; and what that saves."""

from roundoff.quantize.sparse.channels import PrunedChannels, prune_channels_
from roundoff.quantize.sparse.cost import Cost, cost, latency_ratio
from roundoff.quantize.sparse.importance import taylor_importance
from roundoff.quantize.sparse.low_rank import Decomposed, decompose_
from roundoff.quantize.sparse.masks import (
    Sparsity,
    check_n_m,
    finish_,
    magnitude_scores,
    n_m_mask,
    n_m_masks,
    prunable,
    sparsify_,
    taylor_scores,
    unstructured_masks,
)
from roundoff.quantize.sparse.rank import evbmf_rank

__all__ = [
    "Cost",
    "Decomposed",
    "PrunedChannels",
    "Sparsity",
    "check_n_m",
    "cost",
    "decompose_",
    "evbmf_rank",
    "finish_",
    "latency_ratio",
    "magnitude_scores",
    "n_m_mask",
    "n_m_masks",
    "prunable",
    "prune_channels_",
    "sparsify_",
    "taylor_importance",
    "taylor_scores",
    "unstructured_masks",
]
