"""Loading a workload: execute the user's Python file, or import it by its dotted name."""

from __future__ import annotations
import __future__

import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roundoff.errors import WorkloadError, did_you_mean, nearest
from roundoff.workload.code import user_code

__all__ = ["check_defined", "execute"]

_PREFIX = "roundoff_workload_"


@contextmanager
def execute(source: str | Path) -> Iterator[tuple[dict[str, Any], Path | None]]:
    """Execute a Python file, or import a dotted name; yields its namespace and its file.

    A file becomes a module with a name of its own, so that two workloads never share one, and
    nothing is cached. Its folder (for a dotted name: the current folder) is first on ``sys.path``
    until the block ends.

    Raises:
        WorkloadError: there is no such file or module, it is not Python, or its code raised.
    """
    path = _find_file(source)
    saved = list(sys.path)
    sys.path.insert(0, str(path.parent if path else Path.cwd()))
    importlib.invalidate_caches()
    try:
        module = _import(str(source)) if path is None else _execute_file(path)
        file = getattr(module, "__file__", None)
        yield vars(module), path or (Path(file) if file else None)
    finally:
        sys.path[:] = saved


def _find_file(source: str | Path) -> Path | None:
    """The absolute path of a file (links are not resolved); None for a dotted name."""
    text = str(source)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".py":
        return path.absolute()
    dotted = (
        isinstance(source, str)
        and path.suffix != ".py"
        and all(part.isidentifier() for part in text.split("."))
    )
    if dotted and (not path.exists() or (path / "__init__.py").exists()):
        return None
    if path.exists():
        kind = "a folder" if path.is_dir() else f"a file ending in {path.suffix!r}"
        raise WorkloadError(
            "not a Python file", where=text, expected="a file ending in .py", got=kind
        )
    found = sorted(file.name for file in path.parent.glob("*.py"))
    near = nearest(path.with_suffix(".py").name, found, at_most=1)
    do = did_you_mean(str(path.with_name(name)) for name in near)
    raise WorkloadError(
        "no such file",
        where=text,
        expected="a Python file or the dotted name of a module",
        do=do or f"check the path; the current folder is {Path.cwd()}",
    )


def _execute_file(path: Path) -> types.ModuleType:
    _forget_helpers(path.parent)
    name = next(
        name
        for n in itertools.count()
        if (name := f"{_PREFIX}{path.stem}_{n}") not in sys.modules
    )
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise WorkloadError("Python cannot load this file", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        with user_code("the file", str(path), path=path):
            # Compiled here rather than by the loader, whose bytecode cache misses an edit within
            # the same second.
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            exec(code, vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _forget_helpers(folder: Path) -> None:
    """Forget other workloads' helper modules that have a namesake in this folder."""
    modules = [
        (name, getattr(module, "__file__", None) or "")
        for name, module in sys.modules.items()
    ]
    others = {
        Path(file).parent for name, file in modules if name.startswith(_PREFIX)
    } - {folder}
    for name, file in modules:
        if Path(file).parent in others and (folder / f"{name}.py").is_file():
            del sys.modules[name]


def _import(name: str) -> types.ModuleType:
    try:
        with user_code(f"importing {name}", name):
            return importlib.import_module(name)
    except WorkloadError as error:
        missing = getattr(error.__cause__, "name", None) or ""
        # Only when the module itself is what is missing; what it imports in turn is its own error.
        if isinstance(error.__cause__, ModuleNotFoundError) and f"{name}.".startswith(
            missing + "."
        ):
            raise WorkloadError(
                "no such file or module",
                where=name,
                expected="a Python file, ending in .py, or the dotted name of a module",
                got=f"no module named {missing!r}",
                do=f"did you mean {name}.py?"
                if Path(f"{name}.py").exists()
                else f"check the name; the current folder is {Path.cwd()}",
            ) from error.__cause__
        raise


def check_defined(namespace: dict[str, Any], where: str) -> None:
    """Raise ``WorkloadError`` if ``model`` or ``batches`` is missing; it says what there is."""
    missing = [name for name in ("model", "batches") if name not in namespace]
    if not missing:
        return
    own = [
        name
        for name, value in namespace.items()
        if _is_own(name, value, namespace["__name__"])
    ]
    near = [(name, nearest(name, own, at_most=1)) for name in missing]
    hints = [f"rename {found[0]!r} to {name!r}" for name, found in near if found]
    raise WorkloadError(
        " and ".join(f"{name}()" for name in missing) + " missing",
        where=where,
        expected="a file that defines model() and batches()",
        got=f"it defines {', '.join(own)}" if own else "it defines nothing",
        do=", ".join(hints)
        or " and ".join(f"add `def {name}(): ...`" for name in missing),
    )


def _is_own(name: str, value: object, module: str) -> bool:
    """Whether a public name was defined in the module rather than imported into it."""
    if name.startswith("_") or isinstance(
        value, (types.ModuleType, __future__._Feature)
    ):
        return False
    if isinstance(value, (type, types.FunctionType)):
        return value.__module__ == module
    return True
