"""Faulty ports of the capsules."""

from ..bank import Change

_CONVS = "types.0.conv|types.1.conv|types.0.conv.weight|types.1.conv.weight"

FAULTS = [
    Change(
        "tf_caps",
        "softmax over the capsules",
        "c = torch.softmax(b, dim=1)",
        "c = torch.softmax(b, dim=2)",
    ),
    Change(
        "tf_caps",
        "one routing less",
        "range(self.routings - 1)",
        "range(self.routings - 2)",
        at="c = torch.softmax(|b = b +|s = torch.matmul(c[",
        reference="logits = logits +",
    ),
    Change(
        "tf_caps",
        "only the unit vector",
        "factor = squared / (1.0 + squared) / torch.sqrt(squared + 1e-8)",
        "factor = 1.0 / torch.sqrt(squared + 1e-8)",
        at="return factor * vectors",
    ),
    Change(
        "tf_caps",
        "half in the squash",
        "(1.0 + squared)",
        "(0.5 + squared)",
        at="return factor * vectors",
    ),
    Change(
        "tf_caps",
        "capsules keep the order of types",
        "        weight = weight.view(2, 9, *weight.shape[1:]).transpose(0, 1).flatten(0, 1)\n",
        "",
        parameter="caps.W",
        at="u_hat = torch.matmul(",
    ),
    Change(
        "tf_caps",
        "matrices of capsules are not turned",
        "weight.permute(1, 0, 3, 2)",
        "weight.permute(1, 0, 2, 3)",
        parameter="caps.W",
        at="u_hat = torch.matmul(",
    ),
    Change(
        "tf_caps",
        "routing carries gradient",
        "u_stopped = u_hat.detach()",
        "u_stopped = u_hat",
        at="s = torch.einsum(|b = b + torch.einsum(|c = torch.softmax(",
        reference="fixed = predicted.detach()",
    ),
    Change(
        "tf_caps",
        "masked by the longest",
        "hot = torch.eye(3, dtype=poses.dtype)[label]",
        "hot = torch.eye(3, dtype=poses.dtype)[lengths.argmax(1)]",
        at='masked = torch.einsum("nkd,nk->nkd"',
    ),
    Change(
        "tf_caps",
        "absent classes weigh one",
        "hot * above + 0.5 * (1.0 - hot) * below",
        "hot * above + (1.0 - hot) * below",
    ),
    Change(
        "tf_caps",
        "picture is averaged",
        "rebuilt = error.square().sum(dim=1)",
        "rebuilt = error.square().mean(dim=1)",
        at="return torch.mean(margin",
    ),
    Change(
        "tf_caps",
        "moments are not corrected",
        'v_hat = slot["v"] / (1 - two**self.t)',
        'v_hat = slot["v"]',
        phase="optimizer",
    ),
    Change(
        "by_type",
        "no activation in the decoder",
        "h = F.relu(layer(h))",
        "h = layer(h)",
    ),
    Change(
        "by_type",
        "types in reverse",
        'state["primary.conv.weight"].chunk(2)',
        'state["primary.conv.weight"].chunk(2)[::-1]',
        parameter=_CONVS,
    ),
    Change(
        "by_type",
        "offset is left out of routing",
        "pose = squash(mean + layer.offset.detach())",
        "pose = squash(mean)",
        reference="+ self.bias",
    ),
    Change(
        "by_type",
        "squash of each type's plane",
        "self.conv(x).flatten(2).transpose(1, 2)",
        "self.conv(x).flatten(2).reshape(len(x), 9, -1)",
        at="u = torch.cat([capsules|u = squash(u)",
    ),
    Change(
        "by_type",
        "agreement with the unsquashed mean",
        "(held[k] * pose).sum(-1)",
        "(held[k] * mean).sum(-1)",
    ),
]
