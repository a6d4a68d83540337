"""What the documents say of options, defaults, scripts and files is so, and none is left out."""

import re
import shlex
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer

from roundoff.cli.app import app
from roundoff.lint.rules.table import RULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(DOCS.glob("*.md")) if page.name != "lint.md"),
]
BENCHMARKS = ROOT / "benchmarks"
#: Every verb has them; the top of docs/cli.md says so.
OF_EVERY_VERB = {"--help", "--quiet", "--verbose", "--debug"}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
#: What is chosen where the parser, which tells what was asked from what was not, has None: its help says so.
CHOSEN_LATER = {("check", "--repeat"): "3", ("quantize", "--samples"): "512"}


def verbs() -> dict[str, Any]:
    """The parser of each verb, by the words that call it."""
    commands: dict[str, Any] = dict(typer.main.get_group(app).commands)
    group = commands.pop("plan")
    commands["plan"] = group.commands.pop("budget")
    return commands | {f"plan {name}": c for name, c in group.commands.items()}


VERBS = verbs()


def options_of(command: Any) -> dict[str, Any]:
    """Each long option of a verb, and what the parser knows of it."""
    return {
        name: parameter
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in [*parameter.opts, *parameter.secondary_opts]
        if name.startswith("--")
    }


def sections() -> dict[str, str]:
    """What docs/cli.md says of each verb."""
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    parts = re.split(r"^## roundoff ", text, flags=re.MULTILINE)[1:]
    return {
        re.match(r"(plan )?[a-z]+", part)[0]: part.partition("\n")[2] for part in parts
    }


SECTIONS = sections()


@pytest.mark.parametrize("verb", VERBS)
def test_the_options_of_a_verb_are_those_of_its_section(verb: str) -> None:
    """Both ways: the parser's options are described, what is described is an option."""
    section = SECTIONS[verb]
    for link in re.findall(r"\]\([^)]*\)", section):
        section = section.replace(link, "")
    described = {
        option
        for span in re.findall(r"`([^`\n]+)`", section)
        for option in re.findall(r"^--[a-z][a-z-]*", span)
    }
    known = set(options_of(VERBS[verb])) - OF_EVERY_VERB
    of_others = {"--keep", "--version", "--fix", *OF_EVERY_VERB}
    assert known - described == set()
    assert described - known - of_others == set()


@pytest.mark.parametrize("verb", VERBS)
def test_short_forms_are_those_of_the_parser(verb: str) -> None:
    for option, short in re.findall(r"`(--[a-z-]+)` `(-[a-z])`", SECTIONS[verb]):
        assert short in options_of(VERBS[verb])[option].opts, option


def stated_defaults() -> Iterator[tuple[str, str, str]]:
    """Each (verb, option, default) of docs/cli.md, in sentences and in rows of tables."""
    for verb, section in SECTIONS.items():
        sentences = re.findall(
            r"`(--[a-z-]+)`[^`]*?\([^()]*?default `?([\w.-]+)`?", section
        )
        for option, value in sentences:
            yield verb, option, value
        for row in re.findall(r"^\| `--.*$", section, re.MULTILINE):
            _, names, cell, _ = re.split(r"(?<!\\)\|", row)
            values = [
                *re.findall(r"default `([\w.-]+)`", cell),
                *re.findall(r"\(default ([\w.-]+)\)", cell),
                *re.findall(r"`([\w.-]+)` \((?:the )?default\)", cell),
                *re.findall(r"\(`?([\w,./-]+)`?\)$", cell.strip()),
            ]
            for value in values:
                yield verb, OPTION.findall(names)[0], value


STATED = sorted(set(stated_defaults()))


def as_text(default: object) -> str:
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, tuple | list):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_defaults_are_found() -> None:
    assert len(STATED) > 20
    assert {("capture", "--leaves", "8"), ("bench", "--seeds", "3")} <= set(STATED)


@pytest.mark.parametrize(("verb", "option", "value"), STATED)
def test_stated_defaults_are_the_parsers(verb: str, option: str, value: str) -> None:
    parameter = options_of(VERBS[verb])[option]
    if (verb, option) in CHOSEN_LATER:
        assert parameter.default is None
        assert CHOSEN_LATER[verb, option] == value
        assert value in parameter.help
    else:
        assert as_text(parameter.default) == value.removesuffix("dB")


