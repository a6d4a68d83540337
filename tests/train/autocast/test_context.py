"""roundoff.autocast against torch.autocast, against models with casts written by hand, and against itself compiled,
checkpointed, nested and on threads."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundoff
from roundoff.errors import PlanError
from roundoff.ops.calls import watch
from roundoff.plan.rounded_model import Plain
from roundoff.plan.rules import Plan, Rule
from roundoff.train.autocast.context import active
from roundoff.train.autocast.overrides import _REGISTERED
from roundoff.train.autocast.rules import Rules

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    """An embedding, an encoder layer, batch normalisation, and operators called by functions and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.table(tokens))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x @ (x.transpose(1, 2) @ x).softmax(-1))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


TOKENS = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 5, (24,), generator=torch.Generator().manual_seed(2))
MIXED = Plan(
    (
        Rule("fp32", ("op:softmax", "class:LayerNorm", "head/linear")),
        Rule("bf16", ("layer", "norm/*", "/matmul*")),
    )
)


def step(
    model: nn.Module, *regions: AbstractContextManager[object]
) -> list[torch.Tensor]:
    """The loss and all gradients of one step inside regions."""
    model.zero_grad()
    for region in regions:
        region.__enter__()
    try:
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), LABELS)
    finally:
        for region in reversed(regions):
            region.__exit__(None, None, None)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


def test_a_format_is_torch_autocast_to_the_bit():
    model = net()
    assert same(
        step(model, torch.autocast("cpu", BF16)),
        step(model, roundoff.autocast("bf16", model)),
    )
    assert same(
        step(model, torch.autocast("cpu", BF16)), step(model, roundoff.autocast("bf16"))
    )
    assert same(step(model), step(model, roundoff.autocast("fp32", model)))


