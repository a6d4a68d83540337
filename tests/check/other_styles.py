"""Training scripts in other styles than those of ``planted``, each with one difference.

Batches of numpy, streams, hand-written loops, classes, several optimizers, closures.
"""

from __future__ import annotations

from .planted import Alike, Planted

#: No loader and no data set: numpy draws the order, a loop sets the rates.
BY_HAND = """
import math
import numpy as np
import torch
import torch.nn.functional as F

rs = np.random.RandomState(11)
X = rs.randn(120, 6).astype("float32")
Y = (X[:, :3].argmax(1)).astype("int64")
X = (X - 0.1) / 1.5
torch.manual_seed(1)
w1 = torch.nn.Parameter(torch.randn(6, 20) * 0.3)
b1 = torch.nn.Parameter(torch.zeros(20))
w2 = torch.nn.Parameter(torch.randn(20, 3) * 0.3)
params = [w1, b1, w2]


def net(x, training=True):
    h = F.gelu(x @ w1 + b1)
    h = F.layer_norm(h, (20,), eps=1e-5)
    h = F.dropout(h, 0.2, training)
    return h @ w2


opt = torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
WARM, BS, TOTAL = 3, 20, 12
order_rs = np.random.RandomState(5)
ema = [p.detach().clone() for p in params]
step = 0
while step < TOTAL:
    perm = order_rs.permutation(len(X))
    for s in range(0, len(X), BS):
        idx = perm[s:s + BS]
        xb, yb = torch.from_numpy(X[idx]), torch.from_numpy(Y[idx])
        for g in opt.param_groups:
            g["lr"] = 0.05 * min(1.0, (step + 1) / WARM)
        loss = F.cross_entropy(net(xb), yb, label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for e, p in zip(ema, params):
                e.mul_(0.99).add_(p, alpha=0.01)
        step += 1
        if step == TOTAL:
            break
"""

#: A convolution net, a data set with a transform of its own, groups without decay.
IMAGES = """
import random
import numpy
import torch
import torch.nn as nn
from torch.utils.data import Dataset, DataLoader, WeightedRandomSampler, Subset


def seed_everything(s):
    random.seed(s); numpy.random.seed(s); torch.manual_seed(s)


seed_everything(2024)


class Prepare:
    def __init__(self, mean, std, size, mode):
        self.mean, self.std, self.size, self.mode = mean, std, size, mode

    def __call__(self, img):
        img = (img - self.mean) / self.std
        extra = {} if self.mode == "nearest" else {"align_corners": False}
        return nn.functional.interpolate(
            img[None], size=self.size, mode=self.mode, **extra)[0]


class Toy(Dataset):
    def __init__(self, n, transform):
        g = torch.Generator().manual_seed(0)
        self.x = torch.rand(n, 3, 10, 10, generator=g)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.transform = transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.transform(self.x[i])
        if random.random() < 0.5:
            x = x.flip(-1)
        return {"image": x, "label": self.y[i]}


data = Toy(60, Prepare(0.5, 0.25, 8, "bilinear"))
weights = torch.ones(60)
weights[:30] = 3.0
sampler = WeightedRandomSampler(weights, 60, generator=torch.Generator().manual_seed(9))
loader = DataLoader(data, batch_size=12, sampler=sampler)


class Block(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, cout)
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Block(3, 8), nn.MaxPool2d(2), Block(8, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


net = Net()
decay = [p for p in net.parameters() if p.ndim > 1]
rest = [p for p in net.parameters() if p.ndim <= 1]
opt = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
    lr=2e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
criterion = nn.CrossEntropyLoss(label_smoothing=0.0)


def train_one_epoch(epoch):
    net.train()
    for batch in loader:
        out = net(batch["image"])
        loss = criterion(out, batch["label"])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.5)
        opt.step()
    sched.step()


@torch.no_grad()
def evaluate():
    net.eval()
    for batch in loader:
        net(batch["image"])


for epoch in range(3):
    train_one_epoch(epoch)
    evaluate()
"""

