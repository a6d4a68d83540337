"""Loading a workload: execute the user's Python file, or import it by its dotted name."""

from __future__ import annotations
import __future__

import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundoff.errors import WorkloadError, did_you_mean, nearest
from roundoff.files import as_path
from roundoff.workload.code import arguments_of, user_code

__all__ = ["UserModule", "check_defined", "execute_module"]

_PREFIX = "roundoff_workload_"


@dataclass(frozen=True)
class UserModule:
    """What the user's file or module defines.

    Attributes:
        namespace: its names and their values.
        path: its file, if it has one.
    """

    namespace: Mapping[str, Any]
    path: Path | None


@contextmanager
def execute_module(source: str | Path) -> Iterator[UserModule]:
    """Execute a Python file, or import a dotted name; yields what it defines.

    A file becomes a module with a name of its own, so that two workloads never share
    one, and nothing is cached. Its folder (for a dotted name: the current folder) is
    first on ``sys.path`` until the block ends.

    Raises:
        WorkloadError: there is no such file or module, it is not Python, or its code
            raised.
    """
    path = _find_file(source)
    saved = list(sys.path)
    sys.path.insert(0, str(path.parent if path else Path.cwd()))
    importlib.invalidate_caches()
    try:
        module = _import(str(source)) if path is None else _execute_file(path)
        file = getattr(module, "__file__", None)
        yield UserModule(vars(module), path or (Path(file) if file else None))
    finally:
        sys.path[:] = saved


def _find_file(source: str | Path) -> Path | None:
    """The absolute path of a file (links are not resolved); None for a dotted name."""
    path = as_path(
        source, "source", "a Python file, or the name of a module"
    ).expanduser()
    if path.is_file() and path.suffix == ".py":
        return path.absolute()
    is_package = (path / "__init__.py").exists()
    if _is_dotted_name(source) and (is_package or not path.exists()):
        return None
    if path.exists():
        kind = "a folder" if path.is_dir() else f"a file ending in {path.suffix!r}"
        raise WorkloadError(
            "not a Python file",
            where=str(source),
            expected="a file ending in .py",
            got=kind,
        )
    raise _no_such_file(source)


def _is_dotted_name(source: str | Path) -> bool:
    if not isinstance(source, str) or source.endswith(".py"):
        return False
    return all(part.isidentifier() for part in source.split("."))


def _no_such_file(source: str | Path) -> WorkloadError:
    path = Path(source).expanduser()
    files = sorted(file.name for file in path.parent.glob("*.py"))
    near = nearest(path.with_suffix(".py").name, files, at_most=1)
    question = did_you_mean(str(path.with_name(name)) for name in near)
    return WorkloadError(
        "no such file",
        where=str(source),
        expected="a Python file or the dotted name of a module",
        do=question or f"check the path; the current folder is {Path.cwd()}",
    )


def _execute_file(path: Path) -> types.ModuleType:
    _forget_helpers(path.parent)
    name = _unused_name(path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise WorkloadError("Python cannot load this file", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        with user_code("the file", str(path), path=path):
            # Compiled here rather than by the loader, whose bytecode cache misses an
            # edit within the same second.
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            exec(code, vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _unused_name(stem: str) -> str:
    names = (f"{_PREFIX}{stem}_{number}" for number in itertools.count())
    return next(name for name in names if name not in sys.modules)


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
        with user_code(f"importing {name}", name), arguments_of(name):
            return importlib.import_module(name)
    except WorkloadError as error:
        missing = getattr(error.__cause__, "name", None) or ""
        is_missing = isinstance(error.__cause__, ModuleNotFoundError)
        # What the module imports in turn is its own error.
        if not is_missing or not f"{name}.".startswith(missing + "."):
            raise
        do = f"check the name; the current folder is {Path.cwd()}"
        if Path(f"{name}.py").exists():
            do = f"did you mean {name}.py?"
        raise WorkloadError(
            "no such file or module",
            where=name,
            expected="a Python file, ending in .py, or the dotted name of a module",
            got=f"no module named {missing!r}",
            do=do,
        ) from error.__cause__


def check_defined(namespace: Mapping[str, Any], where: str) -> None:
    """Raise ``WorkloadError`` if ``model`` or ``batches`` is missing; it says what there is."""
    missing = [name for name in ("model", "batches") if name not in namespace]
    if not missing:
        return
    defined = _defined_in(namespace)
    renames = []
    for name in missing:
        near = nearest(name, defined, at_most=1)
        renames += [f"rename {other!r} to {name!r}" for other in near]
    additions = [f"add `def {name}(): ...`" for name in missing]
    raise WorkloadError(
        " and ".join(f"{name}()" for name in missing) + " missing",
        where=where,
        expected="a file that defines model() and batches()",
        got=f"it defines {', '.join(defined)}" if defined else "it defines nothing",
        do=", ".join(renames) or " and ".join(additions),
    )


def _defined_in(namespace: Mapping[str, Any]) -> list[str]:
    """The public names that the module defines, rather than imports."""
    module = namespace["__name__"]
    return [
        name for name, value in namespace.items() if _is_defined(name, value, module)
    ]


def _is_defined(name: str, value: object, module: str) -> bool:
    is_import = isinstance(value, (types.ModuleType, __future__._Feature))
    if name.startswith("_") or is_import:
        return False
    if isinstance(value, (type, types.FunctionType)):
        return value.__module__ == module
    return True
