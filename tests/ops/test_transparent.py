"""CallMode: with the mode on, results and gradients are those of the plain model, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from roundoff.ops.calls import watch


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        y = F.gelu(F.linear(x, self.w))
        y = y + 1.0
        y *= 0.5
        z = F.softmax(y @ y.transpose(-1, -2), dim=-1)
        return z @ x, y.argmax(-1)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 2, 2, stride=2),
            nn.GroupNorm(1, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    def forward(self, x):
        return {"logits": F.log_softmax(self.layers(x), -1)}


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(10, 4)
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1]))
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])
        h, c = self.cell(self.gru(out)[0][-1])
        return h + c


def attention():
    return nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, norm_first=True)


def wrapped_attention():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 3, add_bias_kv=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=True)

    return Net()


CASES = {
    "functional": (Functional, (2, 5, 6)),
    "convolutional": (Convolutional, (2, 2, 8, 8)),
    "packed": (Packed, (4, 3, 6)),
    "encoder layer": (attention, (2, 5, 6)),
    "attention": (wrapped_attention, (4, 2, 6)),
}


class Identity:
    def call(self, call):
        return call.run()

    def before_write(self, tensor):
        return None


def run(model, x, *, watched):
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    if watched:
        with watch(model, Identity()) as mode:
            mode.begin()
            with mode:
                output = model(x * 1.0)
    else:
        output = model(x * 1.0)
    floats = [t for t in tree_leaves(output) if t.is_floating_point()]
    inputs = [x, *model.parameters()]
    gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
        [t.sin().sum() for t in floats], inputs, allow_unused=True
    )
    return [*tree_leaves(output), *(g for g in gradients if g is not None)]


@pytest.fixture
def _slow_attention():
    """Without the fused inference kernel, which torch itself leaves out under any function mode."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("_slow_attention")
def test_outputs_and_gradients_are_bit_identical(name, training):
    make, shape = CASES[name]
    model = make().train(training)
    x = torch.randn(shape)
    plain, watched = (run(model, x, watched=w) for w in (False, True))
    assert len(plain) == len(watched) > 2
    for one, other in zip(plain, watched, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_random_numbers_are_drawn_in_the_same_order():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3)).train()
    x = torch.randn(4, 6)
    for one, other in zip(
        run(model, x, watched=False), run(model, x, watched=True), strict=True
    ):
        assert torch.equal(one, other)


def test_compiled_models_are_seen_as_the_model_inside():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = torch.compile(inner, backend="eager")
    seen = []

    class Names(Identity):
        def call(self, call):
            seen.append(str(call.site))
            return call.run()

    x = torch.randn(2, 4)
    with torch.no_grad(), watch(model, Names()) as mode, mode:
        output = model(x)
    assert torch.equal(output, inner(x))
    assert [name.rpartition("/")[2] for name in seen] == ["linear", "tanh"]
    assert seen[0].rpartition("/")[0].endswith("0")
