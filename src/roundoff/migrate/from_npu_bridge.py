"""Ascend's adapter (npu_bridge) taken out of a TensorFlow 1 script: plain TensorFlow."""

from __future__ import annotations

import ast

from roundoff.lint import Script
from roundoff.migrate.arguments import remove_keyword
from roundoff.migrate.names import add_import
from roundoff.migrate.result import Migration, NotUnderstoodError, Remark
from roundoff.migrate.tensorflow_names import (
    adapter_name,
    imported_tensorflow,
    uses_adapter,
)
from roundoff.migrate.text_edits import TextEdits

_GONE = "part of Ascend's adapter"
_PLAIN = "TensorFlow's own"
#: Calls by another name.
_RENAMED = {
    "NPUEstimator": "estimator.Estimator",
    "NPURunConfig": "estimator.RunConfig",
    "NPUEstimatorSpec": "estimator.EstimatorSpec",
    "npu_ops.dropout": "nn.dropout",
}
#: What tf.estimator.RunConfig and EstimatorSpec take of what the adapter's take.
_TAKEN = {
    "NPURunConfig": """model_dir tf_random_seed save_summary_steps save_checkpoints_steps
        save_checkpoints_secs session_config keep_checkpoint_max
        keep_checkpoint_every_n_hours log_step_count_steps""".split(),
    "NPUEstimatorSpec": """mode predictions loss train_op eval_metric_ops export_outputs
        training_chief_hooks training_hooks scaffold evaluation_hooks
        prediction_hooks""".split(),
}
#: What stands around something that stays.
_AROUND = (
    "NPULossScaleOptimizer",
    "NPUDistributedOptimizer",
    "npu_distributed_optimizer_wrapper",
    "npu_allreduce",
    "npu_tf_optimizer",
    "npu_hooks_append",
    "npu_callbacks_append",
    "npu_run_config_init",
    "npu_config_proto",
)
#: Statements that go.
_ENDED = ("init_resource", "shutdown_resource", "close_session")
_MANAGERS = ("ExponentialUpdateLossScaleManager", "FixedLossScaleManager")
_REWRITER = ("remapping", "memory_optimization")
_GELU = (
    "def gelu(x):",
    "    return 0.5 * x * (1.0 + {tf}.tanh(0.7978845608028654 * (x + 0.044715 * {tf}.pow(x, 3))))",
)


def from_npu_bridge(script: Script) -> Migration:
    """Return the script in plain TensorFlow; as it is where something has no plain form."""
    if not uses_adapter(script):
        note = Remark(0, "npu_bridge is not used: nothing to take out")
        return Migration(script.path, script.text, script.text, notes=(note,))
    work = _Work(script)
    try:
        work.options()
        work.calls()
        work.names()
        work.imports()
        text = work.edits.apply()
    except NotUnderstoodError as error:
        return Migration(script.path, script.text, script.text, left=(error.remark,))
    return Migration(
        script.path,
        script.text,
        text,
        changes=tuple(sorted(work.edits.remarks)),
        notes=tuple(sorted(set(work.notes))),
    )


