"""``roundoff plan`` with its subcommands.

A first word that is none of them is the budget to plan from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from roundoff.cli import kinds, plan, talk
from roundoff.cli import options as o

if TYPE_CHECKING:
    from roundoff.plan import SiteDecision

_BUDGET = "budget"
#: Names of the tool whose lists edit a library.
ASCEND = ("ascend", "cann")

Tool = Annotated[
    str,
    kinds.option(
        "--to",
        parse=kinds.tool,
        help="plan, or ascend, paddle, tensorflow, apex, transformer_engine.",
        metavar="TOOL",
    ),
]
Source = Annotated[
    str | None,
    kinds.option(
        "--from",
        parse=kinds.source_tool,
        help="Whose settings the input has; found by its keys when left out.",
        metavar="TOOL",
    ),
]
Model = Annotated[
    Path | None,
    kinds.option(
        "--model",
        parse=kinds.input_file,
        help="A workload file: its model has the layers and classes.",
        metavar="WORKLOAD",
    ),
]


class PlanGroup(TyperGroup):
    """Hands what is no subcommand to ``roundoff plan BUDGET``, ``--help`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the hidden subcommand in front if there is none."""
        named = bool(args) and args[0] in self.commands and args[0] != _BUDGET
        return super().parse_args(ctx, args if named else [_BUDGET, *args])


class FromBudget(TyperCommand):
    """The hidden subcommand, which goes by the name of its group."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Show it as ``roundoff plan``, not as a word below it."""
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
)(talk.command(plan.command))


@app.command("convert")
@talk.command
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
        kinds.option(
            "--base",
            parse=kinds.input_file,
            metavar="FILE",
            help="Ascend's installed aic-*-ops-info.json, which its lists edit.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        kinds.option(
            "--format",
            parse=kinds.half,
            help="bf16 or fp16, where the input does not say it.",
            metavar="FORMAT",
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Leave out what cannot be said, and list it."),
    ] = False,
    json: o.Json = False,
) -> int:
    """Read a plan or another tool's operator lists, and write them as a plan or for
    another tool."""
    from roundoff.plan import Lists, read_lists, write_lists
    from roundoff.workload import Workload

    module = None
    if model is not None:
        with o.progress(json):
            module = Workload.load(model).model
    edits_library = base is not None and _is_ascend(source, tool)
    read = read_lists(
        source,
        tool=tool,
        model=module,
        format=format,
        base=base if edits_library else None,
        partial=partial,
    )
    if to == "plan":
        read.save(output)
        use = f"roundoff.autocast({str(output)!r}, model)" if read.autocast else ""
        written = Lists([], [], use)
    else:
        written = write_lists(
            read,
            to,
            output,
            base=base if to in ASCEND else None,
            model=module,
            partial=partial,
        )
    about = read.about if "from" in read.about else {}
    left_out = [*about.get("left_out", []), *written.left_out]
    notes = [*about.get("notes", []), *written.notes]
    if json:
        o.print_json(
            {
                "output": str(output),
                "use": written.use,
                "left_out": left_out,
                "notes": notes,
            }
        )
        return 0
    console = o.console()
    for line in left_out:
        console.print(f"Left out: {line}", markup=False, soft_wrap=True)
    for line in notes:
        console.print(f"Note: {line}", markup=False, soft_wrap=True)
    use = f"; use: {written.use}" if written.use else ""
    console.print(f"Written to {output}{use}", markup=False, soft_wrap=True)
    return 0


@app.command("explain")
@talk.command
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
        kinds.option(
            "--workload",
            "-w",
            parse=kinds.input_file,
            metavar="WORKLOAD",
            help="Its model: for rules over classes, and to check the sites.",
        ),
    ] = None,
    device: Annotated[
        str,
        kinds.option(
            "--device",
            parse=kinds.device_type,
            metavar="DEVICE",
            help="Whose built-in lists decide where no rule does: cpu or cuda.",
        ),
    ] = "cpu",
    json: o.Json = False,
) -> int:
    """Say for each site which rule of a plan decides, and what autocast's own lists
    say on CPU and CUDA."""
    from roundoff.plan import explain as decide
    from roundoff.plan import read_lists, run_batches
    from roundoff.workload import Workload

    model = None
    called = None
    if workload is not None:
        with o.progress(json):
            loaded = Workload.load(workload)
            model = loaded.model
            called = run_batches(loaded).handler.sites
    lists = read_lists(source, model=model)
    decisions = decide(
        lists, sites, model=model, called=called, device=device, file=source
    )
    if json:
        rows = [{**dataclasses.asdict(row), "why": row.why} for row in decisions]
        o.print_json(rows)
    else:
        _print_decisions(decisions, with_autocast=bool(lists.autocast))
    return 0


def _print_decisions(decisions: Sequence[SiteDecision], *, with_autocast: bool) -> None:
    """Print a table of deciding rules, with what autocast's own lists say."""
    from roundoff.plan import DEVICES
    from roundoff.report import print_table

    devices = DEVICES if with_autocast else ()
    columns = {
        "site": [row.site for row in decisions],
        "format": [row.format for row in decisions],
        "decided by": [row.why for row in decisions],
    }
    for device in devices:
        columns[f"autocast, {device}"] = [
            row.listed.get(device, "–") for row in decisions
        ]
    print_table(o.console(), columns)


def _is_ascend(source: Path, tool: str | None) -> bool:
    """Return True if the input is one of Ascend's mixlists: those edit the library."""
    from roundoff.plan import READERS, read_file

    if tool is not None:
        return tool in ASCEND
    return READERS["ascend"](read_file(source))
