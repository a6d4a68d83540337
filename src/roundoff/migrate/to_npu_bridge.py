"""Ascend's adapter (npu_bridge) written into a plain TensorFlow 1 script.

What is written is what the porting guide of TF Adapter for TensorFlow 1.15 asks for:
the import, the optimizer ``NpuOptimizer`` of the session's configuration, remapping and
memory optimization off, ``NPUEstimator`` with ``NPURunConfig``, a loss scale that reads
the device's own overflow flag, and the device's dropout and gelu.
"""

from __future__ import annotations

import ast

from roundoff.errors import ScriptError
from roundoff.lint import Script
from roundoff.migrate.arguments import (
    add_argument,
    argument,
    keyword_node,
    remove_keyword,
)
from roundoff.migrate.names import add_import, free_name
from roundoff.migrate.result import Migration, NotUnderstoodError, Remark
from roundoff.migrate.tensorflow_names import (
    imported_tensorflow,
    tensorflow_name,
    uses_adapter,
)
from roundoff.migrate.text_edits import TextEdits

#: Sessions, with the place of their configuration among the arguments.
_SESSIONS = {
    "Session": 2,
    "InteractiveSession": 2,
    "train.MonitoredTrainingSession": None,
}
_PRECISION = "allow_mix_precision"
_PROFILE = '{"output": "/tmp/profiling", "task_trace": "on"}'
#: Each line of a session's configuration, and why.
_CONFIGURATION = (
    (
        "{op} = {config}.graph_options.rewrite_options.custom_optimizers.add()",
        "TensorFlow hands its graph to the optimizers that are registered here",
    ),
    (
        '{op}.name = "NpuOptimizer"',
        "the adapter's optimizer, which runs graphs on NPUs",
    ),
    (
        '{op}.parameter_map["use_off_line"].b = True',
        "the graph runs on the NPU, not on the host",
    ),
    (
        '{op}.parameter_map["precision_mode"].s = {tf}.compat.as_bytes("'
        + _PRECISION
        + '")',
        "mixed precision by Ascend's operator lists",
    ),
    (
        '{op}.parameter_map["profiling_mode"].b = False',
        "True records where the time goes",
    ),
    (
        """{op}.parameter_map["profiling_options"].s = {tf}.compat.as_bytes('{profile}')""",
        "what a profile holds, and where it goes",
    ),
    (
        "{config}.graph_options.rewrite_options.remapping = RewriterConfig.OFF",
        "has to be off: it fuses operators that the NPU fuses itself",
    ),
    (
        "{config}.graph_options.rewrite_options.memory_optimization = RewriterConfig.OFF",
        "has to be off: the NPU plans its own memory",
    ),
)
_SOFT = (
    "{config}.allow_soft_placement = True",
    "tf.device names devices that are not there: TensorFlow may choose",
)
_MANAGER = (
    "{name} = ExponentialUpdateLossScaleManager(init_loss_scale=2**32, "
    "incr_every_n_steps=1000, decr_every_n_nan_or_inf=2, decr_ratio=0.5)"
)
_SCALED = (
    "an NPU may saturate instead of overflow: its loss scale reads the device's flag"
)
#: Arguments of tf.estimator.RunConfig that NPURunConfig does not take.
_NO_ARGUMENTS = {
    "train_distribute": "NPUs are distributed by npu_distributed_optimizer_wrapper",
    "eval_distribute": "evaluation runs on one NPU",
    "device_fn": "the adapter places operators itself",
    "protocol": "gRPC plays no part between NPUs",
    "experimental_distribute": "NPUs are distributed by npu_distributed_optimizer_wrapper",
    "experimental_max_worker_delay_secs": "workers start together",
    "session_creation_timeout_secs": "the session is the adapter's",
}
#: Calls by another name; TensorFlow's name → the adapter's, and why.
_RENAMED = {
    "estimator.Estimator": ("NPUEstimator", "trains on the NPU"),
    "contrib.mixed_precision.LossScaleOptimizer": ("NPULossScaleOptimizer", _SCALED),
    "contrib.mixed_precision.ExponentialUpdateLossScaleManager": (
        "ExponentialUpdateLossScaleManager",
        _SCALED,
    ),
    "contrib.mixed_precision.FixedLossScaleManager": ("FixedLossScaleManager", _SCALED),
}
_GRAPH_REWRITE = "train.experimental.enable_mixed_precision_graph_rewrite"
_DISTRIBUTED = (
    "horovod.tensorflow.DistributedOptimizer",
    "horovod.tensorflow.keras.DistributedOptimizer",
)
_DROPOUT_LAYERS = (
    "layers.dropout",
    "layers.Dropout",
    "keras.layers.Dropout",
    "keras.layers.SpatialDropout1D",
    "keras.layers.SpatialDropout2D",
    "keras.layers.SpatialDropout3D",
)
_HOROVOD = {
    "size": "get_rank_size()",
    "rank": "get_rank_id()",
    "local_rank": "get_local_rank_id()",
    "local_size": "get_local_rank_size()",
}
#: What has no equivalent, and what to do.
_NOTHING = {
    "distribute.": "distribution strategies do not run on NPUs: npu_distributed_optimizer_wrapper(optimizer) and "
    "one process a device",
    "py_func": "Python functions do not run on NPUs: mix_compile_mode leaves them to the host",
    "contrib.tpu.": "TPUs have interfaces of their own: write the script for tf.estimator first",
    "function": "tf.function belongs to TensorFlow 2: npu_device.open().as_default()",
    "GradientTape": "eager TensorFlow 2: npu_device.open().as_default()",
    "RunMetadata": "the NPU's times are not in a run's metadata: set profiling_mode in the session's configuration",
    "train.ProfilerHook": "the NPU's times are not in its timeline: set profiling_mode in the session's configuration",
    "summary.image": "images of summaries are not written from the NPU",
}