class ByHand(nn.Module):
    """Two layers, one function; second layer and function in bf16, the rest in fp32, with casts as one writes them."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.cast = nn.Linear(6, 6), nn.Linear(6, 6), cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        if not self.cast:
            return (self.b(h).sigmoid() * 2).exp()
        h = F.linear(h.bfloat16(), self.b.weight.bfloat16(), self.b.bias.bfloat16())
        return (h.float().sigmoid() * 2).bfloat16().exp()


def test_a_plan_is_the_casts_one_would_write():
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    plan = Plan((Rule("bf16", ("b/linear", "/exp")),))
    plain, written = ByHand(False), ByHand(True)
    with roundoff.autocast(plan, plain):
        output = plain(x)
    expected = written(x)
    assert output.dtype == BF16
    assert torch.equal(output, expected)
    output.float().sum().backward()
    expected.float().sum().backward()
    for name in ("a.weight", "a.bias", "b.weight", "b.bias"):
        assert torch.equal(
            plain.get_parameter(name).grad, written.get_parameter(name).grad
        )


def test_the_record_says_what_ran():
    model = net()
    with pytest.raises(PlanError, match="record=True"):
        roundoff.autocast(MIXED, model).report  # noqa: B018
    region = roundoff.autocast(MIXED, model, record=True)
    recorded = step(model, region)
    assert same(recorded, step(model, roundoff.autocast(MIXED, model)))
    rows = {row["site"]: row for row in region.report.iter_rows(named=True)}
    linear = rows["layer.linear1/linear"]
    assert (
        linear["rule"],
        linear["asked"],
        linear["inputs"],
        linear["ran"],
        linear["output"],
    ) == ("layer", "bf16", "fp32", "bf16", "bf16")
    # input (4, 6, 8), weight (16, 8) and bias (16) are cast: 2 bytes each
    assert (linear["casts"], linear["cast_bytes"]) == (3, 2 * (4 * 6 * 8 + 16 * 8 + 16))
    assert (linear["backward"], linear["backward_casts"]) == ("bf16", 3)
    softmax = rows["/softmax"]
    assert (softmax["rule"], softmax["ran"], softmax["backward"]) == (
        "op:softmax",
        "fp32",
        "fp32",
    )
    assert (rows["norm/batch_norm"]["ran"], rows["norm/batch_norm"]["output"]) == (
        "bf16",
        "bf16",
    )
    assert rows["table/embedding"]["asked"] == "fp32"


def test_operators_are_overridden_in_the_dispatcher():
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)

    def dtypes() -> list[torch.dtype]:
        h = F.linear(x, weight)
        return [
            h.dtype,
            h.softmax(-1).dtype,
            F.mse_loss(h, h * 0.5).dtype,
            F.cosine_similarity(h, h).dtype,
        ]

    plan = Plan(
        (
            Rule("fp32", ("op:softmax", "op:cosine_similarity")),
            Rule("bf16", ("op:mse_loss",)),
        ),
        autocast="bf16",
    )
    with torch.autocast("cpu", BF16):
        builtin = dtypes()
    assert builtin == [BF16, BF16, FP32, BF16]
    with roundoff.autocast(plan):
        assert dtypes() == [BF16, FP32, BF16, FP32]
        with torch.autocast("cpu", BF16):  # not a region of ours: the same rules
            assert dtypes() == [BF16, FP32, BF16, FP32]
        with roundoff.autocast("bf16"):  # another plan
            assert dtypes() == builtin
        elsewhere: list[torch.dtype] = []

        def run() -> None:
            with torch.autocast("cpu", BF16):
                elsewhere.extend(dtypes())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert elsewhere == builtin
    assert not _REGISTERED
    with torch.autocast("cpu", BF16):
        assert dtypes() == builtin


def test_following_and_the_lists_of_another_device():
    x = torch.randn(2, 3, 4, 4)
    weight = nn.Parameter(torch.randn(4, 4))
    gray = Plan((Rule("follow", ("op:linear", "op:mse_loss")),), autocast="bf16")
    with roundoff.autocast(gray):
        assert F.linear(x, weight).dtype == FP32
        assert F.linear(x.bfloat16(), weight).dtype == BF16
        assert F.mse_loss(x.bfloat16(), x.bfloat16()).dtype == BF16
        assert (x @ x).dtype == BF16
    with roundoff.autocast("bf16", policy="cuda"):
        h = x @ x
        assert [
            h.dtype,
            h.softmax(-1).dtype,
            h.exp().dtype,
            F.layer_norm(h, (4,)).dtype,
        ] == [BF16, FP32, FP32, FP32]
        assert F.interpolate(h, scale_factor=2, mode="bilinear").dtype == FP32
        assert torch.addcmul(x, h, h).dtype == FP32
        assert F.gelu(h).dtype == BF16  # on neither list
    assert not _REGISTERED


@pytest.mark.parametrize(
    "plan",
    [MIXED, Plan((Rule("fp32", ("op:softmax", "op:layer_norm")),), autocast="bf16")],
)
def test_compiled_code_has_the_same_casts(plan):
    torch._dynamo.reset()
    model = net()
    expected = step(model, roundoff.autocast(plan, model))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same(expected, step(compiled, roundoff.autocast(plan, compiled)))
    # another plan, and none, are not taken for this one
    other = Plan((Rule("bf16", ("head",)),))
    assert same(
        step(model, roundoff.autocast(other, model)),
        step(compiled, roundoff.autocast(other, compiled)),
    )
    assert same(step(model), step(compiled))
    assert same(expected, step(compiled, roundoff.autocast(plan, compiled)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("record", [False, True])
def test_what_is_recomputed_is_cast_the_same(reentrant, record):
    class Twice(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.parts, self.recompute = (
                nn.ModuleList(nn.Linear(6, 6) for _ in range(3)),
                recompute,
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:

                def run(x: torch.Tensor, part: nn.Module = part) -> torch.Tensor:
                    return part(x).softmax(-1) * 3

                x = (
                    checkpoint(run, x, use_reentrant=reentrant)
                    if self.recompute
                    else run(x)
                )
            return x

    # softmax#1 is in fp32 the second time too only if calls are counted from where they were
    plan = Plan((Rule("fp32", ("/softmax#1", "parts.2/*")), Rule("bf16", ("*",))))
    found = []
    for recompute in (False, True):
        model = Twice(recompute)
        x = torch.randn(
            4, 6, generator=torch.Generator().manual_seed(6), requires_grad=True
        )
        with roundoff.autocast(plan, model, record=record):
            y = model(x)
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert same(*found)
    assert (
        torch.utils.checkpoint.CheckpointFunction.apply.__qualname__ == "Function.apply"
    )
    assert (
        torch.utils.checkpoint._checkpoint_without_reentrant_generator.__module__
        == "torch.utils.checkpoint"
    )


def test_threads_have_regions_of_their_own():
    model = net()
    model.norm.momentum = (
        0.0  # the encoder layer in evaluation takes another way when a module has hooks
    )
    plans = [MIXED, Plan((Rule("bf16", ("head",)),)), Plan((), autocast="bf16"), None]

    def run(plan: Plan | None) -> torch.Tensor:
        if plan is None:
            return model(TOKENS)
        with roundoff.autocast(plan, model):
            return model(TOKENS)

    with torch.no_grad():
        expected = [run(plan) for plan in plans]
    results: dict[int, bool] = {}

    def often(number: int) -> None:
        with torch.no_grad():
            results[number] = all(
                torch.equal(run(plans[number]), expected[number]) for _ in range(20)
            )

    threads = [threading.Thread(target=often, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_everything_is_undone_also_after_an_error():
    model = net()
    before = step(model)
    region = roundoff.autocast(MIXED, model)
    with pytest.raises(ZeroDivisionError), region:
        model(TOKENS)
        assert active() is region
        raise ZeroDivisionError
    assert active() is None
    assert not torch.is_autocast_enabled("cpu")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert same(before, step(model))

    @roundoff.autocast(MIXED, model)
    def run() -> torch.dtype:
        return model.layer.linear1(torch.randn(2, 8)).dtype

    assert [run(), model.layer.linear1(torch.randn(2, 8)).dtype, run()] == [
        BF16,
        FP32,
        BF16,
    ]


def test_a_model_inside_wrappers_and_several_passes_in_one_region():
    model = net()
    wrapped = torch.nn.DataParallel(model)
    once = step(model, roundoff.autocast(MIXED, model))
    with roundoff.autocast(MIXED, wrapped):
        model(TOKENS)
        again = F.cross_entropy(
            model(TOKENS).flatten(0, 1), LABELS
        )  # calls are counted anew
    assert torch.equal(again.detach(), once[0])


@pytest.mark.parametrize("kind", ["gpt2", "bert", "resnet", "lstm", "mha"])
def test_sites_have_the_names_of_the_budget(kind, request):
    """The light mode names what ``capture.calls`` names: every site of a budget is found."""
    model: nn.Module
    if kind == "lstm":
        request.getfixturevalue("bf16_lstm")

        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn, self.head = nn.LSTM(4, 4, 2), nn.Linear(4, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y, (h, _) = self.rnn(x)
                return self.head(y[-1] + h[-1]).log_softmax(-1)

        model, call = Recurrent(), lambda m: m(torch.ones(3, 2, 4))
    elif kind == "mha":
        model = nn.MultiheadAttention(8, 2)
        call = lambda m: m(*[torch.ones(3, 2, 8)] * 3)  # noqa: E731
    else:
        transformers = pytest.importorskip(
            "transformers", reason="transformers is not installed"
        )
        if kind == "resnet":
            config = transformers.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"
            )
            model, call = (
                transformers.ResNetModel(config),
                lambda m: m(torch.ones(2, 3, 16, 16)),
            )
        else:
            names = {"gpt2": "GPT2", "bert": "Bert"}
            sizes: dict[str, int] = {
                "vocab_size": 50,
                "n_positions": 16,
                "n_embd": 8,
                "n_layer": 1,
                "n_head": 2,
            }
            if kind == "bert":
                sizes = {
                    "vocab_size": 50,
                    "hidden_size": 8,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "intermediate_size": 16,
                    "max_position_embeddings": 16,
                }
            config = getattr(transformers, f"{names[kind]}Config")(**sizes)
            model = getattr(transformers, f"{names[kind]}Model")(config)
            call = lambda m: m(torch.arange(6).view(2, 3))  # noqa: E731
    handler = Plain()
    with watch(model, handler) as mode, mode:
        call(model)
    plan = Plan.from_formats(dict.fromkeys(handler.sites, "bf16"), {})
    region = roundoff.autocast(plan, model)
    with region:  # any rule without a site would warn, and warnings are errors here
        call(model)
    assert region.rules.unused() == []
    decided = {s for s, d in region.rules._decided.items() if d.rule is not None}
    assert decided == set(handler.sites)


def test_what_goes_wrong():
    model = net()
    with pytest.raises(
        PlanError,
        match=r"rule 1 of .* that this model has not: layr/linear\n.*such as layer",
    ):
        roundoff.autocast(Plan((Rule("fp32", ("layr/linear",)),)), model)
    with pytest.raises(PlanError, match="rule 1 .* layr"):
        roundoff.autocast(Plan((Rule("fp32", ("layr",)),)), model)
    with pytest.raises(PlanError, match="need the model: layer/add"):
        roundoff.autocast(Plan((Rule("fp32", ("layer/add",)),)))
    with pytest.raises(
        PlanError, match="fp8_e4m3fn is simulated, which needs the model"
    ):
        roundoff.autocast("fp8_e4m3fn")
    with pytest.raises(PlanError, match="no autocast on such a device"):
        roundoff.autocast("bf16", device="meta")
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]
    with pytest.raises(PlanError, match="use DistributedDataParallel"):
        roundoff.autocast("bf16", parallel)
    with pytest.raises(PlanError, match="not a readable plan"):
        roundoff.autocast("missing.toml", model)


def test_warnings():
    model = net()
    with pytest.warns(RuntimeWarning, match="16 to 32 times slower"):
        roundoff.autocast("fp16", model)
    lost = roundoff.autocast(
        Plan((Rule("bf16", ("head/conv2d", "head/linear")),)), model
    )
    with (
        pytest.warns(
            RuntimeWarning,
            match="1 of the plan's patterns named no site in .*: head/conv2d",
        ),
        lost,
    ):
        model(TOKENS)
    with lost:  # said once
        model(TOKENS)
    outer, inner = Plan((Rule("fp32", ("head",)),)), Plan((Rule("bf16", ("head",)),))
    with (
        roundoff.autocast(outer, model),
        pytest.warns(
            RuntimeWarning,
            match=r"inside head is to run in bf16 \(rule 1\), outside in fp32 \(head\); the inner",
        ),
        roundoff.autocast(inner, model),
    ):
        assert model(TOKENS).dtype == BF16


def test_explain():
    model = net()
    region = roundoff.autocast(MIXED, model)
    assert (
        region.explain("head/linear") == "head/linear runs in fp32: rule 1, head/linear"
    )
    assert (
        region.explain("layer.norm1/layer_norm")
        == "layer.norm1/layer_norm runs in fp32: rule 1, class:LayerNorm"
    )
    assert (
        region.explain("layer.linear1/linear")
        == "layer.linear1/linear runs in bf16: rule 2, layer"
    )
    assert (
        region.explain("table/embedding")
        == "table/embedding runs in fp32: no rule: the plan's default"
    )
    lists = roundoff.autocast("bf16", model)
    assert (
        lists.explain("head/linear")
        == "head/linear runs in bf16: no rule: autocast's own lists"
    )
    assert "runs in fp32: no rule" in roundoff.autocast(
        "bf16", model, policy="cuda"
    ).explain("/softmax")
    for site in (
        "head/linear",
        "layer.norm1/layer_norm",
        "table/embedding",
    ):  # and that is what runs
        assert region.rules.decide(site).format in region.explain(site)


def test_a_batch_may_be_several_forward_passes():
    """A budget names the second pass's calls #1; its plan says that a batch has two, and both are found, each batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))

    def forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch) - model(batch * 2)

    workload = roundoff.Workload(
        model, [torch.randn(3, 4), torch.randn(3, 4)], forward=forward
    )
    budget = roundoff.budget(workload, ["bf16"], probes=4)
    assert budget.about.forwards == 2
    assert "1/softmax#1" in {site.site for site in budget.sites}
    assert budget.plan("1dB").about["forwards"] == 2
    plan = Plan.from_formats({"1/softmax#1": "bf16"}, {"forwards": 2})
    for record in (False, True):
        with roundoff.autocast(plan, model, record=record):
            for batch in workload.batches:  # both in one region
                one, two = model(batch), model(batch * 2)
                assert [one.dtype, two.dtype] == [FP32, BF16]
    with roundoff.autocast(
        Plan(plan.rules), model
    ) as region:  # a plan that says nothing counts from each pass
        assert [model(batch).dtype, model(batch).dtype] == [FP32, FP32]
        region.rules.told = True


def test_one_set_of_rules_for_one_plan():
    """Else code compiled in one step would be compiled again in the next."""
    model = net()
    one, two = roundoff.autocast(MIXED, model), roundoff.autocast(MIXED, model)
    assert one.rules is two.rules
    assert isinstance(one.rules, Rules)
    assert one.rules is not roundoff.autocast(MIXED, net()).rules


def test_tf32_on_cuda_is_allowed_for_one_call_and_its_backward():
    """The flags can be set without a GPU: they stand during the call and its backward, and are as before after both."""
    from roundoff.train.autocast.mode import run_in

    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(
                (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
            )
            return gradient * 2

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    x = torch.ones(2, requires_grad=True)
    y = run_in(Watched.apply, "matmul", (x,), {}, "tf32", "cuda")
    assert (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    ) == before
    y.sum().backward()
    assert seen == [True, (True, True)]
    assert (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    ) == before
    assert Rules(Plan((), default="tf32"), net(), "cuda").simulated == []
    assert Rules(Plan((), default="tf32"), net(), "cpu").simulated == ["tf32"]
