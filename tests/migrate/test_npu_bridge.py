"""Ascend's adapter written into TensorFlow 1 scripts and taken out again. TensorFlow is
not needed: the results are parsed and compared with the text that is expected.
"""

from __future__ import annotations

import ast

import pytest

from roundoff.errors import ScriptError
from roundoff.migrate.migrating import migrate_script
from roundoff.migrate.result import Migration

STAR = "from npu_bridge.npu_init import *\n"
LINES = """\
custom_op = config.graph_options.rewrite_options.custom_optimizers.add()
custom_op.name = "NpuOptimizer"
custom_op.parameter_map["use_off_line"].b = True
custom_op.parameter_map["precision_mode"].s = tf.compat.as_bytes("allow_mix_precision")
custom_op.parameter_map["profiling_mode"].b = False
custom_op.parameter_map["profiling_options"].s = tf.compat.as_bytes('{"output": "/tmp/profiling", "task_trace": "on"}')
config.graph_options.rewrite_options.remapping = RewriterConfig.OFF
config.graph_options.rewrite_options.memory_optimization = RewriterConfig.OFF
"""
MANAGER = (
    "loss_scale_manager = ExponentialUpdateLossScaleManager(init_loss_scale=2**32, "
    "incr_every_n_steps=1000, decr_every_n_nan_or_inf=2, decr_ratio=0.5)\n"
)
OPTIONS = (
    'precision_mode="allow_mix_precision", profiling_config=ProfilingConfig('
    "enable_profiling=False, profiling_options="
    '\'{"output": "/tmp/profiling", "task_trace": "on"}\')'
)
SESSION = "with tf.Session() as sess:\n    sess.run(train_op)\n"


def to_npu(code: str) -> Migration:
    migration = migrate_script(code, "train.py", to="npu_bridge")
    ast.parse(migration.after)
    again = migrate_script(migration.after, "train.py", to="npu_bridge")
    assert not again.is_changed
    return migration


def from_npu(code: str) -> Migration:
    migration = migrate_script(code, "train.py", to=None, source="npu_bridge")
    ast.parse(migration.after)
    return migration


def test_a_session_with_a_configuration() -> None:
    code = (
        "import tensorflow as tf\n"
        "config = tf.ConfigProto(log_device_placement=True)\n"
        "sess = tf.Session(config=config)\n"
        "sess.close()\n"
    )
    migration = to_npu(code)
    assert migration.after == (
        "import tensorflow as tf\n"
        + STAR
        + "config = tf.ConfigProto(log_device_placement=True)\n"
        + LINES
        + "sess = tf.Session(config=config)\n"
        "sess.close()\n"
    )
    assert migration.left == ()
    reasons = " ".join(each.reason for each in migration.changes)
    for words in ("remapping", "memory_optimization", "precision_mode", "profiling"):
        assert words in reasons


def test_a_session_without_one() -> None:
    code = f"import tensorflow.compat.v1 as tf\n{SESSION}"
    after = to_npu(code).after
    made = f"config = tf.ConfigProto()\n{LINES}with tf.Session(config=config) as sess:"
    assert made in after


def test_a_configuration_inside_of_the_call() -> None:
    code = "import tensorflow as tf\nsess = tf.Session('', config=tf.ConfigProto(allow_soft_placement=True))\nsess.close()\n"
    after = to_npu(code).after
    assert f"config = tf.ConfigProto(allow_soft_placement=True)\n{LINES}" in after
    assert "sess = tf.Session('', config=config)\n" in after


def test_a_name_that_is_taken() -> None:
    code = f"import tensorflow as tf\nconfig = parse()\ncustom_op = 1\n{SESSION}"
    after = to_npu(code).after
    assert "npu_config = tf.ConfigProto()\n" in after
    assert 'npu_op.name = "NpuOptimizer"' in after
    assert "tf.Session(config=npu_config)" in after


def test_devices_that_are_not_there() -> None:
    code = f"import tensorflow as tf\nwith tf.device('/gpu:0'):\n    x = f()\n{SESSION}"
    assert "config.allow_soft_placement = True\n" in to_npu(code).after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tf.nn.dropout(x, keep)", "npu_ops.dropout(x, keep)"),
        ("tf.nn.dropout(x, rate=r)", "npu_ops.dropout(x, keep_prob=1 - r)"),
        (
            "tf.nn.dropout(x, rate=1 - k, seed=1)",
            "npu_ops.dropout(x, keep_prob=1 - (1 - k), seed=1)",
        ),
        ("tf.nn.gelu(x)", "npu_unary_ops.gelu(x)"),
        (
            "tf.train.AdamOptimizer(0.1).minimize(loss)",
            "NPULossScaleOptimizer(tf.train.AdamOptimizer(0.1), loss_scale_manager).minimize(loss)",
        ),
    ],
)
def test_calls(before: str, after: str) -> None:
    code = f"import tensorflow as tf\ny = {before}\n{SESSION}"
    migration = to_npu(code)
    assert f"y = {after}\n" in migration.after


