"""What a script is migrated from and to, and the errors that say why it is not."""

from __future__ import annotations

from collections.abc import Callable

from roundoff.errors import ScriptError, did_you_mean, nearest
from roundoff.lint import Kind, Script, parse
from roundoff.migrate.apex import from_apex
from roundoff.migrate.from_npu_bridge import from_npu_bridge
from roundoff.migrate.mixed_precision import migrate_text
from roundoff.migrate.result import Migration, Remark
from roundoff.migrate.targets import To
from roundoff.migrate.to_npu_bridge import to_npu_bridge
from roundoff.migrate.torch_cuda_amp import from_torch_cuda_amp

#: What mixed precision is written as.
TARGETS = ("amp", "bf16", "roundoff", "npu_bridge")
#: What a script may use that is rewritten.
SOURCES = ("torch.cuda.amp", "apex", "npu_bridge")
_FROM: dict[str, Callable[[Script], Migration]] = {
    "torch.cuda.amp": from_torch_cuda_amp,
    "apex": from_apex,
    "npu_bridge": from_npu_bridge,
}


def check_direction(to: str | None, source: str | None) -> None:
    """Raise ``ScriptError`` for what cannot be migrated from or to."""
    for what, name, names in (("to", to, TARGETS), ("from", source, SOURCES)):
        if name is not None and name not in names:
            raise ScriptError(
                f"nothing to migrate {what}",
                where=what,
                expected=", ".join(names),
                got=repr(name),
                do=did_you_mean(nearest(name, names, at_most=1)),
            )
    if to is None and source is None:
        raise ScriptError(
            "what to migrate to is not said",
            where="to",
            expected=", ".join(TARGETS),
            do=f"or say what it is migrated from: {', '.join(SOURCES)}",
        )
    if source is not None and to not in (None, "amp"):
        raise ScriptError(
            f"a script is not migrated from {source} to {to} in one go",
            where="to",
            expected="one of the two",
            do="migrate twice",
        )


def migrate_script(
    text: str,
    path: str,
    *,
    to: str | None,
    source: str | None = None,
    plan: str = "plan.toml",
    scales: bool = True,
) -> Migration:
    """Return what a script becomes; nothing is imported, run or written.

    Args:
        text: the script.
        path: what to call it.
        to: one of ``TARGETS``.
        source: one of ``SOURCES``.
        plan: of ``roundoff``, the plan that the new text names.
        scales: of ``roundoff``, the plan runs something in fp16: the loss is scaled.

    Raises:
        ScriptError: it is no Python, or has no training loop.
    """
    check_direction(to, source)
    try:
        script = parse(text, path)
    except ValueError as error:
        raise ScriptError(
            f"no Python that can be migrated: {error}", where=path
        ) from None
    if source is not None:
        return _FROM[source](script)
    if to == "npu_bridge":
        return to_npu_bridge(script)
    return _to_mixed_precision(script, to, plan=plan, scales=scales)  # type: ignore[arg-type]


def _to_mixed_precision(
    script: Script, to: To, *, plan: str, scales: bool
) -> Migration:
    present = _mixed_precision_of(script)
    if present is not None:
        note = Remark(present.line, f"already mixed precision: {present.reason}")
        return Migration(script.path, script.text, script.text, notes=(note,))
    if not script.uses("torch"):
        raise ScriptError(
            "no PyTorch script",
            where=script.path,
            expected="a training script that imports torch",
            do="for TensorFlow 1 scripts: --to npu_bridge",
        )
    if not script.loops:
        raise ScriptError(
            "no training loop found",
            where=script.path,
            expected="a loop with loss.backward() and optimizer.step()",
        )
    if to != "roundoff":
        scales = to == "amp"
    return migrate_text(script, to, plan=plan, scales=scales)


def _mixed_precision_of(script: Script) -> Remark | None:
    """Return where a script runs in mixed precision already, and by what."""
    for call in (*script.calls("roundoff.autocast", "roundoff.LossScaler"),):
        return Remark(call.lineno, f"{script.called(call)} is used")
    for program in script.programs:
        for event in program.events:
            for context in event.contexts:
                if script.things.kind(context) is Kind.AUTOCAST:
                    return Remark(context.lineno, "autocast is used")
    for name in ("torch.autocast", "torch.amp.GradScaler"):
        for call in script.calls(name):
            return Remark(call.lineno, f"{name} is used")
    return _old_interface(script)


def _old_interface(script: Script) -> Remark | None:
    """Return where an interface of before is used, and how to leave it."""
    for call in script.calls("torch.cuda.amp.autocast", "torch.cuda.amp.GradScaler"):
        reason = "torch.cuda.amp is used; --from torch.cuda.amp writes it anew"
        return Remark(call.lineno, reason)
    for call in script.calls("apex.amp.initialize"):
        return Remark(call.lineno, "apex is used; --from apex writes it anew")
    return None