class _Work:
    """The edits of one script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.tf = imported_tensorflow(script) or "tf"
        self.edits = TextEdits(script)
        self.notes: list[Remark] = []
        self._gone: set[ast.AST] = set()
        self._needs_gelu = False

    def _delete(self, statement: ast.stmt, reason: str) -> None:
        """Delete a statement once; the only one of a block becomes ``pass``."""
        if statement in self._gone:
            return
        self._gone.update(ast.walk(statement))
        above = self.script.parent(statement)
        blocks = [getattr(above, name, None) for name in ("body", "orelse")]
        if [statement] in blocks and not isinstance(above, ast.Module):
            self.edits.replace(statement, "pass", reason)
        else:
            self.edits.delete(statement, reason)

    # -- the session's configuration ---------------------------------------------------

    def options(self) -> None:
        """Delete the lines that configure the adapter in a session."""
        for statement in self.script.nodes(ast.Assign):
            if self._is_option(statement):
                if "precision_mode" in self.script.segment(statement):
                    self._note_precision(statement)
                self._delete(statement, _GONE)

    def _note_precision(self, node: ast.stmt | ast.expr) -> None:
        reason = (
            "mixed precision was the adapter's: tf.train.experimental."
            "enable_mixed_precision_graph_rewrite(optimizer) is TensorFlow's"
        )
        self.notes.append(Remark(node.lineno, reason))

    def _is_option(self, statement: ast.Assign) -> bool:
        value = self.script.segment(statement.value)
        if value.endswith("custom_optimizers.add()"):
            return True
        (target,) = statement.targets[:1]
        if isinstance(target, ast.Attribute) and target.attr in _REWRITER:
            return value.endswith("RewriterConfig.OFF")
        return self._is_of_custom_op(target)

    def _is_of_custom_op(self, target: ast.expr) -> bool:
        """Return True for ``custom_op.name`` and ``custom_op.parameter_map[...].s``."""
        inner: ast.AST = target
        while isinstance(inner, ast.Attribute | ast.Subscript):
            inner = inner.value
        if not isinstance(inner, ast.Name) or inner is target:
            return False
        home = self.script.home(inner)
        bindings = () if home is None else self.script.bindings(home)[inner.id]
        return any(
            each.value is not None
            and self.script.segment(each.value).endswith("custom_optimizers.add()")
            for each in bindings
        )

    # -- calls -------------------------------------------------------------------------

    def calls(self) -> None:
        """Write TensorFlow's own calls."""
        for call in self.script.nodes(ast.Call):
            name = adapter_name(self.script, call.func)
            if name is None or call in self._gone:
                continue
            if name in _ENDED:
                self._delete(self.script.statement(call), _GONE)
            elif name in _MANAGERS:
                self._manager(call)
            elif name in _AROUND:
                self._unwrap(call, name)
            elif name in _RENAMED:
                self._rename(call, name)
            elif name == "npu_unary_ops.gelu":
                self._needs_gelu = not self._has_gelu()
                self.edits.replace(
                    call.func, "gelu", "TensorFlow 1 has none of its own"
                )
                self._gone.update(ast.walk(call.func))

    def _has_gelu(self) -> bool:
        """Return True where the script has a gelu of its own."""
        return "gelu" in self.script.bindings(self.script.tree)

    def _manager(self, call: ast.Call) -> None:
        statement = self.script.statement(call)
        if not isinstance(statement, ast.Assign) or statement.value is not call:
            return  # inside of the optimizer that goes
        self._delete(statement, _GONE)

    def _unwrap(self, call: ast.Call, name: str) -> None:
        """``NPULossScaleOptimizer(optimizer, manager)`` → ``optimizer``."""
        inside = [*call.args, *(each.value for each in call.keywords)]
        start, end = self.script.span(call)
        if not inside:
            if name != "npu_config_proto":
                raise NotUnderstoodError(call.lineno, f"{name}() around nothing")
            self.edits.replace(call, f"{self.tf}.ConfigProto()", _PLAIN)
            self._gone.update(ast.walk(call))
            return
        first, last = self.script.span(inside[0])
        self.edits.replace_span(start, first, "", _GONE)
        self.edits.replace_span(last, end, "", _GONE)
        self._gone.update(ast.walk(call.func))
        for other in inside[1:]:
            self._gone.update(ast.walk(other))

    def _rename(self, call: ast.Call, name: str) -> None:
        self.edits.replace(call.func, f"{self.tf}.{_RENAMED[name]}", _PLAIN)
        self._gone.update(ast.walk(call.func))
        taken = _TAKEN.get(name)
        if taken is None:
            return
        gone = [each for each in call.keywords if each.arg and each.arg not in taken]
        if len(gone) == len(call.keywords) and not call.args:
            start = self.script.span(call.func)[1]
            end = self.script.span(call)[1]
            self.edits.replace_span(start, end, "()", _GONE)
        else:
            for keyword in gone:
                remove_keyword(self.script, self.edits, call, keyword, _GONE)
        for keyword in gone:
            self._gone.update(ast.walk(keyword))
            if keyword.arg in ("precision_mode", "precision_mode_v2"):
                self._note_precision(keyword.value)

    # -- what is left over -------------------------------------------------------------

    def names(self) -> None:
        """Raise ``NotUnderstoodError`` for a name of the adapter without a plain form."""
        for node in self.script.nodes(ast.Name):
            if node in self._gone or not isinstance(node.ctx, ast.Load):
                continue
            name = adapter_name(self.script, node)
            if name is None or name == "RewriterConfig":
                continue
            raise NotUnderstoodError(
                node.lineno, f"{name} has no form in plain TensorFlow"
            )

    def imports(self) -> None:
        """Delete the adapter's imports."""
        for statement in self.script.nodes(ast.ImportFrom):
            module = statement.module or ""
            if module.startswith("npu_bridge"):
                self._delete(statement, _GONE)
            elif module.endswith("rewriter_config_pb2"):
                self._delete_unused(statement)
        for plain in self.script.nodes(ast.Import):
            if all(alias.name.startswith("npu_bridge") for alias in plain.names):
                self._delete(plain, _GONE)
        for line in _GELU if self._needs_gelu else ():
            text = line.format(tf=self.tf)
            add_import(self.script, self.edits, text, "the usual formula")

    def _delete_unused(self, statement: ast.ImportFrom) -> None:
        uses = [
            node
            for node in self.script.nodes(ast.Name)
            if node.id == "RewriterConfig" and node not in self._gone
        ]
        if not uses:
            self._delete(statement, _GONE)