def test_layers_that_convert_themselves() -> None:
    code = f"import tensorflow as tf\ny = tf.layers.dropout(x, 0.1)\n{SESSION}"
    after = to_npu(code).after
    assert (
        "from npu_bridge.estimator.npu import npu_convert_dropout\n" + STAR
    ) in after
    assert "y = tf.layers.dropout(x, 0.1)\n" in after


def test_a_loss_scale_outside_of_dependencies() -> None:
    code = (
        "import tensorflow as tf\n"
        "def build(loss):\n"
        "    with tf.control_dependencies(updates):\n"
        "        return tf.train.AdamOptimizer(0.1).minimize(loss)\n" + SESSION
    )
    after = to_npu(code).after
    assert f"def build(loss):\n    {MANAGER}    with tf.control_dependencies" in after


def test_loss_scales_that_are_there() -> None:
    code = (
        "import tensorflow as tf\n"
        "manager = tf.contrib.mixed_precision.FixedLossScaleManager(512)\n"
        "opt = tf.contrib.mixed_precision.LossScaleOptimizer(tf.train.AdamOptimizer(), manager)\n"
        + SESSION
    )
    after = to_npu(code).after
    assert "manager = FixedLossScaleManager(512)\n" in after
    assert "opt = NPULossScaleOptimizer(tf.train.AdamOptimizer(), manager)\n" in after
    assert "ExponentialUpdate" not in after


def test_the_rewrite_of_the_graph() -> None:
    code = (
        "import tensorflow as tf\n"
        "opt = tf.train.AdamOptimizer()\n"
        "opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt, loss_scale='dynamic')\n"
        + SESSION
    )
    after = to_npu(code).after
    assert f"{MANAGER}opt = NPULossScaleOptimizer(opt, loss_scale_manager)\n" in after
    assert "opt = tf.train.AdamOptimizer()\n" in after


def test_gradients_by_hand_are_left() -> None:
    code = (
        "import tensorflow as tf\nopt = tf.train.AdamOptimizer()\n"
        f"g = tf.gradients(loss, variables)\n{SESSION}"
    )
    migration = to_npu(code)
    assert "NPULossScaleOptimizer" not in migration.after
    assert "by hand" in migration.left[0].reason


ESTIMATOR = """\
import tensorflow as tf
session_config = tf.ConfigProto()
run_config = tf.estimator.RunConfig(
    model_dir="out",
    session_config=session_config,
)
classifier = tf.estimator.Estimator(model_fn, config=run_config)
other = tf.estimator.Estimator(model_fn)
"""


def test_estimators() -> None:
    migration = to_npu(ESTIMATOR)
    assert migration.after == (
        f"import tensorflow as tf\n{STAR}"
        "session_config = tf.ConfigProto()\n"
        "run_config = NPURunConfig(\n"
        '    model_dir="out",\n'
        f"    session_config=session_config, {OPTIONS},\n"
        ")\n"
        "classifier = NPUEstimator(model_fn, config=run_config)\n"
        f"other = NPUEstimator(model_fn, config=NPURunConfig({OPTIONS}))\n"
    )


def test_arguments_without_an_equivalent_are_listed() -> None:
    code = ESTIMATOR.replace(
        'model_dir="out",',
        'model_dir="out", train_distribute=tf.distribute.MirroredStrategy(),',
    )
    migration = to_npu(code)
    assert "train_distribute" not in migration.after
    reasons = " ".join(each.reason for each in migration.left)
    assert "NPURunConfig takes no train_distribute" in reasons
    assert "distribution strategies do not run on NPUs" in reasons


def test_horovod() -> None:
    code = f"""\
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
opt = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.1 * hvd.size()))
hooks = [hvd.BroadcastGlobalVariablesHook(0)]
folder = "out" if hvd.rank() == 0 else None
{SESSION}"""
    after = to_npu(code).after
    assert "hvd" not in after
    assert (
        "opt = NPULossScaleOptimizer(npu_distributed_optimizer_wrapper("
        "tf.train.AdamOptimizer(0.1 * get_rank_size())), loss_scale_manager, is_distributed=True)\n"
    ) in after
    assert 'NPUBroadcastGlobalVariablesHook(0, int(os.getenv("RANK_ID", "0")))' in after
    assert "import os\n" in after
    assert 'folder = "out" if get_rank_id() == 0 else None\n' in after


