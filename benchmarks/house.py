"""How the house is kept: layout, complexity, names, rows between rooms, as numbers.

    python benchmarks/house.py            the bars
    python benchmarks/house.py --room ops   each finding of one room, with its line

Complexity is radon's, which counts the decisions inside expressions too.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from radon.complexity import cc_visit
from radon.visitors import Class, Function

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "roundoff"
ANY_ROW = re.compile(r"\b(dict|Mapping|MutableMapping)\[str, (Any|object)\]|\bRow\b")
#: What one object becomes in JSON, or is read from, is no row.
JSON = ("to_dict", "from_dict", "to_json")
#: Mappings that are no rows, because their keys are not ours to choose: the function or
#: class, its parameter, field or ``return``, and whose keys they are.
NOT_OURS = {
    ("write_checkpoint", "config"): "config.json of the user's model",
    ("write_compressed", "config"): "config.json of the user's model",
    ("read_lists", "source"): "settings of another tool, as the user has them",
    ("read_lists", "base"): "the operator library of another tool",
    ("write_lists", "base"): "the operator library of another tool",
    ("Plan", "about"): "the open [about] table of a plan file; Plan.figures has fields",
    ("Plan.from_formats", "about"): "the same table",
    ("Record", "about"): "the open [about] table of a record file",
    ("Rounding", "parameters"): "arguments of the observer that the user names",
    ("prepare_qat", "parameters"): "arguments of the learners that the user names",
    ("parameter_groups", "return"): "parameter groups of torch.optim",
    ("LossScaler.state_dict", "return"): "torch's protocol of checkpoints",
    ("LossScaler.load_state_dict", "state"): "torch's protocol of checkpoints",
}
VAGUE = {"found", "made", "known", "own", "one", "here", "told", "said", "given"}


@dataclass(frozen=True)
class Finding:
    """Something that a bar counts: where it is, and what."""

    kind: str
    where: str
    what: str


#: The function or class that a type hint belongs to, of what, the hint and its line.
Hint = tuple[str, str, ast.expr, int]


@dataclass(frozen=True)
class Module:
    """One file of the source: its name, text and syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> Module:
        text = path.read_text(encoding="utf-8")
        return cls(path, text, ast.parse(text))

    @property
    def room(self) -> str:
        parts = self.path.relative_to(SOURCE).parts
        return parts[0] if len(parts) > 1 else "roundoff"

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def modules() -> list[Module]:
    return [Module.read(path) for path in sorted(SOURCE.rglob("*.py"))]


def nodes(module: Module) -> int:
    """Statements and expressions of a file."""
    return sum(isinstance(n, ast.stmt | ast.expr) for n in ast.walk(module.tree))


def complexities(module: Module) -> Iterator[tuple[str, int, int]]:
    """(name, line, complexity) of each function and method."""
    for block in cc_visit(module.text):
        if isinstance(block, Function):
            yield block.fullname, block.lineno, block.complexity
        elif isinstance(block, Class):
            # cc_visit lists the methods of a class beside it, those of inner classes not
            for inner in block.inner_classes:
                for method in inner.methods:
                    yield method.fullname, method.lineno, method.complexity


def _strings(node: ast.expr) -> list[str]:
    """The strings of a literal collection, or of the words of a text that is split."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        value = node.func.value
        if node.func.attr == "split" and isinstance(value, ast.Constant):
            return str(value.value).split()
    if isinstance(node, ast.Dict):
        items: list[ast.expr | None] = list(node.keys)
    elif isinstance(node, ast.Set | ast.List | ast.Tuple):
        items = list(node.elts)
    else:
        return []
    constants = [i.value for i in items if isinstance(i, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


#: Words that are operators and much else, attributes of tensors among them: alone they
#: make no table of operators.
WORDS = set(
    "min max mean std sum norm all any copy zero input output clip round values real "
    "index scale relu abs size bias var float double half to data fill dot cat "
    "dtype device layout shape stride numel memory_format".split()
)


def operator_names() -> set[str]:
    """Every operator of aten and function of torch."""
    import torch

    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names()}
    names = {name.split(".")[0] for name in names}
    return names | set(dir(torch.Tensor)) | set(dir(torch.nn.functional))


def operator_tables(module: Module, operators: set[str]) -> Iterator[Finding]:
    """Literal collections of four or more operators, most of whose strings are."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.expr):
            continue
        strings = _strings(node)
        named = [s for s in strings if s in operators and s not in WORDS]
        if len(named) >= 4 and len(named) >= 0.6 * len(strings):
            what = ", ".join(strings[:4])
            yield Finding("operator table", module.at(node.lineno), what)


def statements(module: Module) -> Iterator[Finding]:
    """Parallel assignments, conditionals in conditionals, texts times flags, vague names."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign):
            pair = isinstance(node.value, ast.Tuple) and isinstance(
                node.targets[0], ast.Tuple
            )
            if pair:
                what = ast.unparse(node)[:60]
                yield Finding("parallel assignment", module.at(node.lineno), what)
        elif isinstance(node, ast.IfExp):
            parts = (node.test, node.body, node.orelse)
            if any(isinstance(n, ast.IfExp) for part in parts for n in ast.walk(part)):
                what = ast.unparse(node)[:60]
                yield Finding("nested conditional", module.at(node.lineno), what)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if _text_times_flag(node):
                what = ast.unparse(node)[:60]
                yield Finding("text times flag", module.at(node.lineno), what)
        elif (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in VAGUE
        ):
            yield Finding("vague name", module.at(node.lineno), node.id)


def _text_times_flag(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    for text, flag in (sides, sides[::-1]):
        is_text = isinstance(text, ast.JoinedStr) or (
            isinstance(text, ast.Constant) and isinstance(text.value, str)
        )
        if is_text and isinstance(flag, ast.Compare | ast.BoolOp | ast.UnaryOp):
            return True
        if is_text and isinstance(flag, ast.Call) and ast.unparse(flag.func) == "bool":
            return True
    return False


def exported(room: str) -> set[str]:
    """The names that a room's face hands out."""
    stub = SOURCE / room / "__init__.pyi"
    if not stub.exists():
        return set()
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names}


