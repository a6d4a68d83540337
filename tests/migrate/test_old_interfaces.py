"""torch.cuda.amp and Apex, rewritten to torch.amp."""

from __future__ import annotations

import ast

import pytest

from roundoff.migrate.migrating import migrate_script
from roundoff.migrate.result import Migration

LOOP = """\
for x, y in data:
    optimizer.zero_grad()
    with amp.scale_loss(criterion(model(x.cuda()), y.cuda()), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""
APEX = """\
import torch
from apex import amp

model = torch.nn.Linear(4, 1).cuda()
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
"""


def migrated(code: str, source: str) -> Migration:
    migration = migrate_script(code, "train.py", to=None, source=source)
    ast.parse(migration.after)
    assert not migrate_script(
        migration.after, "train.py", to=None, source=source
    ).is_changed
    return migration


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from torch.cuda.amp import autocast\nwith autocast():\n    pass\n",
            'from torch.amp import autocast\nwith autocast("cuda"):\n    pass\n',
        ),
        (
            "from torch.cuda.amp import autocast as low, GradScaler\ns = GradScaler(1024.0)\n",
            'from torch.amp import autocast as low, GradScaler\ns = GradScaler("cuda", 1024.0)\n',
        ),
        (
            "import torch.cuda.amp as amp\nwith amp.autocast(use, torch.bfloat16):\n    pass\n",
            'import torch.amp as amp\nwith amp.autocast("cuda", enabled=use, dtype=torch.bfloat16):\n    pass\n',
        ),
        (
            "from torch.cuda import amp\ns = amp.GradScaler(\n    enabled=use,  # or not\n)\n",
            'from torch import amp\ns = amp.GradScaler("cuda", \n    enabled=use,  # or not\n)\n',
        ),
        (
            "import torch\nwith torch.cpu.amp.autocast(dtype=torch.bfloat16):\n    pass\n",
            'import torch\nwith torch.amp.autocast("cpu", dtype=torch.bfloat16):\n    pass\n',
        ),
        (
            "import torch as th\n@th.cuda.amp.custom_fwd(cast_inputs=th.float16)\ndef f(ctx): ...\n",
            'import torch as th\n@th.amp.custom_fwd(device_type="cuda", cast_inputs=th.float16)\ndef f(ctx): ...\n',
        ),
        (
            "import torch\nx = isinstance(s, torch.cuda.amp.GradScaler)\n",
            "import torch\nx = isinstance(s, torch.amp.GradScaler)\n",
        ),
    ],
)
def test_torch_cuda_amp(before: str, after: str) -> None:
    assert migrated(before, "torch.cuda.amp").after == after


def test_torch_cuda_amp_that_is_not_used() -> None:
    migration = migrated("import torch\n", "torch.cuda.amp")
    assert "not used" in migration.notes[0].reason


def test_autocast_that_is_passed_on() -> None:
    code = "from torch.cuda.amp import autocast\nmake = choose(autocast)\n"
    assert "passed on" in migrated(code, "torch.cuda.amp").left[0].reason


def test_apex() -> None:
    migration = migrated(APEX + LOOP, "apex")
    assert "apex" not in migration.after
    assert 'scaler = torch.amp.GradScaler("cuda")' in migration.after
    assert (
        "        loss = criterion(model(x.cuda()), y.cuda())\n"
        "    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    ) in migration.after
    assert any("O1 patched functions" in note.reason for note in migration.notes)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_levels_are_remarks(level: str) -> None:
    migration = migrated(APEX.replace("O1", level) + LOOP, "apex")
    assert any(note.reason.startswith(level) for note in migration.notes)


def test_apex_switched_off() -> None:
    migration = migrated(APEX.replace("O1", "O0") + LOOP, "apex")
    assert "    (criterion(model(x.cuda()), y.cuda())).backward()\n" in migration.after
    assert "scaler" not in migration.after


@pytest.mark.parametrize(
    "code",
    [
        APEX.replace("model, optimizer = amp", "net, opt = amp") + LOOP,
        APEX + "amp.register_float_function(torch, 'exp')\n" + LOOP,
        APEX + LOOP.replace("optimizer.step()", "optimizer.step(closure)"),
    ],
)
def test_apex_that_stays(code: str) -> None:
    migration = migrate_script(code, "train.py", to=None, source="apex")
    assert migration.after == code
    assert migration.left
    assert migration.changes == ()


def test_masters_and_states() -> None:
    code = APEX + LOOP.replace(
        "    optimizer.step()",
        "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)\n    optimizer.step()",
    )
    code += """\
torch.save({"optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, "x.pt")
state = torch.load("x.pt")
optimizer.load_state_dict(state["optimizer"])
amp.load_state_dict(state["amp"])
"""
    after = migrated(code, "apex").after
    assert "    scaler.unscale_(optimizer)\n    torch.nn.utils.clip" in after
    assert (
        '{"scaler": scaler.state_dict(), "optimizer": optimizer.state_dict()}' in after
    )
    assert after.endswith('    scaler.load_state_dict(state["scaler"])\n')


def test_what_switches_apex_on_switches_autocast_on() -> None:
    code = """\
import torch
from apex import amp


def fit(model, data, fp16):
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
        if fp16:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        optimizer.step()
"""
    after = migrated(code, "apex").after
    assert 'torch.amp.GradScaler("cuda", enabled=fp16)' in after
    assert "dtype=torch.float16, enabled=fp16):" in after


def test_a_loss_scale_that_moves_is_no_remark() -> None:
    code = (APEX + LOOP).replace('"O1")', '"O1", loss_scale="dynamic")')
    notes = [note.reason for note in migrated(code, "apex").notes]
    assert not any("loss_scale" in note for note in notes)


def test_a_form_feed_ends_no_line_of_the_difference() -> None:
    code = (APEX + LOOP).replace("\n\n", "\n\x0c\n")
    lines = list(migrated(code, "apex").diff())
    assert " \x0c" in lines
    assert sum(line.startswith("@@ -1,") for line in lines) == 1
