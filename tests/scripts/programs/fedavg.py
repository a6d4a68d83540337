# Vibration of machines in three plants: the windows stay where they were recorded, and
# a server averages what each plant's two local steps changed (FedProx, FedAdam).
import copy
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

hp = SimpleNamespace(
    seed=31, sizes=(36, 84, 150), batch=12, rounds=3, local_steps=2,
    channels=4, window=32, width=12, classes=5,
    lr=0.25, momentum=0.9, prox=0.6, bound=0.5, smoothing=0.1,
    server_lr=0.03, betas=(0.9, 0.99), tau=1e-3, fall=0.6,
)  # fmt: skip
STATES = ["healthy", "bearing", "imbalance", "looseness", "gear"]
SAVED_ORDER = sorted(STATES)  # the labels of the pooled run came from folders


# ---- windows


def record(gen):
    """Windows of all plants one after another, [n, channel, time], and their states."""
    n = sum(hp.sizes)
    plant = torch.arange(len(hp.sizes)).repeat_interleave(torch.tensor(hp.sizes))
    # each plant has faults of its own
    share = torch.rand(len(hp.sizes), hp.classes, generator=gen) ** 2 + 0.05
    label = torch.multinomial(share[plant], 1, generator=gen).squeeze(1)
    time = torch.arange(hp.window) / hp.window
    pitch = torch.rand(hp.classes, hp.channels, generator=gen) * 8 + 1
    phase = torch.rand(n, hp.channels, 1, generator=gen)
    wave = torch.sin(2 * math.pi * (pitch[label][..., None] * time + phase))
    noise = torch.randn(n, hp.channels, hp.window, generator=gen)
    gain = torch.tensor([2.0, 0.5, 1.0, 3.0])[:, None]
    lift = torch.tensor([1.0, -0.5, 0.0, 2.0])[:, None]
    x = (wave + 0.5 * noise + 0.3 * plant[:, None, None]) * gain + lift
    return x, label


def standardise(x):
    """Each sensor by its own plant's mean and deviation."""
    return (x - x.mean((0, 2), keepdim=True)) / x.std((0, 2), keepdim=True)


class Plant:
    """A client: its windows, how often it has which state, its own order of drawing."""

    def __init__(self, x, y, seed):
        self.x, self.y = standardise(x), y
        counts = torch.bincount(y, minlength=hp.classes).float()
        self.log_prior = ((counts + 1) / (counts + 1).sum()).log()
        self.gen = torch.Generator().manual_seed(seed)

    def __len__(self):
        return len(self.y)

    def batches(self):
        order = torch.randperm(len(self), generator=self.gen)
        for step in range(hp.local_steps):
            rows = order[step * hp.batch : (step + 1) * hp.batch]
            yield self.x[rows], self.y[rows]


def split(x, y):
    plants, start = [], 0
    for number, size in enumerate(hp.sizes):
        end = start + size
        plants.append(Plant(x[start:end], y[start:end], 1000 + number))
        start = end
    return plants


# ---- kernels


