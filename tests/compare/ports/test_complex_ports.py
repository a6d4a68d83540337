"""Complex numbers in one program, their real and imaginary parts in the other."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.records.value_sketch import sketch_of_tensor

HEADS, WIDTH, LENGTH = 2, 6, 5


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "query": drawn(HEADS * WIDTH, 8, seed=1),
    "key": drawn(HEADS * WIDTH, 8, seed=2),
    "leave": drawn(LENGTH, LENGTH, seed=3),
}
X = drawn(2, LENGTH, 8, seed=4)


def angles(base=100.0):
    rates = base ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    return torch.arange(LENGTH)[:, None] * rates


def rotated_halves(x):
    """(batch, heads, length, width): an element and the one half a width later are a pair."""
    cos = angles().cos().repeat(1, 2)
    sin = angles().sin().repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def in_halves(m, x):
    def projected(weight):
        heads = (x @ weight.t()).view(2, LENGTH, HEADS, WIDTH).transpose(1, 2)
        return rotated_halves(heads)

    scores = projected(m.query) @ projected(m.key).transpose(-1, -2)
    return torch.tanh(scores * 0.1) @ m.leave


def rotated_pairs(x, table):
    """(batch, length, heads, width): neighbours are a pair, as a complex number."""
    pairs = torch.view_as_complex(x.reshape(2, LENGTH, HEADS, WIDTH // 2, 2))
    return torch.view_as_real(pairs * table[None, :, None, :]).flatten(3)


class InPairs(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        for name, tensor in LEAVES.items():
            if name != "leave":
                halves = tensor.view(HEADS, 2, WIDTH // 2, 8)
                tensor = halves.transpose(1, 2).reshape(HEADS * WIDTH, 8)
            self.register_parameter(name, torch.nn.Parameter(tensor.clone()))
        table = torch.polar(torch.ones(LENGTH, WIDTH // 2), angles(base))
        self.register_buffer("turns", table)

    def forward(self, x):
        q = (x @ self.query.t()).view(2, LENGTH, HEADS, WIDTH)
        k = (x @ self.key.t()).view(2, LENGTH, HEADS, WIDTH)
        q = rotated_pairs(q, self.turns)
        k = rotated_pairs(k, self.turns)
        scores = torch.einsum("blhw,bmhw->bhlm", q, k)
        return torch.einsum("bhlm,mn->bhln", torch.tanh(0.1 * scores), self.leave)


def own_rows(program, step_of, candidate):
    sides = Sides(step_of(program(in_halves, **LEAVES), X), step_of(candidate, X))
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_pairs_as_complex_numbers_are_the_same_as_halves(program, step_of):
    assert not own_rows(program, step_of, InPairs(base=100.0))


def test_a_table_of_other_angles_is_named(program, step_of):
    [row] = own_rows(program, step_of, InPairs(base=30.0))
    assert row.name == "turns"
    assert "turns holds other values than the reference's table" in row.evidence


def test_the_sketch_of_complex_numbers_is_that_of_their_parts():
    z = torch.complex(drawn(7, seed=5), drawn(7, seed=6))
    apart = torch.cat([z.imag, z.real])
    assert sketch_of_tensor(z).distance(sketch_of_tensor(apart)) == 0.0
    # the conjugate is a view of the same memory
    assert sketch_of_tensor(z.conj()).distance(sketch_of_tensor(z)) > 0.1


def of_one_product(m, x):
    waves = torch.fft.rfft(x)
    return torch.fft.irfft(waves * torch.complex(m.real, m.imag), x.shape[-1]) @ m.mix


def of_four_products(m, x, sign):
    n = x.shape[-1]
    turns = torch.outer(torch.arange(n // 2 + 1.0), torch.arange(float(n)))
    turns = turns * (2 * torch.pi / n)
    real = x @ turns.cos().t()
    imag = -(x @ turns.sin().t())
    mixed_real = real * m.real - sign * imag * m.imag
    mixed_imag = real * m.imag + imag * m.real
    twice = torch.full((n // 2 + 1,), 2.0)
    twice[0] = twice[-1] = 1.0
    back = (mixed_real * twice) @ turns.cos() - (mixed_imag * twice) @ turns.sin()
    return torch.einsum("ln,nm->lm", back / n, m.mix)


@pytest.mark.parametrize(("sign", "is_right"), [(1, True), (-1, False)])
def test_a_transform_agrees_with_its_parts(program, step_of, sign, is_right):
    leaves = {
        "real": drawn(5, seed=7),
        "imag": drawn(5, seed=8),
        "mix": X[0].t() @ X[1],
    }
    sides = Sides(
        step_of(program(of_one_product, **leaves), X[0]),
        step_of(program(lambda m, x: of_four_products(m, x, sign), **leaves), X[0]),
    )
    rows = compare_port(sides, EarlierSteps())
    own = [row for row in rows if row.cause == "own"]
    assert (not own) == is_right
    # the transform itself is right: its real part is that of the reference's
    named = {row.operator for row in rows if row.status == "matched" and row.operator}
    assert {"mm", "neg"} & {name.split("#")[0] for name in named}


class OfLowModes(torch.nn.Module):
    """A kernel over the modes, complex; the transform along the first axis, scaled there."""

    def __init__(self, kernel, norm="forward", back="forward"):
        super().__init__()
        self.kernel = torch.nn.Parameter(kernel)
        self.norm = norm
        self.back = back

    def forward(self, x):
        waves = torch.fft.rfft(x, dim=0, norm=self.norm)
        mixed = torch.einsum("mi,mio->mo", waves, self.kernel)
        return torch.fft.irfft(mixed, n=len(x), dim=0, norm=self.back)


def of_last_axis(m, x):
    waves = torch.fft.rfft(x.t())
    return torch.fft.irfft(torch.einsum("im,iom->om", waves, m.kernel), n=len(x))


KERNEL = torch.complex(drawn(3, 2, 5, seed=9), drawn(3, 2, 5, seed=10))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda k: k, ""),
        (torch.conj_physical, "kernel is the reference's kernel conjugated"),
        (
            lambda k: torch.complex(k.imag, k.real),
            "kernel is the reference's kernel with real and imaginary parts exchanged",
        ),
        (torch.neg, "kernel is the reference's kernel"),
    ],
)
def test_a_complex_kernel_that_is_made_otherwise_is_named(
    program, step_of, made, words
):
    x = drawn(8, 3, seed=11)
    port = OfLowModes(made(KERNEL.permute(2, 0, 1).contiguous()))
    sides = Sides(step_of(program(of_last_axis, kernel=KERNEL), x), step_of(port, x))
    own = [r for r in compare_port(sides, EarlierSteps()) if r.cause == "own"]
    assert [row.name for row in own] == (["kernel"] if words else [])
    assert [words in row.evidence for row in own] == [True] * len(own), own
