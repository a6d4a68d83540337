"""Faulty ports of the small RWKV."""

from ..bank import Change


def _each(names, layers=(0, 1, 2)):
    """Return these names of parameters in each of the layers."""
    return "|".join(f"layers.{i}.{name}" for i in layers for name in names.split())


FAULTS = [
    Change(
        "all_at_once",
        "key and value exchanged in the stack",
        '("receptance", "key", "value")',
        '("receptance", "value", "key")',
        parameter=_each("time.rkv"),
    ),
    Change(
        "all_at_once",
        "mixes of key and value exchanged",
        'for name in "rkv"',
        'for name in "rvk"',
        parameter=_each("time.mix"),
    ),
    Change(
        "all_at_once",
        "decay without the exponential",
        'torch.exp(w[source + "time_decay"])',
        'w[source + "time_decay"]',
        parameter=_each("time.rate"),
        at="logs = -rate * (age - 1)",
        reference="w = -torch.exp(decay)",
    ),
    Change(
        "all_at_once",
        "norms of time and channels exchanged",
        'f"blocks.{i}.ln1"\n        norms[f"layers.{i}.channel_norm"] = f"blocks.{i}.ln2"',
        'f"blocks.{i}.ln2"\n        norms[f"layers.{i}.channel_norm"] = f"blocks.{i}.ln1"',
        parameter=_each(
            "time_norm.weight time_norm.bias channel_norm.weight channel_norm.bias"
        ),
    ),
    Change(
        "all_at_once",
        "head tied to the embedding",
        '"logits.weight": w["head.weight"]',
        '"logits.weight": w["emb.weight"]',
        parameter="logits.weight",
    ),
    Change(
        "all_at_once",
        "one step of decay too many",
        "-rate * (age - 1)",
        "-rate * age",
    ),
    Change(
        "all_at_once",
        "bonus for the token before",
        "torch.where(age == 0, bonus, logs)",
        "torch.where(age == 1, bonus, logs)",
    ),
    Change(
        "all_at_once",
        "shift across the batch",
        "F.pad(x[:-1], (0, 0, 0, 0, 1, 0))",
        "F.pad(x[:, :-1], (0, 0, 1, 0))",
    ),
    Change(
        "all_at_once",
        "silu for the sigmoid of the receptance",
        "torch.sigmoid(r) * mean",
        "F.silu(r) * mean",
    ),
    Change(
        "all_at_once",
        "hidden units are not squared",
        "self.down(hidden**2)",
        "self.down(hidden)",
        reference="torch.square(",
    ),
    Change(
        "all_at_once",
        "total over the wrong axis of steps",
        "torch.logsumexp(logs, dim=1, keepdim=True)",
        "torch.logsumexp(logs, dim=0, keepdim=True)",
    ),
    Change(
        "all_at_once",
        "total carries no gradient",
        "torch.logsumexp(logs, dim=1, keepdim=True)",
        "torch.logsumexp(logs, dim=1, keepdim=True).detach()",
        at="logs = decays[:, :, None] + k",
    ),
    Change(
        "all_at_once",
        "padding counts in the mean of the loss",
        "/ real.sum()",
        "/ real.numel()",
    ),
    Change(
        "engine",
        "output matrix is not transposed",
        'w[att + "output.weight"].t()',
        'w[att + "output.weight"]',
        parameter=_each("att_out"),
    ),
    Change(
        "engine",
        "mixes of the feed-forward net the wrong way round",
        'p["ffn_past_" + key] = 1 - w[',
        'p["ffn_past_" + key] = w[',
        parameter=_each("ffn_past_r ffn_past_k"),
        at="(last - x) * p.ffn_past_",
    ),
    Change(
        "engine",
        "feed-forward net of the next layer",
        'block + "att.", block + "ffn."',
        'block + "att.", f"blocks.{min(i + 1, 2)}.ffn."',
        parameter=_each("ffn_past_r ffn_past_k ffn_r ffn_k ffn_v", layers=(0, 1)),
    ),
    Change(
        "engine",
        "bias of the last norm left out",
        '"out_bias": w["ln_out.bias"]',
        '"out_bias": torch.zeros_like(w["ln_out.bias"])',
        parameter="base.out_bias",
    ),
    Change(
        "engine",
        "exponential of the decay twice",
        '"decay": w[att + "time_decay"]',
        '"decay": torch.exp(w[att + "time_decay"])',
        parameter=_each("decay"),
        at="aged = top - torch.exp(p.decay)",
    ),
    Change(
        "engine",
        "wrong epsilon",
        "EPS = 1e-5",
        "EPS = 1e-3",
        at="torch.rsqrt(x.square().mean() + EPS)",
    ),
    Change(
        "engine",
        "state goes on from prompt to prompt",
        "        for prompt in prompts:\n            state = self.fresh_state()\n",
        "        state = self.fresh_state()\n        for prompt in prompts:\n",
        at="att_last, num, den, top, ffn_last = state[i].unbind()",
        reference="num = torch.zeros_like",
    ),
    Change(
        "engine",
        "maximum updated before it has aged",
        "    aged = top - torch.exp(p.decay)\n    top = torch.maximum(aged, k)\n",
        "    top = torch.maximum(top, k)\n    aged = top - torch.exp(p.decay)\n",
        at="aged = top - torch.exp(p.decay)",
    ),
    Change(
        "engine",
        "bonus stays in the sums",
        "torch.exp(aged - top), torch.exp(k - top)",
        "torch.exp(aged - top), torch.exp(boosted - top)",
    ),
    Change(
        "engine",
        "shift of the feed-forward net remembers the residual",
        "torch.stack([a, *sums, f])",
        "torch.stack([a, *sums, x])",
    ),
    Change(
        "engine",
        "states of the layers kept in reverse",
        "rows.append(torch.stack([a, *sums, f]))",
        "rows.insert(0, torch.stack([a, *sums, f]))",
        at="att_last, num, den, top, ffn_last = state[i].unbind()",
    ),
    Change(
        "engine",
        "no norm of the embedding",
        "x = norm(p.emb[token], p.emb_gain, p.emb_bias)",
        "x = p.emb[token]",
        reference="self.ln0(self.emb(idx))",
    ),
    Change(
        "engine",
        "no gradient from token to token",
        "score, state = self.step(token, state)",
        "score, state = self.step(token, state.detach())",
        at="rows.append(torch.stack([a, *sums, f]))|return x @ p.head, torch.stack(rows)",
    ),
]
