"""Groups of channels that a factor would not leave as they are: known before, or found in the output and undone alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.channels import follow
from roundoff.quantize.channels.groups import channel_groups
from roundoff.quantize.channels.rescale import rescale_, why_not_rescalable
from roundoff.quantize.channels.rescale_alike import rescale_alike_
from roundoff.quantize.channels.spread import spread_
from roundoff.quantize.importance import importance
from roundoff.quantize.model import Rescaling


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def written_numbers(s, h):
    h[..., :2] = 0.5
    return h


def written_after(s, h):
    y = F.relu(h)
    y[:, 0] = torch.ones(y.shape[-1])
    return y


def both_ways(s, h):
    return F.relu(h) @ s.b.weight + F.relu(h) @ s.b.weight.t()


def other_value(s, h):
    return torch.where(torch.rand(h.shape) > 0.5, F.relu(h), 0.25)


def joined_constant(s, h):
    return torch.cat([F.relu(h), torch.full_like(h[:, :1], 0.3)], 1)


def normed(s, h):
    return h / torch.norm(h, dim=-1, keepdim=True)


def normed_over(s, h):
    return h / torch.norm(h, 2, 1, True)


def scan(s, h):
    """A state of the decay of a softplus, as in a selective state space."""
    decay = torch.exp(-F.softplus(s.b(h)) * torch.exp(s.v))
    state = torch.zeros_like(h[:, 0])
    states = []
    for step in range(h.shape[1]):
        state = decay[:, step] * state + h[:, step]
        states.append(state)
    return torch.stack(states, 1) + s.v * h


def products(s, h):
    kept = torch.cumprod(torch.sigmoid(s.b(h)), 1)
    return kept * torch.cumsum(h / kept, 1)


def biased_and_scaled(s, h):
    return F.relu(h + s.v) * s.v


def added_numbers(s, h):
    return F.relu(h) + 1


def inverse(s, h):
    return 1 / (1 + F.relu(h))


def gated(s, h):
    return h * torch.sigmoid(s.b(h))


BODIES = [
    written_numbers,
    written_after,
    both_ways,
    other_value,
    joined_constant,
    normed,
    normed_over,
    scan,
    products,
    biased_and_scaled,
    added_numbers,
    inverse,
    gated,
]


def network(Model, body):
    torch.manual_seed(0)
    return Model(
        lambda s, x: s.d(F.relu(s.c(body(s, s.a(x))))),
        a=nn.Linear(5, 8),
        b=nn.Linear(8, 8),
        c=nn.Linear(8, 6),
        d=nn.Linear(6, 2),
        v=nn.Parameter(torch.rand(8) + 0.5),
    ).eval()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_may_be_rescaled_leaves_the_function_as_it_is(Model, body):
    """By powers of two, so bit by bit but for sums in another order."""
    net = network(Model, body)
    (x,) = data(3, 4, 5, count=1)
    rescaled = 0
    for group in channel_groups(net, [x], purpose="rescale"):
        if not group.consumers or why_not_rescalable(group):
            continue
        twin = copy.deepcopy(net)
        generator = torch.Generator().manual_seed(3)
        factors = 2.0 ** torch.randint(-2, 3, (group.size,), generator=generator)
        rescale_(twin, group, factors.double())
        with torch.no_grad():
            torch.manual_seed(5)
            want = net(x)
            torch.manual_seed(5)
            assert torch.allclose(twin(x), want, rtol=1e-5, atol=1e-6), group.name
        rescaled += 1
    assert rescaled  # c to d at least


def test_a_rule_that_fails_costs_its_own_channels(Model, monkeypatch):
    def broken(call):
        raise KeyError(call.name)

    monkeypatch.setitem(follow._RULES, "tanh", broken)
    net = Model(
        lambda s, x: s.d(F.relu(s.c(torch.tanh(s.a(x))))),
        a=nn.Linear(5, 8),
        c=nn.Linear(8, 6),
        d=nn.Linear(6, 2),
    )
    groups = channel_groups(net, data(3, 5), purpose="rescale")
    reasons = {group.name: group.pinned for group in groups}
    assert reasons["c.weight"] is None
    assert reasons["a.weight"] == "what tanh (/tanh) does to channels is not known"


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: torch.norm(x, dim=1),
        lambda x: torch.norm(x, 2, -1),
        lambda x: x.norm(dim=(0, 2), keepdim=True),
        lambda x: torch.linalg.vector_norm(x, 2, 1),
        lambda x: x.max(),
        lambda x: x.max(1).values,
        lambda x: torch.quantile(x, 0.5, 1),
        lambda x: x.std(1, keepdim=True),
        lambda x: torch.logsumexp(x, 1),
        lambda x: x.max() + 1,
        lambda x: 1 - x.mean() * 2,
    ],
)
def test_reductions_are_followed_or_known_not_to_be(Model, reduce):
    net = Model(lambda s, x: reduce(s.a(x)), a=nn.Linear(5, 8))
    assert channel_groups(net, data(3, 4, 5), purpose="rescale")


def blind(self, x):
    """What ``detach`` hides: ``h`` goes into the output by its own size."""
    h = F.relu(self.a(x))
    return self.d(F.relu(self.c(h))) + self.hidden(h)


class Hidden(nn.Module):
    """Reads values where no mode sees it."""

    def forward(self, h):
        with torch._C.DisableTorchFunction():
            return torch.sin(h.detach().sum(-1, keepdim=True)) * 3


def test_a_group_that_changes_the_output_is_undone_alone(Model, laid):
    torch.manual_seed(0)
    net = Model(
        blind,
        a=nn.Linear(5, 8),
        c=nn.Linear(8, 6),
        d=nn.Linear(6, 2),
        hidden=Hidden(),
    )
    model, workload, _ = laid(net, data(16, 5))
    calibration = Calibration.of(model, workload)
    weights = importance(calibration)
    before = {k: v.clone() for k, v in model.model.state_dict().items()}
    gain = spread_(calibration, weights)
    assert "undone for 1 that changed what the model computes: a.weight" in gain.note
    assert [r.group.name for r in model.rescalings] == ["c.weight"]
    after = model.model.state_dict()
    assert torch.equal(after["a.weight"], before["a.weight"])
    assert not torch.equal(after["d.weight"], before["d.weight"])
    assert gain.after_db >= gain.before_db
    x = workload.batches[0]
    with torch.no_grad():
        assert torch.allclose(model.model(x), net(x), rtol=1e-4, atol=1e-5)


def test_models_that_draw_are_compared_on_the_same_numbers(Model, laid):
    net = Model(
        lambda s, x: s.c(F.relu(s.a(x))) + torch.randn(len(x), 1),
        a=nn.Linear(5, 8),
        c=nn.Linear(8, 3),
    )
    model, workload, _ = laid(net, data(16, 5))
    group, *_ = channel_groups(model.model, workload.batches, purpose="rescale")
    factors = torch.full((8,), 2.0, dtype=torch.float64)
    rescaling = Rescaling(group, factors, clips=True)
    assert rescale_alike_(Calibration.of(model, workload), [rescaling]) == []
    assert model.rescalings == [rescaling]


def test_tied_ends_keep_the_rest_rescaled(Model):
    """The norm's weight would go into the head, which is the table of the embedding too."""
    torch.manual_seed(0)
    table = nn.Embedding(9, 8)
    head = nn.Linear(8, 9, bias=False)
    head.weight = table.weight
    net = Model(
        lambda s, ids: s.head(s.norm(s.table(ids) + s.d(F.relu(s.c(s.table(ids)))))),
        table=table,
        c=nn.Linear(8, 16),
        d=nn.Linear(16, 8),
        norm=nn.LayerNorm(8),
        head=head,
    )
    ids = [torch.randint(0, 9, (4, 6)) for _ in range(2)]
    model = ro.quantize(net, "int8", ids)
    assert [r.group.name for r in model.rescalings] == ["c.weight"]
    assert "undone" not in model.steps[0].note
