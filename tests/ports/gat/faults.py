"""Faulty ports of the graph network."""

from ..bank import Change

FAULTS = [
    Change(
        "dense",
        "edges the other way",
        "start = eye[edges[0]]\n        end = eye[edges[1]]",
        "start = eye[edges[1]]\n        end = eye[edges[0]]",
    ),
    Change(
        "dense",
        "softmax over what leaves a node",
        'total = torch.einsum("en,eh->nh", end, weight)\n        weight = weight / torch.einsum("en,nh->eh", end, total)',
        'total = torch.einsum("en,eh->nh", start, weight)\n        weight = weight / torch.einsum("en,nh->eh", start, total)',
    ),
    Change(
        "dense",
        "no edge in the message",
        "(at_start + e) * weight",
        "at_start * weight",
    ),
    Change(
        "dense",
        "vectors in another order",
        '("source", "target", "link")',
        '("target", "source", "link")',
        parameter="first.att|second.att",
    ),
    Change("dense", "other slope of scores", "0.2 * score", "0.01 * score"),
    Change("dense", "sum for mean", "nodes.mean(0)", "nodes.sum(0)"),
    Change(
        "dense",
        "no shortcut",
        " + self.shortcut(h)",
        "",
        at="h = self.second(",
        reference="self.skip(h)",
    ),
    Change(
        "dense",
        "slope the other way",
        "- self.slope * torch.relu(-z)",
        "+ self.slope * torch.relu(-z)",
    ),
    Change(
        "dense",
        "heads are inner",
        "kernel.t().reshape(kernel.shape[1], heads, -1)",
        "kernel.t().reshape(kernel.shape[1], -1, heads).transpose(1, 2)",
        parameter="first.w_node|second.w_node",
    ),
    Change("dense", "smoothed twice", "* 0.9 + 0.1 / 4", "* 0.8 + 0.2 / 4"),
]
