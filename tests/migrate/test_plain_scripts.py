"""Plain fp32 scripts of many styles: migrated they run to their end, their loss goes
down, no rule on loss scaling or autocast finds anything, and nothing is left to migrate.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import warnings
from pathlib import Path

import pytest
import torch

import roundoff
from roundoff.plan import Plan, Rule

SCRIPTS = sorted((Path(__file__).parent / "plain").glob("*.py"))
#: A plan names the sites of one model; these train two.
TWO_MODELS = ("f_two_optimizers", "g_gan")
#: What the scripts themselves have, whatever they are trained in.
HALF = {"amp": torch.float16, "bf16": torch.bfloat16}


def run(path: Path) -> list[float]:
    """The losses of a script."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")  # fp16 is slow on a CPU; a skipped first step
        names = runpy.run_path(str(path), run_name="__main__")
    return names["losses"]


def goes_down(losses: list[float]) -> bool:
    part = max(1, len(losses) // 5)
    return sum(losses[-part:]) < 0.95 * sum(losses[:part])


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_many_styles() -> None:
    assert len(SCRIPTS) >= 15


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("to", ["amp", "bf16", "roundoff"])
def test_migrated(workplace: Path, script: Path, to: str) -> None:
    Plan((Rule("fp32", ("op:exp",)),), autocast="fp16").save("plan.toml")
    migration = roundoff.migrate(script, to)
    if to == "roundoff" and script.stem in TWO_MODELS:
        assert not migration.is_changed
        assert "a plan names sites of one model" in migration.left[0].reason
        return
    assert migration.left == ()
    assert migration.is_changed
    new = workplace / script.name
    new.write_bytes(migration.after.encode())
    # nothing that is not meant: each line of before is there, or has a reason
    gone = [line for line in migration.diff() if line.startswith("-")][1:]
    assert len(gone) <= sum(1 for line in migration.diff() if line.startswith("+"))
    again = roundoff.migrate(new, to)
    assert not again.is_changed
    assert "already mixed precision" in again.notes[0].reason
    findings = roundoff.lint(new, select=["RO1", "RO2"]).findings
    codes = {each.code for each in findings}
    if codes == {"RO204"}:  # the script names no device but the CPU
        assert "--to bf16" in migration.notes[0].reason
        codes = set()
    assert codes == set()
    assert goes_down(run(new))


@pytest.mark.parametrize("to", ["amp", "bf16"])
def test_the_forward_pass_is_in_half_precision(
    workplace: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[torch.dtype] = set()
    original = torch.nn.CrossEntropyLoss.forward

    def forward(self, output, target):
        seen.add(output.dtype)
        return original(self, output, target)

    monkeypatch.setattr(torch.nn.CrossEntropyLoss, "forward", forward)
    script = next(path for path in SCRIPTS if path.stem == "a_plain_loop")
    new = workplace / "new.py"
    new.write_bytes(roundoff.migrate(script, to).after.encode())
    run(new)
    assert seen == {HALF[to]}


def test_what_is_not_touched_stays_as_it_was(workplace: Path) -> None:
    script = next(path for path in SCRIPTS if path.stem == "q_texts_between")
    text = script.read_text().replace("    ", "\t").replace("\n", "\r\n")
    (workplace / "tabs.py").write_bytes(text.encode())
    after = roundoff.migrate(workplace / "tabs.py", "amp").after
    assert "\n" not in after.replace("\r\n", "")
    assert '\t\t\tmessage = """two\r\nlines"""\r\n' in after
    assert '\t\t"""targets are\r\n  sums"""\r\n' in after
    (workplace / "tabs.py").write_bytes(after.encode())
    assert goes_down(run(workplace / "tabs.py"))


def test_a_plan_without_fp16_needs_no_scaler(workplace: Path) -> None:
    Plan((Rule("fp32", ("op:exp",)),), autocast="bf16").save("plan.toml")
    script = next(path for path in SCRIPTS if path.stem == "h_batch_scheduler")
    after = roundoff.migrate(script, "roundoff").after
    assert 'with ro.autocast("plan.toml", model):' in after
    assert "LossScaler" not in after
