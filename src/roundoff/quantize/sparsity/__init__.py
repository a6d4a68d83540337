"""Fewer weights: masks, N:M structure, removed channels, low rank; and what that saves."""

from roundoff.quantize.sparsity.channels import PrunedChannels, prune_channels_
from roundoff.quantize.sparsity.importance import taylor_importance
from roundoff.quantize.sparsity.low_rank import Decomposed, decompose_
from roundoff.quantize.sparsity.masks import (
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
from roundoff.quantize.sparsity.model_cost import Cost, latency_ratio, model_cost
from roundoff.quantize.sparsity.rank import evbmf_rank

__all__ = [
    "Cost",
    "Decomposed",
    "PrunedChannels",
    "Sparsity",
    "check_n_m",
    "decompose_",
    "evbmf_rank",
    "finish_",
    "latency_ratio",
    "magnitude_scores",
    "model_cost",
    "n_m_mask",
    "n_m_masks",
    "prunable",
    "prune_channels_",
    "sparsify_",
    "taylor_importance",
    "taylor_scores",
    "unstructured_masks",
]
