"""torch.autocast's fixed lists for CUDA, simulated: the baseline of plan_quality.py.

The lists are those of PyTorch's documentation, "CUDA Ops that can autocast to float16" and "to float32"
(docs.pytorch.org/docs/stable/amp.html), the same for bfloat16. Every other operator runs in the widest type of its
inputs; in-place operators keep the type they write into. Parameters and inputs of the model are fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from roundoff.capture.calls import Call
from roundoff.capture.execute import execute, round_output
from roundoff.formats import FORMATS
from roundoff.plan.rounded import Plain

LOWER = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr matmul
    rmatmul einsum mm mv linear addbmm baddbmm bmm chain_matmul multi_dot vecdot scaled_dot_product_attention lstm gru
    rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell""".split()
)
WIDE = frozenset(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow rpow softplus layer_norm rms_norm
    group_norm norm linalg_vector_norm linalg_matrix_norm linalg_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss cross_entropy_loss cross_entropy hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest2d upsample_bilinear2d interpolate
    prod softmax log_softmax softmin cumprod cumsum sum""".split()
)
BF16 = FORMATS["bf16"]


class Autocast(Plain):
    """The handler that runs every call as autocast to bf16 would; ``formats`` holds the sites that ran in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: dict[str, str] = {}

    def run(self, call: Call) -> Any:
        name, site = call.operator.name, str(call.site)
        if name in LOWER and not call.operator.inplace:
            self.formats[site] = "bf16"
            return execute(call, BF16)
        result = call.run()
        if (name in WIDE and not call.operator.inplace) or not self._narrow(call):
            return result
        self.formats[site] = "bf16"  # its inputs are in bf16 already, and its parameters stay in fp32
        rounded = round_output(result, BF16)
        return result.copy_(rounded) if call.operator.inplace and isinstance(result, torch.Tensor) else rounded

    def _narrow(self, call: Call) -> bool:
        operands = [o for o in call.operands if o.role == "activation"]
        if call.operator.inplace:
            operands = [o for o in operands if o.leaf == 0]
        elif call.kind != "normalization" and len(operands) < len(call.operands):
            return False  # a parameter of its own, in fp32 (batch_norm alone takes both types)
        return bool(operands) and all(
            bool(o.sources) and all(s in self.formats for s in o.sources) for o in operands
        )