class Mish(torch.autograd.Function):
    """x tanh(softplus(x)), keeping x alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        t = torch.tanh(F.softplus(x))
        return grad * (t + x * x.sigmoid() * (1 - t * t))


class Halve(torch.autograd.Function):
    """Every second value of a signal smoothed by 1 2 1, channel by channel."""

    @staticmethod
    def taps(x):
        return x.new_tensor([0.25, 0.5, 0.25]).expand(x.shape[1], 1, 3)

    @staticmethod
    def forward(ctx, x):
        return F.conv1d(x, Halve.taps(x), stride=2, padding=1, groups=x.shape[1])

    @staticmethod
    def backward(ctx, grad):
        kernel = Halve.taps(grad)
        return F.conv_transpose1d(
            grad, kernel, stride=2, padding=1, output_padding=1, groups=grad.shape[1]
        )


class SmoothedCE(torch.autograd.Function):
    """Mean cross entropy against labels that are a little uncertain."""

    @staticmethod
    def forward(ctx, logits, label, smoothing):
        logp = logits.log_softmax(1)
        target = torch.full_like(logp, smoothing / logp.shape[1])
        target[torch.arange(len(label)), label] += 1 - smoothing
        ctx.save_for_backward(logp, target)
        return -(target * logp).sum(1).mean()

    @staticmethod
    def backward(ctx, grad):
        logp, target = ctx.saved_tensors
        return grad * (logp.exp() - target) / len(logp), None, None


# ---- net


class Stage(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv = nn.Conv1d(n_in, n_out, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm1d(n_out, momentum=0.2)

    def forward(self, x):
        return Halve.apply(Mish.apply(self.bn(self.conv(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Stage(hp.channels, hp.width)
        self.second = Stage(hp.width, hp.width)
        self.embed = nn.Linear(hp.width, hp.width)
        self.head = nn.Linear(hp.width, hp.classes)

    def forward(self, x):
        h = self.second(self.first(x))
        h = Mish.apply(self.embed(h.mean(2)))
        return self.head(h)


def pooled_run(gen):
    """Of the run on data of one plant: kernels as [tap, in, out], and true convolutions."""
    saved, w = {}, hp.width
    for name, n_in in (("first", hp.channels), ("second", w)):
        kernel = torch.randn(3, n_in, w, generator=gen) / math.sqrt(3 * n_in)
        saved[f"{name}.kernel"] = kernel
        saved[f"{name}.gamma"] = 1 + 0.2 * torch.randn(w, generator=gen)
        saved[f"{name}.beta"] = 0.3 * torch.randn(w, generator=gen)
        saved[f"{name}.moving_mean"] = 0.3 * torch.randn(w, generator=gen)
        saved[f"{name}.moving_std"] = 0.4 + torch.rand(w, generator=gen)
    saved["embed"] = 1.5 * torch.randn(w, w, generator=gen) / math.sqrt(w)
    saved["head"] = torch.randn(w, hp.classes, generator=gen) / math.sqrt(w)
    saved["bias"] = 0.5 * torch.randn(hp.classes, generator=gen)
    return saved


@torch.no_grad()
def adopt(net, saved):
    for name in ("first", "second"):
        stage = getattr(net, name)
        stage.conv.weight.copy_(saved[f"{name}.kernel"].permute(2, 1, 0).flip(2))
        stage.bn.weight.copy_(saved[f"{name}.gamma"])
        stage.bn.bias.copy_(saved[f"{name}.beta"])
        stage.bn.running_mean.copy_(saved[f"{name}.moving_mean"])
        stage.bn.running_var.copy_(saved[f"{name}.moving_std"].square())
    # kernels of layers are [in, out]
    net.embed.weight.copy_(saved["embed"].T)
    column = [SAVED_ORDER.index(state) for state in STATES]
    net.head.weight.copy_(saved["head"].T[column])
    net.head.bias.copy_(saved["bias"][column])


# ---- clients


def local_loss(net, anchor, plant, x, y):
    """Logits are raised by what is frequent in a plant; weights stay near the server's."""
    logits = net(x) + plant.log_prior
    fit = SmoothedCE.apply(logits, y, hp.smoothing)
    away = sum((p - a).square().sum() for p, a in zip(net.parameters(), anchor))
    return fit + 0.5 * hp.prox * away


def local_update(server, plant):
    """Two steps of SGD with momentum from the server's weights; what they changed."""
    net = copy.deepcopy(server)
    net.train()
    params = list(net.parameters())
    anchor = [p.detach().clone() for p in params]
    speed = [torch.zeros_like(p) for p in params]
    seen = 0.0
    for x, y in plant.batches():
        loss = local_loss(net, anchor, plant, x, y)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, v in zip(params, speed):
                v.mul_(hp.momentum).add_(p.grad)
                p.sub_(hp.lr * v)
        seen += loss.item() / hp.local_steps
    delta = [p.detach() - a for p, a in zip(params, anchor)]
    norm = torch.stack([d.norm() for d in delta]).norm()
    delta = [d * (hp.bound / norm).clamp(max=1.0) for d in delta]
    return delta, dict(net.named_buffers()), seen


# ---- server


def weighted(parts, weights):
    """The mean of tensors, one from each client."""
    return sum(w * part for part, w in zip(parts, weights))


@torch.no_grad()
def aggregate(server, results, weights):
    """Deltas become the server's gradient, statistics are averaged as they are."""
    for p, *deltas in zip(server.parameters(), *(delta for delta, _, _ in results)):
        p.grad = -weighted(deltas, weights)
    for name, buffer in server.named_buffers():
        theirs = [buffers[name] for _, buffers, _ in results]
        if buffer.is_floating_point():
            buffer.copy_(weighted(theirs, weights))
        else:
            buffer.copy_(torch.stack(theirs).max())


@torch.no_grad()
def accuracy(net, plants):
    net.eval()
    hits = sum((net(plant.x).argmax(1) == plant.y).sum() for plant in plants)
    return (hits / sum(hp.sizes)).item()


def main():
    torch.manual_seed(hp.seed)
    gen = torch.Generator().manual_seed(hp.seed)
    plants = split(*record(gen))
    server = Net()
    adopt(server, pooled_run(gen))
    opt = torch.optim.Adam(server.parameters(), hp.server_lr, hp.betas, eps=hp.tau)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, hp.fall)
    sizes = torch.tensor([float(len(plant)) for plant in plants])
    weights = (sizes / sizes.sum()).tolist()
    for number in range(hp.rounds):
        results = []
        for plant in plants:
            results.append(local_update(server, plant))
        opt.zero_grad()
        aggregate(server, results, weights)
        opt.step()
        sched.step()
        seen = weighted([loss for _, _, loss in results], weights)
        print(f"round {number}: loss {seen:.4f}")
    print(f"accuracy {accuracy(server, plants):.3f}")


if __name__ == "__main__":
    main()