def test_what_horovod_has_alone() -> None:
    code = f"import tensorflow as tf\nimport horovod.tensorflow as hvd\nx = hvd.allgather(y)\n{SESSION}"
    migration = migrate_script(code, "train.py", to="npu_bridge")
    assert not migration.is_changed
    assert "hvd.allgather" in migration.left[0].reason


def test_keras_gets_a_session() -> None:
    code = (
        '"""Digits."""\nimport tensorflow as tf\nfrom tensorflow.keras import layers\n\n'
        "model = tf.keras.Sequential([layers.Dense(2)])\n"
        'model.compile("adam", "mse")\nmodel.fit(x, y)\n'
    )
    migration = migrate_script(code, "train.py", to="npu_bridge")
    lines = migration.after.splitlines()
    ast.parse(migration.after)
    made = lines.index("config = tf.ConfigProto()")
    used = lines.index("tf.keras.backend.set_session(tf.Session(config=config))")
    assert made < used < lines.index("model = tf.keras.Sequential([layers.Dense(2)])")
    assert [remark.line for remark in migration.left] == [6]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch\n", "no TensorFlow script"),
        ("import tensorflow as tf\nx = tf.ones(3)\n", "no session and no estimator"),
    ],
)
def test_scripts_of_another_kind(code: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        migrate_script(code, "train.py", to="npu_bridge")


PLAIN = """\
import numpy as np
import tensorflow as tf


def gelu(x):
    return 0.5 * x * (1.0 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * tf.pow(x, 3))))


x = tf.placeholder(tf.float32, [None, 4])
hidden = gelu(tf.layers.dense(x, 16))
hidden = tf.nn.dropout(hidden, keep_prob=0.9)
optimizer = tf.train.AdamOptimizer(1e-3)
train_op = optimizer.minimize(tf.reduce_mean(hidden))
config = tf.ConfigProto(allow_soft_placement=True)
with tf.Session(config=config) as sess:
    sess.run(train_op)
"""


@pytest.mark.parametrize(
    "code",
    [
        PLAIN,
        ESTIMATOR.replace("other = tf.estimator.Estimator(model_fn)\n", ""),
        "import tensorflow as tf\nopt = tf.train.AdamOptimizer()\nc = tf.ConfigProto()\ns = tf.Session(config=c)\n",
    ],
)
def test_there_and_back(code: str) -> None:
    after = to_npu(code).after
    assert after != code
    back = from_npu(after)
    assert back.after == code
    assert back.left == ()


def test_a_script_that_the_adapters_own_tool_wrote() -> None:
    code = """\
import tensorflow as tf
from npu_bridge.npu_init import *
from npu_bridge.estimator.npu.npu_config import NPURunConfig

(npu_sess, npu_shutdown) = init_resource()
opt = npu_tf_optimizer(tf.train.AdamOptimizer(0.1))
sess = tf.Session(config=npu_config_proto())
other = tf.Session(config=npu_config_proto(config_proto=c))
y = npu_unary_ops.gelu(x)
run = NPURunConfig(precision_mode="allow_mix_precision", iterations_per_loop=10)
est = NPUEstimator(fn, config=run, hooks=npu_hooks_append(hooks_list=hooks))
shutdown_resource(npu_sess, npu_shutdown)
close_session(npu_sess)
"""
    after = from_npu(code).after
    assert "npu" not in after.lower()
    assert "opt = tf.train.AdamOptimizer(0.1)\n" in after
    assert "sess = tf.Session(config=tf.ConfigProto())\n" in after
    assert "other = tf.Session(config=c)\n" in after
    assert "def gelu(x):\n" in after
    assert "run = tf.estimator.RunConfig()\n" in after
    assert "est = tf.estimator.Estimator(fn, config=run, hooks=hooks)\n" in after


def test_what_has_no_plain_form_stays() -> None:
    code = f"import tensorflow as tf\n{STAR}x = hccl_ops.allreduce(y, 'sum')\n"
    migration = from_npu(code)
    assert not migration.is_changed
    assert migration.left[0].line == 3
    assert "hccl_ops has no form" in migration.left[0].reason


def test_a_script_without_the_adapter() -> None:
    migration = from_npu("import tensorflow as tf\n")
    assert "not used" in migration.notes[0].reason
