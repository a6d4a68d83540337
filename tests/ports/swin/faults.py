"""Faulty ports of the network of shifted windows."""

from ..bank import Change

FAULTS = [
    Change(
        "keras_like",
        "rolled the wrong way back",
        "y = y.roll((self.offset, self.offset), (1, 2))",
        "y = y.roll((-self.offset, self.offset), (1, 2))",
    ),
    Change("keras_like", "no mask of shifted windows", "-100.0)", "0.0)"),
    Change(
        "keras_like",
        "mask begins one late",
        "(zone >= side - 2)",
        "(zone >= side - 1)",
        parameter="first.zone|second.zone",
        at="logits = logits + torch.where",
    ),
    Change(
        "keras_like", "scale of all units", "math.sqrt(c // self.heads)", "math.sqrt(c)"
    ),
    Change(
        "keras_like",
        "table is transposed",
        "table.t().reshape(3, 7, 7)",
        "table.reshape(7, 7, 3).permute(2, 1, 0)",
        parameter="first.bias_table|second.bias_table",
    ),
    Change(
        "keras_like",
        "parts of the merge in another order",
        ".permute(0, 1, 3, 4, 2, 5)",
        ".permute(0, 1, 3, 2, 4, 5)",
    ),
    Change(
        "keras_like",
        "gelu of tanh",
        "0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))",
    ),
    Change(
        "keras_like",
        "epsilon of Keras",
        "epsilon=1e-5",
        "epsilon=1e-3",
        at="torch.rsqrt(",
    ),
    Change(
        "keras_like",
        "square kernel is not transposed",
        "layer.kernel.copy_(kernel.t())",
        "layer.kernel.copy_(kernel)",
        parameter="|".join(
            f"{s}.{n}.kernel"
            for s in ("first", "second")
            for n in ("query", "key", "value")
        ),
    ),
    Change(
        "keras_like",
        "relative rows the other way",
        "row[:, None] - row[None, :] + 3",
        "row[None, :] - row[:, None] + 3",
        at="down = row|bias_table[:, down, right]",
    ),
]
