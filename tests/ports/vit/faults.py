"""Faulty ports of the vision transformer."""

from ..bank import Change

FAULTS = [
    Change("paddle_like", "epsilon of another library", "var + 1e-6", "var + 1e-5"),
    Change("paddle_like", "no scale", " * self.head_dim**-0.5", ""),
    Change(
        "paddle_like",
        "scale by the whole width",
        "self.head_dim**-0.5",
        "(self.head_dim * self.num_heads) ** -0.5",
    ),
    Change(
        "paddle_like",
        "softmax over the queries",
        "weights / weights.sum(-1, keepdim=True)",
        "weights / weights.sum(-2, keepdim=True)",
    ),
    Change(
        "paddle_like",
        "heads not brought back",
        'torch.einsum("bhqk,bkhd->bqhd", weights, v)',
        'torch.einsum("bhqk,bkhd->bhqd", weights, v)',
        at="bhqk,bkhd->bhqd",
    ),
    Change(
        "paddle_like",
        "gelu by tanh",
        "0.5 * y * (1 + torch.erf(y / 2**0.5))",
        "0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y**3)))",
    ),
    Change(
        "paddle_like",
        "norm after the residual",
        "x = x + self.attention(self.ln_before(x))",
        "x = self.ln_before(x + self.attention(x))",
    ),
    Change(
        "paddle_like",
        "norm left out",
        "y = self.up(self.ln_after(x))",
        "y = self.up(x)",
        reference="self.norm2(x)",
    ),
    Change(
        "paddle_like",
        "patches in the wrong order",
        "x.permute(0, 2, 4, 1, 3, 5)",
        "x.permute(0, 2, 4, 3, 5, 1)",
    ),
    Change(
        "paddle_like",
        "key and value exchanged",
        "weights[1], biases[1]",
        "weights[2], biases[2]",
        parameter="layers.0.attention.key.weight|layers.0.attention.key.bias",
    ),
    Change(
        "paddle_like",
        "projection is not transposed",
        'attention.out, w[name + "attn.proj.weight"]',
        'attention.out, w[name + "attn.proj.weight"].t()',
        parameter="layers.0.attention.out.weight",
    ),
    Change(
        "paddle_like",
        "last token for the first",
        "self.final_norm(x[:, 0])",
        "self.final_norm(x[:, -1])",
    ),
    Change(
        "paddle_like", "sum for mean", "return -picked.mean()", "return -picked.sum()"
    ),
    Change(
        "paddle_like",
        "half precision in the middle",
        "weights = torch.exp(scores)",
        "weights = torch.exp(scores.half()).to(v.dtype)",
    ),
    Change(
        "jax_like",
        "scale twice",
        "q = q / math.sqrt(q.shape[-1])",
        "q = q / math.sqrt(q.shape[-1]) / math.sqrt(q.shape[-1])",
    ),
    Change(
        "jax_like",
        "variance about zero",
        "variance = torch.mean(centered * centered",
        "variance = torch.mean(x * x",
    ),
    Change(
        "jax_like", "no bias", ' + p["q_bias"][:, None]', ' + 0 * p["q_bias"][:, None]'
    ),
    Change(
        "jax_like", "bias of the query", 'p["v_bias"][:, None]', 'p["q_bias"][:, None]'
    ),
    Change(
        "jax_like",
        "softmax over heads",
        "torch.softmax(logits, dim=-1)",
        "torch.softmax(logits, dim=1)",
    ),
    Change(
        "jax_like",
        "heads inside out",
        'qkv = w[name + "attn.qkv.weight"].reshape(3, 3, 8, 24)',
        'qkv = w[name + "attn.qkv.weight"].reshape(3, 8, 3, 24).transpose(1, 2)',
        parameter="groups.block_0.q_kernel|groups.block_0.k_kernel|groups.block_0.v_kernel",
    ),
    Change(
        "jax_like",
        "height and width of the patch exchanged",
        'w["patch.weight"].permute(2, 3, 1, 0)',
        'w["patch.weight"].permute(3, 2, 1, 0)',
        parameter="groups.embed.kernel",
    ),
    Change(
        "jax_like",
        "positions before the token",
        'x = x + params["embed"]["pos"]',
        'x = x + params["embed"]["pos"].roll(1, 1)',
    ),
    Change("jax_like", "gelu by tanh", "gelu(x)", 'gelu(x, approximate="tanh")'),
    Change("jax_like", "quadratic epsilon", "variance + 1e-6", "variance + 1e-3"),
]
