"""Faulty ports of the small SchNet."""

from ..bank import Change

FAULTS = [
    Change(
        "dense",
        "softplus is not shifted",
        "return torch.logaddexp(x, torch.zeros_like(x)) - 0.6931471805599453",
        "return torch.logaddexp(x, torch.zeros_like(x))",
        reference="return F.softplus(x) - self.shift",
    ),
    Change(
        "dense",
        "factor of the Gaussians",
        "torch.exp(-0.5 * gamma * ",
        "torch.exp(-gamma * ",
    ),
    Change(
        "dense",
        "atoms are their own neighbours",
        "    both = both & ~torch.eye(real.shape[1], dtype=torch.bool)\n",
        "    same = torch.eye(real.shape[1], dtype=torch.bool)\n"
        "    vectors = torch.where(same[..., None], 1e-6, vectors)\n",
        at="torch.where(both & (d < CUTOFF)|filters = filters * envelope",
    ),
    Change(
        "dense",
        "envelope is not applied",
        "    filters = filters * envelope[..., None]\n",
        "    filters = filters * (envelope[..., None] > 0)\n",
    ),
    Change(
        "dense",
        "cutoff in another unit",
        "envelope = 0.5 * torch.cos(torch.pi * d / CUTOFF) + 0.5",
        "envelope = 0.5 * torch.cos(torch.pi * d / 5.0) + 0.5",
    ),
    Change(
        "dense",
        "centers end before the cutoff",
        "torch.linspace(0, CUTOFF, 7)",
        "torch.arange(7) * CUTOFF / 7",
        at="gamma = 1 /|torch.exp(-0.5",
    ),
    Change(
        "dense",
        "update takes the place of the atoms",
        "        x = x + interaction(",
        "        x = interaction(",
        reference="h = h + interaction(",
        at='softplus(dense(p["out"]',
    ),
    Change(
        "dense",
        "mean of the atoms",
        "return torch.where(real, y, 0.0).sum(1)",
        "return torch.where(real, y, 0.0).sum(1) / real.sum(1)",
    ),
    Change(
        "dense",
        "shift of padded atoms is counted",
        "return torch.where(real, y, 0.0).sum(1)",
        "return y.sum(1)",
    ),
    Change(
        "dense",
        "mean and deviation are exchanged",
        '    y = p["mean"] + p["std"] * y',
        '    y = p["std"] + p["mean"] * y',
    ),
    Change(
        "dense",
        "square kernel is not transposed",
        '"post": layer(at + "lin"),',
        '"post": {"kernel": sd[at + "lin.weight"], "bias": sd[at + "lin.bias"]},',
        parameter="p_round_0.p_post.p_kernel|p_round_1.p_post.p_kernel",
    ),
    Change(
        "dense",
        "forces along the slope",
        '"force": -slope[atoms > 0]',
        '"force": slope[atoms > 0]',
    ),
    Change(
        "dense",
        "forces carry no gradient",
        "energy.sum(), positions, create_graph=True)",
        "energy.sum(), positions, retain_graph=True)",
        at='return {"energy"|force = (output[',
    ),
    Change(
        "dense",
        "forces are summed over the axes",
        'force = (output["force"] - batch["force"]).square().mean()',
        'force = (output["force"] - batch["force"]).square().sum(-1).mean()',
    ),
    Change(
        "dense",
        "decay of another recipe",
        "lr=5e-4, amsgrad=True",
        "lr=5e-4, weight_decay=0.01, amsgrad=True",
        phase="optimizer",
    ),
    Change(
        "segments",
        "envelope is not squared",
        "torch.cos(r * (torch.pi / 7.0)).square()[:, None]",
        "torch.cos(r * (torch.pi / 7.0))[:, None]",
    ),
    Change(
        "segments",
        "filter before its second layer is activated again",
        "gate = self.f2(ssp(self.f1(radial))) * switch",
        "gate = ssp(self.f2(ssp(self.f1(radial)))) * switch",
    ),
    Change(
        "segments",
        "messages are averaged",
        "received = segment_sum(sent, receivers, len(nodes))",
        "number = receivers.bincount(minlength=len(nodes)).clamp(min=1)\n"
        "        received = segment_sum(sent, receivers, len(nodes)) / number[:, None]",
    ),
    Change(
        "segments",
        "activation before the first update is left out",
        "return self.u2(ssp(self.u1(received)))",
        "return self.u2(self.u1(received))",
        reference="return self.lin(self.act(x))",
    ),
    Change(
        "segments",
        "both rounds share their weights",
        'Message(sd, f"interactions.{i}.") for i in range(2)',
        'Message(sd, "interactions.0.") for _ in range(2)',
        parameter="|".join(
            f"messages.1.{name}"
            for name in (
                "project",
                *(
                    f"{n}.{k}"
                    for n in ("f1", "f2", "u1", "u2")
                    for k in ("weight", "bias")
                ),
            )
        ),
    ),
    Change(
        "segments",
        "bias of the head is not loaded",
        '            layer.weight.data = sd[name + ".weight"]\n'
        '            layer.bias.data = sd[name + ".bias"]\n'
        "        self.alone",
        '            layer.weight.data = sd[name + ".weight"]\n'
        "            layer.bias.data.zero_()\n"
        "        self.alone",
        parameter="r1.bias|r2.bias",
    ),
    Change(
        "segments",
        "energies of single atoms left out",
        "        each = each + F.embedding(species, self.alone)\n",
        "",
        reference="h = h + self.atomref(z)",
        at="total = segment_sum(",
    ),
    Change(
        "segments",
        "energy weighs as much as forces",
        "return energy / 20 + force",
        "return energy + force",
        at="energy = F.mse_loss(",
    ),
]
