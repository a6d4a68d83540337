"""The callbacks of training libraries, driven by the libraries themselves where they are installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks

from roundoff.errors import RoundoffError, RunError
from roundoff.record.callbacks import lightning_callback, transformers_callback
from roundoff.record.disk.loading import load

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def there(name):
    return importlib.util.find_spec(name) is not None


def calls(run, operator):
    found = run.ops.filter(
        pl.col("operator") == operator, pl.col("phase") == "forward"
    ).collect()
    return [
        found.filter(pl.col("step") == step)["call"].n_unique() for step in run.steps
    ]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x, labels=None):
        y = self.head(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


DATA = [{"x": torch.full((4,), float(i)), "labels": torch.zeros(2)} for i in range(8)]


def drive_transformers(callback, steps=4, accumulate=2, error=None):
    """What ``Trainer`` calls, through transformers' own handler of callbacks."""
    from transformers import TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handler = CallbackHandler([callback], model, None, optimizer, None)
    state, control, args = (
        TrainerState(),
        TrainerControl(),
        types.SimpleNamespace(logging_nan_inf_filter=False),
    )
    control = handler.on_train_begin(args, state, control)
    for step in range(steps):
        control = handler.on_step_begin(args, state, control)
        for micro in range(accumulate):
            if error is not None and step == 2:
                raise error
            model(DATA[micro]["x"][None], DATA[micro]["labels"][None])[
                "loss"
            ].backward()
            if micro < accumulate - 1:
                control = handler.on_substep_end(args, state, control)
        control = handler.on_pre_optimizer_step(args, state, control)
        optimizer.step()
        control = handler.on_optimizer_step(args, state, control)
        optimizer.zero_grad()
        state.global_step += 1
        control = handler.on_step_end(args, state, control)
    handler.on_train_end(args, state, control)
    return model


@pytest.fixture(scope="module")
def transformers():
    """Imported by the tests that use it alone: that takes a second."""
    return pytest.importorskip("transformers.trainer_callback")


@pytest.mark.usefixtures("transformers")
class TestTransformers:
    def test_steps_with_gradient_accumulation(self, tmp_path):
        before = len(_global_forward_hooks)
        drive_transformers(transformers_callback(tmp_path / "run", steps="1:2"))
        run = load(tmp_path / "run")
        assert run.steps == [1, 2]
        assert run.about.complete is True
        assert run.about.model == "Model"
        assert calls(run, "addmm") == [2, 2]
        assert set(
            run.ops.filter(pl.col("operator") == "addmm").collect()["module"]
        ) == {"head"}
        assert len(_global_forward_hooks) == before

    def test_numbers_stay(self, tmp_path):
        torch.manual_seed(3)
        alone = drive_transformers(__import__("transformers").TrainerCallback())
        torch.manual_seed(3)
        recorded = drive_transformers(
            transformers_callback(tmp_path / "run", keep="tensors")
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(alone.parameters(), recorded.parameters(), strict=True)
        )

    def test_an_exception_leaves_finished_steps(self, tmp_path):
        callback = transformers_callback(tmp_path / "run")
        with pytest.raises(ZeroDivisionError):
            drive_transformers(callback, error=ZeroDivisionError())
        assert load(tmp_path / "run").steps == [0, 1]
        callback.end(ZeroDivisionError())
        run = load(tmp_path / "run")
        assert run.steps[:2] == [0, 1]
        assert run.about.complete is False

    def test_a_folder_with_a_run_is_refused_before_training(self, tmp_path):
        drive_transformers(transformers_callback(tmp_path / "run"))
        with pytest.raises(RoundoffError, match="there is a run here already"):
            drive_transformers(transformers_callback(tmp_path / "run"))
        drive_transformers(
            transformers_callback(tmp_path / "run", overwrite=True, steps="0")
        )
        assert load(tmp_path / "run").steps == [0]

    @pytest.mark.skipif(
        not there("accelerate"),
        reason="Trainer needs accelerate, which is not installed",
    )
    def test_trainer_itself(self, tmp_path):
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            str(tmp_path / "out"),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
        callback = transformers_callback(tmp_path / "run", steps="0-1")
        Trainer(Model(), arguments, train_dataset=DATA, callbacks=[callback]).train()
        run = load(tmp_path / "run")
        assert run.steps == [0, 1]
        assert calls(run, "addmm") == [2, 2]


@pytest.mark.skipif(
    not (there("lightning") or there("pytorch_lightning")),
    reason="lightning is not installed",
)
def test_lightning_itself(tmp_path):
    lightning: Any = importlib.import_module(
        "lightning.pytorch" if there("lightning") else "pytorch_lightning"
    )

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callback = lightning_callback(tmp_path / "run", steps="0-1")
    trainer = lightning.Trainer(
        max_steps=3,
        accumulate_grad_batches=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), torch.utils.data.DataLoader(DATA, batch_size=1))
    run = load(tmp_path / "run")
    assert run.steps == [0, 1]
    assert calls(run, "addmm") == [2, 2]


@pytest.fixture
def stand_in(monkeypatch):
    """A module with Lightning's name, whose callbacks are called in Lightning's order."""
    if there("lightning") or there("pytorch_lightning"):
        pytest.skip("the real one is tested")
    module: Any = types.ModuleType("lightning.pytorch")
    module.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)


def drive_lightning(callback, error=None):
    """Two batches a step; the optimizer runs the batch in its closure, as Lightning's automatic optimization does."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = types.SimpleNamespace(global_step=0)
    callback.on_train_start(trainer, model)
    try:
        for number, row in enumerate(DATA):
            batch = {key: value[None] for key, value in row.items()}

            def closure(batch=batch):
                loss = model(**batch)["loss"]
                loss.backward()
                return loss

            if error is not None and number == 5:
                raise error
            if number % 2:
                optimizer.step(closure)
                optimizer.zero_grad()
                trainer.global_step += 1
            else:
                closure()
            callback.on_train_batch_end(trainer, model, None, batch, number)
    except ZeroDivisionError as raised:
        callback.on_exception(trainer, model, raised)
        raise
    callback.on_train_end(trainer, model)


def test_lightning_order_of_hooks(tmp_path, stand_in):
    drive_lightning(lightning_callback(tmp_path / "run", steps="0-1"))
    run = load(tmp_path / "run")
    assert run.steps == [0, 1]
    assert calls(run, "addmm") == [2, 2]  # in the closure too
    assert run.about.complete is True


def test_lightning_exception(tmp_path, stand_in):
    with pytest.raises(ZeroDivisionError):
        drive_lightning(lightning_callback(tmp_path / "run"), error=ZeroDivisionError())
    run = load(tmp_path / "run")
    assert run.steps[:2] == [0, 1]
    assert run.about.complete is False


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match="lightning is not installed"):
        lightning_callback(tmp_path / "run")
    with pytest.raises(RunError, match="pip install transformers"):
        transformers_callback(tmp_path / "run")
