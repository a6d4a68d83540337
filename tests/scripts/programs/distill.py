"""A small student of four bits learns from a teacher: softened targets, hints by hooks, rounding passed straight through."""

import torch
import torch.nn.functional as F
from torch import nn

TEMPERATURE, HARD, HINT = 3.0, 0.3, 0.05
BITS, CLASSES, HINTED = 4, 5, "middle"


class RoundThrough(torch.autograd.Function):
    """Rounds; its gradient is that of the identity inside the range."""

    @staticmethod
    def forward(ctx, x, scale, low, high):
        code = x / scale
        ctx.save_for_backward((code >= low) & (code <= high))
        return code.round().clamp(low, high) * scale

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None, None


class QuantConv(nn.Conv2d):
    """Weights rounded by output channel, inputs by a range that follows what it sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("peak", torch.tensor(0.0))
        self.register_buffer("seen", torch.tensor(0))

    def observe(self, x):
        largest = x.detach().abs().max()
        if self.seen == 0:
            self.peak.copy_(largest)
        else:
            self.peak.mul_(0.9).add_(0.1 * largest)
        self.seen += 1

    def forward(self, x):
        if self.training:
            self.observe(x)
        top = 2 ** (BITS - 1) - 1
        x = RoundThrough.apply(x, self.peak / top, -top - 1, top)
        scale = self.weight.detach().abs().amax((1, 2, 3), keepdim=True) / top
        weight = RoundThrough.apply(self.weight, scale, -top, top)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def stage(conv, inside, outside, stride=1, groups=1):
    return nn.Sequential(
        conv(inside, outside, 3, stride=stride, padding=1, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class Teacher(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.early = stage(nn.Conv2d, 3, width)
        self.late = stage(nn.Conv2d, width, 2 * width, stride=2)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x):
        return self.head(self.drop(self.late(self.early(x)).mean((2, 3))))


class Student(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.early = stage(nn.Conv2d, 3, width)
        self.middle = stage(QuantConv, width, width, groups=2)
        self.late = stage(QuantConv, width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x):
        return self.head(self.late(self.middle(self.early(x))).mean((2, 3)))


class Hooks:
    """What named modules put out in the last forward pass."""

    def __init__(self, model, names):
        self.kept = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(self.keeper(name))

    def keeper(self, name):
        def keep(module, inputs, output):
            self.kept[name] = output

        return keep


def teacher_of(seed):
    torch.manual_seed(seed)
    teacher = Teacher()
    with torch.no_grad():
        for module in teacher.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
        teacher.head.weight.mul_(4)
    return teacher


def student_from(teacher):
    student = Student()
    with torch.no_grad():
        student.early[0].weight.copy_(teacher.early[0].weight[::2])
        for name, value in student.early[1].state_dict().items():
            if value.ndim:
                value.copy_(teacher.early[1].state_dict()[name][::2])
    return student


def batch(step, size=8):
    g = torch.Generator().manual_seed(300 + step)
    label = torch.randint(CLASSES, (size,), generator=g)
    place = torch.linspace(0, 3.14, 10)
    wave = torch.sin((label[:, None, None] + 1) * (place[:, None] + 0.5 * place))
    picture = wave[:, None] + 0.3 * torch.randn(size, 3, 10, 10, generator=g)
    flipped = torch.rand(size, 1, 1, 1, generator=g) < 0.5
    return torch.where(flipped, picture.flip(-1), picture), label


def distilled(student_logits, teacher_logits, label):
    soft = F.kl_div(
        F.log_softmax(student_logits / TEMPERATURE, dim=1),
        F.softmax(teacher_logits / TEMPERATURE, dim=1),
        reduction="batchmean",
    )
    hard = F.cross_entropy(student_logits, label)
    return (1 - HARD) * TEMPERATURE**2 * soft + HARD * hard


teacher = teacher_of(seed=20).eval().requires_grad_(False)
student = student_from(teacher).train()
torch.manual_seed(22)
adapt = nn.Conv2d(6, 12, 1)
teacher_sees, student_sees = Hooks(teacher, ["early"]), Hooks(student, [HINTED])
weights = [p for p in student.parameters() if p.ndim > 1]
others = [p for p in student.parameters() if p.ndim < 2]
optimizer = torch.optim.SGD(
    [{"params": weights, "weight_decay": 1e-3}, {"params": others, "lr": 2e-2}],
    lr=1e-2,
    momentum=0.9,
)
adapt_optimizer = torch.optim.Adagrad(adapt.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 4], gamma=0.5)
for step in range(3):
    picture, label = batch(step)
    with torch.no_grad():
        wanted = teacher(picture)
    logits = student(picture)
    hint = F.mse_loss(adapt(student_sees.kept[HINTED]), teacher_sees.kept["early"])
    loss = distilled(logits, wanted, label) + HINT * hint
    optimizer.zero_grad()
    adapt_optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    adapt_optimizer.step()
    schedule.step()
    print(step, f"{loss.item():.5f} {hint.item():.5f}")