def to_npu_bridge(script: Script) -> Migration:
    """Return the script for Ascend's adapter.

    Raises ``ScriptError`` for a script without TensorFlow, or that makes no session and
    no estimator.
    """
    tensorflow = imported_tensorflow(script)
    if tensorflow is None:
        raise ScriptError(
            "no TensorFlow script",
            where=script.path,
            expected="a script that imports tensorflow, written for TensorFlow 1",
        )
    if uses_adapter(script):
        note = Remark(0, "npu_bridge is used already: nothing is changed")
        return Migration(script.path, script.text, script.text, notes=(note,))
    work = _Work(script, tensorflow)
    try:
        is_ported = work.sessions() | work.estimators()
        if not is_ported and not work.keras():
            raise ScriptError(
                "no session and no estimator found",
                where=script.path,
                expected="tf.Session, tf.train.MonitoredTrainingSession, tf.estimator.Estimator, or a model "
                "of Keras that is fitted",
                do="TensorFlow 2 runs on NPUs by npu_device.open().as_default()",
            )
        work.loss_scales()
        work.layers()
        work.horovod()
        work.renamed()
        work.nothing()
        work.imports()
        text = work.edits.apply()
    except NotUnderstoodError as error:
        return Migration(script.path, script.text, script.text, left=(error.remark,))
    return Migration(
        script.path,
        script.text,
        text,
        changes=tuple(sorted(work.edits.remarks)),
        left=tuple(sorted(set(work.left))),
        notes=tuple(sorted(set(work.notes))),
    )


