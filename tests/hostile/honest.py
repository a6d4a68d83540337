"""Honest files of every kind that a verb reads, made once; attacks change them."""

from __future__ import annotations

import argparse
import json
import shutil
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import roundoff
from roundoff.export import write_checkpoint
from roundoff.verbs.compare import compare

WORKLOAD = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))

def batches():
    return [torch.linspace(-1, 1, 16).reshape(4, 4)]

def loss(output, batch):
    return output.square().mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""
PLAN = """\
schema = 1
default = "fp32"

[about]
target = 40.0

[[rule]]
format = "bf16"
sites = ["0/linear", "1/tanh"]
"""
SECONDS = """\
[[seconds]]
kind = "linear"
format = "fp32"
size = "any"
seconds = 1e-6
"""
SCRIPT = """\
import torch
from torch import nn

model = nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.cuda.amp.GradScaler()
for batch, wanted in data:
    with torch.cuda.amp.autocast():
        loss = nn.functional.mse_loss(model(batch), wanted)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
PLAIN = """\
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for batch, wanted in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
SESSION = """\
import tensorflow as tf

optimizer = tf.train.AdamOptimizer(1e-3)
train_op = optimizer.minimize(loss)
config = tf.ConfigProto(allow_soft_placement=True)
with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    sess.run(train_op)
"""
TUNING = """\
schema = 1

[[change]]
name = "channels_last"

[[change]]
name = "no_fp64"
modules = ["0", "2"]
"""
#: What lint reads beside a script, and what quantize and plan convert are told of.
PYPROJECT = """\
[project]
name = "a"

[tool.roundoff.lint]
select = ["RO1", "RO4"]
ignore = ["RO101"]
exclude = ["old/*"]

[tool.roundoff.lint.per-file-ignores]
"train.py" = ["RO402"]
"""
AMCT = {
    "simple.cfg": """\
batch_num : 1
activation_offset : true
skip_layers : "2"
common_config : {
    arq_quantize : {
        channel_wise : true
    }
}
""",
    "quant.json": '{"version": 1, "batch_num": 1, "activation_offset": true}',
    "record.txt": """\
record {
  key: "c1"
  value {
    scale_d: 0.5
    offset_d: 3
    scale_w: 0.25
    offset_w: 0
  }
}
""",
}
OPS_INFO = '{"MatMul": {"precision_reduce": {"flag": "true"}}, "Add": {"precision_reduce": {"flag": "false"}}}'
#: Settings of other tools, which plan convert reads.
LISTS = {
    "tensorflow.env": "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_ALLOWLIST_ADD=MatMul,Conv2D\n",
    "paddle.json": '{"custom_white_list": ["matmul_v2"], "custom_black_list": ["softmax"]}',
    "ascend.json": '{"black-list": {"to-add": ["Add"]}, "white-list": {"to-remove": ["MatMul"]}}',
    "te.yaml": "transformer_engine_config_dict:\n  recipe: delayed\nlayers:\n  - name: 0\n",
    "apex.toml": 'half_functions = ["torch.matmul"]\n',
    "mindspore.json": '{"white_list": ["nn.Conv2d", "ops.MatMul"], "dtype": "float16"}',
    "layers.yaml": """\
one:
  enabled: True
  layers:
    layer_name_regex_pattern: "[02]"
  transformer_engine:
    DisableFP8Layer:
      enabled: True
""",
    "numbers.yaml": """\
two:
  enabled: True
  layers:
    layer_types: [all]
    layer_numbers: 0-1
  transformer_engine:
    FakeQuant:
      enabled: True
      quant_format: FP8E5M2
      gemms: [fprop]
""",
}
APEX = """\
import torch
from apex import amp

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for batch, wanted in data:
    loss = torch.nn.functional.mse_loss(model(batch), wanted)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
#: Dumps as msprobe has written them.
MSPROBE = Path(__file__).parents[1] / "record" / "dumps" / "fixtures" / "msprobe"


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv1d(2, 3, 3),
        nn.BatchNorm1d(3),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(9, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 3),
    ]
    return nn.Sequential(*layers)


def _record(folder: Path, *, fault: float = 0.0) -> None:
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.linspace(-1, 1, 64).reshape(4, 2, 8)
    targets = torch.tensor([0, 1, 2, 1])
    table = nn.Embedding(5, 4)
    nn.init.ones_(table.weight)
    with roundoff.capture(folder, model, keep="tensors") as run:
        for _ in range(2):
            looked_up = table(targets) * (1.0 + fault)
            loss = nn.functional.cross_entropy(model(batch) + looked_up[:, :3], targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=float(loss), loss_scale=1024.0)


def _repeat(folder: Path, kind: str) -> None:
    """Copy the run as one that repeats it."""
    repeat = folder / f"ref.{kind}1"
    shutil.copytree(folder / "ref", repeat)
    about = json.loads((repeat / "run.json").read_text())
    about["of"] = about["id"]
    about["id"] = f"{about['id']}-{kind}"
    about.pop("checksum", None)
    (repeat / "run.json").write_text(json.dumps(about))


def _save_checkpoints(folder: Path) -> None:
    """Write two checkpoints that differ, as a file of each kind and as a folder of parts."""
    for side, moved in (("a", 0.0), ("b", 0.01)):
        state = {name: each + moved for name, each in _network().state_dict().items()}
        floats = {
            name: each for name, each in state.items() if each.is_floating_point()
        }
        torch.save({"model": state, "step": 3}, folder / f"{side}.pt")
        save_file(floats, folder / f"{side}.safetensors")
        parts = folder / f"parts_{side}"
        parts.mkdir()
        names = list(floats)
        of_files = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
        for file, chosen in of_files.items():
            save_file({name: floats[name] for name in chosen}, parts / file)
        weights = {name: file for file, chosen in of_files.items() for name in chosen}
        index = json.dumps({"metadata": {}, "weight_map": weights})
        (parts / "model.safetensors.index.json").write_text(index)


def _save_megatron(folder: Path) -> None:
    """Write a checkpoint as Megatron does: an iteration, and a file for each rank."""
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    for rank in ("mp_rank_00", "mp_rank_01"):
        place = folder / "iter_0000003" / rank
        place.mkdir(parents=True)
        content = {
            "args": argparse.Namespace(rank=rank),
            "model": dict(_network().state_dict()),
        }
        torch.save(content, place / "model_optim_rng.pt")


def layer() -> nn.Module:
    """What is written as codes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))


