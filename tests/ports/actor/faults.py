"""Faulty ports of the actor and its critic."""

from ..bank import Change

FAULTS = [
    Change(
        "scan",
        "inputs of the first kernels keep the order of channels",
        "seen = seen.reshape(6, 4, -1).transpose(0, 1).reshape(24, -1)",
        "seen = seen.reshape(24, -1)",
        parameter="tree.pi/0/kernel|tree.vf/0/kernel",
        at="x = torch.cat([x.reshape(*lead, -1), body]",
    ),
    Change(
        "scan",
        "variance before the new mean",
        "m2 = (delta * (x - self.obs_mean)).sum((0, 1))",
        "m2 = (delta * delta).sum((0, 1))",
        parameter="obs_var",
        at="m2 = (delta * delta)|self.obs_var.copy_(",
    ),
    Change(
        "scan",
        "one activation for another",
        "return torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))",
        "return torch.where(x > 0, x, 0.01 * x)",
    ),
    Change(
        "scan",
        "rows and columns of the view exchanged",
        "x = view.reshape(-1, *view.shape[2:]).permute(0, 2, 3, 1)",
        "x = view.reshape(-1, *view.shape[2:]).permute(0, 3, 2, 1)",
        at='x = elu(conv(p, "conv_0"|patches = x.unfold',
    ),
    Change(
        "scan",
        "the critic's layers are the actor's",
        '("vf/1", "critic.2")',
        '("vf/1", "actor.2")',
        parameter="tree.vf/1/kernel|tree.vf/1/bias",
    ),
    Change(
        "scan",
        "values after the end are counted",
        'batch["rewards"][t] + HYPER["gamma"] * mask[t] * values[t + 1]',
        'batch["rewards"][t] + HYPER["gamma"] * values[t + 1]',
    ),
    Change(
        "scan",
        "ends are read one step late",
        'mask = 1.0 - batch["done"]',
        'mask = 1.0 - batch["done"].roll(1, 0)',
    ),
    Change(
        "scan",
        "squashing is left out",
        "return torch.sum(normal - jacobian, -1)",
        "return torch.sum(normal, -1)",
        reference="ratio = ((density - squash)",
    ),
    Change(
        "scan",
        "every ratio is clipped from both sides",
        "adv >= 0, torch.clip(ratio, max=high) * adv, torch.clip(ratio, min=low) * adv",
        "adv >= 0, torch.clip(ratio, low, high) * adv, torch.clip(ratio, low, high) * adv",
        at="surrogate = torch.where(",
    ),
    Change(
        "scan",
        "every gradient is clipped by itself",
        "g = p.grad * shrink",
        'g = p.grad * torch.clip(group["max_norm"] / (p.grad.norm() + 1e-6), max=1.0)',
        phase="optimizer",
    ),
    Change(
        "fused",
        "advantages are not standardized",
        "advantage = (advantage - mean) / (spread + 1e-8)",
        "advantage = advantage - mean",
        reference="gain = (gain - gain.mean())",
    ),
    Change(
        "fused",
        "a decay is read one step late",
        "decay[t:-1]]).cumprod(0)",
        "decay[t + 1 :]]).cumprod(0)",
    ),
    Change(
        "fused",
        "entropy is punished",
        "- 0.01 * policy.entropy().sum(2).mean()",
        "+ 0.01 * policy.entropy().sum(2).mean()",
    ),
    Change(
        "fused",
        "the larger gain is taken",
        "objective = gains.amin(0).mean()",
        "objective = gains.amax(0).mean()",
    ),
    Change(
        "fused",
        "actor and critic exchanged in the second layer",
        'self.second = Twin(w, "actor.2", "critic.2")',
        'self.second = Twin(w, "critic.2", "actor.2")',
        parameter="second.kernels|second.biases",
    ),
    Change(
        "fused",
        "no gradient from the critic to the eye",
        "both = self.second(self.first(x.expand(2, -1, -1)))",
        "x = torch.stack([x, x.detach()])\n        both = self.second(self.first(x))",
    ),
]
