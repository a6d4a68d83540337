"""TabNet as for NumPy: a dictionary of arrays and functions; rows are columns of a matrix.

An example is a column of [features, examples], so that a layer is w @ x. Values and gates
have matrices of their own. Pass 0 only looks; passes 1, 2 and 3 decide.
"""

import os

import torch

STEPS = 3
DECIDE, ATTEND = 8, 6
VIRTUAL = 12
RELAX = 1.3
LAMBDA = 0.05
EPS = 1e-3
TINY = 1e-5
EMBEDDED = [(7, 3), (5, 2), (11, 4)]
MEDIAN = [38.0, 10.0, 12.0, 0.0, 0.0, 40.0]
IS_LOG = [False, False, False, True, True, False]
CLASS_WEIGHT = [0.6, 1.1, 1.9]


# --- arrays of the network


def read_weights(path):
    s = torch.load(path)
    passes = ["splitter"] + [f"features.{t}" for t in range(STEPS)]
    p, r = {}, {}
    for c in range(len(EMBEDDED)):
        p[f"emb{c}"] = s[f"embedder.tables.{c}.weight"].T
    p["in_scale"], p["in_shift"] = s["initial_bn.weight"], s["initial_bn.bias"]
    r["in_mean"], r["in_var"] = (
        s["initial_bn.running_mean"],
        s["initial_bn.running_var"],
    )

    # fully connected layers: shared ones, then [pass, out, in] of each pass
    for i in range(2):
        p[f"shared{i}_v"], p[f"shared{i}_g"] = torch.tensor_split(
            s[f"shared.{i}.weight"], 2
        )
    for i in range(2):
        own = torch.stack([s[f"{name}.fcs.{i}.weight"] for name in passes])
        p[f"own{i}_v"], p[f"own{i}_g"] = torch.tensor_split(own, 2, dim=1)

    # norms of the gated layers: [pass, layer, value or gate, feature]
    def glu_norm(key):
        rows = [s[f"{name}.norms.{i}.bn.{key}"] for name in passes for i in range(4)]
        return torch.stack(rows).reshape(len(passes), 4, 2, DECIDE + ATTEND)

    p["glu_scale"], p["glu_shift"] = glu_norm("weight"), glu_norm("bias")
    r["glu_mean"], r["glu_var"] = glu_norm("running_mean"), glu_norm("running_var")

    # attention: [step, ...]
    def attention(key):
        return torch.stack([s[f"attentive.{t}.{key}"] for t in range(STEPS)])

    p["att_w"] = attention("fc.weight")
    p["att_scale"] = attention("norm.bn.weight")
    p["att_shift"] = attention("norm.bn.bias")
    r["att_mean"] = attention("norm.bn.running_mean")
    r["att_var"] = attention("norm.bn.running_var")

    p["out_w"], p["out_b"] = s["head.weight"], s["head.bias"]
    return p, r


class Arrays(torch.nn.Module):
    def __init__(self, params, running):
        super().__init__()
        for name, array in params.items():
            array = torch.nn.Parameter(array.clone().contiguous())
            self.register_parameter(name, array)
        for name, array in running.items():
            self.register_buffer(name, array.clone().contiguous())

    def __getitem__(self, name):
        return getattr(self, name)


def model():
    here = os.path.dirname(os.path.abspath(__file__))
    return Arrays(*read_weights(os.path.join(here, "weights.pt")))


# --- functions


def update_running(mean, var, group_means, group_vars, counts, rate):
    """One virtual batch after the other; var is that of a sample."""
    with torch.no_grad():
        for mu, sigma2, n in zip(group_means.T, group_vars.T, counts):
            mean.copy_((1 - rate) * mean + rate * mu)
            var.copy_((1 - rate) * var + rate * sigma2 * n / (n - 1))


def batch_norm(x, scale, shift, mean, var, size, rate):
    """x is [features, examples]; each group of size examples has its own statistics."""
    group = torch.arange(x.shape[1]) // size
    member = (group[:, None] == torch.unique(group)[None, :]).to(x.dtype)
    counts = member.sum(0)
    mu = x @ member / counts
    centered = x - mu[:, group]
    sigma2 = centered**2 @ member / counts
    update_running(mean, var, mu, sigma2, counts, rate)
    std = torch.sqrt(sigma2 + EPS)
    return scale[:, None] * centered / std[:, group] + shift[:, None]


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def gated(net, step, layer, w_value, w_gate, x):
    branches = []
    for half, w in enumerate((w_value, w_gate)):
        at = (step, layer, half)
        branches.append(
            batch_norm(
                w @ x,
                net["glu_scale"][at],
                net["glu_shift"][at],
                net["glu_mean"][at],
                net["glu_var"][at],
                VIRTUAL,
                0.02,
            )
        )
    value, gate = branches
    return value * sigmoid(gate)


