"""``roundoff plan`` with its subcommands: a first word that is none of them is the budget to plan from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from roundoff.cli import options as o
from roundoff.cli import plan

_BUDGET = "budget"

Tool = Annotated[
    str,
    typer.Option(
        "--to", help="plan, or ascend, paddle, tensorflow, apex, transformer_engine."
    ),
]
Source = Annotated[
    str | None,
    typer.Option(
        "--from", help="Whose settings the input has; found by its keys when left out."
    ),
]
Model = Annotated[
    Path | None,
    typer.Option("--model", help="Workload whose model's layers or classes are meant."),
]


class PlanGroup(TyperGroup):
    """Hands what is no subcommand to ``roundoff plan BUDGET``, options and ``--help`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the hidden subcommand in front where none is given."""
        named = bool(args) and args[0] in self.commands and args[0] != _BUDGET
        return super().parse_args(ctx, args if named else [_BUDGET, *args])


class FromBudget(TyperCommand):
    """The hidden subcommand, which goes by the name of its group."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """As ``roundoff plan``, not a word below it."""
        return super().make_context(
            parent.info_name or info_name, args, parent.parent, **extra
        )


app = typer.Typer(
    cls=PlanGroup,
    rich_markup_mode=None,
    help="The cheapest plan that meets a target, from a budget.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    _BUDGET,
    cls=FromBudget,
    hidden=True,
    epilog="Also: roundoff plan convert (other tools' operator lists), roundoff plan explain (which rule decides).",
)(plan.command)


@app.command("convert")
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT", help="A plan, or the settings of another tool."
        ),
    ],
    to: Tool,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    tool: Source = None,
    model: Model = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            help="Ascend's installed aic-*-ops-info.json, which its lists edit.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", help="bf16 or fp16, where the input does not say it."),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Leave out what cannot be said, and list it."),
    ] = False,
    json: o.Json = False,
) -> int:
    """Read a plan or another tool's operator lists, and write them as a plan or for another tool."""
    from roundoff.plan import Lists, read_lists, write_lists
    from roundoff.workload import Workload

    module = Workload.load(model).model if model is not None else None
    library = base if base is not None and _ascend(source, tool) else None
    found = read_lists(
        source, tool=tool, model=module, format=format, base=library, partial=partial
    )
    if to == "plan":
        found.save(output)
        done = Lists(
            [],
            [],
            f"roundoff.autocast({str(output)!r}, model)" if found.autocast else "",
        )
    else:
        done = write_lists(
            found,
            to,
            output,
            base=base if to in ("ascend", "cann") else None,
            model=module,
            partial=partial,
        )
    read = (
        {key: list(found.about.get(key, [])) for key in ("left_out", "notes")}
        if "from" in found.about
        else {}
    )
    said = {
        "output": str(output),
        "use": done.use,
        "left_out": read.get("left_out", []) + done.left_out,
        "notes": read.get("notes", []) + done.notes,
    }
    if json:
        o.print_json(said)
        return 0
    for label, lines in (("Left out", said["left_out"]), ("Note", said["notes"])):
        for line in lines:
            print(f"{label}: {line}")
    print(f"Written to {output}" + (f"; use: {done.use}" if done.use else ""))
    return 0


@app.command("explain")
def explain(
    source: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A plan, or the settings of another tool."),
    ],
    sites: Annotated[
        list[str],
        typer.Argument(
            metavar="SITE...",
            help="module/operator, or op:NAME for an operator anywhere.",
        ),
    ],
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            "-w",
            help="Its model: for rules over classes, and to check the sites.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help="Whose built-in lists decide where no rule does: cpu or cuda.",
        ),
    ] = "cpu",
    json: o.Json = False,
) -> int:
    """Say for each site which rule of a plan decides, and what autocast's own lists say on CPU and CUDA."""
    from rich.table import Table
    from rich.text import Text

    from roundoff.plan import DEVICES, read_lists
    from roundoff.plan import explain as decide
    from roundoff.workload import Workload

    model = Workload.load(workload).model if workload is not None else None
    found = read_lists(source, model=model)
    decisions = decide(found, sites, model=model, device=device, file=source)
    if json:
        o.print_json([{**dataclasses.asdict(d), "why": d.why} for d in decisions])
        return 0
    table = Table(
        "site",
        "format",
        "decided by",
        *(f"autocast, {d}" for d in DEVICES if found.autocast),
        box=None,
    )
    for d in decisions:
        said = (d.listed.get(name, "–") for name in DEVICES if found.autocast)
        table.add_row(
            *map(Text, (d.site, d.format, d.why, *said))
        )  # Text: a name in brackets is no markup
    o.console(False).print(table)
    return 0


def _ascend(source: Path, tool: str | None) -> bool:
    """Whether the input is one of Ascend's mixlists: those edit the library."""
    from roundoff.plan import READERS, read_file

    return (
        tool in ("ascend", "cann")
        if tool is not None
        else READERS["ascend"](read_file(source))
    )
