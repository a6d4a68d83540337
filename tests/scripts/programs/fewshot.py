"""Learns to learn digits from three pictures of each: fast weights at learned rates, prototypes beside them."""

import contextlib
import io
import math
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

opt = SimpleNamespace(
    seed=2024,
    known=(0, 1, 2, 3, 4, 5, 6),
    new=(7, 8, 9),
    ways=4,
    shots=3,
    queries=5,
    noise=0.1,
    widths=(8, 12),
    slope=1.5,
    inner_steps=2,
    inner_lr=0.25,
    shares=(0.3, 0.7),
    smoothing=0.1,
    beside=0.4,
    tasks=3,
    outer_steps=3,
    planned=30,
    lr=1e-2,
    rate_lr=3e-2,
    decay=0.05,
    warm=2,
    clip=1.0,
    keep=0.9,
)


class Episodes:
    """Tasks of a few classes each; a class is a digit, turned by some quarters of a circle."""

    def __init__(self, digits, seed):
        bunch = load_digits()
        images = (bunch.images.astype(np.float32) / 16.0 - 0.3) / 0.38
        self.pools = {d: images[bunch.target == d] for d in digits}
        self.classes = [(d, turns) for d in digits for turns in range(4)]
        self.rng = np.random.default_rng(seed)

    def draw(self):
        support, query = [], []
        for index in self.rng.choice(len(self.classes), size=opt.ways, replace=False):
            digit, turns = self.classes[index]
            pool = self.pools[digit]
            rows = self.rng.choice(len(pool), size=opt.shots + opt.queries, replace=False)
            pictures = np.rot90(pool[rows], turns, axes=(1, 2))
            support.append(pictures[: opt.shots])
            query.append(pictures[opt.shots :])
        xs = torch.from_numpy(np.concatenate(support)).unsqueeze(1)
        xq = torch.from_numpy(np.concatenate(query)).unsqueeze(1)
        labels = torch.arange(opt.ways)
        return xs, labels.repeat_interleave(opt.shots), xq, labels.repeat_interleave(opt.queries)


class Swish(torch.autograd.Function):
    """x sigmoid(slope x), a slope for each channel; its slopes have slopes themselves."""

    @staticmethod
    def forward(ctx, x, slope):
        gate = torch.sigmoid(slope * x)
        ctx.save_for_backward(x, slope)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, slope = ctx.saved_tensors
        gate = torch.sigmoid(slope * x)
        bent = x * gate * (1 - gate)
        grad_x = grad * (gate + slope * bent)
        grad_slope = (grad * x * bent).sum((0, 2, 3)).view_as(slope)
        return grad_x, grad_slope


