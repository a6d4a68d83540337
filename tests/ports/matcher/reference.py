"""A small LightGlue: points of two images attend to their own image, then to the other.

Points and descriptors are padded; masks tell which are there. Every layer is scored.
"""

import torch
from torch import nn
from torch.nn import functional as F

DESC, DIM, HEADS, LAYERS = 20, 24, 3, 3
BALANCE, GAMMA = 0.6, 0.8
UNMATCHED, IGNORED = -1, -2


def root_sift(desc):
    desc = F.normalize(desc, p=1, dim=-1, eps=1e-6)
    return desc.clamp(min=1e-6).sqrt()


def normalize_keypoints(kpts, size):
    shift = size / 2
    scale = size.amax(-1) / 2
    return (kpts - shift[:, None]) / scale[:, None, None]


def rotate_half(x):
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def apply_rotary(freqs, t):
    return t * freqs[0] + rotate_half(t) * freqs[1]


class LearnableFourierPositionalEncoding(nn.Module):
    def __init__(self, inputs, dim):
        super().__init__()
        self.Wr = nn.Linear(inputs, dim // 2, bias=False)

    def forward(self, x):
        """Return cosines and sines (2, batch, 1, points, head)."""
        projected = self.Wr(x)
        emb = torch.stack([projected.cos(), projected.sin()]).unsqueeze(-3)
        return emb.repeat_interleave(2, dim=-1)


class TokenConfidence(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.token = nn.Sequential(nn.Linear(dim, 1), nn.Sigmoid())

    def forward(self, desc):
        return self.token(desc.detach()).squeeze(-1)


def make_ffn(dim):
    return nn.Sequential(
        nn.Linear(2 * dim, 2 * dim),
        nn.LayerNorm(2 * dim),
        nn.GELU(),
        nn.Linear(2 * dim, dim),
    )


class SelfBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.ffn = make_ffn(dim)

    def forward(self, x, encoding, mask):
        qkv = self.Wqkv(x).unflatten(-1, (self.heads, -1, 3)).transpose(1, 2)
        q, k, v = qkv.unbind(-1)
        q = apply_rotary(encoding, q)
        k = apply_rotary(encoding, k)
        context = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])
        message = self.out_proj(context.transpose(1, 2).flatten(-2))
        return x + self.ffn(torch.cat([x, message], -1))


class CrossBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qk = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)
        self.ffn = make_ffn(dim)

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x0, x1, mask0, mask1):
        qk0, qk1 = self.split(self.to_qk(x0)), self.split(self.to_qk(x1))
        v0, v1 = self.split(self.to_v(x0)), self.split(self.to_v(x1))
        qk0, qk1 = qk0 * self.scale**0.5, qk1 * self.scale**0.5
        sim = torch.einsum("bhid,bhjd->bhij", qk0, qk1)
        least = torch.finfo(sim.dtype).min
        attn01 = sim.masked_fill(~mask1[:, None, None], least).softmax(-1)
        attn10 = sim.masked_fill(~mask0[:, None, :, None], least).softmax(-2)
        m0 = torch.einsum("bhij,bhjd->bhid", attn01, v1)
        m1 = torch.einsum("bhij,bhid->bhjd", attn10, v0)
        m0 = self.to_out(m0.transpose(1, 2).flatten(-2))
        m1 = self.to_out(m1.transpose(1, 2).flatten(-2))
        x0 = x0 + self.ffn(torch.cat([x0, m0], -1))
        x1 = x1 + self.ffn(torch.cat([x1, m1], -1))
        return x0, x1


class TransformerLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.self_attn = SelfBlock(dim, heads)
        self.cross_attn = CrossBlock(dim, heads)

    def forward(self, desc0, desc1, encoding0, encoding1, mask0, mask1):
        desc0 = self.self_attn(desc0, encoding0, mask0)
        desc1 = self.self_attn(desc1, encoding1, mask1)
        return self.cross_attn(desc0, desc1, mask0, mask1)


def sigmoid_log_double_softmax(sim, z0, z1):
    """Return log assignments (batch, m + 1, n + 1); the last are those without a match."""
    batch, m, n = sim.shape
    certainties = F.logsigmoid(z0)[:, :, None] + F.logsigmoid(z1)[:, None]
    scores0 = F.log_softmax(sim, 2)
    scores1 = F.log_softmax(sim, 1)
    scores = sim.new_zeros(batch, m + 1, n + 1)
    scores[:, :m, :n] = scores0 + scores1 + certainties
    scores[:, :m, n] = F.logsigmoid(-z0)
    scores[:, m, :n] = F.logsigmoid(-z1)
    return scores


