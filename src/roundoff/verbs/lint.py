"""``roundoff.lint``: what is wrong with training scripts, without running them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from roundoff.errors import RoundoffError, wrong_type
from roundoff.files import as_path
from roundoff.lint import (
    LintConfig,
    LintResult,
    check_codes,
    lint_paths,
    nearest_config,
    write_fixed,
)

_Path = str | os.PathLike[str]


def lint(
    paths: _Path | Sequence[_Path],
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fix: bool = False,
    diff: bool = False,
    config: LintConfig | None = None,
) -> LintResult:
    """Read training scripts, and say what is wrong with their mixed precision, formulas,
    losses, loops and input pipelines. Nothing is imported or run.

    Args:
        paths: scripts, notebooks, and folders with them. A file that cannot be read or
            is no Python is a row of ``unread``, and the rest goes on.
        select: codes or their beginnings (``RO1``); every rule when empty.
        ignore: codes or their beginnings that do not run.
        fix: write mended texts over the files, where a fix is safe.
        diff: return mended texts in ``fixed`` and write nothing.
        config: instead of ``[tool.roundoff.lint]`` of the nearest ``pyproject.toml``.

    Raises:
        RoundoffError: a path does not exist, a code fits no rule, or the configuration
            is not what it should be.

    Example:
        >>> import tempfile, pathlib, roundoff
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder, "train.py")
        ...     _ = script.write_text('''
        ... import torch
        ... for x in loader:
        ...     scaler = torch.amp.GradScaler()
        ...     scaler.scale(model(x)).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ... ''')
        ...     answer = roundoff.lint(folder)
        >>> "RO101" in [finding.code for finding in answer.findings]
        True
    """
    if not isinstance(paths, str | os.PathLike | Iterable):
        raise wrong_type("paths", paths, "scripts or folders")
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    places = [as_path(path, "paths", "a script or a folder") for path in several]
    for place in places:
        if not os.path.lexists(place):
            raise RoundoffError("no such file or folder", where=str(place))
    settings = nearest_config(places) if config is None else config
    if select:
        settings = replace(settings, select=check_codes(select, "select"))
    if ignore:
        both = (*settings.ignore, *check_codes(ignore, "ignore"))
        settings = replace(settings, ignore=both)
    result = lint_paths(places, settings, mend=fix or diff)
    if fix:
        write_fixed(result)
    return result