def _save_codes(folder: Path) -> None:
    """Write weights in eight bits as one file, and as parts with an index."""
    batches = [torch.linspace(-1, 1, 32).reshape(4, 8)]
    model = roundoff.quantize(layer(), "int8", batches)
    write_checkpoint(model, folder / "compressed")
    parts = folder / "compressed_parts"
    shutil.copytree(folder / "compressed", parts)
    file = parts / "model.safetensors"
    weights = dict.fromkeys(load_file(file), "one.safetensors")
    file.rename(parts / "one.safetensors")
    index = {"metadata": {}, "weight_map": weights}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))


def make(folder: Path) -> None:
    """Write one of each kind into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _record(folder / "ref")
    _record(folder / "cand", fault=0.01)
    compare(reference=folder / "ref", candidate=folder / "cand").save(folder / "saved")
    for kind in ("noise", "repeat"):
        _repeat(folder, kind)
    (folder / "net.py").write_text(WORKLOAD)
    workload = roundoff.Workload.load(folder / "net.py")
    budget = roundoff.budget(workload, formats=["bf16", "int8"])
    budget.save(folder / "budget.parquet")
    (folder / "plan.toml").write_text(PLAN)
    roundoff.Plan.load(folder / "plan.toml").save(folder / "plan.json")
    (folder / "seconds.toml").write_text(SECONDS)
    (folder / "train.py").write_text(SCRIPT)
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# A title"]},
        {
            "cell_type": "code",
            "execution_count": None,
            "metadata": {},
            "outputs": [],
            "source": SCRIPT.splitlines(keepends=True),
        },
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "train.ipynb").write_text(json.dumps(notebook))
    (folder / "plain.py").write_text(PLAIN)
    (folder / "session.py").write_text(SESSION)
    (folder / "tuning.toml").write_text(TUNING)
    _save_checkpoints(folder)
    _save_megatron(folder / "megatron")
    _save_codes(folder)
    quantized = roundoff.quantize(layer(), "int8", [torch.ones(2, 8)])
    quantized.record().save(folder / "record.toml")
    (folder / "apex.py").write_text(APEX)
    for name in ("tensor", "tensor_l0", "ranks", "md5", "mix"):
        shutil.copytree(MSPROBE / name, folder / f"msprobe_{name}")
    (folder / "map.toml").write_text('"0" = "0"\n"5" = "5"\n')
    more = {"pyproject.toml": PYPROJECT, "ops_info.json": OPS_INFO}
    for name, text in (LISTS | AMCT | more).items():
        (folder / name).write_text(text)
    with zipfile.ZipFile(folder / "run.zip", "w") as archive:
        for file in sorted((folder / "ref").rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder / "ref").as_posix())
    dump = {"task": "statistics", "level": "L1", "data": {}}
    step = folder / "dump" / "step0" / "rank0"
    step.mkdir(parents=True)
    statistics = {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2, 3],
        "Max": 1.0,
        "Min": -1.0,
        "Mean": 0.1,
        "Norm": 2.0,
        "requires_grad": False,
    }
    dump["data"] = {
        "Functional.linear.0.forward": {
            "input_args": [statistics],
            "input_kwargs": {},
            "output": [statistics],
        }
    }
    for name, content in {
        "dump.json": dump,
        "stack.json": {"0": [["Functional.linear.0.forward"], ["File train.py"]]},
        "construct.json": {"Functional.linear.0.forward": None},
    }.items():
        (step / name).write_text(json.dumps(content))


#: Those that migrate, check and advise; the words that name a file are in brackets.
OF_SCRIPTS_AND_CHECKPOINTS = (
    "check {ref} {cand}",
    "check {ref} {cand} --json",
    "check {ref} {cand} --repeats {ref}",
    "check zip://::{run.zip} {cand}",
    "check {a.pt} {b.pt}",
    "check {a.safetensors} {b.safetensors}",
    "check {a.safetensors} {b.pt} --json",
    "check {parts_a} {parts_b}",
    "migrate {plain.py} --to amp",
    "migrate {plain.py} --to bf16 --json",
    "migrate {plain.py} --to roundoff --plan {plan.toml} -o out.py",
    "migrate {plain.py} --to amp --write",
    "migrate {train.py} --from torch.cuda.amp",
    "migrate {train.ipynb} --to amp",
    "check {ref} {a.pt}",
    "migrate {session.py} --to npu_bridge",
    "migrate {session.py} --from npu_bridge -o out.py",
    "advise net.py --apply {tuning.toml} --seconds 0.001",
    "read_tuning {tuning.toml}",
    "read_config {simple.cfg}",
    "read_config {quant.json}",
    "read_record {record.txt}",
    "load_checkpoint {compressed}",
    "load_checkpoint {compressed_parts}",
)
#: Dumps of msprobe with tensors, checksums, modules and ranks; runs that were repeated.
OF_DUMPS_AND_REPEATS = (
    "show {msprobe_tensor} --views",
    "overflow {msprobe_tensor_l0}",
    "replay {msprobe_tensor}",
    "compare {msprobe_tensor} {msprobe_tensor}",
    "compare {msprobe_tensor_l0} {msprobe_mix} --json",
    "compare {msprobe_md5} {msprobe_tensor}",
    "compare {msprobe_ranks} {msprobe_ranks} --stats",
    "check {msprobe_tensor} {msprobe_ranks}",
    "diff {msprobe_tensor_l0} {msprobe_tensor_l0} low/Linear",
    "compare {ref} {cand} # {ref.noise1} {ref.repeat1}",
    "check {ref} {cand} # {ref.noise1} {ref.repeat1}",
)
#: Plans and lists where they are followed, and the rest that scripts read.
OF_PLANS_AND_RECORDS = (
    "check {megatron} {megatron}",
    "check {megatron} {a.pt} --json",
    "plan convert {mindspore.json} --to plan -o out.toml --format fp16 --partial",
    "plan convert {layers.yaml} --to plan --model net.py -o out.toml --partial",
    "plan convert {numbers.yaml} --to plan --model net.py -o out.toml --partial",
    "migrate {apex.py} --from apex",
    "quantize net.py --plan {plan.toml} --no-onnx -o out",
    "quantize net.py --config {simple.cfg} --no-onnx -o out",
    "bench net.py --configs fp32,{plan.toml} --steps 3 --seeds 1 -o out",
    "read_quantized {record.toml}",
    "autocast {plan.toml}",
    "autocast {plan.json}",
    "autocast {paddle.json}",
    "autocast {tensorflow.env}",
)
#: Every command that reads such files; the words that name a file are in brackets.
COMMANDS = (
    "show {ref}",
    "show {ref} 5/addmm",
    "show {ref} * --sort nan --views --step 0",
    "show {ref} --json",
    "overflow {ref}",
    "overflow {ref} --json",
    "replay {ref}",
    "replay {ref} --dtype same --step 1",
    "replay {ref} --phase backward --json",
    "compare {ref} {cand}",
    "compare {cand} {ref}",
    "compare {ref} {cand} --stats",
    "compare {ref} {cand} --json --step 0",
    "compare {ref} {cand} --map {map.toml}",
    "compare {ref} {cand} --html out.html --save out",
    "compare {saved}",
    "compare {saved} --limit cosine=0.9 --json",
    "compare {saved} --html out.html",
    "diff {ref} {cand} 5/addmm",
    "diff {ref} {cand} 5.weight --json",
    "show zip://::{run.zip}",
    "replay zip://::{run.zip}",
    "compare zip://::{run.zip} {cand}",
    "show {dump}",
    "overflow {dump}",
    "compare {dump} {dump}",
    "plan {budget.parquet} --target 30dB -o out.toml",
    "plan {budget.parquet} --target 30dB --cost bitops --json -o out.json",
    "plan {budget.parquet} --target 30dB --cost seconds --cost-table {seconds.toml} -o out.toml",
    "plan explain {plan.toml} 0/linear",
    "plan explain {plan.json} 0/linear --json",
    "plan convert {plan.toml} --to paddle -o out.json --partial",
    "plan convert {plan.json} --to tensorflow -o out.env --partial",
    "plan convert {tensorflow.env} --to plan -o out.toml --format bf16 --partial",
    "plan convert {paddle.json} --to plan -o out.toml --format bf16 --partial",
    "plan convert {ascend.json} --to plan -o out.toml --format fp16 --partial",
    "plan convert {te.yaml} --to plan -o out.toml --format bf16 --partial",
    "plan convert {apex.toml} --to plan -o out.toml --format fp16 --partial",
    "lint {train.py}",
    "lint {train.py} --format json",
    "lint {train.py} --diff",
    "lint {train.ipynb}",
    "lint train.py # {pyproject.toml} {train.py}",
    "lint . --format sarif # {pyproject.toml} {train.py} {train.ipynb}",
    "plan convert {ascend.json} --to plan -o out.toml --format fp16 --base {ops_info.json} --partial",
    "plan convert {plan.toml} --to ascend -o out.json --base {ops_info.json} --partial",
    "plan explain {plan.toml} 0/linear -w net.py",
    *OF_SCRIPTS_AND_CHECKPOINTS,
    *OF_DUMPS_AND_REPEATS,
    *OF_PLANS_AND_RECORDS,
    "verify net.py {plan.toml} --target 30dB --no-native",
    "verify net.py {plan.toml} --budget {budget.parquet} --target 30dB --no-native -o out.toml",
)