def dict_rows(module: Module) -> Iterator[Finding]:
    """Functions and fields of a room's face that take or give rows without fields."""
    for owner, name, hint, line in face_hints(module):
        if (owner, name) not in NOT_OURS and ANY_ROW.search(ast.unparse(hint)):
            yield Finding("dict row", module.at(line), f"{owner}, {name}")


def face_hints(module: Module) -> Iterator[Hint]:
    """Every type hint of a room's face: of its functions, methods and fields."""
    names = exported(module.room)
    for node in module.tree.body:
        if getattr(node, "name", None) not in names:
            continue
        if isinstance(node, ast.FunctionDef):
            yield from function_hints(node, node.name)
        elif isinstance(node, ast.ClassDef):
            yield from class_hints(node)


def class_hints(node: ast.ClassDef) -> Iterator[Hint]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            yield node.name, ast.unparse(part.target), part.annotation, part.lineno
        elif isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            yield from function_hints(part, f"{node.name}.{part.name}")


def function_hints(function: ast.FunctionDef, owner: str) -> Iterator[Hint]:
    if function.name in JSON:
        return
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if argument.annotation is not None:
            yield owner, argument.arg, argument.annotation, function.lineno
    if function.returns is not None:
        yield owner, "return", function.returns, function.lineno


def needless_exceptions(everything: list[Module]) -> Iterator[Finding]:
    """Entries of ``NOT_OURS`` that no face has, or that are no rows any more."""
    rows = {
        (owner, name)
        for module in everything
        for owner, name, hint, _ in face_hints(module)
        if ANY_ROW.search(ast.unparse(hint))
    }
    for owner, name in NOT_OURS.keys() - rows:
        yield Finding("needless exception", "benchmarks/house.py", f"{owner}, {name}")


def deep_imports(faces: set[str]) -> Iterator[Finding]:
    """Names that documents, examples and benchmarks take from behind a face."""
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*.py")),
        *sorted((ROOT / "benchmarks").glob("*.py")),
    ]:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"(?:from|import) roundoff\.(\w+)\.(\w[\w.]*)", text):
            if match[1] in faces:
                line = text[: match.start()].count("\n") + 1
                where = f"{path.relative_to(ROOT)}:{line}"
                yield Finding("deep import", where, match[0])


def lines_to_format() -> int:
    """Files that the formatter would change."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "src", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.count("Would reformat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", help="list the findings of one room")
    parser.add_argument("--over", type=int, default=10, help="complexity to list from")
    options = parser.parse_args()

    operators = operator_names()
    everything = modules()
    chosen = [m for m in everything if options.room in (None, m.room)]
    faces = {m.room for m in everything} - {"roundoff", "cli", "verbs"}

    blocks = [(m, *block) for m in chosen for block in complexities(m)]
    findings = [f for m in chosen for f in statements(m)]
    findings += [f for m in chosen for f in dict_rows(m)]
    findings += [
        f for m in chosen if m.room != "ops" for f in operator_tables(m, operators)
    ]
    if options.room is None:
        findings += deep_imports(faces)
        findings += needless_exceptions(everything)
    else:
        for module, name, line, complexity in blocks:
            if complexity > options.over:
                print(f"{module.at(line)}: complexity {complexity}: {name}")
        for finding in findings:
            print(f"{finding.where}: {finding.kind}: {finding.what}")

    lines = sum(m.text.count("\n") for m in chosen)
    counts = Counter(finding.kind for finding in findings)
    tables = counts["operator table"]
    mean = sum(b[3] for b in blocks) / len(blocks)
    rows = [
        ("nodes a line", f"{sum(map(nodes, chosen)) / lines:.2f}", "3.6"),
        ("files to format", str(lines_to_format()), "0"),
        ("functions over complexity 15", str(sum(b[3] > 15 for b in blocks)), "0"),
        ("functions over complexity 10", str(sum(b[3] > 10 for b in blocks)), "few"),
        ("mean complexity", f"{mean:.2f} of {len(blocks)}", "4"),
        ("operator tables outside ops/", str(tables), "2"),
        ("dict rows in faces", str(counts["dict row"]), "0"),
        ("needless exceptions of these", str(counts["needless exception"]), "0"),
        ("deep imports in documents", str(counts["deep import"]), "0"),
        ("parallel assignments", str(counts["parallel assignment"]), "0"),
        ("nested conditionals", str(counts["nested conditional"]), "0"),
        ("texts times flags", str(counts["text times flag"]), "0"),
        ("vague names", str(counts["vague name"]), "0"),
        ("lines", str(lines), ""),
    ]
    print(f"\n{'':32}{'measured':>16}{'bar':>8}")
    for name, measured, bar in rows:
        print(f"{name:32}{measured:>16}{bar:>8}")


if __name__ == "__main__":
    main()