class _Work:
    """The edits of one script."""

    def __init__(self, script: Script, tensorflow: str) -> None:
        self.script = script
        self.tf = tensorflow
        self.edits = TextEdits(script)
        self.left: list[Remark] = []
        self.notes: list[Remark] = []
        self.op = free_name(script, ("custom_op", "npu_op"))
        self.config = free_name(script, ("config", "npu_config"))
        self.manager = free_name(script, ("loss_scale_manager", "npu_loss_scale"))
        self._lines: list[str] = []
        self._configured: set[ast.AST] = set()
        is_soft = "allow_soft_placement" in script.text
        self.needs_soft = bool(self._calls("device")) and not is_soft

    def _calls(self, *names: str) -> list[ast.Call]:
        return [
            call
            for call in self.script.nodes(ast.Call)
            if tensorflow_name(self.script, call.func) in names
        ]

    # -- sessions ----------------------------------------------------------------------

    def sessions(self) -> bool:
        """Configure every session; return True where there is one."""
        passed_on = self._passed_to_estimators()
        for call in self._calls("ConfigProto"):
            if call not in passed_on:
                self._configure(call)
        calls = self._calls(*_SESSIONS)
        for call in calls:
            self._session(call)
        return bool(calls)

    def _passed_to_estimators(self) -> set[ast.AST]:
        """Return the configurations that an estimator's RunConfig takes."""
        found_in: set[ast.AST] = set()
        for call in self._calls("estimator.RunConfig"):
            value = argument(call, "session_config")
            if value is not None:
                found_in.add(self.script.definition(value) or value)
        return found_in

    def _configure(self, call: ast.Call) -> None:
        """Add the adapter's lines behind ``config = tf.ConfigProto(...)``."""
        statement = self.script.statement(call)
        is_assigned = isinstance(statement, ast.Assign) and statement.value is call
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if is_assigned and isinstance(target, ast.Name | ast.Attribute):
            self._configured.add(statement)
            self._write(statement, self.script.segment(target), before=False)
        elif not self._in_session(call):
            reason = "a configuration without a name: give it one, and migrate again"
            raise NotUnderstoodError(call.lineno, reason)

    def _in_session(self, call: ast.Call) -> bool:
        above = self.script.parent(call)
        if isinstance(above, ast.keyword):
            above = self.script.parent(above)
        if not isinstance(above, ast.Call):
            return False
        return tensorflow_name(self.script, above.func) in _SESSIONS

    def _write(
        self, statement: ast.stmt, config: str, *, before: bool, first: str = ""
    ) -> None:
        lines = [*_CONFIGURATION, *([_SOFT] if self.needs_soft else [])]
        names = {
            "op": self.op,
            "config": config,
            "tf": self.tf,
            "profile": _PROFILE,
        }
        texts = [line.format(**names) for line, _ in lines]
        insert = self.edits.before if before else self.edits.after
        insert(statement, [first, *texts] if first else texts, "")
        for text, (_, why) in zip(texts, lines, strict=True):
            shown = text.partition(" = ")[0]
            self.edits.remarks.add(Remark(statement.lineno, f"{shown}: {why}"))

    def _session(self, call: ast.Call) -> None:
        """Give a session its configuration, where it has none of a name."""
        name = tensorflow_name(self.script, call.func) or ""
        value = argument(call, "config", _SESSIONS[name])
        statement = self.script.statement(call)
        if value is None:
            first = f"{self.config} = {self.tf}.ConfigProto()"
            self._write(statement, self.config, before=True, first=first)
            text = f"config={self.config}"
            reason = "the session runs on the NPU by its configuration"
            add_argument(self.script, self.edits, call, text, reason)
        elif (
            tensorflow_name(self.script, getattr(value, "func", None)) == "ConfigProto"
        ):
            first = f"{self.config} = {self.script.segment(value)}"
            self._write(statement, self.config, before=True, first=first)
            self.edits.replace(value, self.config, "its configuration has a name")
        elif not self._configured:
            reason = "the session's configuration is made in another file: configure it there"
            self.left.append(Remark(call.lineno, reason))
        self._closed(call, statement)

    def _closed(self, call: ast.Call, statement: ast.stmt) -> None:
        is_with = isinstance(statement, ast.With)
        if not is_with and not self.script.method_calls("close"):
            reason = "close the session, or make it by `with`: the NPU is released then"
            self.notes.append(Remark(call.lineno, reason))

    # -- Keras -------------------------------------------------------------------------

    def keras(self) -> bool:
        """Give Keras a session on the NPU; return True where it fits a model."""
        backend = self._keras_backend()
        fits = self.script.method_calls("fit", "fit_generator", "train_on_batch")
        first = next(filter(_is_work, self.script.tree.body), None)
        if backend is None or not fits or first is None:
            return False
        declared = f"{self.config} = {self.tf}.ConfigProto()"
        self._write(first, self.config, before=True, first=declared)
        self.edits.before(
            first,
            [f"{backend}.set_session({self.tf}.Session(config={self.config}))"],
            "Keras runs in this session, which is on the NPU",
        )
        self.notes.append(Remark(first.lineno, _KERAS_VERSION))
        for call in self.script.method_calls("compile"):
            self.left.append(Remark(call.lineno, _KERAS_LOSS_SCALE))
        return True

    def _keras_backend(self) -> str | None:
        """Return how a script can write Keras' backend; None where it has no Keras."""
        targets = self.script.imports
        for name, target in targets.items():
            if target in ("keras.backend", "tensorflow.keras.backend"):
                return name
        names = set(targets.values())
        if any(target.split(".")[0] == "keras" for target in names):
            return "keras.backend" if targets.get("keras") == "keras" else None
        spelled = any(target.startswith("tensorflow.keras") for target in names)
        return f"{self.tf}.keras.backend" if spelled or self._has_keras() else None

    def _has_keras(self) -> bool:
        """Return True where the script writes ``tf.keras``."""
        names = map(self.script.qualified, self.script.nodes(ast.Attribute))
        return any((name or "").startswith("tensorflow.keras") for name in names)

    # -- estimators --------------------------------------------------------------------

    def estimators(self) -> bool:
        """Port estimators and their configurations; return True where there is one."""
        for call in self._calls("estimator.RunConfig"):
            self.edits.replace(
                call.func, "NPURunConfig", "the adapter's configuration of a run"
            )
            for name, reason in _NO_ARGUMENTS.items():
                keyword = keyword_node(call, name)
                if keyword is not None:
                    text = f"NPURunConfig takes no {name}: {reason}"
                    remove_keyword(self.script, self.edits, call, keyword, text)
                    self.left.append(Remark(keyword.value.lineno, text))
            self._options(call)
        calls = self._calls("estimator.Estimator")
        for call in calls:
            if argument(call, "config", 2) is None:
                text = f"config=NPURunConfig({self._run_options()})"
                reason = "mixed precision by Ascend's operator lists; profiling is off"
                add_argument(self.script, self.edits, call, text, reason)
        return bool(calls)

    def _options(self, call: ast.Call) -> None:
        reason = "mixed precision by Ascend's operator lists; profiling is off"
        add_argument(self.script, self.edits, call, self._run_options(), reason)

    def _run_options(self) -> str:
        profile = (
            f"ProfilingConfig(enable_profiling=False, profiling_options='{_PROFILE}')"
        )
        return f'precision_mode="{_PRECISION}", profiling_config={profile}'

    # -- loss scale --------------------------------------------------------------------

    def loss_scales(self) -> None:
        """Scale the loss of every optimizer that has no loss scale yet."""
        present = [name for name in _RENAMED if name.startswith("contrib.mixed")]
        if self._calls(*present):
            return
        by_hand = self._calls("gradients")
        if by_hand:
            reason = "gradients of tf.gradients are not scaled: scale the loss and the gradients by hand"
            self.left.append(Remark(by_hand[0].lineno, reason))
            return
        rewritten = self._calls(_GRAPH_REWRITE)
        for call in rewritten:
            self._rewritten(call)
        distributed = self._distributed()
        for call in distributed:
            self._scale(call, ", is_distributed=True")
        if not rewritten and not distributed:
            for call in self._optimizers():
                self._scale(call)

    def _optimizers(self) -> list[ast.Call]:
        """Return the calls that make an optimizer."""
        names = {
            call: tensorflow_name(self.script, call.func) or ""
            for call in self.script.nodes(ast.Call)
        }
        return [
            call
            for call, name in names.items()
            if name.startswith("train.") and name.endswith("Optimizer")
        ]

    def _distributed(self) -> list[ast.Call]:
        """Return Horovod's optimizers: a loss scale goes around them."""
        return [
            call
            for call in self.script.nodes(ast.Call)
            if self.script.qualified(call.func) in _DISTRIBUTED
        ]

    def _rewritten(self, call: ast.Call) -> None:
        """TensorFlow's own rewrite of the graph becomes a loss scale on the NPU."""
        if not call.args:
            raise NotUnderstoodError(
                call.lineno, "mixed precision without an optimizer"
            )
        self._make_manager(call)
        start, end = self.script.span(call)
        first, last = self.script.span(call.args[0])
        self.edits.replace_span(start, first, "NPULossScaleOptimizer(", _SCALED)
        self.edits.replace_span(last, end, f", {self.manager})", _SCALED)

    def _make_manager(self, call: ast.Call) -> None:
        statement = self._outside_of_dependencies(call)
        line = _MANAGER.format(name=self.manager)
        self.edits.before(statement, [line], "a loss scale that grows and shrinks")

    def _scale(self, call: ast.Call, beside: str = "") -> None:
        self._make_manager(call)
        start, end = self.script.span(call)
        self.edits.replace_span(start, start, "NPULossScaleOptimizer(", _SCALED)
        self.edits.replace_span(end, end, f", {self.manager}{beside})", _SCALED)

    def _outside_of_dependencies(self, call: ast.Call) -> ast.stmt:
        """Return where variables of a loss scale may be made: in no control dependency."""
        statement = self.script.statement(call)
        for above in self.script.ancestors(statement):
            if isinstance(above, ast.FunctionDef):
                break
            if isinstance(above, ast.With) and self._has_dependencies(above):
                statement = above
        return statement

    def _has_dependencies(self, block: ast.With) -> bool:
        names = [
            tensorflow_name(self.script, item.context_expr.func)
            for item in block.items
            if isinstance(item.context_expr, ast.Call)
        ]
        return "control_dependencies" in names

    # -- layers ------------------------------------------------------------------------

    def layers(self) -> None:
        """Write the device's own dropout and gelu."""
        for call in self._calls("nn.dropout"):
            self._dropout(call)
        if self._calls(*_DROPOUT_LAYERS):
            line = "from npu_bridge.estimator.npu import npu_convert_dropout"
            self._lines.append(line)
        for call in self._calls("nn.gelu"):
            self.edits.replace(call.func, "npu_unary_ops.gelu", _GELU)
        for function in self.script.nodes(ast.FunctionDef):
            if function.name == "gelu" and _is_gelu(function):
                self._gelu(function)
        for call in self.script.method_calls("batch"):
            if keyword_node(call, "drop_remainder") is None and len(call.args) == 1:
                reason = "a last batch of another size compiles the graph again: drop_remainder=True"
                self.notes.append(Remark(call.lineno, reason))

    def _dropout(self, call: ast.Call) -> None:
        self.edits.replace(
            call.func, "npu_ops.dropout", "the NPU's own dropout is faster"
        )
        rate = keyword_node(call, "rate")
        if rate is not None:
            value = self.script.segment(rate.value)
            if not isinstance(rate.value, ast.Constant | ast.Name | ast.Attribute):
                value = f"({value})"
            text = f"keep_prob=1 - {value}"
            self.edits.replace(rate, text, "npu_ops.dropout takes what is kept")

    def _gelu(self, function: ast.FunctionDef) -> None:
        """Call the device's gelu wherever the script's own is called or passed."""
        for name in self.script.nodes(ast.Name):
            is_read = name.id == "gelu" and isinstance(name.ctx, ast.Load)
            home = self.script.home(name) if is_read else None
            if is_read and home is self.script.scope(function):
                self.edits.replace(name, "npu_unary_ops.gelu", _GELU)

    # -- several devices ---------------------------------------------------------------

    def horovod(self) -> None:
        """Write the adapter's ranks, optimizer and hook in place of Horovod's."""
        needs_os = False
        for call in self.script.nodes(ast.Call):
            name = self.script.qualified(call.func) or ""
            prefix, _, last = name.rpartition(".")
            if prefix not in ("horovod.tensorflow", "horovod.tensorflow.keras"):
                continue
            needs_os = self._of_horovod(call, last) or needs_os
        for statement in self.script.nodes(ast.Import, ast.ImportFrom):
            module = getattr(statement, "module", None) or statement.names[0].name
            if module.split(".")[0] == "horovod":
                self.edits.delete(statement, "NPUs talk by HCCL")
        if needs_os and "os" not in self.script.imports:
            self._lines.insert(0, "import os")

    def _of_horovod(self, call: ast.Call, last: str) -> bool:
        """Rewrite one call; return True where the new text needs ``os``."""
        if last in _HOROVOD:
            self.edits.replace(call, _HOROVOD[last], "the rank of this NPU, by HCCL")
        elif last == "DistributedOptimizer":
            self.edits.replace(
                call.func,
                "npu_distributed_optimizer_wrapper",
                "gradients are summed by HCCL",
            )
        elif last == "BroadcastGlobalVariablesHook":
            text = 'NPUBroadcastGlobalVariablesHook(0, int(os.getenv("RANK_ID", "0")))'
            self.edits.replace(
                call, text, "all NPUs begin with the variables of the first"
            )
            return True
        elif last == "init":
            self.edits.delete(
                self.script.statement(call), "ranks come from the environment"
            )
            reason = (
                "ranks that are asked for before the first session need one that ran "
                "npu_ops.initialize_system(); RANK_TABLE_FILE and RANK_ID say who is there"
            )
            self.notes.append(Remark(call.lineno, reason))
        else:
            raise NotUnderstoodError(call.lineno, f"hvd.{last} has no form for NPUs")
        return False

    # -- the rest ----------------------------------------------------------------------

    def renamed(self) -> None:
        """Write the adapter's names."""
        for call in self._calls(*_RENAMED):
            name, reason = _RENAMED[tensorflow_name(self.script, call.func) or ""]
            self.edits.replace(call.func, name, reason)

    def nothing(self) -> None:
        """List what has no equivalent."""
        for node in self.script.nodes(ast.Attribute):
            name = tensorflow_name(self.script, node) or ""
            for prefix, reason in _NOTHING.items():
                is_part = prefix.endswith(".") and name.startswith(prefix)
                if is_part or name == prefix:
                    self.left.append(Remark(node.lineno, f"tf.{name}: {reason}"))
        for node in self.script.nodes(ast.Attribute):
            if node.attr == "global_jit_level" and isinstance(node.ctx, ast.Store):
                reason = "XLA does not run on NPUs: take this line out"
                self.left.append(Remark(node.lineno, reason))

    def imports(self) -> None:
        """Import the adapter."""
        for line in self._lines:
            add_import(self.script, self.edits, line, "what the new lines use")
        add_import(
            self.script,
            self.edits,
            "from npu_bridge.npu_init import *",
            "the adapter: by this import the script runs on NPUs",
        )


_GELU = "the NPU's own gelu is one operator"


_KERAS_VERSION = (
    "this is Keras of TensorFlow 1.15; in TensorFlow 2 it is "
    "npu_device.open().as_default()"
)
_KERAS_LOSS_SCALE = (
    "npu_bridge has no loss scale for Keras' optimizers: compile with an optimizer of "
    "tf.train in an NPULossScaleOptimizer, or keep precision_mode at must_keep_origin_dtype"
)


def _is_work(statement: ast.stmt) -> bool:
    """Return True for what comes behind the imports and the text of a module."""
    is_text = isinstance(statement, ast.Expr) and isinstance(
        statement.value, ast.Constant
    )
    return not is_text and not isinstance(statement, ast.Import | ast.ImportFrom)


def _is_gelu(function: ast.FunctionDef) -> bool:
    """Return True for the usual formulas, by the error function or its tanh."""
    constants = [
        node.value for node in ast.walk(function) if isinstance(node, ast.Constant)
    ]
    called = [
        node.func.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return 0.044715 in constants or "erf" in called