class MatchAssignment(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.matchability = nn.Linear(dim, 1)
        self.final_proj = nn.Linear(dim, dim)

    def forward(self, desc0, desc1, mask0, mask1):
        mdesc0, mdesc1 = self.final_proj(desc0), self.final_proj(desc1)
        d = mdesc0.shape[-1]
        mdesc0, mdesc1 = mdesc0 / d**0.25, mdesc1 / d**0.25
        sim = torch.einsum("bmd,bnd->bmn", mdesc0, mdesc1)
        pairs = mask0[:, :, None] & mask1[:, None]
        sim = sim.masked_fill(~pairs, torch.finfo(sim.dtype).min)
        z0, z1 = self.matchability(desc0)[..., 0], self.matchability(desc1)[..., 0]
        scores = sigmoid_log_double_softmax(sim, z0, z1)
        real0 = torch.cat([mask0, mask0.new_ones(len(mask0), 1)], 1)
        real1 = torch.cat([mask1, mask1.new_ones(len(mask1), 1)], 1)
        return scores.masked_fill(~(real0[:, :, None] & real1[:, None]), 0.0)


class LightGlue(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_proj = nn.Linear(DESC, DIM)
        self.posenc = LearnableFourierPositionalEncoding(3, DIM // HEADS)
        self.transformers = nn.ModuleList(
            TransformerLayer(DIM, HEADS) for _ in range(LAYERS)
        )
        self.log_assignment = nn.ModuleList(MatchAssignment(DIM) for _ in range(LAYERS))
        self.token_confidence = nn.ModuleList(
            TokenConfidence(DIM) for _ in range(LAYERS - 1)
        )

    def embed(self, kpts, oris, size, desc):
        kpts = normalize_keypoints(kpts, size)
        encoding = self.posenc(torch.cat([kpts, torch.deg2rad(oris)[..., None]], -1))
        return self.input_proj(root_sift(desc)), encoding

    def forward(self, data):
        desc0, encoding0 = self.embed(
            data["keypoints0"], data["oris0"], data["size0"], data["descriptors0"]
        )
        desc1, encoding1 = self.embed(
            data["keypoints1"], data["oris1"], data["size1"], data["descriptors1"]
        )
        mask0, mask1 = data["mask0"], data["mask1"]
        pred = {}
        for i in range(LAYERS):
            desc0, desc1 = self.transformers[i](
                desc0, desc1, encoding0, encoding1, mask0, mask1
            )
            pred[f"scores_{i}"] = self.log_assignment[i](desc0, desc1, mask0, mask1)
            if i < LAYERS - 1:
                pred[f"confidence0_{i}"] = self.token_confidence[i](desc0) * mask0
                pred[f"confidence1_{i}"] = self.token_confidence[i](desc1) * mask1
        return pred


def model():
    torch.manual_seed(1010)
    net = LightGlue()
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear):
                gain = 0.6 if name.endswith("ffn.3") else 1.3
                module.weight.normal_(0, gain * module.in_features**-0.5)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
        net.posenc.Wr.weight.normal_(0, 1.0)
        net.input_proj.weight.mul_(2.5)
        for head in net.log_assignment:
            head.final_proj.weight.mul_(1.6)
            head.matchability.bias.add_(1.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(1011)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    made = []
    for m, n, counts in ((15, 13, ((15, 11), (12, 13))), (12, 14, ((9, 14), (12, 10)))):
        sizes = (torch.tensor([[64.0, 48.0], [40.0, 56.0]]) + 8 * rand(2, 2)).round()
        batch = {
            "keypoints0": torch.zeros(2, m, 2),
            "keypoints1": torch.zeros(2, n, 2),
            "oris0": torch.zeros(2, m),
            "oris1": torch.zeros(2, n),
            "descriptors0": torch.zeros(2, m, 20),
            "descriptors1": torch.zeros(2, n, 20),
            "size0": sizes,
            "size1": sizes.flip(1),
            "mask0": torch.arange(m) < torch.tensor(counts)[:, :1],
            "mask1": torch.arange(n) < torch.tensor(counts)[:, 1:],
            "matches0": torch.full((2, m), -2),
            "matches1": torch.full((2, n), -2),
        }
        for b, (real0, real1) in enumerate(counts):
            shared = min(real0, real1) - 4
            at0 = torch.randperm(real0, generator=generator)
            at1 = torch.randperm(real1, generator=generator)
            points = rand(real0, 2)
            others = rand(real1, 2)
            others[at1[:shared]] = 0.1 + 0.8 * points[at0[:shared]]
            angles, turned = 360 * rand(real0), 360 * rand(real1)
            turned[at1[:shared]] = (angles[at0[:shared]] + 25) % 360
            descs = 255 * rand(real0, 20) ** 3
            others_descs = 255 * rand(real1, 20) ** 3
            noise = 20 * rand(shared, 20)
            others_descs[at1[:shared]] = descs[at0[:shared]] * 0.9 + noise
            batch["keypoints0"][b, :real0] = points * batch["size0"][b]
            batch["keypoints1"][b, :real1] = others * batch["size1"][b]
            batch["oris0"][b, :real0] = angles
            batch["oris1"][b, :real1] = turned
            batch["descriptors0"][b, :real0] = descs
            batch["descriptors1"][b, :real1] = others_descs
            batch["matches0"][b, :real0] = -1
            batch["matches1"][b, :real1] = -1
            batch["matches0"][b, at0[:shared]] = at1[:shared]
            batch["matches1"][b, at1[:shared]] = at0[:shared]
            # too near to tell
            batch["matches0"][b, at0[shared]] = -2
            batch["matches1"][b, at1[shared]] = -2
        made.append(batch)
    return made


def forward(net, batch):
    return net(batch)


def nll_loss(scores, matches0, matches1):
    columns = torch.arange(matches1.shape[1])
    positive = (matches0[:, :, None] == columns).to(scores)
    negative0 = (matches0 == UNMATCHED).to(scores)
    negative1 = (matches1 == UNMATCHED).to(scores)
    nll_pos = -(scores[:, :-1, :-1] * positive).sum((1, 2))
    nll_pos = nll_pos / positive.sum((1, 2)).clamp(min=1)
    nll_neg0 = -(scores[:, :-1, -1] * negative0).sum(1)
    nll_neg1 = -(scores[:, -1, :-1] * negative1).sum(1)
    num_neg = (negative0.sum(1) + negative1.sum(1)).clamp(min=1)
    nll_neg = (nll_neg0 + nll_neg1) / num_neg
    return (BALANCE * nll_pos + (1 - BALANCE) * nll_neg).mean()


def decisions(scores, batch):
    """Return what each point of either image is matched to, or the index behind all."""
    scores = scores.detach()
    absent0, absent1 = ~batch["mask0"][:, :, None], ~batch["mask1"][:, None]
    to1 = torch.cat(
        [scores[:, :-1, :-1].masked_fill(absent1, -torch.inf), scores[:, :-1, -1:]], 2
    )
    to0 = torch.cat(
        [scores[:, :-1, :-1].masked_fill(absent0, -torch.inf), scores[:, -1:, :-1]], 1
    )
    return to1.argmax(2), to0.argmax(1)


def confidence_loss(confidence, correct, mask):
    losses = F.binary_cross_entropy(
        confidence, correct.to(confidence), reduction="none"
    )
    return (losses * mask).sum() / mask.sum()


def loss(output, batch):
    """Later layers weigh more; the confidences learn which points have their last match."""
    final0, final1 = decisions(output[f"scores_{LAYERS - 1}"], batch)
    nll, weights, confidence = 0.0, 0.0, 0.0
    for i in range(LAYERS):
        scores = output[f"scores_{i}"]
        weight = GAMMA ** (LAYERS - i - 1)
        nll = nll + weight * nll_loss(scores, batch["matches0"], batch["matches1"])
        weights += weight
        if i < LAYERS - 1:
            now0, now1 = decisions(scores, batch)
            confidence = confidence + 0.5 * (
                confidence_loss(
                    output[f"confidence0_{i}"], now0 == final0, batch["mask0"]
                )
                + confidence_loss(
                    output[f"confidence1_{i}"], now1 == final1, batch["mask1"]
                )
            )
    return nll / weights + confidence / (LAYERS - 1)


def optimizer(net):
    """The encoding of positions learns slowly; only matrices decay."""
    encoding, decayed, rest = [], [], []
    for name, value in net.named_parameters():
        if name.startswith("posenc."):
            encoding.append(value)
        elif value.dim() >= 2:
            decayed.append(value)
        else:
            rest.append(value)
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0},
        {"params": encoding, "weight_decay": 0.0, "lr": 5e-4},
    ]
    return torch.optim.NAdam(
        groups, lr=2e-3, betas=(0.9, 0.98), decoupled_weight_decay=True
    )
