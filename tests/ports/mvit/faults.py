"""Faulty ports of the small MViT."""

from ..bank import Change

_BLOCKS = (0, 1, 2)

FAULTS = [
    Change(
        "grids",
        "kernel's height and width exchanged",
        'sd["patch_embed.weight"].permute(2, 3, 1, 0)',
        'sd["patch_embed.weight"].permute(3, 2, 1, 0)',
        parameter="patches.kernel",
    ),
    Change(
        "grids",
        "heads interleaved in the merge",
        "merge.T.unflatten(0, (heads, -1))",
        "merge.T.unflatten(0, (-1, heads)).transpose(0, 1)",
        parameter="|".join(f"stage{i}.merge.kernel" for i in _BLOCKS),
    ),
    Change(
        "grids",
        "taps of the pooling transposed",
        "taps.permute(1, 2, 0)",
        "taps.permute(2, 1, 0)",
        parameter="|".join(f"stage{i}.{n}.taps" for i in _BLOCKS for n in "qkv"),
    ),
    Change(
        "grids",
        "queries' norm for all three",
        'f"{at}.attn.norm_{name}"',
        'f"{at}.attn.norm_q"',
        parameter="|".join(
            f"stage{i}.{n}.norm.{kind}"
            for i in _BLOCKS
            for n in "kv"
            for kind in ("scale", "bias")
        ),
    ),
    Change(
        "grids",
        "keys before queries",
        'in enumerate("qkv")',
        'in enumerate("kqv")',
        parameter="|".join(
            f"stage{i}.{n}.{kind}"
            for i in _BLOCKS
            for n in "qk"
            for kind in ("kernel", "bias")
        ),
    ),
    Change(
        "grids",
        "scores not scaled",
        "q, k) / q.shape[-1] ** 0.5",
        "q, k)",
        reference="scores = (q * self.scale) @",
    ),
    Change(
        "grids",
        "offsets along the keys the other way",
        "ratio * torch.arange(keys - 1, -1, -1)",
        "ratio * torch.arange(keys)",
        at="return torch.take_along_dim(",
    ),
    Change(
        "grids",
        "shares of each row of keys",
        "share = power / power.sum((-2, -1), keepdim=True)",
        "share = power / power.sum(-1, keepdim=True)",
    ),
    Change(
        "grids",
        "no residual of the pooled queries",
        "share, v) + q",
        "share, v)",
        reference="x = x + q",
    ),
    Change(
        "grids",
        "shortcut before the norm",
        "apply_dense(p.widen, normed)",
        "apply_dense(p.widen, x)",
    ),
    Change(
        "grids",
        "zeros around the maximum",
        "windows(x, 3, stride_q, -torch.inf)",
        "windows(x, 3, stride_q)",
        at="x = nn.functional.pad(",
    ),
    Change(
        "grids",
        "epsilon of another library",
        "EPS = 1e-6",
        "EPS = 1e-3",
        at="torch.sqrt(variance + EPS)",
    ),
    Change(
        "grids",
        "second label with its whole weight",
        "target = target + (1 - share) * (",
        "target = target + (",
        at="return -(target * logs)",
        reference='(1 - batch["share"]) * other',
    ),
    Change(
        "longer_keys",
        "pooling of values for keys",
        '[ckpt.get("pool_k.weight"), ckpt.get("pool_v.weight")]',
        '[ckpt.get("pool_v.weight"), ckpt.get("pool_k.weight")]',
        parameter="|".join(f"layers.{i}.attention.pool_kv" for i in _BLOCKS),
    ),
    Change(
        "longer_keys",
        "columns' table not turned round",
        'ckpt.get("rel_pos_w").flip(0)',
        'ckpt.get("rel_pos_w")',
        parameter="|".join(f"layers.{i}.attention.table_x" for i in _BLOCKS),
    ),
    Change(
        "longer_keys",
        "square weight transposed",
        'Pointwise(*ckpt.pair("proj"))',
        'Pointwise(ckpt.get("proj.weight").t(), ckpt.get("proj.bias"))',
        parameter="|".join(f"layers.{i}.attention.out.w" for i in _BLOCKS),
    ),
    Change(
        "longer_keys",
        "keys' norm for the values",
        'self.norm_v = ChannelNorm(*ckpt.pair("norm_v"))',
        'self.norm_v = ChannelNorm(*ckpt.pair("norm_k"))',
        parameter="|".join(
            f"layers.{i}.attention.norm_v.{kind}"
            for i in _BLOCKS
            for kind in ("gain", "shift")
        ),
    ),
    Change(
        "longer_keys",
        "each kernel repeated before the next",
        "kernel = self.pool_q.repeat(h, 1, 1, 1)",
        "kernel = self.pool_q.repeat_interleave(h, dim=0)",
        at="q = F.conv2d(q, kernel",
    ),
    Change(
        "longer_keys",
        "scaled again by the longer width",
        "v.transpose(-1, -2), scale=1.0",
        "v.transpose(-1, -2)",
        at="y = F.scaled_dot_product_attention(",
    ),
    Change(
        "longer_keys",
        "columns before rows in the keys",
        "torch.cat([stands_y, stands_x])",
        "torch.cat([stands_x, stands_y])",
        at="return q, torch.cat([k, stands]",
    ),
    Change(
        "longer_keys",
        "rows within columns",
        "torch.stack(likes_y, dim=-2)",
        "torch.stack(likes_y, dim=-1)",
    ),
    Change(
        "longer_keys",
        "average for maximum",
        "F.max_pool2d(carried",
        "F.avg_pool2d(carried",
    ),
    Change(
        "longer_keys",
        "approximation of the activation",
        "F.gelu(u)",
        'F.gelu(u, approximate="tanh")',
    ),
    Change(
        "longer_keys",
        "residual of the normed",
        "carried = x if self.skip is None",
        "carried = u if self.skip is None",
        at="x = carried + self.attention(u)",
    ),
    Change(
        "longer_keys",
        "values without a norm",
        "self.norm_k(k), self.norm_v(v)",
        "self.norm_k(k), v",
        at="y = F.scaled_dot_product_attention(|long_q, long_k, v.transpose",
        reference="return norm(x), size",
    ),
    Change(
        "longer_keys",
        "mean over both labels",
        "-torch.sum(picked * weight, dim=-1).mean()",
        "-torch.mean(picked * weight)",
    ),
]
