"""What each torch-level operator is: its kind, which arguments are its operands, and how they contract.

The table holds only the operators that contract (matrix multiplications, convolutions, attention, recurrent
layers, embeddings): number formats such as int8 run these alone, and need to know which axis is summed over
(blocks lie along it) and which axis of a weight keeps its own scale. Every other operator that returns
floating-point values takes all its floating-point tensors as operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Operators that hand values on unchanged: nothing to round, no site of their own.
MOVES = frozenset(
    """view reshape transpose permute contiguous expand expand_as repeat repeat_interleave flatten unflatten
    squeeze unsqueeze cat concat concatenate stack hstack vstack dstack chunk split split_with_sizes tensor_split
    unbind getitem setitem narrow select index_select gather take take_along_dim index index_put masked_select
    masked_fill masked_scatter where scatter scatter_ index_copy index_fill fill zero copy clone detach
    detach_copy deepcopy alias view_as reshape_as swapaxes swapdims movedim moveaxis T mT H mH adjoint t roll flip fliplr
    flipud rot90 tril triu diagonal diag pad constant_pad_nd unfold im2col pixel_shuffle pixel_unshuffle
    channel_shuffle as_strided broadcast_to broadcast_tensors unsafe_chunk unsafe_split tile ravel real data
    requires_grad_ sort topk kthvalue cpu cuda to float double half bfloat16 type type_as identity
    _pack_padded_sequence _pad_packed_sequence set resolve_conj resolve_neg nested_tensor to_padded_tensor
    lift_fresh refine_names rename is_nonzero atleast_1d atleast_2d atleast_3d meshgrid block_diag squeeze_copy
    dropout alpha_dropout feature_dropout""".split()
)

#: Operators whose result does not depend on the values of their arguments.
CREATES = frozenset(
    """zeros ones full empty arange linspace logspace eye tensor as_tensor from_numpy zeros_like ones_like
    full_like empty_like new_zeros new_ones new_full new_empty new_tensor scalar_tensor empty_strided tril_indices
    triu_indices complex asarray""".split()
)

#: Those among them whose values are exact in every format.
EXACT = frozenset(
    "zeros ones eye empty zeros_like ones_like empty_like new_zeros new_ones new_empty empty_strided".split()
)

#: Operators that draw random numbers: running one again gives another result.
RANDOM = frozenset(
    """rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal uniform
    random exponential geometric cauchy log_normal rrelu poisson""".split()
)

_NORMALIZATION = {
    "layer_norm",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "rms_norm",
    "local_response_norm",
}
_SOFTMAX = {"softmax", "log_softmax", "softmin", "gumbel_softmax", "logsumexp"}
_REDUCTION = set(
    """sum mean prod var std norm linalg_vector_norm linalg_norm cumsum cumprod amax amin max min
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d
    max_pool2d max_pool3d cross_entropy_loss nll_loss mse_loss l1_loss var_mean std_mean cdist
    cosine_similarity""".split()
)


@dataclass(frozen=True)
class OperandSpec:
    """One operand of a contracting operator: its argument, the axis it is contracted over, and, for a weight,
    the axis that keeps a scale of its own (``channel``)."""

    index: int
    name: str
    reduce: int
    channel: int = 0
    bias: bool = False


@dataclass(frozen=True)
class OperatorSpec:
    """A contracting operator: its kind and its operands (other tensor arguments, masks say, are not rounded)."""

    kind: str
    operands: tuple[OperandSpec, ...]


def _spec(kind: str, *operands: tuple[Any, ...]) -> OperatorSpec:
    return OperatorSpec(kind, tuple(OperandSpec(*operand) for operand in operands))


def _conv(dimensions: int, transposed: bool = False) -> OperatorSpec:
    # channels of the input counted from the back: there may be no batch axis
    weight = (1, "weight", 0, 1) if transposed else (1, "weight", 1, 0)
    return _spec("conv", (0, "input", -1 - dimensions), weight, (2, "bias", 0, 0, True))


_MATMUL = _spec("matmul", (0, "input", -1, -2), (1, "other", -2, -1))
_ADD_MATMUL = _spec(
    "matmul", (0, "input", 0, 0, True), (1, "mat1", -1, -2), (2, "mat2", -2, -1)
)
_RNN = _spec("rnn", (0, "input", -1), (1, "hx", -1), (2, "params", 1, 0))
_RNN_CELL = _spec(
    "rnn",
    (0, "input", -1),
    (1, "hx", -1),
    (2, "w_ih", 1, 0),
    (3, "w_hh", 1, 0),
    (4, "b_ih", 0, 0, True),
    (5, "b_hh", 0, 0, True),
)

CONTRACTING: dict[str, OperatorSpec] = {
    "linear": _spec(
        "linear", (0, "input", -1), (1, "weight", 1, 0), (2, "bias", 0, 0, True)
    ),
    "bilinear": _spec(
        "linear",
        (0, "input1", -1),
        (1, "input2", -1),
        (2, "weight", 1, 0),
        (3, "bias", 0, 0, True),
    ),
    **{f"conv{d}d": _conv(d) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _conv(d, transposed=True) for d in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _MATMUL),
    "rmatmul": _spec("matmul", (1, "other", -1, -2), (0, "input", -2, -1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), _ADD_MATMUL),
    "scaled_dot_product_attention": _spec(
        "attention", (0, "query", -1), (1, "key", -1), (2, "value", -2)
    ),
    "embedding": _spec("embedding", (0, "weight", 1, 0)),
    "embedding_bag": _spec("embedding", (0, "weight", 1, 0)),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _RNN),
    **dict.fromkeys(
        ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _RNN_CELL
    ),
}

#: The kinds that a format limited to "matrix" operators can run.
MATRIX_KINDS = frozenset({"linear", "matmul", "conv", "attention", "rnn", "embedding"})

_DUNDER = re.compile(r"^__i?(?P<name>\w+?)__$")
_RENAMED = {
    "truediv": "div",
    "rtruediv": "rdiv",
    "rdiv": "rdiv",
    "radd": "add",
    "rmul": "mul",
    "rpow": "rpow",
    "rsub": "rsub",
    "isub": "sub",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "floordiv": "floor_divide",
}


@dataclass(frozen=True)
class Operator:
    """The canonical name of a torch-level function and whether it writes into its first argument.

    >>> import torch
    >>> Operator.of(torch.Tensor.__iadd__), Operator.of(torch.relu_).name, Operator.of(torch.Tensor.__matmul__).name
    (Operator(name='add', inplace=True), 'relu', 'matmul')
    """

    name: str
    inplace: bool

    @classmethod
    def of(cls, func: Callable[..., Any]) -> Operator:
        """The operator of a function that a ``TorchFunctionMode`` was given."""
        raw = getattr(func, "__name__", type(func).__name__)
        if raw == "__get__":  # a property: x.T, x.data, x.shape
            return cls(getattr(getattr(func, "__self__", None), "__name__", raw), False)
        if raw == "__invert__":
            return cls("invert", False)
        dunder = _DUNDER.match(raw)
        if dunder:
            inplace = (
                raw.startswith("__i")
                and raw[2:-2] not in ("index", "int")
                or raw == "__setitem__"
            )
            name = dunder["name"] if inplace or not raw.startswith("__i") else raw[2:-2]
            return cls(_RENAMED.get(name, name), inplace)
        inplace = raw.endswith("_") and raw != "requires_grad_"
        name = raw.rstrip("_") if inplace else raw
        return cls(_RENAMED.get(name, name), inplace)

    @property
    def spec(self) -> OperatorSpec | None:
        """The operand table of a contracting operator, None for any other."""
        return CONTRACTING.get(self.name)

    @property
    def kind(self) -> str:
        """linear, matmul, conv, attention, rnn, embedding, normalization, softmax, reduction or elementwise."""
        if self.name in CONTRACTING:
            return CONTRACTING[self.name].kind
        if self.name == "einsum":
            return "matmul"
        for kind, names in (
            ("normalization", _NORMALIZATION),
            ("softmax", _SOFTMAX),
            ("reduction", _REDUCTION),
        ):
            if self.name in names:
                return kind
        return "elementwise"


def einsum_axes(equation: str, operand: int) -> tuple[int, int]:
    """Two axes of one einsum operand, from the back unless an ellipsis follows: the one that is contracted (the last
    when none is), and the one that keeps a scale of its own, an axis of the result that the other operands lack.

    >>> einsum_axes("bij,bkj->bik", 1), einsum_axes("...ij,jk", 1)
    ((-1, -2), (-2, -1))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(sorted({c for c in left if c.isalpha() and left.count(c) == 1}))
    labels = terms[operand]
    others = "".join(terms[:operand] + terms[operand + 1 :])
    front = labels.find(".")
    axes = {
        c: i if i < front else i - len(labels)
        for i, c in enumerate(labels)
        if c.isalpha()
    }
    summed = [axis for c, axis in axes.items() if c not in right]
    kept = [axis for c, axis in axes.items() if c in right]
    own = [axis for c, axis in axes.items() if c in right and c not in others]
    return (summed or [-1])[-1], (own or kept or [0])[-1]
