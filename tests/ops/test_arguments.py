"""Arguments of a call to text and back."""

import json
import math
from operator import attrgetter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundoff.errors import RunError
from roundoff.ops.arguments import describe, overload_of, restore

numbers = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.complex_numbers()
)
constants = st.sampled_from(
    [
        torch.float32,
        torch.bfloat16,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.bool,
        torch.strided,
        torch.sparse_coo,
        torch.channels_last,
        torch.preserve_format,
        torch.device("cpu"),
        torch.device("cuda", 3),
        torch.device("meta"),
    ]
)
ends = st.none() | st.integers()
scalars = numbers | constants | st.builds(slice, ends, ends, ends)
tensors = st.integers(0, 2**40).map(lambda n: Named(n))
values = st.recursive(
    scalars | tensors, lambda v: st.lists(v) | st.lists(v).map(tuple), max_leaves=10
)


class Named(torch.Tensor):
    """A tensor that equals another of its number."""

    number: int

    def __new__(cls, number):
        made = torch.Tensor._make_subclass(cls, torch.empty(0))
        made.number = number
        return made


def same(a, b):
    """Equal in type and value, NaN and -0.0 included."""
    if isinstance(a, Named):
        return isinstance(b, Named) and a.number == b.number
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return a == b


@given(st.lists(values).map(tuple), st.dictionaries(st.text(), values))
def test_restore_undoes_describe(args, kwargs):
    text = describe(args, kwargs, attrgetter("number"))
    json.loads(text, parse_constant=pytest.fail)  # strict JSON
    found = restore(text, Named)
    assert same(found[0], args)
    assert list(found[1]) == list(kwargs)
    assert all(same(found[1][k], v) for k, v in kwargs.items())


@pytest.mark.parametrize(
    "value", [torch.Generator(), object(), {"a": 1}, b"x", torch.finfo(torch.half)]
)
def test_what_cannot_be_written_gives_none(value):
    assert describe((1, [value]), {}, lambda t: 0) is None
    assert describe((), {"a": value}, lambda t: 0) is None


def test_a_tensor_without_record_gives_none():
    assert describe((torch.ones(1),), {}, lambda t: None) is None


def test_sizes_and_symbolic_numbers():
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    symbol = env.create_symbol(5, source=ConstantSource("n"))
    five = env.create_symintnode(symbol, hint=5)
    assert isinstance(five, torch.SymInt)
    assert describe((five, [five]), {}, lambda t: 0) == "[[5,[5]],{}]"
    assert restore(describe((torch.Size([2, 3]),), {}, lambda t: 0), None)[0] == (
        (2, 3),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        '[[{"dtype":"ones"}],{}]',
        '[[{"what":1}],{}]',
        '[[{"a":1,"b":2}],{}]',
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(RunError, match="arguments of a call cannot be read"):
        restore(text, lambda record: record)


def test_overload_of_every_name_that_torch_writes():
    aten, prims = torch.ops.aten, torch.ops.prims
    for func in (
        aten.convolution.default,
        aten.add_.Tensor,
        aten.add.out,
        prims.convert_element_type.default,
    ):
        assert overload_of(str(func)) is func


@pytest.mark.parametrize(
    "name",
    [
        "aten.no_such_thing.default",
        "aten.add.nothing",
        "aten",
        "",
        "aten.add",
        "os.path.join",
    ],
)
def test_unknown_operators(name):
    with pytest.raises(RunError, match="torch does not know this operator"):
        overload_of(name)


def test_a_custom_operator_says_what_to_import():
    with pytest.raises(
        RunError, match="import the library that registers 'mylib' first"
    ):
        overload_of("mylib.scale.default")