def lines_of_code(page: Path) -> Iterator[str]:
    """The lines of a page's blocks of code, and what stands between backticks."""
    text = page.read_text(encoding="utf-8")
    for number, block in enumerate(re.split(r"^ *```.*$", text, flags=re.MULTILINE)):
        if number % 2:
            yield from block.replace("\\\n", " ").splitlines()
        else:
            yield from re.findall(r"`([^`\n]+)`", block)
            yield from re.findall(r"^    (\S.*)$", block, re.MULTILINE)


def words_of(line: str) -> list[str]:
    """The words of a command up to the script that it runs; none where it is no command."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:
        return []
    return words[: words.index("--")] if "--" in words else words


def commands() -> Iterator[tuple[str, str, str]]:
    """Each (page, verb, option) of the commands that the pages show."""
    for page in PAGES:
        for line in lines_of_code(page):
            words = words_of(line)
            if "roundoff" not in words[:1] or len(words) < 2:
                continue
            verb = " ".join(words[1:3]) if words[1] == "plan" else words[1]
            verb = verb if verb in VERBS else words[1]
            for word in words[2:]:
                if OPTION.fullmatch(word) or re.fullmatch("-[a-z]", word):
                    yield page.name, verb, word


COMMANDS = sorted(set(commands()))


def test_commands_use_options_that_exist() -> None:
    assert len(COMMANDS) > 100
    assert [
        command
        for command in COMMANDS
        if command[1] not in VERBS
        or not any(
            command[2] in [*parameter.opts, *parameter.secondary_opts, "--help"]
            for parameter in VERBS[command[1]].params
        )
    ] == []


@pytest.mark.parametrize(
    ("page", "verb"), [("train", "tune"), ("watch", "watch"), ("quantize", "quantize")]
)
def test_tables_of_options_on_other_pages(page: str, verb: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--[^|]*)\|", text, re.MULTILINE)
    assert rows
    named = {option for row in rows for option in OPTION.findall(row)}
    assert named - set(options_of(VERBS[verb])) == set()


def scripts() -> dict[str, str]:
    """The text of each benchmark."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(BENCHMARKS.glob("*.py"))
    }


def test_every_benchmark_is_in_the_page_of_figures() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    started = {
        name
        for name, script in scripts().items()
        if "__main__" in script and not name.startswith(("every", "peer_"))
    }
    assert {name for name in started if name not in text} == {"quantize_peers.py"}


def test_benchmarks_that_are_named_exist_and_have_their_options() -> None:
    texts = scripts()
    named = 0
    for page in PAGES:
        for line in lines_of_code(page):
            for name, rest in re.findall(r"benchmarks/(\w+\.py)([^#;]*)", line):
                named += 1
                parsers = texts[name] + "".join(
                    texts[f"{shared}.py"]
                    for shared in ("common", "fashion_nets")
                    if f"from {shared} import" in texts[name]
                )
                for option in OPTION.findall(rest):
                    spelled = option.removeprefix("--").replace("-", "_")
                    assert f'"{option}"' in parsers or f"{spelled}=" in parsers, line
    assert named > 45


#: Folders at the top.
TOPS = ("benchmarks", "docs", "examples", "src", "tests")


def test_files_that_are_named_exist() -> None:
    named = set()
    for page in PAGES:
        for line in lines_of_code(page):
            named |= {
                path
                for path in re.findall(rf"(?:{'|'.join(TOPS)})/[\w./]+\w", line)
                if "NAME" not in path
            }
    assert len(named) > 30
    assert {path for path in named if not (ROOT / path).exists()} == set()


def anchors(page: Path) -> set[str]:
    """The anchors that mkdocs gives the headings of a page."""
    text = re.sub(
        r"^```.*?^```",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if target.startswith("http"):
            continue
        other = page.parent / target if target else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


def test_the_reference_of_python_has_every_face() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    source = ROOT / "src"
    faces = [
        ".".join(stub.parent.relative_to(source).parts)
        for stub in source.rglob("__init__.pyi")
    ]
    assert len(faces) > 10
    assert [face for face in faces if f"api/{face}.md" not in navigation] == []


def test_make_bench_leaves_out_what_other_scripts_start() -> None:
    """One that cannot run alone would end the whole."""
    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nbench:")[2]
    others = [
        name
        for name in scripts()
        if {"peer", "peers", "every"} & set(name.removesuffix(".py").split("_"))
    ]
    assert len(others) == 4
    assert [name for name in others if f"%/{name}" not in rule] == []


def test_lint_has_as_many_rules_as_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (count,) = re.findall(r"`lint` knows \[(\d+) mistakes\]", readme)
    assert int(count) == len(RULES)
