"""Faulty ports of SchNet."""

from ..bank import Change


def _each(names):
    """Return these names in each block of the first port."""
    return "|".join(f"schnet/block_{i}/{name}" for i in range(3) for name in names)


FAULTS = [
    Change(
        "jax_style",
        "square weights behind the activation of the update keep the layout of torch",
        '        put_linear(scope + "/update/linear_1", name + ".f2out.2")\n',
        '        put_linear(scope + "/update/linear_1", name + ".f2out.2")\n'
        '        params[scope + "/update/linear_1/w"] = state[name + ".f2out.2.weight"]\n',
        parameter=_each(["update/linear_1/w"]),
        at='y = torch.tensordot(x, params[scope + "/w"], dims=1)'
        '|return linear(params, scope + "/linear_1", h)'
        '|v = mlp(params, scope + "/update", v)',
    ),
    Change(
        "jax_style",
        "filters of the last block are those of the one before",
        'put_linear(scope + "/filter/linear_1", name + ".filter_net.2")',
        'put_linear(\n            scope + "/filter/linear_1",\n'
        '            f"interactions.{min(block, N_BLOCKS - 2)}.filter_net.2",\n        )',
        parameter="schnet/block_2/filter/linear_1/w|schnet/block_2/filter/linear_1/b",
    ),
    Change(
        "jax_style",
        "scales and offsets of the elements are swapped",
        '    params["schnet/per_species/scale"] = state["scale.weight"][:, 0]\n'
        '    params["schnet/per_species/offset"] = state["shift.weight"][:, 0]\n',
        '    params["schnet/per_species/scale"] = state["shift.weight"][:, 0]\n'
        '    params["schnet/per_species/offset"] = state["scale.weight"][:, 0]\n',
        parameter="schnet/per_species/scale|schnet/per_species/offset",
    ),
    Change(
        "jax_style",
        "biases of the filters are left at zero",
        '        put_linear(scope + "/filter/linear_0", name + ".filter_net.0")\n',
        '        put_linear(scope + "/filter/linear_0", name + ".filter_net.0")\n'
        '        params[scope + "/filter/linear_0/b"] = torch.zeros(20)\n',
        parameter=_each(["filter/linear_0/b"]),
        at="return y if b is None else y + b",
    ),
    Change(
        "jax_style",
        "softplus is not shifted",
        "return torch.logaddexp(x, torch.zeros_like(x)) - LOG2",
        "return torch.logaddexp(x, torch.zeros_like(x))",
        at='h = shifted_softplus(linear(params, scope + "/linear_0", x))',
        reference="F.softplus(x) - math.log(2.0)",
    ),
    Change(
        "jax_style",
        "filters end with an activation, too",
        '    filters = mlp(params, scope + "/filter", basis)\n',
        '    filters = shifted_softplus(mlp(params, scope + "/filter", basis))\n',
    ),
    Change(
        "jax_style",
        "cutoff is put on the radial basis and not on the filters",
        '    filters = mlp(params, scope + "/filter", basis)\n'
        "    filters = filters * envelope[..., None]\n",
        '    filters = mlp(params, scope + "/filter", basis * envelope[..., None])\n',
        reference="rcut_ij.unsqueeze(-1)",
    ),
    Change(
        "jax_style",
        "block has no shortcut",
        "    return h + v\n",
        "    return v\n",
        at='v = mlp(params, scope + "/update", v)',
        reference="x = x + interaction(",
    ),
    Change(
        "jax_style",
        "width of the Gaussians without the half",
        "gamma = 0.5 / spacing**2",
        "gamma = 1.0 / spacing**2",
        at="return torch.exp(-gamma *",
        reference="self.coeff",
    ),
    Change(
        "jax_style",
        "table of neighbours has too few columns",
        "MAX_NEIGHBORS = 8",
        "MAX_NEIGHBORS = 4",
        at="return idx[:, :MAX_NEIGHBORS]"
        '|return torch.einsum("nkf,nkf->nf", messages, filters)',
    ),
    Change(
        "jax_style",
        "forces do not carry a gradient to the parameters",
        "gradient = torch.autograd.grad(torch.sum(atomic), R, create_graph=True)[0]",
        "gradient = torch.autograd.grad(torch.sum(atomic), R, retain_graph=True)[0]",
        at="return segment_sum(atomic, segment_ids, len(counts)), -gradient",
        reference="create_graph=True",
    ),
    Change(
        "jax_style",
        "squared error is divided by the number of atoms, not the error",
        '    de = de / batch["n_atoms"]\n'
        "    return w_energy * torch.mean(de**2) + w_forces * torch.mean(df**2)\n",
        '    de2 = de**2 / batch["n_atoms"]\n'
        "    return w_energy * torch.mean(de2) + w_forces * torch.mean(df**2)\n",
    ),
    Change(
        "jax_style",
        "moments are not divided for having started at zero",
        "            mu_hat = self.mu[k] / (1.0 - b1**self.count)\n"
        "            nu_hat = self.nu[k] / (1.0 - b2**self.count)\n",
        "            mu_hat = self.mu[k]\n            nu_hat = self.nu[k]\n",
        phase="optimizer",
    ),
    Change(
        "dense_pairs",
        "first layers of the filters stand from the last block to the first",
        "torch.cat(kernels, dim=1)",
        "torch.cat(kernels[::-1], dim=1)",
        parameter="filters_in.kernel",
        at="out = x @ self.kernel|hidden = ssp(self.filters_in(smeared))",
    ),
    Change(
        "dense_pairs",
        "row of the padding stands last in the table of elements",
        'net.type_table.copy_(saved["embedding.weight"])',
        'net.type_table.copy_(saved["embedding.weight"].roll(-1, 0))',
        parameter="type_table",
        at="atoms = self.type_table[types]",
    ),
    Change(
        "dense_pairs",
        "second filter layer is not transposed",
        '            fill(block.filter_out, prefix + "filter_net.2")\n',
        '            fill(block.filter_out, prefix + "filter_net.2")\n'
        '            block.filter_out.kernel.copy_(saved[prefix + "filter_net.2.weight"])\n',
        parameter="|".join(f"blocks.{i}.filter_out.kernel" for i in range(3)),
        at="out = x @ self.kernel|filters = self.filter_out(hidden)",
    ),
    Change(
        "dense_pairs",
        "features of the atom itself are filtered, not those of its neighbours",
        '"bjf,bijf->bif"',
        '"bif,bijf->bif"',
        reference="self.in2f(x)[idx_j]",
    ),
    Change(
        "dense_pairs",
        "messages are averaged over the neighbours",
        '        gathered = torch.einsum("bjf,bijf->bif", self.sender(atoms), filters)\n',
        '        gathered = torch.einsum("bjf,bijf->bif", self.sender(atoms), filters)\n'
        "        near = (envelope > 0).sum(-1, keepdim=True).clamp(min=1)\n"
        "        gathered = gathered / near\n",
        at="return self.mix(ssp(self.receive(gathered)))",
        reference="index_add(0, idx_i, x_ij)",
    ),
    Change(
        "dense_pairs",
        "silu in the head",
        "ssp(self.head_hidden(atoms))",
        "nn.functional.silu(self.head_hidden(atoms))",
    ),
    Change(
        "dense_pairs",
        "fused filters are split with the blocks last",
        "hidden.unflatten(-1, (DEPTH, FILTER_WIDTH)).unbind(-2)",
        "hidden.unflatten(-1, (FILTER_WIDTH, DEPTH)).unbind(-1)",
        at="filters = self.filter_out(hidden)",
    ),
    Change(
        "dense_pairs",
        "each atom is a neighbour of its own",
        "return smeared, envelope * pair_mask",
        "atom_mask = pair_mask.amax(-1)\n"
        "        itself = torch.diag_embed(atom_mask)\n"
        "        return smeared, envelope * (pair_mask + itself)",
        at="filters = self.filter_out(hidden) * envelope",
    ),
    Change(
        "dense_pairs",
        "rows of the padding count in the energy",
        "return ((raw * scale + shift) * atom_mask).sum(dim=1)",
        "return (raw * scale + shift).sum(dim=1)",
    ),
    Change(
        "dense_pairs",
        "centres of the Gaussians stop before the cutoff",
        "torch.linspace(0, R_CUT, RBF_CENTERS)",
        "torch.arange(RBF_CENTERS) * (R_CUT / RBF_CENTERS)",
        at="smeared = (dist.unsqueeze(-1) - self.centers) / self.width",
        parameter="geometry.centers",
    ),
    Change(
        "dense_pairs",
        "slopes of the vectors that end at an atom are left out",
        "forces = slope.sum(dim=2) - slope.sum(dim=1)",
        "forces = slope.sum(dim=2)",
    ),
    Change(
        "dense_pairs",
        "forces are averaged over the padding, too",
        "forces_term = off.square().sum() / (3 * counts.sum())",
        "forces_term = off.square().sum() / (3 * len(counts) * counts.max())",
        at="return 0.3 * energy_term + 0.7 * forces_term",
    ),
    Change(
        "dense_pairs",
        "whatever has two dimensions decays, tables too",
        '        kernels = [p for n, p in net.named_parameters() if n.endswith("kernel")]\n'
        '        others = [p for n, p in net.named_parameters() if not n.endswith("kernel")]\n',
        "        kernels = [p for n, p in net.named_parameters() if p.ndim > 1]\n"
        "        others = [p for n, p in net.named_parameters() if p.ndim < 2]\n",
        phase="optimizer",
    ),
]