def transform(net, step, x):
    h = gated(net, step, 0, net["shared0_v"], net["shared0_g"], x)
    h = (h + gated(net, step, 1, net["shared1_v"], net["shared1_g"], h)) / 2**0.5
    for i in range(2):
        w_value, w_gate = net[f"own{i}_v"][step], net[f"own{i}_g"][step]
        h = (h + gated(net, step, 2 + i, w_value, w_gate, h)) / 2**0.5
    return h


def sparsemax(z):
    """Over the first axis, without a sort: an entry counts all that are no smaller."""
    no_smaller = (z[None, :, :] >= z[:, None, :]).to(z.dtype)
    rank = no_smaller.sum(1)
    total = torch.einsum("ijn,jn->in", no_smaller, z)
    support = (1 + rank * z > total).to(z.dtype)
    tau = ((support * z).sum(0) - 1) / support.sum(0)
    return support * (z - tau)


def attend(net, step, a, prior):
    z = batch_norm(
        net["att_w"][step] @ a,
        net["att_scale"][step],
        net["att_shift"][step],
        net["att_mean"][step],
        net["att_var"][step],
        VIRTUAL,
        0.02,
    )
    return sparsemax(z * prior)


def per_feature(mask):
    """The share of a column, divided among its features."""
    widths = torch.tensor([1] * len(MEDIAN) + [width for _, width in EMBEDDED])
    return torch.repeat_interleave(mask / widths[:, None], widths, dim=0)


def clean(numeric):
    numeric, is_log = numeric.T, torch.tensor(IS_LOG)[:, None]
    numeric = torch.where(numeric == numeric, numeric, torch.tensor(MEDIAN)[:, None])
    return torch.where(is_log, torch.log1p(numeric), numeric)


def embed(net, category):
    parts = []
    for c, (rows, _) in enumerate(EMBEDDED):
        code = category[:, c].clone()
        code[code >= rows] = 0
        parts.append(net[f"emb{c}"][:, code])
    return parts


def forward(net, batch):
    x = torch.vstack([clean(batch["numeric"]), *embed(net, batch["category"])])
    n = x.shape[1]
    x = batch_norm(
        x, net["in_scale"], net["in_shift"], net["in_mean"], net["in_var"], n, 0.01
    )
    a = transform(net, 0, x)[DECIDE:]
    prior = torch.ones(len(MEDIAN) + len(EMBEDDED), n)
    decisions, entropies = [], []
    for t in range(STEPS):
        mask = attend(net, t, a, prior)
        prior = (RELAX - mask) * prior
        entropies.append(-(mask * torch.log(mask + TINY)).sum() / n)
        h = transform(net, t + 1, per_feature(mask) * x)
        d, a = h[:DECIDE], h[DECIDE:]
        decisions.append(torch.clip(d, min=0))
    total = torch.stack(decisions).sum(0)
    logits = net["out_w"] @ total + net["out_b"][:, None]
    return {"logits": logits.T, "entropy": sum(entropies) / STEPS}


def loss(output, batch):
    logits, label = output["logits"], batch["label"]
    shifted = logits - logits.amax(1, keepdim=True)
    log_p = shifted - torch.log(torch.exp(shifted).sum(1, keepdim=True))
    w = torch.tensor(CLASS_WEIGHT)[label]
    w = w / w.sum()
    nll = -(w * log_p[torch.arange(len(label)), label]).sum()
    return nll + LAMBDA * output["entropy"]


# --- training


class Adam(torch.optim.Optimizer):
    def __init__(self, net):
        self.arrays = list(net.parameters())
        super().__init__(self.arrays, {})
        self.t = 0
        self.first = [torch.zeros_like(p) for p in self.arrays]
        self.second = [torch.zeros_like(p) for p in self.arrays]

    def rate(self):
        return 0.005 * 0.8 ** (self.t / 4)

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.rate()
        self.t += 1
        for p, m, v in zip(self.arrays, self.first, self.second):
            g = p.grad
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g**2)
            m_hat = m / (1 - 0.9**self.t)
            v_hat = v / (1 - 0.999**self.t)
            p.sub_(rate * m_hat / (torch.sqrt(v_hat) + 1e-3))


def optimizer(net):
    return Adam(net)
