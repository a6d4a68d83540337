"""Write the API reference: a page for each room, from its face (``__init__.pyi``)."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).parents[1] / "src" / "roundoff"


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages; mkdocs calls this."""
    for stub in sorted(SOURCE.rglob("__init__.pyi")):
        room = ".".join(stub.parent.relative_to(SOURCE.parent).parts)
        file = File.generated(config, f"api/{room}.md", content=page(room, stub))
        files.append(file)
    return files


def page(room: str, stub: Path) -> str:
    """What the room's docstring says, then every name of its face."""
    module = ast.parse(stub.with_suffix(".py").read_text(encoding="utf-8"))
    introduction = ast.get_docstring(module) or ""
    blocks = [f"# {room}", introduction.replace("``", "`")]
    blocks += [f"::: {name}" for name in sorted(exported(room, stub), key=sort_key)]
    return "\n\n".join(blocks) + "\n"


def exported(room: str, stub: Path) -> list[str]:
    """The full name, where it is defined, of each name that the face hands out."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [
        f"{room}.{node.module}.{alias.name}" for node in imports for alias in node.names
    ]


def sort_key(name: str) -> tuple[str, str]:
    last = name.rpartition(".")[2]
    return last.lower(), last
