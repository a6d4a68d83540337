"""The life of a NaN, on rows made by running real operators of torch and counting with numpy."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import polars as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from roundoff.compare.nonfinite.overflow import trace_overflow

VIEWS = "view select slice t transpose expand detach permute unsqueeze squeeze alias as_strided _unsafe_view".split()


class Tape(TorchDispatchMode):
    """Rows of every tensor; a tensor is known by its memory, so that views share the record of what they equal."""

    def __init__(self, step=0, rank=0):
        super().__init__()
        self.rows, self.kept, self.records, self.roots = [], [], {}, {}
        self.calls, self.phase, self.step, self.rank = {}, "forward", step, rank
        self.call = -1

    def key(self, t):
        return (
            t.untyped_storage()._cdata,
            t.storage_offset(),
            t.shape,
            t.stride(),
            t.dtype,
        )

    def row(self, t, **about):
        with _disable_current_modes():
            values = t.detach().double().numpy().ravel()
        finite = values[np.isfinite(values)]
        exponents = np.frexp(np.abs(finite[finite != 0]))[1] - 1
        low = int(exponents.min()) if exponents.size else 0
        record = len(self.rows)
        self.rows.append(
            {
                "rank": self.rank,
                "step": self.step,
                "record": record,
                "module": "",
                "numel": t.numel(),
                "dtype": str(t.dtype)[6:],
                "shape": list(t.shape),
                "min": finite.min() if finite.size else None,
                "max": finite.max() if finite.size else None,
                "nan": int(np.isnan(values).sum()),
                "posinf": int((values == np.inf).sum()),
                "neginf": int((values == -np.inf).sum()),
                "zero": int((values == 0).sum()),
                "exponent": low,
                "exponents": np.bincount(exponents - low).tolist()
                if exponents.size
                else [],
                "sampled": t.numel(),
                "phase": self.phase,
                "place": 0,
                "overload": None,
                "line": f"train.py:{record}",
                "name": None,
                "view_of": None,
                "inplace": False,
                "index": 0,
                "group": None,
            }
            | about
        )
        self.records[self.key(t)] = record
        self.kept.append(t)
        return record

    def leaf(self, t, operator="input", name=None):
        return self.row(t, call=-1, operator=operator, inputs=[], name=name, line=None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [
            t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)
        ]
        inputs = [
            self.records[k] if (k := self.key(t)) in self.records else self.leaf(t)
            for t in tensors
        ]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (
            torch.ops.aten.detach,
            torch.ops.aten.lift_fresh,
        ):  # nothing new
            return out
        self.call += 1
        operator = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        counter = (self.phase, operator)
        index = self.calls[counter] = self.calls.get(counter, -1) + 1
        inplace = operator.endswith("_")
        written = tensors[:1] if inplace and out is None else []
        for place, t in enumerate(
            [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor)] or written
        ):
            here = (
                inputs[place::2] if operator.startswith("_foreach_") else inputs
            )  # of lists of two
            self.row(
                t,
                call=self.call,
                operator=operator,
                inputs=here,
                place=place,
                overload=str(func),
                index=index,
                view_of=inputs[0] if operator in VIEWS else None,
                inplace=inplace,
            )
        return out

    def table(self):
        return pl.DataFrame(self.rows, infer_schema_length=None)


def follow(tape, *others, **options):
    return trace_overflow(
        pl.concat([t.table() for t in (tape, *others)], how="diagonal_relaxed"),
        **options,
    )


def life(found, *, allowed=False):
    events = found.event_table.filter(pl.col("allowed") == allowed)
    return list(zip(events["kind"], events["site"], strict=True))


def test_birth_propagation_death():
    with Tape() as tape:
        x = torch.tensor(
            [1.0, 12.0], dtype=torch.float16
        ).exp()  # e**12 = 162755 > 65504
        y = (x - x) * 2  # Inf - Inf = NaN
        y = y + 1
        z = torch.nan_to_num(y)
        z * 3
    found = follow(tape)
    assert life(found) == [
        ("birth", "/exp"),
        ("propagation", "/sub"),
        ("propagation", "/mul"),
        ("propagation", "/add"),
        ("death", "/nan_to_num"),
    ]
    assert found.first.line == "train.py:1"
    assert (found.first.reached, found.first.deaths, found.first.posinf) == (
        3,
        1,
        1,
    )
    assert set(found.event_table["origin_site"]) == {"/exp"}
    assert found.event_table["source_site"].to_list() == [
        None,
        "/exp",
        "/sub",
        "/mul",
        "/add",
    ]
    assert "12" in found.first.cause
    assert "6.55e+04" in found.first.cause


KILLERS = {
    "where": lambda x: torch.where(x.isfinite(), x, torch.zeros(3)),
    "masked_fill": lambda x: x.masked_fill(x == math.inf, 1.0),
    "clamp": lambda x: x.clamp(max=9.0),
    "nan_to_num_": lambda x: x.nan_to_num_(),
    "relu": lambda x: (-x).relu(),
    "argmax": lambda x: x.argmax(),
    "reciprocal": lambda x: 1 / x,
    "tanh": lambda x: x.tanh(),
    "_softmax": lambda x: (-x).softmax(0),
}


@pytest.mark.parametrize("name", KILLERS)
def test_silent_deaths(name):
    with Tape() as tape:
        x = torch.tensor([89.0, 1.0, 2.0]).exp()
        KILLERS[name](x)
    events = life(follow(tape))
    assert events[0] == ("birth", "/exp")
    assert events[-1] == ("death", f"/{name}")


@pytest.mark.parametrize(
    "left_out",
    [
        lambda x: x[1:] * 2,
        lambda x: x[torch.tensor([1, 2])] * 2,
        lambda x: torch.zeros_like(x) * 2,
        lambda x: x.isfinite().all(),
        lambda x: x.zero_() + 1,
        lambda x: x.copy_(torch.ones(3)) + 1,
        lambda x: x.fill_(2.0) + 1,
    ],
)
def test_selecting_asking_and_overwriting_kill_nothing(left_out):
    with Tape() as tape:
        left_out(torch.tensor([89.0, 1.0, 2.0]).exp())
    events = life(follow(tape))
    assert events[0] == ("birth", "/exp")
    assert "death" not in dict(events)


LOW = torch.finfo(torch.float16).min
MASKS = {
    "masked_fill": lambda s, keep: s.masked_fill(~keep, -math.inf),
    "where": lambda s, keep: torch.where(keep, s, -math.inf),
    "full": lambda s, keep: s + torch.full((3, 3), -math.inf, dtype=s.dtype).triu(1),
    "index_put": lambda s, keep: s.index_put(
        (~keep).nonzero(as_tuple=True), torch.tensor(-math.inf, dtype=s.dtype)
    ),
    "mul": lambda s, keep: (
        s + torch.where(keep, 0.0, (~keep).to(s.dtype).clamp(min=0.5) * -math.inf)
    ),
    "finfo.min added": lambda s, keep: (
        (s - 100) + torch.where(keep, 0.0, LOW).to(s.dtype)
    ),
    "tril": lambda s, keep: s + torch.full_like(s, -math.inf).triu(1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", MASKS)
def test_an_attention_mask_is_not_blamed(name, dtype):
    keep = torch.ones(3, 3).tril().bool()
    with Tape() as tape:
        scores = MASKS[name](torch.randn(3, 3, dtype=dtype), keep)
        scores.softmax(1) @ torch.ones(3, 2, dtype=dtype)
    found = follow(tape)
    assert life(found) == []
    assert found.first is None
    if (scores == -math.inf).any():
        assert life(found, allowed=True)[-1] == ("death", "/_softmax")
    assert not found.margin_table["saturated"].sum()
    assert not found.margin_table["latent"].any()


def test_a_mask_that_comes_with_the_batch_is_allowed_and_other_inf_is_not():
    with Tape() as tape:
        scores = torch.zeros(2, 2)
        mask = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
        (scores + mask).softmax(1)
        torch.tensor([1.0, -math.inf]) + 1
    found = follow(tape)
    assert life(found)[0] == ("arrived", found.first.site)
    assert found.first.numel == 2
    assert [kind for kind, _ in life(found, allowed=True)] == [
        "arrived",
        "propagation",
        "death",
    ]


def test_a_row_that_is_masked_everywhere_gives_birth_to_nan():
    with Tape() as tape:
        scores = torch.randn(3, 3).masked_fill(
            torch.ones(3, 3).triu().bool(), -math.inf
        )
        scores.softmax(1) * 2
    found = follow(tape)
    assert life(found) == [("birth", "/_softmax"), ("propagation", "/mul")]
    assert found.first.nan == 3
    assert "masked everywhere" in found.first.cause
    assert "/masked_fill" in found.first.note


def test_minus_inf_that_is_no_mask_is_born():
    with Tape() as tape:
        torch.zeros(3).log().softmax(0)
        torch.full(
            (2,), -3e4, dtype=torch.float16
        ) * 4  # neither factor within [-1, 1]: an overflow
    assert life(follow(tape))[:1] == [("birth", "/log")]
    assert ("birth", "/mul") in life(follow(tape))


def test_the_user_can_allow_sites():
    with Tape() as tape:
        torch.zeros(3).log().exp().log() * 2
    assert len(follow(tape).born) == 2
    found = follow(tape, allow=["*/log*"])
    assert found.first is None
    assert found.event_table["allowed"].all()


def test_the_gradient_of_a_root_at_zero_behind_where():
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    with Tape() as tape:
        loss = torch.where(x > 0, x.sqrt(), 0.0).sum()
        tape.phase = "backward"
        loss.backward()
    found = follow(tape)
    assert x.grad.isnan().tolist() == [True, False]
    assert found.first.phase == "backward"
    assert found.first.site == "/div"  # 0 / (2 * sqrt(0))
    assert "root" in found.first.cause


def test_writes_through_views_are_followed():
    with Tape() as tape:
        base = torch.ones(4)
        base[2:].div_(0.0)
        (base + 1).clamp(max=5)
        other = torch.ones(4)
        other[:2].div_(0.0)
        other[2:] * 2  # the other half: untouched
    found = follow(tape)
    assert life(found) == [
        ("birth", "/div_"),
        ("propagation", "/add"),
        ("death", "/clamp"),
        ("birth", "/div_#1"),
    ]


def test_memory_that_was_cleaned_in_place_is_finite():
    with Tape() as tape:
        x = torch.tensor([89.0]).exp()
        flat = x.view(1, 1)
        flat.nan_to_num_()
        x * 0.5
    assert life(follow(tape)) == [("birth", "/exp"), ("death", "/nan_to_num_")]


def test_list_operators_are_followed_item_by_item():
    with Tape() as tape:
        good, bad = torch.ones(3), torch.tensor([89.0]).exp()
        torch._foreach_mul([good, bad], [torch.ones(3), torch.ones(1)])
    events = follow(tape).event_table
    assert events.select("kind", "place").rows() == [("birth", 0), ("propagation", 1)]


def test_unwritten_memory_is_blamed_only_when_it_is_read():
    def rows(reads):
        first = {
            "record": 0,
            "call": 0,
            "operator": "empty",
            "inputs": [],
            "nan": 2,
            "numel": 2,
        }
        second = {
            "record": 1,
            "call": 1,
            "operator": reads,
            "inputs": [0],
            "nan": 2 * (reads == "add"),
            "numel": 2,
        }
        return pl.DataFrame(
            [
                {"dtype": "float32", "min": 0.0, "max": 0.0} | row
                for row in (first, second)
            ]
        )

    assert trace_overflow(rows("fill_")).first is None
    found = trace_overflow(rows("add"))
    assert found.first.site == "/empty"
    assert "unwritten" in found.first.note


def test_nothing_recorded_is_said_and_not_called_finite():
    rows = [
        {
            "record": 0,
            "call": 0,
            "operator": "mm",
            "inputs": [],
            "numel": 2,
            "reason": "sparse",
        },
        {
            "record": 1,
            "call": 1,
            "operator": "add",
            "inputs": [0],
            "nan": 1,
            "numel": 2,
        },
    ]
    found = trace_overflow(pl.DataFrame([{"dtype": "float32"} | row for row in rows]))
    assert found.unknown == 1
    assert found.first.note == "inputs without statistics: /mm"


def parameter_steps(middle):
    tapes = []
    for step, value in enumerate([math.nan, middle, math.nan]):
        tape = Tape(step=step)
        before = value if step else 1.0
        tape.leaf(torch.tensor([before, 1.0]), "parameter", "w")
        tape.phase = "optimizer"
        tape.row(
            torch.tensor([value, 1.0]),
            call=5,
            operator="addcdiv_",
            inputs=[0],
            name="w",
            inplace=True,
        )
        tapes.append(tape)
    return tapes


def test_a_parameter_carries_a_nan_into_the_next_step():
    found = follow(*parameter_steps(math.nan))
    assert life(found) == [
        ("birth", "/addcdiv_"),
        ("carried", "/parameter"),
        ("propagation", "/addcdiv_"),
        ("carried", "/parameter"),
        ("propagation", "/addcdiv_"),
    ]
    assert set(found.event_table["origin_step"]) == {0}
    assert found.first.reached == 4


def test_a_parameter_that_was_finite_in_between_starts_anew():
    found = follow(*parameter_steps(2.0))
    assert [kind for kind, _ in life(found)] == ["birth", "arrived", "propagation"]


def reduced(rank, value):
    tape = Tape(rank=rank)
    with tape:
        torch.ones(1).mul(value).exp()
    tape.phase = "collective"
    result = torch.tensor([math.inf])
    tape.row(
        result, call=9, operator="all_reduce", inputs=[len(tape.rows) - 1], group="0,1"
    )
    return tape


def test_a_collective_brings_inf_from_the_rank_that_made_it():
    found = follow(reduced(0, 1.0), reduced(1, 89.0))
    assert [event.site for event in found.born] == ["/exp"]
    assert found.first.rank == 1
    (received,) = found.event_table.filter(pl.col("kind") == "received").to_dicts()
    assert (received["rank"], received["origin_rank"], received["origin_site"]) == (
        0,
        1,
        "/exp",
    )
    born_there = follow(
        reduced(0, 1.0), reduced(1, 1.0)
    )  # finite everywhere: the sum itself overflowed
    assert {event.site for event in born_there.born} == {"/all_reduce"}


def test_an_empty_run_and_plain_data():
    found = trace_overflow(pl.DataFrame(schema={"record": pl.Int64}))
    assert (
        found.first,
        found.event_table.height,
        found.margin_table.height,
        found.tensors,
    ) == (
        None,
        0,
        0,
        0,
    )
    assert found.loss_scale.scale is None
    assert asdict(found)["events"] == ()


def test_an_input_that_is_read_for_its_shape_kills_nothing():
    x = torch.full((2, 3), 89.0, requires_grad=True)
    with Tape() as tape:
        loss = torch.nn.functional.nll_loss(x.exp(), torch.tensor([0, 1]))
        tape.phase = "backward"
        torch.autograd.grad(loss, x)
    events = follow(tape).event_table
    assert "nll_loss_backward" not in events["operator"].to_list()


def test_another_view_of_written_memory_is_no_arrival():
    rows = [
        {"record": 0, "call": 0, "operator": "exp", "inputs": [], "posinf": 1},
        {"record": 1, "call": -1, "operator": "alias", "inputs": [0], "posinf": 1},
        {"record": 2, "call": 1, "operator": "add", "inputs": [1], "posinf": 1},
        {
            "record": 3,
            "call": 2,
            "operator": "item",
            "inputs": [2],
            "dtype": None,
            "numel": None,
            "reason": "no tensor",
        },
    ]
    found = trace_overflow(
        pl.DataFrame([{"dtype": "float32", "numel": 4} | row for row in rows])
    )
    assert life(found) == [("birth", "/exp"), ("propagation", "/add")]
    assert (found.tensors, found.unknown) == (3, 0)