class SquaredDistance(torch.autograd.Function):
    """Between all rows of a and all rows of b."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad_a = 2 * (grad.sum(1)[:, None] * a - grad @ b)
        grad_b = 2 * (grad.sum(0)[:, None] * b - grad.T @ a)
        return grad_a, grad_b


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.ParameterDict()
        channels = 1
        for i, width in enumerate(opt.widths):
            kernel = nn.init.kaiming_normal_(torch.empty(width, channels, 3, 3), nonlinearity="relu")
            self.theta[f"conv{i}"] = nn.Parameter(kernel)
            self.theta[f"gain{i}"] = nn.Parameter(torch.ones(width))
            self.theta[f"shift{i}"] = nn.Parameter(torch.zeros(width))
            self.theta[f"slope{i}"] = nn.Parameter(torch.full((width, 1, 1), opt.slope))
            channels = width
        features = channels * (8 // 2 ** len(opt.widths)) ** 2
        self.theta["head"] = nn.Parameter(torch.randn(opt.ways, features) / math.sqrt(features))
        self.theta["bias"] = nn.Parameter(torch.zeros(opt.ways))
        start = math.log(opt.inner_lr)
        self.log_rates = nn.ParameterDict(
            {name: nn.Parameter(torch.full((opt.inner_steps, *p.shape), start)) for name, p in self.theta.items()}
        )
        self.log_tau = nn.Parameter(torch.tensor(math.log(features)))

    def embed(self, x, w):
        for i in range(len(opt.widths)):
            x = F.conv2d(x, w[f"conv{i}"], padding=1)
            x = F.batch_norm(x, None, None, w[f"gain{i}"], w[f"shift{i}"], training=True)
            x = F.max_pool2d(Swish.apply(x, w[f"slope{i}"]), 2)
        return x.flatten(1)

    def scores(self, x, w):
        return F.linear(self.embed(x, w), w["head"], w["bias"])

    def adapt(self, xs, ys, graph=True):
        """The weights behind each step on the support."""
        w, trail = dict(self.theta.items()), []
        for k in range(opt.inner_steps):
            loss = F.cross_entropy(self.scores(xs, w), ys)
            grads = torch.autograd.grad(loss, list(w.values()), create_graph=graph)
            fast = {}
            for (name, p), g in zip(w.items(), grads, strict=True):
                rate = self.log_rates[name][k].exp()
                fast[name] = p - rate * g
            w = fast
            trail.append(w)
        return trail

    def prototype_loss(self, xs, xq, yq):
        """How well the nearest mean of a class would do, without any step."""
        w = dict(self.theta.items())
        support = self.embed(xs, w).view(opt.ways, opt.shots, -1)
        prototypes = support.mean(1)
        far = SquaredDistance.apply(self.embed(xq, w), prototypes)
        return F.cross_entropy(-far / self.log_tau.exp(), yq)

    def forward(self, xs, ys, xq, yq):
        loss = opt.beside * self.prototype_loss(xs, xq, yq)
        for share, w in zip(opt.shares, self.adapt(xs, ys), strict=True):
            loss = loss + share * F.cross_entropy(self.scores(xq, w), yq, label_smoothing=opt.smoothing)
        return loss


class Average:
    """A mean of the weights that forgets, first fast, then slowly."""

    def __init__(self, module):
        self.values = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.count = 0

    @torch.no_grad()
    def update(self, module):
        self.count += 1
        keep = min(opt.keep, self.count / (self.count + 2))
        for name, p in module.named_parameters():
            self.values[name].mul_(keep).add_(p, alpha=1 - keep)

    @contextlib.contextmanager
    def in_place_of(self, module):
        own = {name: p.detach().clone() for name, p in module.named_parameters()}
        module.load_state_dict(self.values)
        yield
        module.load_state_dict(own)


def rate_at(step):
    if step < opt.warm:
        return (step + 1) / (opt.warm + 1)
    done = (step - opt.warm) / (opt.planned - opt.warm)
    return 0.5 * (1 + math.cos(math.pi * done))


class Run:
    def __init__(self):
        self.learner = Learner()
        self.episodes = Episodes(opt.known, opt.seed)
        decayed, kept = [], [self.learner.log_tau]
        for name, p in self.learner.theta.items():
            (decayed if name.startswith(("conv", "head")) else kept).append(p)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": opt.decay},
                {"params": kept},
                {"params": self.learner.log_rates.parameters(), "lr": opt.rate_lr},
            ],
            lr=opt.lr,
            weight_decay=0.0,
            eps=1e-6,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate_at)
        self.average = Average(self.learner)

    def save(self):
        file = io.BytesIO()
        state = {
            "learner": self.learner.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "average": self.average.values,
            "count": self.average.count,
            "episodes": self.episodes.rng.bit_generator.state,
            "noise": torch.get_rng_state(),
        }
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved):
        state = torch.load(io.BytesIO(saved))
        self.learner.load_state_dict(state["learner"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.average.values = state["average"]
        self.average.count = state["count"]
        self.episodes.rng.bit_generator.state = state["episodes"]
        torch.set_rng_state(state["noise"])

    def outer_step(self):
        mean = 0.0
        self.optimizer.zero_grad()
        for _ in range(opt.tasks):
            xs, ys, xq, yq = self.episodes.draw()
            xs = xs + opt.noise * torch.randn_like(xs)
            loss = self.learner(xs, ys, xq, yq) / opt.tasks
            loss.backward()
            mean += loss.item()
        norm = nn.utils.clip_grad_norm_(self.learner.parameters(), opt.clip)
        self.optimizer.step()
        self.schedule.step()
        self.average.update(self.learner)
        return mean, norm.item()

    def evaluate(self, tasks):
        """Loss and share of right answers on new digits, adapted from the averaged weights."""
        losses, right = [], []
        with self.average.in_place_of(self.learner):
            for xs, ys, xq, yq in tasks:
                w = self.learner.adapt(xs, ys, graph=False)[-1]
                with torch.no_grad():
                    scores = self.learner.scores(xq, w)
                    losses.append(F.cross_entropy(scores, yq).item())
                    right.append((scores.argmax(1) == yq).float().mean().item())
        return sum(losses) / len(tasks), sum(right) / len(tasks)


def main():
    torch.manual_seed(opt.seed)
    unseen = Episodes(opt.new, opt.seed + 1)
    held_out = [unseen.draw() for _ in range(2)]
    run = Run()
    for step in range(opt.outer_steps):
        loss, norm = run.outer_step()
        if step == 0:  # the queue allows no longer job: the rest is another one
            saved = run.save()
            run = Run()
            run.load(saved)
        held, right = run.evaluate(held_out)
        print(f"{step} loss {loss:.6f} norm {norm:.6f} held out {held:.6f} right {right:.3f}")


if __name__ == "__main__":
    main()
