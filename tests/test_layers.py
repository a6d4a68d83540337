"""The order of packages is the order of data: each imports only from those above it, and heavy
packages load late."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "roundoff"

# From first to last. "roundoff" is the lazy front (__init__), which hands out the names of those
# above it.
ORDER = (
    "errors files foreign foreign_patterns site packages notebook unforeseen preserve engine "
    "workload formats ops record compare plan budget "
    "train quantize export check lint migrate advise report verbs roundoff cli __main__"
).split()
# The same inside the largest of them; the files beside its folders may use all of these.
COMPARE_ORDER = (
    "tensors records rounding pairing nonfinite judging loop portions values blame repairs ports"
).split()
REASON = (
    "A package imports only from those above it (design.md, section 3), also inside functions and "
    "for types: data flows down the list, so every package can be read, tested and replaced by one "
    "who knows only what stands above it, and no import cycle is possible. Move the code up, or pass the "
    "function in as an argument."
)


def layer(module: str) -> str:
    """The name in ORDER that a dotted module name belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imported(
    tree: ast.AST, module: str, *, is_package: bool
) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in a tree: in functions, under TYPE_CHECKING,
    relative ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            # "from roundoff import plan" may name a package or something that the front hands out.
            for alias in node.names:
                known = base == "roundoff" and alias.name in ORDER
                yield node.lineno, f"roundoff.{alias.name}" if known else base


def modules(source: Path = SOURCE) -> Iterator[tuple[Path, str]]:
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path: Path, module: str) -> Sequence[tuple[int, str]]:
    """(line, dotted name) of every import of a module: to parse all of them takes seconds."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return list(imported(tree, module, is_package=path.name == "__init__.py"))


def breaches(source: Path = SOURCE) -> Iterator[str]:
    """One line for each import against the order, and for each module without a place in it."""
    for path, module in modules(source):
        where = path.relative_to(source.parent)
        mine = layer(module)
        if mine not in ORDER:
            yield f"{where}: {mine!r} has no place in ORDER: decide what it may import and add it"
            continue
        if module == "roundoff":
            continue  # the front names everything, and imports it when it is asked for
        for line, name in dict.fromkeys(imports_of(path, module)):
            if name.split(".")[0] != "roundoff" or layer(name) == mine:
                continue
            if layer(name) not in ORDER or ORDER.index(layer(name)) > ORDER.index(mine):
                yield f"{where}:{line}: {mine} imports {name}, which is not above it"


def test_each_package_imports_only_from_those_above_it():
    found = list(breaches())
    assert not found, "\n".join([*found, REASON])


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        (
            "formats/a.py",
            "import roundoff.plan.solver",
            "formats imports roundoff.plan.solver",
        ),
        (
            "formats/a.py",
            "def f():\n    from roundoff.capture import calls",
            ":2: formats imports roundoff.capture",
        ),
        (
            "site.py",
            "if TYPE_CHECKING:\n    from roundoff import workload",
            "site imports roundoff.workload",
        ),
        ("formats/a.py", "from ..cli import app", "formats imports roundoff.cli"),
        ("formats/__init__.py", "from .. import cli", "formats imports roundoff.cli"),
        ("plan/a.py", "from roundoff import choose", "plan imports roundoff, which"),
        ("helpers.py", "", "'helpers' has no place in ORDER"),
    ],
)
def test_the_check_finds_breaches_wherever_they_hide(tmp_path, path, code, expected):
    file = tmp_path / "roundoff" / path
    file.parent.mkdir(parents=True)
    file.write_text(code, encoding="utf-8")
    (found,) = breaches(tmp_path / "roundoff")
    assert expected in found


def test_the_check_allows_what_is_above(tmp_path):
    file = tmp_path / "roundoff" / "plan" / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from roundoff import errors, formats\nfrom . import b\nfrom .b import c\nimport torch\n"
    )
    assert list(breaches(tmp_path / "roundoff")) == []


def test_each_room_of_compare_imports_only_from_those_above_it():
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {room_of(module)} imports {name}"
        for path, module in modules()
        if module.startswith("roundoff.compare.") and room_of(module) in COMPARE_ORDER
        for line, name in imports_of(path, module)
        if name.startswith("roundoff.compare.") and is_below(name, room_of(module))
    ]
    assert not found, "\n".join([*found, REASON])


def test_every_folder_of_compare_has_a_place():
    folders = {path.parent.name for path in SOURCE.glob("compare/*/__init__.py")}
    assert folders == set(COMPARE_ORDER)


def room_of(module: str) -> str:
    """The folder of compare that a module is in; the module's own name where it is in none."""
    return module.split(".")[2]


