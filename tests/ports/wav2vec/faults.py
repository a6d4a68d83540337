"""Faulty ports of the small wav2vec."""

from ..bank import Change

_POSITIONS = "windows = frames(xs|pieces.append(|return gelu(torch.cat(pieces"

FAULTS = [
    Change(
        "flax_like",
        "positional convolution padded the other way",
        "nn.functional.pad(x, (0, 0, 2, 1))",
        "nn.functional.pad(x, (0, 0, 1, 2))",
        at=_POSITIONS,
    ),
    Change(
        "flax_like",
        "weight norm of each output",
        "torch.sqrt((self.v**2).sum((1, 2), keepdim=True))",
        "torch.sqrt((self.v**2).sum((0, 1), keepdim=True))",
        at="kernel = self.v / length",
    ),
    Change(
        "flax_like",
        "length of the kernel is not loaded",
        "g=g.flatten()",
        "g=torch.ones_like(g.flatten())",
        parameter="positions.g",
        at="kernel = self.v / length",
    ),
    Change(
        "flax_like",
        "taps in reverse",
        "v=v.permute(2, 1, 0)",
        "v=v.permute(2, 1, 0).flip(0)",
        parameter="positions.v",
        at="kernel = self.v / length|" + _POSITIONS,
    ),
    Change(
        "flax_like",
        "norm of the first layer over the channels",
        "x = normalize(x, 1, self.scale, self.bias)",
        "x = normalize(x, -1, self.scale, self.bias)",
        at="mean = x.mean(axes|center = x - mean|var = (center|return center / torch.sqrt(",
    ),
    Change(
        "flax_like",
        "epsilon of another library",
        "eps=1e-5",
        "eps=1e-3",
        at="return center / torch.sqrt(",
    ),
    Change(
        "flax_like",
        "all of the gradient to the convolutions",
        "return 0.1 * grad",
        "return grad",
        at="Slow.apply(",
        reference="return grad * ctx.scale",
    ),
    Change(
        "flax_like",
        "penalty of the normed features",
        "        penalty = torch.mean(features * features)\n"
        "        features = self.feature_norm(features)\n",
        "        features = self.feature_norm(features)\n"
        "        penalty = torch.mean(features * features)\n",
        at="penalty = torch.mean(|return contrast + 10",
    ),
    Change(
        "flax_like",
        "masked after the positions",
        "        x = torch.where(mask[..., None], self.masked, x)\n"
        "        x = self.encoder_norm(x + self.positions(x))\n",
        "        x = x + self.positions(x)\n"
        "        x = torch.where(mask[..., None], self.masked, x)\n"
        "        x = self.encoder_norm(x)\n",
        at="torch.where(mask|" + _POSITIONS,
    ),
    Change(
        "flax_like",
        "negatives of the first example",
        "rows = torch.arange(len(wave))[:, None, None]",
        "rows = torch.zeros(len(wave), dtype=torch.long)[:, None, None]",
        at="drawn = target[rows, negatives]",
    ),
    Change(
        "flax_like",
        "the target stands among the negatives",
        "        far = torch.where(equal, -torch.inf, far)\n",
        "",
        at="logits = torch.cat([near, far]|torch.logsumexp(logits, -1)",
        reference="masked_fill(same",
    ),
    Change(
        "flax_like",
        "temperature of another recipe",
        "torch.cat([near, far], -1) / 0.2",
        "torch.cat([near, far], -1) / 0.1",
    ),
    Change(
        "flax_like",
        "targets carry no gradient",
        "drawn = target[rows, negatives]",
        "drawn = target.detach()[rows, negatives]",
        at="far = self.cosine(",
    ),
    Change(
        "flax_like",
        "decay before the division",
        'p -= group["rate"] * (m / (v.sqrt() + self.eps) + self.decay * p)',
        'p -= group["rate"] * ((m + self.decay * p) / (v.sqrt() + self.eps))',
        phase="optimizer",
    ),
    Change(
        "by_example",
        "keys before queries",
        "q, k, v = self.fused(x).split(12, 1)",
        "k, q, v = self.fused(x).split(12, 1)",
        at="scores = q[:, part]",
    ),
    Change(
        "by_example",
        "answers in reverse",
        "self.answer(features[where])",
        "self.answer(features[where.flip(0)])",
    ),
    Change(
        "by_example",
        "query is not of length one",
        "asked = F.normalize(self.ask(x[where]), dim=1)",
        "asked = self.ask(x[where])",
        at="logits = answers[[i, *others]]",
    ),
    Change(
        "by_example",
        "costs are summed",
        "return torch.stack(costs).mean(), penalty",
        "return torch.stack(costs).sum(), penalty",
    ),
    Change(
        "by_example",
        "sample variance",
        "correction=0",
        "correction=1",
    ),
]
