"""Write the API reference: a page for each room, from its face (``__init__.pyi``)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import markdown

SOURCE = Path(__file__).parents[1] / "src" / "roundoff"


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages; mkdocs calls this."""
    front = set(exported("roundoff", SOURCE / "__init__.pyi"))
    for stub in sorted(SOURCE.rglob("__init__.pyi")):
        room = ".".join(stub.parent.relative_to(SOURCE.parent).parts)
        elsewhere = set() if room == "roundoff" else front
        content = page(room, stub, elsewhere)
        files.append(File.generated(config, f"api/{room}.md", content=content))
    return files


def page(room: str, stub: Path, elsewhere: set[str]) -> str:
    """What the room's docstring says, then every name of its face.

    Names that the package itself hands out are described on its page.
    """
    module = ast.parse(stub.with_suffix(".py").read_text(encoding="utf-8"))
    introduction = markdown(ast.get_docstring(module) or "")
    names = sorted(exported(room, stub), key=sort_key)
    blocks = [f"# {room}", introduction]
    linked = [last_name(name) for name in names if name in elsewhere]
    if linked:
        links = ", ".join(f"`{name}`" for name in linked)
        blocks.append(f"Described under [roundoff](roundoff.md): {links}.")
    blocks += [f"::: {name}" for name in names if name not in elsewhere]
    return "\n\n".join(blocks) + "\n"


def exported(room: str, stub: Path) -> list[str]:
    """The full name, where it is defined, of each name that the face hands out."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [
        f"{room}.{node.module}.{alias.name}" for node in imports for alias in node.names
    ]


def last_name(name: str) -> str:
    return name.rpartition(".")[2]


def sort_key(name: str) -> tuple[str, str]:
    return last_name(name).lower(), last_name(name)
