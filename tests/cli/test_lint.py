"""``roundoff lint`` on the command line: exit codes, and the four formats."""

import json
import shlex
from pathlib import Path

import pytest

from roundoff.cli.app import main
from roundoff.lint import RULES

SCRIPT = """\
import torch

with torch.cuda.amp.autocast():
    y = model(x)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(SCRIPT)
    Path("right.py").write_text("import torch\n")
    Path("bad.py").write_text("def f(:\n")
    return tmp_path


def run(line, capsys):
    code = main(["lint", *shlex.split(line)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a.py", 1),
        ("right.py", 0),
        ("bad.py right.py", 1),
        ("a.py --ignore RO2", 0),
        ("a.py --fix", 0),
        ("a.py --diff", 0),
        ("missing.py", 2),
        ("", 2),
        ("a.py --select RO999", 2),
        ("a.py --format xml", 2),
    ],
)
def test_exit_codes(line, expected, capsys):
    assert run(line, capsys)[0] == expected


def test_text(capsys):
    _, out, _ = run("a.py bad.py", capsys)
    lines = out.splitlines()
    assert lines[0].startswith("a.py:3:6: RO209 ")
    assert lines[0].endswith(" [fixable]")
    assert lines[1] == "bad.py: not linted: does not parse: line 1: invalid syntax"
    assert lines[2] == "1 finding in 1 file; --fix mends 1; 1 file not linted."


def test_a_name_with_controls_does_no_harm(capsys):
    Path("a\x1b[2J.py").write_text(SCRIPT)
    for form in ("text", "github", "json", "sarif"):
        _, out, _ = run(f". --format {form}", capsys)
        assert "\x1b" not in out


def test_diff_can_be_applied(capsys):
    _, out, _ = run("a.py --diff", capsys)
    assert out == (
        "--- a.py\n+++ a.py\n@@ -1,4 +1,4 @@\n import torch\n \n"
        "-with torch.cuda.amp.autocast():\n"
        '+with torch.autocast("cuda"):\n'
        "     y = model(x)\n"
    )
    assert Path("a.py").read_text() == SCRIPT


def test_controls_in_a_difference_are_escapes_and_a_form_feed_ends_no_line(capsys):
    text = SCRIPT.replace("    y", "\t\x0c\n\x1b[2J\n    y", 1)
    Path("a.py").write_text(text.replace("\x1b[2J", "    # \x1b[2J"))
    _, out, _ = run("a.py --diff", capsys)
    assert " \t\\x0c\n     # \\x1b[2J\n     y = model(x)\n" in out


def test_json(capsys):
    _, out, _ = run("a.py bad.py --format json", capsys)
    answer = json.loads(out)
    assert answer["files"] == 1
    assert answer["findings"][0]["code"] == "RO209"
    assert answer["findings"][0]["fixable"] is True
    assert answer["unread"][0]["path"] == "bad.py"


def test_sarif_has_what_github_asks_for(capsys):
    """The properties that GitHub's page "SARIF support for code scanning" requires."""
    Path("sub dir").mkdir()
    Path("sub dir/b.py").write_text(SCRIPT)
    _, out, _ = run(". --format sarif", capsys)
    log = json.loads(out)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (sarif_run,) = log["runs"]
    driver = sarif_run["tool"]["driver"]
    assert driver["name"] == "roundoff"
    assert [rule["id"] for rule in driver["rules"]] == [rule.code for rule in RULES]
    for rule in driver["rules"]:
        assert len(rule["shortDescription"]["text"]) <= 1024
        assert len(rule["fullDescription"]["text"]) <= 1024
        assert rule["help"]["text"]
        assert len(rule["name"]) <= 255
        assert rule["defaultConfiguration"]["level"] in ("note", "warning", "error")
    results = sarif_run["results"]
    places = [each["locations"][0]["physicalLocation"] for each in results]
    assert [each["artifactLocation"]["uri"] for each in places] == [
        "a.py",
        "sub%20dir/b.py",
    ]
    for result, place in zip(results, places, strict=True):
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        assert place["region"] == {
            "startLine": 3,
            "startColumn": 6,
            "endLine": 3,
            "endColumn": 31,
        }
    (invocation,) = sarif_run["invocations"]
    assert invocation["executionSuccessful"] is True
    (notification,) = invocation["toolExecutionNotifications"]
    assert notification["message"]["text"].startswith("does not parse")


def test_github_commands(capsys):
    Path("a,b%.py").write_text(SCRIPT)
    _, out, _ = run("'a,b%.py' --format github", capsys)
    assert out.startswith(
        "::warning file=a%2Cb%25.py,line=3,col=6,endLine=3,endColumn=31,"
        "title=RO209 deprecated-autocast::"
    )


ADVICE = """import torch

optimizer.zero_grad(set_to_none=False)
"""


def test_advice_fails_only_where_it_is_strict(capsys):
    Path("slow.py").write_text(ADVICE)
    assert run("slow.py", capsys)[0] == 0
    assert run("slow.py --strict", capsys)[0] == 1
    assert run("slow.py a.py", capsys)[0] == 1


def test_advice_is_marked_in_every_format(capsys):
    Path("slow.py").write_text(ADVICE)
    _, text, _ = run("slow.py a.py", capsys)
    lines = text.splitlines()
    assert lines[0].startswith("slow.py:3:1: RO706 ")
    assert lines[0].endswith(" [advice] [fixable]")
    assert lines[1].startswith("a.py:3:6: RO209 ")
    assert "[advice]" not in lines[1]
    assert lines[2] == "2 findings in 2 files; 1 of them advice; --fix mends 2."
    answer = json.loads(run("slow.py a.py --format json", capsys)[1])
    assert [each["severity"] for each in answer["findings"]] == ["advice", "warning"]
    (sarif_run,) = json.loads(run("slow.py a.py --format sarif", capsys)[1])["runs"]
    levels = [result["level"] for result in sarif_run["results"]]
    assert levels == ["note", "warning"]
    github = run("slow.py a.py --format github", capsys)[1].splitlines()
    assert [line.partition(" ")[0] for line in github] == ["::notice", "::warning"]
    assert "RO706 cleared-to-zero (advice)" in run("--explain RO706", capsys)[1]


def test_explain(capsys):
    code, out, _ = run("--explain RO104", capsys)
    assert code == 0
    assert out.startswith("RO104 clip-before-unscale\n")
    assert "    scaler.unscale_(optimizer)" in out
    _, listing, _ = run("--explain all", capsys)
    assert len(listing.splitlines()) == len(RULES)
    _, theme, _ = run("--explain ro2", capsys)
    assert {line[:3] for line in theme.splitlines()} == {"RO2"}
