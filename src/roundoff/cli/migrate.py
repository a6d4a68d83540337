"""``roundoff migrate``: mixed precision written into a training script."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o
from roundoff.cli.talk import talk
from roundoff.errors import ScriptError

if TYPE_CHECKING:
    from roundoff.migrate import Migration

#: Something was left as it is.
UNDECIDED = 4


def command(
    script: Annotated[Path, typer.Argument(help="A Python file that trains.")],
    to: Annotated[
        str | None,
        kinds.option(
            "--to",
            parse=kinds.migration_target,
            help="amp (fp16 with a scaler), bf16, roundoff (a plan), or npu_bridge (Ascend, TensorFlow 1).",
            metavar="WHAT",
        ),
    ] = None,
    source: Annotated[
        str | None,
        kinds.option(
            "--from",
            parse=kinds.migration_source,
            help="torch.cuda.amp, apex or npu_bridge: written anew for present interfaces.",
            metavar="WHAT",
        ),
    ] = None,
    plan: Annotated[
        Path,
        kinds.option(
            "--plan",
            parse=kinds.input_file,
            help="With --to roundoff: the plan that is trained under.",
            metavar="FILE",
        ),
    ] = Path("plan.toml"),
    write: Annotated[
        bool, typer.Option("--write", help="Change the file itself.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the new text to another file."),
    ] = None,
    json: o.Json = False,
) -> int:
    """Write mixed precision into a plain training script, and show it as a diff.

    A training loop is migrated as a whole; one whose shape is not understood is left as
    it is, and said so. The exit code is 4 where something was left, 0 where nothing was
    or the script is in mixed precision already, 2 for bad input.
    """
    import roundoff
    from roundoff.report import migration_lines

    if write and output is not None:
        raise ScriptError(
            "one file is written", where="--write", expected="--write or --output"
        )
    migration = roundoff.migrate(script, to, source=source, plan=plan)
    target = script if write else output
    if target is not None:
        _save(migration, script, target)
    if json:
        written = None if target is None else str(target)
        o.print_json(_as_json(migration, written))
    elif not talk().quiet:
        for line in migration_lines(migration):
            print(line)
        if target is not None:
            print(f"Written to {target}")
        elif migration.is_changed:
            print("Nothing is written: --write changes the file, -o another.")
    return UNDECIDED if migration.left else 0


def _as_json(migration: Migration, written: str | None) -> dict[str, Any]:
    """Return a migration as one object, without the text of before."""
    data = asdict(migration)
    del data["before"]
    return {**data, "diff": "\n".join(migration.diff()), "output": written}


def _save(migration: Migration, script: Path, target: Path) -> None:
    """Write the new text, with the rights, the encoding and the mark of the script."""
    from roundoff.files import atomic_path, check_folder
    from roundoff.lint import encoded

    check_folder(target.parent)
    data = encoded(migration.after, script.read_bytes())
    mode = stat.S_IMODE(script.stat().st_mode)
    place = Path(os.path.realpath(target))
    with atomic_path(place) as temporary:
        temporary.write_bytes(data)
    place.chmod(mode)
