"""Linear attention as a recurrent network: time first, one state that words are written to.

A state is a matrix [features, head width + 1] for each head: the last column sums the keys,
because a 1 stands behind each value. The causal layers read it after each word, the others
when all words are in it.
"""

from pathlib import Path

import torch
from torch import nn

N_TOKENS, PAD_TOKEN = 24, 0
WIDTH, N_HEADS = 36, 3
HEAD_WIDTH = WIDTH // N_HEADS
TURNED, WAVELENGTH = 8, 10000.0
RANDOM_DIRECTIONS = 20
FLOOR, READ_FLOOR = 1e-3, 1e-6
GLU_WIDTH = 48
SMOOTH = 0.1
PEAK_RATE, RAMP, MAX_GRAD, DECAY = 4e-3, 3, 0.6, 0.1
BETA1, BETA2, TINY = 0.9, 0.98, 1e-6


# --------------------------------------------------------------------- pieces


class Affine(nn.Module):
    def __init__(self, w, b=None):
        super().__init__()
        self.w = nn.Parameter(w.clone().contiguous())
        self.b = nn.Parameter(b.clone()) if b is not None else None

    def forward(self, x):
        y = torch.tensordot(x, self.w, dims=1)
        return y if self.b is None else y + self.b


class Norm(nn.Module):
    def __init__(self, g, b, eps=1e-5):
        super().__init__()
        self.g = nn.Parameter(g.clone())
        self.b = nn.Parameter(b.clone())
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        spread = torch.var(x, -1, keepdim=True, unbiased=False)
        return self.g * (centred / torch.sqrt(spread + self.eps)) + self.b


class GatedUnit(nn.Module):
    """The gate is the second half."""

    def __init__(self, up, down):
        super().__init__()
        self.up = up
        self.down = down

    def forward(self, x):
        value, gate = torch.split(self.up(x), GLU_WIDTH, dim=-1)
        gate = gate * (0.5 * torch.erfc(gate * -(0.5**0.5)))
        return self.down(value * gate)


