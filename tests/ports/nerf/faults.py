"""Faulty ports of the radiance field."""

from ..bank import Change

FAULTS = [
    Change(
        "transmittance",
        "bands with pi",
        "scales = 2.0 ** torch.arange(count)",
        "scales = torch.pi * 2.0 ** torch.arange(count)",
    ),
    Change(
        "transmittance",
        "light is lost before it is used",
        "passed = torch.cumsum(optical, -1) - optical",
        "passed = torch.cumsum(optical, -1)",
    ),
    Change(
        "transmittance",
        "steps are not as long as the direction",
        "optical = sigma * delta * norm",
        "optical = sigma * delta",
    ),
    Change(
        "transmittance",
        "the last step is far",
        '"last_step": 0.5',
        '"last_step": 1e10',
        at='delta[:, -1] = CONFIG["last_step"]|optical = sigma * delta',
    ),
    Change(
        "transmittance",
        "direction of the view has no unit length",
        "rgb, sigma = mlp(xyz, d / norm)",
        "rgb, sigma = mlp(xyz, d)",
    ),
    Change(
        "transmittance",
        "black behind",
        "return rgb + white[:, None], weights",
        "return rgb, weights",
        reference="return seen + background",
    ),
    Change(
        "transmittance",
        "skip kernel keeps the order of bands",
        '"w_2_skip": by_bands(skip, 4)',
        '"w_2_skip": skip',
        parameter="mlp.w_2_skip|mlp_fine.w_2_skip",
    ),
    Change(
        "transmittance",
        "skip and hidden rows exchanged",
        'skip, hidden = w[at + "layers.2.weight"].t().split([27, 24])',
        'hidden, skip = w[at + "layers.2.weight"].t().split([24, 27])',
        parameter="mlp.w_2_skip|mlp_fine.w_2_skip|mlp.w_2_hidden|mlp_fine.w_2_hidden",
    ),
    Change(
        "transmittance",
        "density is not shifted",
        'density_bias = w[at + "density.bias"] - 1',
        'density_bias = w[at + "density.bias"]',
        parameter="mlp.b_out|mlp_fine.b_out",
        at="softplus(out[..., 0])",
    ),
    Change(
        "transmittance",
        "fine samples are drawn with all weights' neighbours",
        "weights[:, 1:-1]",
        "weights[:, :-2]",
        at="weights = weights + CONFIG",
    ),
    Change(
        "transmittance",
        "middles are the left edges",
        "mids = (t[:, 1:] + t[:, :-1]) / 2",
        "mids = t[:, :-1]",
    ),
    Change(
        "transmittance",
        "samples are not sorted",
        "t_all, _ = torch.sort(torch.cat([t, t_new], 1), dim=1)",
        "t_all = torch.cat([t, t_new], 1)",
    ),
    Change(
        "transmittance",
        "fine colours by the coarse field",
        "rgb_fine, weights = self.ray_march(self.mlp_fine, rays, t_all)",
        "rgb_fine, weights = self.ray_march(self.mlp, rays, t_all)",
    ),
    Change(
        "transmittance",
        "densities in bfloat16",
        "sigma = torch.nn.functional.softplus(out[..., 0])",
        "sigma = torch.nn.functional.softplus(out[..., 0].bfloat16()).float()",
    ),
    Change(
        "transmittance",
        "second moment is not corrected",
        'v = s["v"] / (1 - g["b2"] ** s["t"])',
        'v = s["v"]',
        phase="optimizer",
    ),
    Change(
        "transmittance",
        "coarse and fine weigh the same",
        "return 0.5 * coarse + fine",
        "return coarse + fine",
    ),
]
