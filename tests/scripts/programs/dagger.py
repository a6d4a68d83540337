"""A crane copies its expert: DAgger with a policy that is a mixture of Gaussians.

The expert knows the state and is the linear-quadratic regulator of the model. The
learner sees noisy readings. A recurrent model learns how the readings go on, and where
it is surprised the samples count more.
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

args = SimpleNamespace(
    seed=23, rounds=3, cranes=10, horizon=16, dt=0.2, batch=96, width=32, modes=3,
    memory=16, beta=0.7, beta_decay=0.6, blame=2.0, lr=0.02, decay=0.3, gamma=0.6,
    clip=0.4, dyn_lr=0.01, ema=0.8, limit=1.5, noise=0.05, far=2.6,
)  # fmt: skip
STATE, ACTION, READING = 4, 2, 6


# ---- simulator and expert


class Crane:
    """Trolley and load, two drives; exact steps of a linear system with held actions."""

    def __init__(self, rng):
        self.rng = rng
        a = torch.zeros(STATE, STATE)
        a[0, 1], a[1, 2], a[1, 1] = 1.0, 0.8, -0.3
        a[2, 3], a[3, 2], a[3, 3] = 1.0, -2.5, -0.2
        b = torch.tensor([[0.0, 0.0], [1.0, 0.2], [0.0, 0.0], [-0.9, 0.7]])
        both = torch.zeros(STATE + ACTION, STATE + ACTION)
        both[:STATE] = torch.cat([a, b], 1) * args.dt
        held = torch.matrix_exp(both)
        self.A, self.B = held[:STATE, :STATE], held[:STATE, STATE:]
        self.C = torch.randn(READING, STATE, generator=rng)
        self.offset = 2.0 * torch.randn(READING, generator=rng)

    def reset(self, n):
        return 1.5 * torch.randn(n, STATE, generator=self.rng)

    def read(self, x):
        noise = torch.randn(len(x), READING, generator=self.rng)
        return x @ self.C.T + self.offset + args.noise * noise

    def step(self, x, u):
        push = torch.randn(x.shape, generator=self.rng)
        u = u.clamp(-args.limit, args.limit)
        return x @ self.A.T + u @ self.B.T + args.noise * push


def regulator(A, B, rounds=200):
    """Gain of the discrete Riccati equation."""
    Q, R = torch.diag(torch.tensor([2.0, 0.2, 3.0, 0.2])), 0.5 * torch.eye(ACTION)
    P = Q
    for _ in range(rounds):
        gain = torch.linalg.solve(R + B.T @ P @ B, B.T @ P @ A)
        P = Q + A.T @ P @ (A - B @ gain)
    return gain


@torch.no_grad()
def roll_out(crane, gain, learner, beta, rng):
    """Sequences [cranes, horizon, ..]; who is too far off has ended."""
    x = crane.reset(args.cranes)
    alive = torch.ones(args.cranes, dtype=torch.bool)
    seen = {"reading": [], "expert": [], "done": [], "own": [], "alive": []}
    for _ in range(args.horizon):
        reading = crane.read(x)
        expert = -(x @ gain.T)
        own = torch.rand(args.cranes, generator=rng) >= beta
        action = torch.where(own[:, None], learner.act(reading), expert)
        step = (reading, expert, action, own, alive)
        for column, value in zip(seen.values(), step):
            column.append(value)
        x = crane.step(x, action)
        alive = alive & (x[:, [0, 2]].abs().amax(1) < args.far)
    return {name: torch.stack(column, 1) for name, column in seen.items()}


# ---- networks


class MixtureNLL(torch.autograd.Function):
    """-log sum_k pi_k N(target; mean_k, exp(log_std_k)), without the 2 pi."""

    @staticmethod
    def forward(ctx, logits, mean, log_std, target):
        prior = logits.log_softmax(-1)
        z = (target.unsqueeze(-2) - mean) * torch.exp(-log_std)
        joint = prior - (0.5 * z * z + log_std).sum(-1)
        total = joint.logsumexp(-1)
        share = torch.exp(joint - total.unsqueeze(-1))
        ctx.save_for_backward(prior, z, log_std, share)
        return -total

    @staticmethod
    def backward(ctx, grad):
        prior, z, log_std, share = ctx.saved_tensors
        to_logits = grad.unsqueeze(-1) * (prior.exp() - share)
        mine = (grad.unsqueeze(-1) * share).unsqueeze(-1)
        to_mean = -mine * z * torch.exp(-log_std)
        to_log_std = mine * (1 - z * z)
        return to_logits, to_mean, to_log_std, None


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(READING))
        self.register_buffer("spread", torch.ones(READING))
        self.inlet = nn.Linear(READING, args.width)
        self.norm = nn.LayerNorm(args.width)
        self.hidden = nn.Linear(args.width, args.width)
        self.mode = nn.Linear(args.width, args.modes)
        self.mean = nn.Linear(args.width, args.modes * ACTION)
        self.log_std = nn.Linear(args.width, args.modes * ACTION)

    def normalise(self, reading):
        return (reading - self.centre) / self.spread

    def forward(self, reading):
        h = torch.tanh(self.inlet(self.normalise(reading)))
        h = h + F.silu(self.hidden(self.norm(h)))
        mean = self.mean(h).unflatten(-1, (args.modes, ACTION))
        log_std = self.log_std(h).unflatten(-1, (args.modes, ACTION))
        return self.mode(h), mean, log_std.clamp(-3.0, 1.0)

    def act(self, reading):
        """Mean of the mixture."""
        logits, mean, _ = self(reading)
        return (logits.softmax(-1).unsqueeze(-1) * mean).sum(-2)


class Dynamics(nn.Module):
    """Tells by how much each reading will change."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(READING + ACTION, args.memory)
        self.out = nn.Linear(args.memory, READING)

    def forward(self, reading, done):
        x = torch.cat([reading, done], -1)
        h = x.new_zeros(len(x), args.memory)
        told = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            told.append(self.out(h))
        return torch.stack(told, 1)


