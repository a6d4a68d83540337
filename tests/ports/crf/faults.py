"""Faulty ports of the tagger."""

from ..bank import Change

FAULTS = [
    Change(
        "jaxish",
        "gates in torch's order",
        "i, o, f, g = gates",
        "i, f, g, o = gates",
        at="i, f, g, o = gates|torch.sigmoid(f) * c|return torch.sigmoid(o)",
    ),
    Change(
        "jaxish",
        "gates not reordered in the loader",
        "return torch.cat([i, o, f, g])",
        "return torch.cat([i, f, g, o])",
        parameter="fw_w|bw_w|fw_u|bw_u|fw_b|bw_b",
    ),
    Change(
        "jaxish",
        "one bias dropped",
        'sd[f"lstm.bias_ih_l0{tail}"] + sd[f"lstm.bias_hh_l0{tail}"]',
        'sd[f"lstm.bias_ih_l0{tail}"]',
        parameter="fw_b|bw_b",
    ),
    Change(
        "jaxish",
        "backward states not turned back",
        'scan(p, "bw", xs.flip(0)).flip(0)',
        'scan(p, "bw", xs.flip(0))',
        at="backwards|hs = torch.cat",
    ),
    Change(
        "jaxish",
        "unbiased variance",
        "(x - mu).pow(2).mean(-1, keepdim=True)",
        "x.var(-1, keepdim=True)",
    ),
    Change(
        "jaxish",
        "edges transposed",
        'put("edges", sd["crf.trans"])',
        'put("edges", sd["crf.trans"].T)',
        parameter="edges",
    ),
    Change(
        "jaxish",
        "end scores left out of the partition",
        "torch.log(torch.exp(a + p.last).sum(1))",
        "torch.log(torch.exp(a).sum(1))",
    ),
    Change(
        "jaxish",
        "mean over letters for the largest",
        "conv.tanh().amax(2)",
        "conv.tanh().mean(2)",
    ),
    Change(
        "jaxish",
        "kernel turned",
        'char_cnn.weight"].permute(2, 1, 0)',
        'char_cnn.weight"].flip(2).permute(2, 1, 0)',
        parameter="char_kernel",
    ),
    Change("jaxish", "activation after the pool is relu", "conv.tanh()", "conv.relu()"),
    Change(
        "jaxish", "score of the wrong direction", '"tbi,ij,tbj->b"', '"tbi,ji,tbj->b"'
    ),
    Change("jaxish", "start left out of the score", " + hot[0] @ p.first", ""),
    Change("jaxish", "sum for mean", "output.sum() / output.numel()", "output.sum()"),
]
