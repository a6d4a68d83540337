"""What is not understood stays as it is, whole, with its line and a reason."""

from __future__ import annotations

import pytest

from roundoff.errors import ScriptError
from roundoff.migrate.migrating import migrate_script
from roundoff.migrate.result import Migration

HEAD = """\
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.MSELoss()
"""
LOOP = """\
for x, y in data:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""


def migrated(code: str, to: str = "amp") -> Migration:
    return migrate_script(HEAD + code, "train.py", to=to)


def reason_left(code: str, to: str = "amp") -> str:
    migration = migrated(code, to)
    assert not migration.is_changed
    assert migration.changes == ()
    (remark,) = migration.left
    assert remark.line > 0
    return remark.reason


LEFT = {
    "closure": (
        """
def closure():
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    return loss
for x, y in data:
    optimizer.step(closure)
""",
        "closure",
    ),
    "clip in every micro-step": (
        """
for i, (x, y) in enumerate(data):
    loss = criterion(model(x), y) / 4
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        "iterations that do not step",
    ),
    "one line": (
        """
for x, y in data:
    optimizer.zero_grad()
    loss = criterion(model(x), y); loss.backward()
    optimizer.step()
""",
        "on one line",
    ),
    "no forward pass": (
        """
for loss in losses_of_somewhere():
    loss.backward()
    optimizer.step()
""",
        "forward pass",
    ),
    "no step": (
        """
for x, y in data:
    loss = criterion(model(x), y)
    loss.backward()
    update_by_hand(model)
""",
        "no optimizer step",
    ),
    "accelerate": (
        """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x, y in data:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
""",
        "a library",
    ),
    "probabilities": (
        LOOP.replace("criterion(", "nn.functional.binary_cross_entropy("),
        "BCEWithLogitsLoss",
    ),
    "gradient penalty": (
        """
for x, y in data:
    optimizer.zero_grad()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = criterion(out, y) + slope.square().mean()
    loss.backward()
    optimizer.step()
""",
        "bf16 needs no scaler",
    ),
    "steps under conditions of their own": (
        """
other = torch.optim.SGD(model.parameters(), lr=0.2)
for i, (x, y) in enumerate(data):
    loss = criterion(model(x), y)
    loss.backward()
    if i % 2:
        optimizer.step()
    if i % 3:
        other.step()
""",
        "depends on conditions",
    ),
    "half precision by hand": (
        LOOP.replace("model(x)", "model(x.half())"),
        "half precision by hand",
    ),
    "a format by hand": (
        "model.to(dtype=torch.bfloat16)\n" + LOOP,
        "half precision by hand",
    ),
    "made anew where it is used": (
        """
for i, (x, y) in enumerate(data):
    loss = criterion(model(x), y)
    loss.backward()
    inner.step()
    if i % 10 == 0:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
""",
        "made anew",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    code, words = LEFT[name]
    assert words in reason_left(code)


@pytest.mark.parametrize("name", ["closure", "gradient penalty"])
def test_without_a_scaler_it_is_understood(name: str) -> None:
    migration = migrated(LEFT[name][0], "bf16")
    assert migration.left == ()
    assert "dtype=torch.bfloat16" in migration.after


def test_one_loop_is_left_and_the_other_migrated() -> None:
    migration = migrated(LOOP + LEFT["clip in every micro-step"][0])
    (remark,) = migration.left
    assert remark.line > len((HEAD + LOOP).splitlines())
    assert migration.after.count("scaler.step(optimizer)") == 1
    assert migration.after.endswith(LEFT["clip in every micro-step"][0])


@pytest.mark.parametrize(
    "text",
    ["def f(:\n", "\0", "print 'x'\n", "x = (" * 500, "\ufeffx = = 1\n"],
)
def test_no_python(text: str) -> None:
    with pytest.raises(ScriptError, match=r"train\.py"):
        migrate_script(text, "train.py", to="amp")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch\nx = torch.ones(3)\n", "no training loop"),
        ("", "no PyTorch script"),
        ("import numpy\n", "no PyTorch script"),
    ],
)
def test_nothing_that_trains(text: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        migrate_script(text, "train.py", to="amp")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("scaler = torch.amp.GradScaler()\n" + LOOP, "GradScaler is used"),
        ("with torch.autocast('cuda'):\n    y = model(x)\n" + LOOP, "autocast is used"),
        (
            "from torch.cuda.amp import GradScaler\ns = GradScaler()\n" + LOOP,
            "--from torch.cuda.amp",
        ),
    ],
)
def test_already_in_mixed_precision(code: str, words: str) -> None:
    migration = migrated(code)
    assert not migration.is_changed
    assert migration.left == ()
    assert words in migration.notes[0].reason


@pytest.mark.parametrize(
    ("to", "source", "words"),
    [
        (None, None, "not said"),
        ("fp16", None, "did you mean bf16"),
        (None, "amp", "torch.cuda.amp"),
        ("bf16", "apex", "in one go"),
    ],
)
def test_directions(to: str | None, source: str | None, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        migrate_script("import torch\n", "train.py", to=to, source=source)


def test_names_that_are_taken() -> None:
    code = """
from sklearn.preprocessing import StandardScaler
scaler = StandardScaler()
scale_before = 1
sched = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for x, y in data:
    optimizer.zero_grad()
    loss = criterion(model(scaler.transform(x)), y)
    loss.backward()
    optimizer.step()
    sched.step()
"""
    after = migrated(code).after
    assert "grad_scaler = torch.amp.GradScaler(device.type)" in after
    assert "scale_of_step = grad_scaler.get_scale()" in after
    assert "scaler = StandardScaler()" in after


def test_torch_under_another_name() -> None:
    code = """\
import torch as th
net = th.nn.Linear(2, 1).cuda()
opt = th.optim.SGD(net.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    loss = (net(x) - y).square().mean()
    loss.backward(retain_graph=True)
    opt.step()
"""
    after = migrate_script(code, "train.py", to="amp").after
    assert 'with th.amp.autocast(device_type="cuda", dtype=th.float16):' in after
    assert "scaler.scale(loss).backward(retain_graph=True)" in after


def test_torch_that_is_not_imported_by_itself() -> None:
    code = '''\
"""A script."""
from __future__ import annotations
from torch import nn, optim

net = nn.Linear(2, 1).to("cuda:1")
opt = optim.SGD(net.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    opt.step()
'''
    after = migrate_script(code, "train.py", to="bf16").after
    lines = after.splitlines()
    assert lines[3] == "import torch"
    assert (
        '    with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):'
        in lines
    )


def test_callers_in_other_files_are_told() -> None:
    code = """\
import torch

def train(model, data, optimizer, device):
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
"""
    migration = migrate_script(code, "train.py", to="amp")
    assert "def train(model, data, optimizer, device, scaler):" in migration.after
    assert "pass scaler= where it is called" in migration.notes[0].reason


def test_functions_written_by_hand_run_in_fp32() -> None:
    code = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient
"""
    after = migrated(code + LOOP).after
    assert (
        "    @staticmethod\n"
        "    @torch.amp.custom_fwd(device_type=device.type, cast_inputs=torch.float32)\n"
        "    def forward(ctx, x):\n"
    ) in after
    assert "    @torch.amp.custom_bwd(device_type=device.type)\n" in after