def surprise(dynamics, reading, done):
    """Squared error of each step but the last, mean over the readings."""
    told = dynamics(reading[:, :-1], done[:, :-1])
    return (told - (reading[:, 1:] - reading[:, :-1])).square().mean(-1)


# ---- data set


class Memory:
    """All that was ever seen while alive: readings, the expert's actions, weights."""

    def __init__(self):
        self.reading = torch.empty(0, READING)
        self.expert = torch.empty(0, ACTION)
        self.weight = torch.empty(0)

    def add(self, seen, weight):
        alive = seen["alive"]
        self.reading = torch.cat([self.reading, seen["reading"][alive]])
        self.expert = torch.cat([self.expert, seen["expert"][alive]])
        self.weight = torch.cat([self.weight, weight[alive]])

    def sample(self, rng):
        rows = torch.randperm(len(self.weight), generator=rng)[: args.batch]
        return self.reading[rows], self.expert[rows], self.weight[rows]


@torch.no_grad()
def weigh(dynamics, policy, seen):
    """States to which the learner led count more, and those that were not foreseen."""
    weight = 1 + (args.blame - 1) * seen["own"].float()
    error = surprise(dynamics, policy.normalise(seen["reading"]), seen["done"])
    error = torch.cat([error.new_zeros(len(error), 1), error], 1)
    return weight * (0.5 + error).clamp(max=2.0)


@torch.no_grad()
def prepare(policy, first):
    """Normalisation and where the mixture begins, from the expert alone."""
    reading, expert = first["reading"][first["alive"]], first["expert"][first["alive"]]
    var, mean = torch.var_mean(reading, dim=0)
    policy.centre.copy_(mean)
    policy.spread.copy_(var.sqrt())
    spread = expert.std(0)
    apart = torch.linspace(-1, 1, args.modes)[:, None]
    policy.mean.bias.copy_((expert.mean(0) + apart * spread).flatten())
    policy.log_std.bias.copy_((0.5 * spread).log().repeat(args.modes))


# ---- training


@torch.no_grad()
def follow(slow, policy):
    for s, p in zip(slow.parameters(), policy.parameters()):
        s.mul_(args.ema).add_(p, alpha=1 - args.ema)


def main():
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed)
    crane = Crane(rng)
    gain = regulator(crane.A, crane.B)
    policy, dynamics = Policy(), Dynamics()
    first = roll_out(crane, gain, policy, 1.0, rng)
    prepare(policy, first)
    slow = copy.deepcopy(policy).requires_grad_(False)
    memory = Memory()
    memory.add(first, weigh(dynamics, policy, first))

    flat = [p for p in policy.parameters() if p.dim() < 2]
    deep = [p for p in policy.parameters() if p.dim() >= 2]
    groups = [{"params": deep, "weight_decay": args.decay}]
    groups += [{"params": flat, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-5)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=args.gamma)
    dyn_opt = torch.optim.Adam(dynamics.parameters(), lr=args.dyn_lr, eps=1e-5)

    beta = args.beta
    for number in range(args.rounds):
        seen = roll_out(crane, gain, slow, beta, rng)
        memory.add(seen, weigh(dynamics, policy, seen))
        beta *= args.beta_decay

        dyn_opt.zero_grad()
        alive = seen["alive"][:, 1:].float()
        error = surprise(dynamics, policy.normalise(seen["reading"]), seen["done"])
        dyn_loss = (error * alive).sum() / alive.sum()
        dyn_loss.backward()
        dyn_opt.step()

        opt.zero_grad()
        reading, expert, weight = memory.sample(rng)
        nll = MixtureNLL.apply(*policy(reading), expert)
        loss = (weight * nll).sum() / weight.sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), args.clip)
        opt.step()
        sched.step()
        follow(slow, policy)
        off = (slow.act(reading) - expert).square().mean()
        print(f"{number}: nll {loss:.4f} norm {norm:.3f} dynamics {dyn_loss:.4f} off {off:.3f}")


if __name__ == "__main__":
    main()
