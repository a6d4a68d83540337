"""Recordings of what runs on a device, whose backward pass has a thread of its own."""

import threading

import pytest
import torch

import roundoff
from roundoff.record.source_lines import prepares_gradients, user_line
from roundoff.train.scaling.delayed_read import moved
from roundoff.train.watch.tensor_summary import summarize_tensor


def test_the_engines_thread_has_no_frames_above_the_recorder():
    answers: list[object] = []

    def asks():
        answers.append(user_line(40, in_engine=True))
        answers.append(user_line(40))
        answers.append(prepares_gradients(40))

    thread = threading.Thread(target=asks)
    thread.start()
    thread.join()
    assert answers == [None, None, False]


@pytest.fixture
def captured(monkeypatch):
    """Sets whether a CUDA graph is captured: no GPU is asked."""
    answers = {"now": False}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: answers["now"]
    )
    return lambda now: answers.update(now=now)


def test_what_a_cuda_graph_captures_is_not_recorded(device, tmp_path, captured):
    x = torch.ones(3, device=device)
    with roundoff.capture(tmp_path / "run") as run:
        y = x.exp()
        captured(True)
        with pytest.warns(RuntimeWarning, match="CUDA graph"):
            y = y.sin().cos()
        captured(False)
        y.tan()
        run.step()
    rows = roundoff.load(tmp_path / "run").ops.collect()
    assert {"exp", "tan"} <= set(rows["operator"])
    assert not {"sin", "cos"} & set(rows["operator"])


def test_the_watch_reads_nothing_of_a_captured_graph(device, captured):
    tensor = torch.ones(2000, device=device)
    captured(True)
    summary = summarize_tensor(tensor)
    # memory of the CPU is there whatever a GPU is told
    assert (summary is None) == (device != "cpu")
    captured(False)
    assert summarize_tensor(tensor) is not None


class Arriving:
    """A tensor whose copy to the host arrives late."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.asked = {}

    def to(self, device, *, non_blocking):
        self.asked[device.type] = non_blocking
        return self


def test_the_host_waits_for_what_comes_to_it():
    """torch does not wait for a copy to the CPU that is not blocking: kernels of the CPU
    would read what has not arrived (torch.Tensor.to, "non_blocking")."""
    tensor = Arriving("cuda")
    moved(tensor, torch.device("cpu"))
    moved(tensor, torch.device("cuda"))
    assert tensor.asked == {"cpu": False, "cuda": True}