def is_below(name: str, room: str) -> bool:
    """Whether a module of compare comes later than a room, or is one of those that use all rooms."""
    if room_of(name) not in COMPARE_ORDER:
        return True
    return COMPARE_ORDER.index(room_of(name)) > COMPARE_ORDER.index(room)


def test_the_map_lists_the_rooms_in_their_order():
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| room | what is there |")[2].partition("\n\n")[0]
    cells = [
        line.split("|")[1] for line in table.splitlines() if line.startswith("| `")
    ]
    rooms = re.findall(r"`(\w+)`", " ".join(cells))
    assert rooms == [name for name in ORDER if name in rooms]
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders <= set(rooms)


def test_the_map_names_files_that_exist():
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| change | where |")[2].partition("\n\n")[0]
    places = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(places) >= 28
    missing = [p for p in places if "VERB" not in p and not (SOURCE / p).exists()]
    assert not missing


def behind_a_face(imports: Iterable[tuple[int, str]], room: str | None) -> list[str]:
    """The imports of modules that lie behind the face of another room."""
    found = []
    for line, name in imports:
        parts = name.split(".")
        if parts[0] != "roundoff" or len(parts) < 3 or parts[1] == room:
            continue
        if (SOURCE / parts[1] / "__init__.pyi").exists():
            found.append(f"{line}: {name} lies behind the face of roundoff.{parts[1]}")
    return found


FACE = (
    "A room is used by its face, src/roundoff/ROOM/__init__.pyi: the files behind it may be renamed at any "
    "time. Import the name from the room; if the face lacks it, add it there."
)


def test_rooms_are_used_by_their_faces():
    breaches = []
    for path, module in modules():
        if module == "roundoff":
            continue
        where = path.relative_to(SOURCE.parent)
        behind = behind_a_face(imports_of(path, module), layer(module))
        breaches += [f"{where}:{breach}" for breach in behind]
    assert not breaches, "\n".join([*breaches, FACE])


def documents() -> Iterator[tuple[str, str]]:
    """(name, Python) of every example, benchmark, and block of Python in a document."""
    root = SOURCE.parents[1]
    for folder in ("examples", "benchmarks"):
        for path in sorted((root / folder).glob("*.py")):
            yield f"{folder}/{path.name}", path.read_text(encoding="utf-8")
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            yield path.name, block


def test_documents_teach_faces_only():
    breaches = []
    for name, code in documents():
        imports = imported(ast.parse(code), "", is_package=False)
        breaches += [f"{name}:{breach}" for breach in behind_a_face(imports, None)]
    assert not breaches, "\n".join([*breaches, FACE])


@pytest.mark.parametrize("stub", sorted(SOURCE.rglob("__init__.pyi")), ids=str)
def test_a_face_hands_out_what_it_lists(stub):
    room = ".".join(stub.parent.relative_to(SOURCE.parent).parts)
    package = importlib.import_module(room)
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    assert not [name for name in names if name.startswith("_")]
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(package, name) is not None


def test_report_never_names_torch():
    found = [
        f"{path.name}:{line} imports {name}"
        for path, module in modules()
        if layer(module) == "report"
        for line, name in imports_of(path, module)
        if name.split(".")[0] in ("torch", "transformers")
    ]
    assert not found, "\n".join(
        [*found, "A report is made from plain data, also where torch is not installed."]
    )


def run(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    done = (
        subprocess.run(  # a process of its own: this one has long imported everything
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_report_works_without_torch():
    names = [module for _, module in modules() if layer(module) == "report"]
    code = "import sys, importlib\nsys.modules['torch'] = None\n"
    run(code + f"for name in {names!r}: importlib.import_module(name)")


# torch is among them, although every verb needs it: it takes over a second, and --help or a typo
# should not.
HEAVY = ("torch", "transformers", "onnx", "tensorflow", "paddle", "scipy", "polars")
LOADED = f"import sys; print('loaded:', sorted(set({HEAVY!r}) & set(sys.modules)))"


def test_plain_import_is_light():
    assert run(f"import roundoff\n{LOADED}").splitlines()[-1] == "loaded: []"


def test_help_is_light():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['roundoff', '--help']\n"
        "try: runpy.run_module('roundoff', run_name='__main__')\n"
        "except SystemExit as stop: print('exit', stop.code or 0)\n"
    )
    lines = run(code + LOADED).splitlines()
    assert lines[-2:] == ["exit 0", "loaded: []"]
    assert any("diagnose" in line for line in lines)
