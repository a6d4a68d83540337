"""Read any tool's lists, write any tool's lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from roundoff.errors import PlanError
from roundoff.files import atomic_path
from roundoff.plan.lists import (
    apex,
    ascend,
    mindspore,
    paddle,
    tensorflow,
    transformer_engine,
)
from roundoff.plan.lists.fold import Written, over_lists, refuse
from roundoff.plan.lists.source import read_file
from roundoff.plan.rules import Plan

if TYPE_CHECKING:
    from torch import nn

#: In the order in which a file is tried: what has the most telling keys comes first.
READERS = {
    "ascend": ascend.recognise,
    "tensorflow": tensorflow.recognise,
    "apex": apex.recognise,
    "paddle": paddle.recognise,
    "mindspore": mindspore.recognise,
    "transformer_engine": transformer_engine.recognise,
}
WRITERS = ("ascend", "tensorflow", "apex", "paddle", "transformer_engine")
#: Those that change lists of their own, and cannot say what all other operators run in.
LISTS_ONLY = ("ascend", "tensorflow", "apex")
_ALSO = {
    "tf": "tensorflow",
    "te": "transformer_engine",
    "cann": "ascend",
    "paddlepaddle": "paddle",
}


class Lists(NamedTuple):
    """What ``write_lists`` did: what it had to leave out, what is coarser there than
    here, and how to use the file.
    """

    left_out: list[str]
    notes: list[str]
    use: str


def read_lists(
    source: str | Path | Mapping[str, Any],
    *,
    tool: str | None = None,
    model: nn.Module | Iterable[str] | None = None,
    format: str | None = None,
    base: str | Path | Mapping[str, Any] | None = None,
    partial: bool = False,
) -> Plan:
    """The plan that another tool's settings ask for.

    Args:
        source: a file (.json, .toml, .yaml, or NAME=VALUE lines), or the same as a
            mapping: Ascend's ``modify_mixlist``, ``precision_mode`` options or operator
            library; Paddle's ``auto_cast`` arguments; TensorFlow's environment;
            ``apex.amp.initialize`` arguments; MindSpore's lists; Transformer Engine's
            debug YAML; a plan of this package.
        tool: whose it is; found by its keys when left out.
        model: for Transformer Engine, whose file searches layers: the module, or the
            names of its layers.
        format: bf16 or fp16, for files that do not say it (fp16, Transformer Engine: bf16).
        base: for Ascend, the installed ``aic-*-ops-info.json`` that the lists edit.
            Without it, and for the other tools, operators that the file does not name
            follow torch's own autocast lists.
        partial: leave out operators that the table of names does not have; they stand
            under ``about["left_out"]``.

    Returns:
        A plan. ``about`` has what could not be a rule (``left_out``), what had to be
        assumed (``notes``), and which line of the file each pattern comes from
        (``origin``).

    Raises:
        PlanError: unreadable (JSON with comments: the lines), unknown settings or
            operators with the nearest names, an operator on two lists with both places,
            or settings that exclude each other.

    Example:
        >>> plan = read_lists({"black-list": {"to-add": ["SoftmaxV2"]}}, format="bf16")
        >>> plan.autocast, plan.rules
        ('bf16', (Rule(format='fp32', sites=('op:softmax',)),))
    """
    if isinstance(source, Mapping):
        data: Any = source
        where = tool or "settings"
        folder = None
    elif isinstance(source, (str, Path)):
        data = read_file(Path(source))
        where = str(source)
        folder = Path(source).parent
    else:
        raise PlanError(
            "no settings",
            where="read_lists",
            expected="a path or a mapping",
            got=type(source).__name__,
        )
    tool = _tool(data, tool, where)
    if tool == "plan":
        return _read_plan(source, where)
    if base is not None and tool != "ascend":
        raise PlanError(
            f"{tool} has no operator library", where="base", expected="Ascend's lists"
        )
    if tool == "ascend":
        return ascend.read(
            data, where, format=format, base=base, partial=partial, folder=folder
        )
    if tool == "apex":
        return apex.read(data, where, partial=partial)
    if tool == "transformer_engine":
        return transformer_engine.read(
            data, where, model=model, format=format, partial=partial
        )
    reader = {
        "paddle": paddle.read,
        "tensorflow": tensorflow.read,
        "mindspore": mindspore.read,
    }[tool]
    return reader(data, where, format=format, partial=partial)


def _read_plan(source: str | Path | Mapping[str, Any], where: str) -> Plan:
    if isinstance(source, Mapping):
        raise PlanError(
            "a plan is read from its file", where=where, do="Plan.load(path)"
        )
    return Plan.load(source)


def write_lists(
    plan: Plan,
    tool: str,
    path: str | Path,
    *,
    base: str | Path | Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    partial: bool = False,
) -> Lists:
    """Write a plan as another tool's settings, whole or not at all; what was left out
    is returned with ``partial``.

    Args:
        plan: what to write.
        tool: ascend, paddle, tensorflow, apex or transformer_engine.
        path: the file: JSON, for TensorFlow NAME=VALUE lines, for Transformer Engine YAML.
        base: for Ascend, the installed ``aic-*-ops-info.json``: only what differs from
            it is written.
        model: writes ``class:`` patterns out as its modules.
        partial: write what can be said. Otherwise a rule that the tool cannot say (a
            module to a tool that knows operator types) is a ``PlanError`` that lists
            all of them, and nothing is written.

    Example:
        >>> import tempfile
        >>> plan = read_lists({"level": "O1", "dtype": "bfloat16", "custom_black_list": ["softmax"]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = write_lists(plan, "ascend", Path(folder, "ops_info.json"))
        ...     Path(folder, "ops_info.json").read_text().split()
        ['{', '"black-list":', '{', '"to-add":', '[', '"SoftmaxV2"', ']', '}', '}']
    """
    tool = _ALSO.get(tool, tool)
    if tool not in WRITERS:
        raise PlanError(
            "no lists of this tool can be written",
            where=tool,
            expected=", ".join(WRITERS),
            got=repr(tool),
        )
    if model is not None:
        plan = plan.for_model(model)
    assumed: list[str] = []
    if tool in LISTS_ONLY:
        plan, assumed = over_lists(plan, tool)
    written = _write(plan, tool, str(path), base)
    written.notes[:0] = assumed
    refuse(written.left_out, tool, partial)
    with atomic_path(path) as temporary:
        temporary.write_text(written.text, encoding="utf-8")
    return Lists(
        written.left_out, written.notes, written.use.replace("FILE", str(path))
    )


def _write(plan: Plan, tool: str, path: str, base: Any) -> Written:
    if tool == "ascend":
        return ascend.write(plan, path=path, base=base)
    if base is not None:
        raise PlanError(
            f"{tool} has no operator library", where="base", expected="Ascend's lists"
        )
    writers = {
        "paddle": paddle.write,
        "tensorflow": tensorflow.write,
        "apex": apex.write,
        "transformer_engine": transformer_engine.write,
    }
    return writers[tool](plan)


def _tool(data: Any, tool: str | None, where: str) -> str:
    if not isinstance(data, Mapping):
        raise PlanError(
            "no settings",
            where=where,
            expected="names and values",
            got=type(data).__name__,
        )
    if tool is not None:
        tool = _ALSO.get(tool, tool)
        if tool not in (*READERS, "plan"):
            raise PlanError(
                "no such tool", where=tool, expected=", ".join(READERS), got=repr(tool)
            )
        return tool
    if "schema" in data:
        return "plan"
    for name, recognised in READERS.items():
        if recognised(data):
            return name
    keys = ", ".join(map(repr, list(data)[:5])) or "nothing"
    raise PlanError(
        "not the settings of a tool that is known here",
        where=where,
        got=f"the keys {keys}",
        expected="black-list, precision_mode (Ascend); custom_white_list, level (Paddle); TF_AUTO_MIXED_PRECISION_...; "
        "opt_level (Apex); white_list (MindSpore); sections with layers (Transformer Engine)",
        do="say whose it is: tool= (--from)",
    )
