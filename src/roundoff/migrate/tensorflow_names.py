"""What names of TensorFlow 1 scripts stand for, Ascend's adapter included."""

from __future__ import annotations

import ast

from roundoff.lint import Script

#: What ``from npu_bridge.npu_init import *`` brings.
ADAPTER = frozenset(
    """NPUEstimator NPUEstimatorSpec NPURunConfig ProfilingConfig DumpConfig
    NPULossScaleOptimizer ExponentialUpdateLossScaleManager FixedLossScaleManager
    NPUDistributedOptimizer npu_distributed_optimizer_wrapper npu_allreduce npu_ops
    npu_unary_ops NPUBroadcastGlobalVariablesHook NPUCheckpointSaverHook
    NPUOutputTensorHook RewriterConfig get_rank_size get_rank_id get_local_rank_id
    get_local_rank_size hccl_ops npu_config_proto npu_run_config_init npu_hooks_append
    npu_tf_optimizer npu_callbacks_append init_resource shutdown_resource close_session
    npu_convert_dropout npu_scope npu_compile util""".split()
)


def tensorflow_name(script: Script, node: ast.AST | None) -> str | None:
    r"""Return the name below ``tf`` that an expression stands for, as TensorFlow 1 has it.

    >>> script = Script("import tensorflow.compat.v1 as tf\ntf.train.AdamOptimizer()")
    >>> tensorflow_name(script, script.nodes(ast.Call)[0].func)
    'train.AdamOptimizer'
    """
    name = script.qualified(node)
    if name is None or not name.startswith("tensorflow."):
        return None
    return name.removeprefix("tensorflow.").removeprefix("compat.v1.")


def adapter_name(script: Script, node: ast.AST | None) -> str | None:
    """Return the adapter's name that an expression stands for, by import or by star."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    target = script.imports.get(node.id, "")
    if target.startswith("npu_bridge."):
        first = target.rpartition(".")[2]
    elif node.id in ADAPTER and has_star(script) and script.home(node) is None:
        first = node.id
    else:
        return None
    return ".".join([first, *attributes])


def has_star(script: Script) -> bool:
    """Return True where everything of the adapter is imported."""
    return any(
        (statement.module or "").startswith("npu_bridge")
        and any(alias.name == "*" for alias in statement.names)
        for statement in script.nodes(ast.ImportFrom)
    )


def uses_adapter(script: Script) -> bool:
    """Return True where a script imports Ascend's adapter."""
    return has_star(script) or script.uses("npu_bridge")


def imported_tensorflow(script: Script) -> str | None:
    """Return what TensorFlow is called in a script; None where it is not imported."""
    for name, target in script.imports.items():
        if target in ("tensorflow", "tensorflow.compat.v1"):
            return name
    return None
