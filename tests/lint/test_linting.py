"""Files and folders, silence, configuration, fixes: what surrounds the rules."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import roundoff
from roundoff.errors import RoundoffError
from roundoff.lint import LintConfig, lint_paths, nearest_config

DEPRECATED = """\
import torch

with torch.cuda.amp.autocast():  # why
    y = model(x)
"""
PRESENT = DEPRECATED.replace("torch.cuda.amp.autocast()", 'torch.autocast("cuda")')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*paths, **settings):
    result = roundoff.lint(paths, **settings)
    return [(f.code, f.line, f.column) for f in result.findings]


def reasons(*paths):
    result = lint_paths([Path(path) for path in paths], LintConfig())
    return [(Path(row.path).name, row.reason) for row in result.unread]


# -- files -----------------------------------------------------------------------------


def test_a_finding_has_its_place(folder):
    Path("a.py").write_text("import torch\nü = 1; torch.autocast('cuda')\n")
    (finding,) = roundoff.lint("a.py").findings
    # in characters from 1: `ü = 1; ` has seven
    assert (finding.line, finding.column, finding.end_column) == (2, 8, 30)
    assert (finding.path, finding.code, finding.cell) == ("a.py", "RO211", None)


def test_folders_are_walked_in_order_and_each_file_counts_once(folder):
    for name in ("b/x.py", "a.py", "b/.venv/y.py", "b/node_modules/z.py", "b/t.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(DEPRECATED)
    result = roundoff.lint([".", "a.py", "b"])
    assert [finding.path for finding in result.findings] == ["a.py", "b/x.py"]
    assert result.files == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"def f(:\n", "does not parse: line 1"),
        (b"import torch\nx = '\xff'\n", "not UTF-8: byte 18"),
        (b"print 'a'\n", "does not parse"),
        (b"# coding: klingon\nx = 1\n", "unknown encoding: klingon"),
        ("x = 1\n".encode("utf-16"), "UTF-16"),
        (b"x = 0\0", "does not parse"),
        (b"#" * (2 * 2**20 + 1), "more than"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "does not parse"),
        (b"x = " + b"-" * 100_000 + b"1", "nested too deep"),
    ],
)
def test_what_cannot_be_read_is_a_row(content, reason, folder):
    Path("bad.py").write_bytes(content)
    Path("good.py").write_text(DEPRECATED)
    result = roundoff.lint(".")
    (row,) = result.unread
    assert row.path == "bad.py"
    assert reason in row.reason
    assert len(result.findings) == 1


def test_deep_trees_that_parse_end_in_a_row_or_in_findings(folder):
    Path("deep.py").write_text("import torch\nx = " + "a." * 3000 + "b\n")
    Path("sum.py").write_text("import torch\nx = " + "a + " * 3000 + "b\n")
    result = roundoff.lint(".")
    assert result.files + len(result.unread) == 2


def test_odd_files_are_rows(folder):
    Path("broken.py").symlink_to("nowhere.py")
    Path("notebook.ipynb").write_text("{}")
    Path("other.ipynb").write_text('{"cells": [{"cell_type": "code"}]}')
    os.mkfifo("pipe.py")
    Path("folder.py").mkdir()
    assert reasons(".") == [
        ("broken.py", "not a file"),
        ("notebook.ipynb", "not a notebook"),
        ("other.ipynb", "not a notebook"),
        ("pipe.py", "not a file"),
    ]


def test_an_empty_file_and_an_empty_folder_have_no_findings(folder):
    Path("empty.py").write_text("")
    Path("nothing").mkdir()
    result = roundoff.lint(["empty.py", "nothing"])
    assert (result.findings, result.unread, result.files) == ((), (), 1)


def test_a_path_that_is_not_there_is_an_error(folder):
    with pytest.raises(RoundoffError, match="no such file or folder"):
        roundoff.lint("nowhere")


def test_cells_of_a_notebook(folder):
    cells = [
        {"cell_type": "markdown", "source": ["# with torch.cuda.amp.autocast():"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import torch\n"]},
        {"cell_type": "code", "source": "%%bash\nls (\n"},
        {"cell_type": "code", "source": ["!ls\n", *DEPRECATED.splitlines(True)[2:]]},
    ]
    Path("a.ipynb").write_text(json.dumps({"cells": cells}))
    (finding,) = roundoff.lint("a.ipynb", fix=True).findings
    assert (finding.code, finding.cell, finding.line) == ("RO209", 4, 2)
    assert not finding.fixable


# -- silence and configuration ---------------------------------------------------------


@pytest.mark.parametrize(
    ("comment", "count"),
    [
        ("# noqa", 0),
        ("# NOQA", 0),
        ("# noqa: RO209", 0),
        ("# noqa:RO209,E501", 0),
        ("# noqa: E501, RO2", 0),
        ("# noqa: RO208", 1),
        ("# noqa: E501", 1),
        ("# noqarter", 1),
    ],
)
def test_noqa(comment, count, folder):
    Path("a.py").write_text(DEPRECATED.replace("# why", comment))
    assert len(found("a.py")) == count


def test_noqa_at_the_end_of_a_long_call(folder):
    text = "import torch\ntorch.autocast(\n    'cuda',\n)  # noqa: RO211\n"
    Path("a.py").write_text(text)
    assert found("a.py") == []


def test_select_and_ignore(folder):
    Path("a.py").write_text(DEPRECATED + "torch.autocast('cuda')\n")
    assert [code for code, *_ in found("a.py")] == ["RO209", "RO211"]
    assert [code for code, *_ in found("a.py", select=["RO211"])] == ["RO211"]
    assert [code for code, *_ in found("a.py", ignore=["RO2"])] == []
    chosen = found("a.py", select=["RO2"], ignore=["RO21"])
    assert [code for code, *_ in chosen] == ["RO209"]
    # the longer beginning wins
    chosen = found("a.py", select=["RO211"], ignore=["RO2"])
    assert [code for code, *_ in chosen] == ["RO211"]


def test_configuration_of_the_nearest_file_above(folder):
    Path("pyproject.toml").write_text(
        "[tool.roundoff.lint]\n"
        'ignore = ["RO211"]\nexclude = ["old", "*_gen.py"]\n'
        'per-file-ignores = {"tests/*" = ["RO2"]}\n'
    )
    for name in ("a.py", "old/b.py", "x_gen.py", "tests/c.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(DEPRECATED + "torch.autocast('cuda')\n")
    result = roundoff.lint(".")
    assert [(f.path, f.code) for f in result.findings] == [("a.py", "RO209")]
    assert result.files == 2
    # a file that is named is linted, whatever is excluded
    assert len(roundoff.lint("old/b.py").findings) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.roundoff.lint]\nselct = []", "unknown key 'selct'"),
        ('[tool.roundoff.lint]\nselect = ["RO999"]', "no rule has the code"),
        ('[tool.roundoff.lint]\nselect = "RO1"', "select is a text, not a list"),
        ("[tool.roundoff.lint]\nignore = [1]", "ignore"),
        ("[tool.roundoff.lint", "cannot be read"),
        ("[tool]\nroundoff = 3", "roundoff is no table"),
        ('[tool.roundoff.lint]\nper-file-ignores = {"a" = ["X"]}', "no rule has"),
    ],
)
def test_a_wrong_configuration_is_an_error(text, message, folder):
    Path("pyproject.toml").write_text(text)
    Path("a.py").write_text("")
    with pytest.raises(RoundoffError, match=message):
        roundoff.lint("a.py")


def test_no_configuration(folder):
    Path("pyproject.toml").write_text("[project]\nname = 'a'\n")
    assert nearest_config([Path("a.py")]) == LintConfig()


# -- fixes -----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_fix_keeps_everything_else(end, mark, folder):
    file = Path("a.py")
    file.write_bytes(mark + DEPRECATED.replace("\n", end).encode())
    file.chmod(0o750)
    result = roundoff.lint("a.py", fix=True)
    assert result.findings == ()
    assert file.read_bytes() == mark + PRESENT.replace("\n", end).encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o750
    assert roundoff.lint("a.py", fix=True).fixed == ()


@pytest.mark.parametrize(
    ("encoding", "text"), [("latin-1", "café"), ("gbk", "损失"), ("cp1252", "”")]
)
def test_a_fix_keeps_the_declared_encoding(encoding, text, folder):
    head = f"# -*- coding: {encoding} -*-\n# {text}\n"
    Path("a.py").write_bytes((head + DEPRECATED).encode(encoding))
    assert roundoff.lint("a.py", fix=True).findings == ()
    assert Path("a.py").read_bytes() == (head + PRESENT).encode(encoding)


def test_a_late_unscaling_moves_in_front_of_the_clipping(folder):
    head = "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in data:\n"
    head += "    optimizer.zero_grad()\n    scaler.scale(loss(x)).backward()\n"
    clip = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # at most 1\n"
    unscale = "    scaler.unscale_(optimizer)\n"
    tail = "    scaler.step(optimizer)\n    scaler.update()\n"
    Path("a.py").write_text(head + clip + unscale + tail)
    assert roundoff.lint("a.py", fix=True).findings == ()
    assert Path("a.py").read_text() == head + unscale + clip + tail


def test_diff_writes_nothing(folder):
    Path("a.py").write_text(DEPRECATED)
    (fixed,) = roundoff.lint("a.py", diff=True).fixed
    assert (fixed.before, fixed.after, fixed.fixes) == (DEPRECATED, PRESENT, 1)
    assert Path("a.py").read_text() == DEPRECATED


def test_a_fix_goes_through_a_link(folder):
    Path("real.py").write_text(DEPRECATED)
    Path("link.py").symlink_to("real.py")
    roundoff.lint("link.py", fix=True)
    assert Path("link.py").is_symlink()
    assert Path("real.py").read_text() == PRESENT


def test_several_fixes_of_one_loop(folder):
    script = """\