#: A language model that reads a stream, accumulates and warms up.
STREAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

torch.set_num_threads(1)
torch.manual_seed(42)
VOCAB, CTX, ACC = 40, 12, 2


class Stream(IterableDataset):
    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(64):
            ids = torch.randint(0, VOCAB, (CTX + 1,), generator=g)
            yield ids[:-1], ids[1:]


class TinyLM(nn.Module):
    def __init__(self, width=16, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.pos = nn.Parameter(torch.zeros(CTX, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True,
                                           norm_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, VOCAB, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        h = self.enc(self.tok(ids) + self.pos[: ids.shape[1]], mask=mask, is_causal=True)
        return self.out(h)


model = TinyLM()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 4))
model.train()
for i, (ids, targets) in enumerate(DataLoader(Stream(3), batch_size=4)):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
        logits = model(ids)
        loss = nn.functional.cross_entropy(
            logits.view(-1, VOCAB), targets.reshape(-1), reduction="mean")
    (loss / ACC).backward()
    if (i + 1) % ACC == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        opt.step()
        warm.step()
        opt.zero_grad()
"""

#: A trainer class, a split, validation, a plateau schedule and a loss scale.
TRAINER = """
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)


class Trainer:
    def __init__(self):
        g = torch.Generator().manual_seed(77)
        x = torch.randn(150, 10, generator=g)
        y = (x.sum(1, keepdim=True) > 0).float()
        split = torch.Generator().manual_seed(1)
        self.train_set, self.val_set = random_split(
            TensorDataset(x, y), [120, 30], generator=split)
        self.model = nn.Sequential(
            nn.Linear(10, 32), nn.BatchNorm1d(32, momentum=0.1), nn.ReLU(),
            nn.Dropout(0.0), nn.Linear(32, 1))
        self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1.0))
        self.opt = optim.RMSprop(self.model.parameters(), lr=1e-3, alpha=0.99)
        self.sched = optim.lr_scheduler.ReduceLROnPlateau(self.opt, patience=0, factor=0.5, threshold=10.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def loader(self, data, shuffle):
        return DataLoader(data, batch_size=16, shuffle=shuffle, drop_last=False)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for x, y in self.loader(self.train_set, True):
                with torch.autocast("cpu", dtype=torch.float16):
                    out = self.model(x)
                    loss = self.loss(out.float(), y)
                self.opt.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.opt)
                nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
                self.scaler.step(self.opt)
                self.scaler.update()
                self.ema.update_parameters(self.model)
            self.sched.step(self.validate())

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total = 0.0
        for x, y in self.loader(self.val_set, False):
            total += self.loss(self.model(x), y).item()
        return total


if __name__ == "__main__":
    Trainer().fit(3)
"""

#: Two networks against each other, two optimizers.
ADVERSARIAL = """
import torch
import torch.nn as nn

torch.manual_seed(3)
G = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
g_opt = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
d_opt = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
real_data = torch.randn(256, 2, generator=torch.Generator().manual_seed(4)) + 2.0
for it in range(6):
    real = real_data[it * 16 : it * 16 + 16]
    z = torch.randn(16, 4)
    fake = G(z)
    d_loss = bce(D(real), torch.ones(16, 1)) + bce(D(fake.detach()), torch.zeros(16, 1))
    d_opt.zero_grad(); d_loss.backward(); d_opt.step()
    g_loss = bce(D(fake), torch.ones(16, 1))
    g_opt.zero_grad(); g_loss.backward(); g_opt.step()