def turn_matrices(steps):
    """[steps, pairs, 2, 2]: how far each pair is turned at each step."""
    speed = WAVELENGTH ** (-2.0 * torch.arange(TURNED // 2) / TURNED)
    angle = torch.outer(torch.arange(steps).float(), speed)
    c, s = torch.cos(angle), torch.sin(angle)
    return torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)


def turn(x, matrices):
    """x: [T, B, H, width]; pairs are neighbours."""
    pairs = x[..., :TURNED].unflatten(-1, (-1, 2))
    pairs = torch.einsum("tpij,tbhpj->tbhpi", matrices, pairs)
    return torch.cat([pairs.flatten(-2), x[..., TURNED:]], -1)


class Kernel(nn.Module):
    """exp(<x, w> - |x|^2 / 2) for each direction w; a column of omega is a direction."""

    def __init__(self, omega):
        super().__init__()
        self.register_buffer("omega", omega.clone().contiguous())

    def lift(self, x, peak_over):
        x = x / HEAD_WIDTH**0.25
        along = torch.matmul(x, self.omega)
        energy = 0.5 * torch.linalg.vecdot(x, x).unsqueeze(-1)
        with torch.no_grad():
            peak = torch.amax(along, peak_over, keepdim=True)
        lifted = torch.exp(along - peak - energy) + FLOOR
        return lifted / RANDOM_DIRECTIONS**0.5

    def query(self, x):
        return self.lift(x, -1)

    def key(self, x):
        return self.lift(x, (0, -1))


# ---------------------------------------------------------------------- state


def zero_state(batch):
    return torch.zeros(batch, N_HEADS, RANDOM_DIRECTIONS, HEAD_WIDTH + 1)


def with_one(v):
    return nn.functional.pad(v, (0, 1), value=1.0)


def write(state, k, v):
    return state + k.unsqueeze(-1) * v.unsqueeze(-2)


def read(state, q):
    both = (q.unsqueeze(-1) * state).sum(-2)
    return both[..., :-1] / (both[..., -1:] + READ_FLOOR)


def heads(x):
    return x.unflatten(-1, (N_HEADS, HEAD_WIDTH))


class Recurrence(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, qkv, out, omega):
        super().__init__()
        self.qkv = qkv
        self.out = out
        self.kernel = Kernel(omega)

    def prepare(self, x, matrices):
        q, k, v = torch.chunk(self.qkv(x), 3, dim=-1)
        q, k = turn(heads(q), matrices), turn(heads(k), matrices)
        return self.kernel.query(q), self.kernel.key(k), with_one(heads(v))

    def causal(self, x, matrices, state):
        """Each step reads what it and those before it have written."""
        q, k, v = self.prepare(x, matrices)
        steps = []
        for q_t, k_t, v_t in zip(q, k, v):
            state = write(state, k_t, v_t)
            steps.append(read(state, q_t))
        return self.out(torch.stack(steps).flatten(2)), state

    def both_ways(self, x, matrices, there):
        q, k, v = self.prepare(x, matrices)
        state = zero_state(x.shape[1])
        for k_t, v_t, there_t in zip(k, v, there):
            state = torch.where(there_t, write(state, k_t, v_t), state)
        return self.out(read(state, q).flatten(2))


class Lookup(nn.Module):
    """Attention to what the encoder has written."""

    def __init__(self, q, kv, out, omega):
        super().__init__()
        self.q = q
        self.kv = kv
        self.out = out
        self.kernel = Kernel(omega)

    def memorize(self, encoded, there):
        k, v = torch.chunk(self.kv(encoded), 2, dim=-1)
        k, v = self.kernel.key(heads(k)), with_one(heads(v))
        state = zero_state(encoded.shape[1])
        for k_t, v_t, there_t in zip(k, v, there):
            state = torch.where(there_t, write(state, k_t, v_t), state)
        return state

    def forward(self, x, memory):
        q = self.kernel.query(heads(self.q(x)))
        return self.out(read(memory, q).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, ln_a, mix, ln_b, glu):
        super().__init__()
        self.ln_a = ln_a
        self.mix = mix
        self.ln_b = ln_b
        self.glu = glu

    def forward(self, x, matrices, there):
        x = x + self.mix.both_ways(self.ln_a(x), matrices, there)
        return x + self.glu(self.ln_b(x))


class DecoderLayer(nn.Module):
    """gain: of the recurrence, of the lookup, of the gated unit."""

    def __init__(self, mix, look, glu, gain):
        super().__init__()
        self.mix = mix
        self.look = look
        self.glu = glu
        self.gain = nn.Parameter(gain.clone())

    def forward(self, x, encoded, there, matrices, state):
        branch, state = self.mix.causal(x, matrices, state)
        x = x + branch * self.gain[0]
        memory = self.look.memorize(encoded, there)
        x = x + self.look(x, memory) * self.gain[1]
        x = x + self.glu(x) * self.gain[2]
        return x, state


class SeqModel(nn.Module):
    def __init__(self, table, enc, ln_enc, dec, ln_dec, bias):
        super().__init__()
        self.table = nn.Parameter(table.clone())
        self.enc = nn.ModuleList(enc)
        self.ln_enc = ln_enc
        self.dec = nn.ModuleList(dec)
        self.ln_dec = ln_dec
        self.bias = nn.Parameter(bias.clone())

    def look_up(self, tokens):
        """[B, T] -> [T, B, width]"""
        return self.table[tokens.t()] * WIDTH**0.5

    def encode(self, tokens):
        lengths = (tokens != PAD_TOKEN).sum(1)
        times = torch.arange(tokens.shape[1]).unsqueeze(1)
        there = (times < lengths)[:, :, None, None, None]
        x = self.look_up(tokens)
        matrices = turn_matrices(len(x))
        for layer in self.enc:
            x = layer(x, matrices, there)
        return self.ln_enc(x), there

    def decode(self, tokens, encoded, there):
        x = self.look_up(tokens)
        matrices = turn_matrices(len(x))
        for layer in self.dec:
            state = zero_state(len(tokens))
            x, state = layer(x, encoded, there, matrices, state)
        scores = torch.tensordot(self.ln_dec(x), self.table, dims=([-1], [-1]))
        return (scores + self.bias).transpose(0, 1)

    def forward(self, source, target):
        encoded, there = self.encode(source)
        return self.decode(target, encoded, there)


# --------------------------------------------------------------------- loading


class Loader:
    def __init__(self, saved):
        self.saved = saved

    def norm(self, key):
        return Norm(self.saved[key + ".weight"], self.saved[key + ".bias"])

    def affine(self, key):
        return Affine(self.saved[key + ".weight"].t(), self.saved[key + ".bias"])

    def fused(self, key, names):
        parts = [self.saved[f"{key}.to_{name}.weight"] for name in names]
        return Affine(torch.cat(parts).t())

    def omega(self, key):
        return self.saved[key + ".projection"].t()

    def recurrence(self, key):
        out = self.affine(key + ".to_out")
        return Recurrence(self.fused(key, "qkv"), out, self.omega(key))

    def lookup(self, key):
        q, kv = self.fused(key, "q"), self.fused(key, "kv")
        return Lookup(q, kv, self.affine(key + ".to_out"), self.omega(key))

    def gated(self, key):
        w, b = self.saved[key + ".w1.weight"], self.saved[key + ".w1.bias"]
        up = Affine(w.roll(GLU_WIDTH, 0).t(), b.roll(GLU_WIDTH, 0))
        return GatedUnit(up, self.affine(key + ".w2"))

    def encoder(self, key):
        return EncoderLayer(
            self.norm(key + ".norm1"),
            self.recurrence(key + ".attn"),
            self.norm(key + ".norm2"),
            self.gated(key + ".ff"),
        )

    def decoder(self, key):
        branches = ("attn", "cross", "ff")
        gain = torch.stack([self.saved[f"{key}.{branch}_gain"] for branch in branches])
        mix, look = self.recurrence(key + ".attn"), self.lookup(key + ".cross")
        return DecoderLayer(mix, look, self.gated(key + ".ff"), gain)

    def build(self):
        return SeqModel(
            self.saved["embed.weight"],
            [self.encoder("encoder.0")],
            self.norm("encoder_norm"),
            [self.decoder("decoder.0"), self.decoder("decoder.1")],
            self.norm("norm"),
            self.saved["out_bias"],
        )


def model():
    return Loader(torch.load(Path(__file__).parent / "weights.pt")).build()


# -------------------------------------------------------------------- training


def forward(net, batch):
    return net(batch["source"], batch["target"][:, :-1])


def loss(output, batch):
    wanted = batch["target"][:, 1:]
    logp = output - torch.logsumexp(output, -1, keepdim=True)
    hit = logp.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    cost = (SMOOTH - 1) * hit - SMOOTH * logp.mean(-1)
    return cost[wanted != PAD_TOKEN].mean()


class Trainer(torch.optim.Optimizer):
    """Adam whose two corrections are in the length of the step."""

    def __init__(self, net):
        decayed = [p for name, p in net.named_parameters() if name.endswith(".w")]
        others = [p for name, p in net.named_parameters() if not name.endswith(".w")]
        groups = [{"params": decayed, "decay": DECAY}, {"params": others, "decay": 0.0}]
        super().__init__(groups, {})
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        everything = [p for group in self.param_groups for p in group["params"]]
        size = torch.cat([p.grad.flatten() for p in everything]).norm()
        shrink = min(1.0, MAX_GRAD / (float(size) + 1e-6))
        self.t += 1
        rate = PEAK_RATE * min(self.t / RAMP, (RAMP / self.t) ** 0.5)
        second = (1 - BETA2**self.t) ** 0.5
        length = rate * second / (1 - BETA1**self.t)
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad * shrink
                kept = self.state[p]
                if not kept:
                    kept["m"], kept["v"] = torch.zeros_like(p), torch.zeros_like(p)
                kept["m"].lerp_(grad, 1 - BETA1)
                kept["v"].lerp_(grad * grad, 1 - BETA2)
                p.mul_(1 - rate * group["decay"])
                p.sub_(length * kept["m"] / (kept["v"].sqrt() + TINY * second))


def optimizer(net):
    return Trainer(net)