import torch

scaler = torch.cuda.amp.GradScaler()
for x, y in loader:
    optimizer.zero_grad()
    with torch.cuda.amp.autocast():
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()  # scaled
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        optimizer.step()
"""
    mended = """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()  # scaled
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    scaler.step(optimizer)
    scaler.update()
"""
    Path("a.py").write_text(script)
    result = roundoff.lint("a.py", fix=True)
    assert Path("a.py").read_text() == mended
    assert result.findings == ()


# -- manners ---------------------------------------------------------------------------


def test_no_framework_is_imported_and_the_script_is_not_run(folder):
    Path("a.py").write_text(DEPRECATED + "raise SystemExit('ran')\n")
    code = (
        "import sys, roundoff; answer = roundoff.lint('a.py');"
        "assert len(answer.findings) == 1;"
        "assert not {'torch', 'tensorflow', 'paddle', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flake8(folder):
    Path("a.py").write_text(DEPRECATED)
    Path("setup.cfg").write_text(
        "[flake8:local-plugins]\nextension =\n"
        "    RO = roundoff.lint.flake8_plugin:Plugin\n"
    )
    command = [sys.executable, "-m", "flake8", "--config", "setup.cfg"]
    done = subprocess.run(
        [*command, "--select", "RO", "a.py"], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("a.py:3:6: RO209 `torch.cuda.amp.autocast`")


# -- gradients that are read -----------------------------------------------------------

LOOP = """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    for p in model.parameters():
        {use}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("use", "codes"),
    [
        ("norms.append(p.grad.norm())", ["RO104"]),
        ("norms.append(p.grad.detach().data.norm(2).item())", ["RO104"]),
        ("p.grad.data.clamp_(-1, 1)", ["RO104"]),
        ("p.grad.add_(torch.randn_like(p.grad))", ["RO104", "RO104"]),
        ("assert p.grad is not None", []),
        ("assert p.grad.dtype == torch.float32", []),
        ("torch.distributed.all_reduce(p.grad)", []),
        ("p.grad /= 2", []),
        ("p.grad.div_(2)", []),
        ("p.grad = None", []),
        ("bad = torch.isnan(p.grad).any()", []),
    ],
)
def test_values_of_scaled_gradients(use, codes, folder):
    Path("a.py").write_text(LOOP.format(use=use))
    assert [code for code, *_ in found("a.py", select=["RO104"])] == codes


def test_the_cell_that_is_no_python_is_named(folder):
    cells = [
        {"cell_type": "code", "source": ["import torch\n"]},
        {"cell_type": "code", "source": ["%time\n", "print 'a'\n"]},
    ]
    Path("a.ipynb").write_text(json.dumps({"cells": cells}))
    ((name, reason),) = reasons("a.ipynb")
    assert name == "a.ipynb"
    assert reason.startswith("does not parse: cell 2, line 2")


def test_notebooks_of_the_third_format(folder):
    cells = [{"cell_type": "code", "input": DEPRECATED.splitlines(keepends=True)}]
    sheets = {"nbformat": 3, "worksheets": [{"cells": cells}]}
    Path("a.ipynb").write_text(json.dumps(sheets))
    (finding,) = roundoff.lint("a.ipynb").findings
    assert (finding.code, finding.cell, finding.line) == ("RO209", 1, 3)