"""

FRESH = (
    Planted(
        "order of numpy",
        "order_rs = np.random.RandomState(5)",
        "order_rs = np.random.RandomState(6)",
        ("data", "mean"),
        script=BY_HAND,
    ),
    Planted(
        "rate by hand",
        "= 0.05 * min",
        "= 0.03 * min",
        ("learning rate", "0.01666", "0.01"),
        script=BY_HAND,
    ),
    Planted(
        "warm-up by hand",
        "WARM, BS, TOTAL = 3",
        "WARM, BS, TOTAL = 5",
        ("learning rate",),
        script=BY_HAND,
    ),
    Planted(
        "label smoothing, function",
        "label_smoothing=0.1",
        "label_smoothing=0.0",
        ("smoothing", "0.1"),
        script=BY_HAND,
    ),
    Planted(
        "label smoothing, module",
        "label_smoothing=0.0",
        "label_smoothing=0.1",
        ("smoothing", "0.1"),
        script=IMAGES,
    ),
    Planted(
        "dropout, function",
        "F.dropout(h, 0.2",
        "F.dropout(h, 0.4",
        ("p of bernoulli_", "train.py:21", "0.8", "0.6"),
        script=BY_HAND,
    ),
    Planted(
        "eps of a function",
        "eps=1e-5",
        "eps=1e-3",
        ("eps", "1e-05", "0.001"),
        script=BY_HAND,
    ),
    Planted(
        "nesterov",
        "nesterov=True",
        "nesterov=False",
        ("nesterov", "True", "False"),
        script=BY_HAND,
    ),
    Planted(
        "activation, function",
        "F.gelu(x @ w1 + b1)",
        'F.gelu(x @ w1 + b1, approximate="tanh")',
        ("gelu", "tanh"),
        script=BY_HAND,
    ),
    Planted(
        "mean of the data",
        "(X - 0.1) / 1.5",
        "(X - 0.0) / 1.5",
        ("data", "plus"),
        script=BY_HAND,
    ),
    Planted(
        "batch size by hand",
        "BS, TOTAL = 3, 20",
        "BS, TOTAL = 3, 30",
        ("batch size", "20", "30"),
        script=BY_HAND,
    ),
    Planted(
        "labels by hand",
        "X[:, :3].argmax(1)",
        "X[:, 1:4].argmax(1)",
        ("label",),
        script=BY_HAND,
    ),
    Planted(
        "scale of the weights",
        "torch.randn(20, 3) * 0.3",
        "torch.randn(20, 3) * 0.5",
        ("mul", "train.py:14", "0.3", "0.5"),
        script=BY_HAND,
    ),
    Planted(
        "average by hand",
        "e.mul_(0.99).add_(p, alpha=0.01)",
        "e.mul_(0.9).add_(p, alpha=0.1)",
        ("0.99", "0.9"),
        script=BY_HAND,
    ),
    Planted(
        "gradients kept",
        "        opt.zero_grad()\n",
        "        if step == 0: opt.zero_grad()\n",
        ("clearing of gradients", "missing", "done"),
        script=BY_HAND,
    ),
    Planted(
        "mean of a transform",
        "Prepare(0.5, 0.25",
        "Prepare(0.45, 0.25",
        ("transform", "0.5", "0.45"),
        script=IMAGES,
    ),
    Planted(
        "resizing",
        '8, "bilinear"',
        '8, "nearest"',
        ("transform", "bilinear", "nearest"),
        script=IMAGES,
    ),
    Planted(
        "augmentation",
        "random.random() < 0.5",
        "random.random() < 0.9",
        ("data",),
        script=IMAGES,
    ),
    Planted(
        "weights of a sampler",
        "weights[:30] = 3.0",
        "weights[:30] = 9.0",
        ("sampler",),
        script=IMAGES,
    ),
    Planted(
        "decay of norms",
        '"params": rest, "weight_decay": 0.0',
        '"params": rest, "weight_decay": 0.05',
        ("weight decay", "0.0", "0.05"),
        script=IMAGES,
    ),
    Planted(
        "groups of a norm",
        "nn.GroupNorm(4, cout)",
        "nn.GroupNorm(2, cout)",
        ("norm", "GroupNorm(4", "GroupNorm(2"),
        script=IMAGES,
    ),
    Planted(
        "activation, module",
        "nn.GELU()",
        'nn.GELU(approximate="tanh")',
        ("GELU", "none", "tanh"),
        script=IMAGES,
    ),
    Planted(
        "evaluation mode left on",
        "def train_one_epoch(epoch):\n    net.train()\n",
        "net.train()\n\n\ndef train_one_epoch(epoch):\n",
        ("mode", "evaluation"),
        script=IMAGES,
    ),
    Planted(
        "schedule by step",
        "        opt.step()\n    sched.step()\n",
        "        opt.step()\n        sched.step()\n",
        ("learning rate",),
        script=IMAGES,
    ),
    Planted(
        "clipped values",
        "net.parameters(), 0.5)",
        "net.parameters(), 0.05)",
        ("clip", "0.5", "0.05"),
        script=IMAGES,
    ),
    Planted(
        "seed of Python",
        "random.seed(s);",
        "random.seed(s + 1);",
        ("seed", "2024", "2025"),
        script=IMAGES,
    ),
    Planted(
        "accumulation",
        "CTX, ACC = 40, 12, 2",
        "CTX, ACC = 40, 12, 4",
        ("backward pass", "2", "4"),
        script=STREAM,
    ),
    Planted(
        "undivided loss",
        "(loss / ACC).backward()",
        "loss.backward()",
        ("loss", "div", "train.py:48"),
        script=STREAM,
    ),
    Planted("stream's seed", "Stream(3)", "Stream(4)", ("data",), script=STREAM),
    Planted(
        "reduction",
        'reduction="mean"',
        'reduction="sum"',
        ("mean", "sum"),
        script=STREAM,
    ),
    Planted(
        "context",
        "VOCAB, CTX, ACC = 40, 12",
        "VOCAB, CTX, ACC = 40, 10",
        ("shape", "12", "10"),
        script=STREAM,
    ),
    Planted(
        "autocast off",
        "enabled=True",
        "enabled=False",
        ("low precision", "bfloat16"),
        script=STREAM,
    ),
    Planted(
        "untied weights",
        "        self.out.weight = self.tok.weight\n",
        "",
        ("share", "out.weight = tok.weight"),
        script=STREAM,
    ),
    Planted(
        "depth", "layers=2", "layers=3", ("num_layers=2", "num_layers=3"), script=STREAM
    ),
    Planted(
        "positions frozen",
        "model = TinyLM()\n",
        "model = TinyLM()\nmodel.pos.requires_grad_(False)\n",
        ("frozen", "pos"),
        script=STREAM,
    ),
    Planted(
        "order of norms",
        "norm_first=True",
        "norm_first=False",
        ("norm_first",),
        script=STREAM,
    ),
    Planted(
        "not causal",
        "mask=mask, is_causal=True",
        "mask=None",
        ("operators", "train.py:35", "add"),
        script=STREAM,
    ),
    Planted(
        "split",
        "split = torch.Generator().manual_seed(1)",
        "split = torch.Generator().manual_seed(2)",
        ("samples",),
        script=TRAINER,
    ),
    Planted(
        "momentum of statistics",
        "momentum=0.1",
        "momentum=0.01",
        ("momentum", "0.1", "0.01"),
        script=TRAINER,
    ),
    Planted(
        "weight of a class",
        "torch.tensor(1.0)",
        "torch.tensor(3.0)",
        ("pos weight", "1", "3"),
        script=TRAINER,
    ),
    Planted(
        "growth",
        "growth_interval=2",
        "growth_interval=200",
        ("growth interval", "2", "200"),
        script=TRAINER,
    ),
    Planted(
        "half of another kind",
        "dtype=torch.float16",
        "dtype=torch.bfloat16",
        ("float16", "bfloat16"),
        script=TRAINER,
    ),
    Planted(
        "average of weights",
        "get_ema_multi_avg_fn(0.99)",
        "get_ema_multi_avg_fn(0.9)",
        ("average", "0.99", "0.9"),
        script=TRAINER,
    ),
    Planted(
        "plateau",
        "factor=0.5",
        "factor=0.1",
        ("learning rate", "0.0005", "0.0001"),
        script=TRAINER,
    ),
    Planted(
        "alpha", "alpha=0.99)", "alpha=0.9)", ("alpha", "0.99", "0.9"), script=TRAINER
    ),
    Planted(
        "last batch",
        "drop_last=False",
        "drop_last=True",
        ("drop_last", "False", "True"),
        script=TRAINER,
    ),
    Planted(
        "no unscaling",
        "                self.scaler.unscale_(self.opt)\n",
        "",
        ("unscale",),
        script=TRAINER,
    ),
    Planted(
        "rate of the second",
        "D.parameters(), lr=2e-3",
        "D.parameters(), lr=1e-3",
        ("learning rate", "0.002", "0.001"),
        script=ADVERSARIAL,
    ),
    Planted(
        "slope",
        "G = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2)",
        "G = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.1)",
        ("slope", "0.2", "0.1"),
        script=ADVERSARIAL,
    ),
    Planted(
        "fp64 everywhere",
        "torch.manual_seed(3)\n",
        "torch.manual_seed(3)\ntorch.set_default_dtype(torch.float64)\n",
        ("default dtype", "float32", "float64"),
        script=ADVERSARIAL,
    ),
    Planted(
        "instructions",
        "",
        "",
        ("ATEN_CPU_CAPABILITY", "default"),
        script=ADVERSARIAL,
        environment=(("ATEN_CPU_CAPABILITY", "default"),),
    ),
    Planted(
        "algorithms",
        "torch.manual_seed(3)\n",
        "torch.manual_seed(3)\ntorch.use_deterministic_algorithms(True)\n",
        ("deterministic", "off", "on"),
        script=ADVERSARIAL,
    ),
)

FRESH_ALIKE = (
    Alike("by hand, again", script=BY_HAND),
    Alike("other names", "order_rs", "shuffler", script=BY_HAND),
    Alike(
        "cleared one by one",
        "        opt.zero_grad()\n",
        "        for p in params: p.grad = None\n",
        script=BY_HAND,
    ),
    Alike(
        "printed losses",
        "        opt.zero_grad()\n        loss.backward()",
        "        print(step, loss.item())\n        opt.zero_grad()\n        loss.backward()",
        script=BY_HAND,
    ),
    Alike("images, again", script=IMAGES),
    Alike(
        "spelled-out defaults",
        "lr=2e-3)",
        "lr=2e-3, betas=(0.9, 0.999), eps=1e-8)",
        script=IMAGES,
    ),
    Alike(
        "an accuracy beside",
        "        loss.backward()\n        nn.utils",
        "        acc = (out.argmax(1) == batch['label']).float().mean().item()\n        loss.backward()\n        nn.utils",
        script=IMAGES,
    ),
    Alike("stream, again", script=STREAM),
    Alike(
        "saved on the way",
        "        opt.zero_grad()\n",
        "        opt.zero_grad()\n        import io; torch.save(model.state_dict(), io.BytesIO())\n",
        script=STREAM,
    ),
    Alike("trainer, again", script=TRAINER),
    Alike(
        "a helper class",
        "class Trainer:",
        "class Empty:\n    pass\n\n\nclass Trainer:",
        script=TRAINER,
    ),
    Alike("two networks, again", script=ADVERSARIAL),
    Alike(
        "written in three lines",
        "d_opt.zero_grad(); d_loss.backward(); d_opt.step()",
        "d_opt.zero_grad()\n    d_loss.backward()\n    d_opt.step()",
        script=ADVERSARIAL,
    ),
)
