"""The graph of a model's calls: what each reads, by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.errors import QuantizationError
from roundoff.quantize.graph import trace
from roundoff.workload.workload import Workload


def graph_of(model, *batches):
    return trace(Workload(model, list(batches)))


def reads(graph):
    return {
        site: [use.value for use in node.uses] for site, node in graph.nodes.items()
    }


def test_values_are_named_by_their_makers_and_weights_by_their_parameters(Model):
    def forward(self, x):
        y = self.a(x)
        return self.b(y.relu().view(-1, 4)) + y

    graph = graph_of(
        Model(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4)), torch.ones(2, 3)
    )
    assert reads(graph) == {
        "a/linear": ["a/linear:0", "a.weight", "a.bias"],
        "/relu": ["a/linear"],
        "b/linear": ["/relu", "b.weight", "b.bias"],
        "/add": ["b/linear", "a/linear"],
    }
    assert graph.outputs == {"/add"}
    assert [n.site for n in graph.readers("a/linear")] == ["/relu", "/add"]
    assert graph.readers("no such value") == []
    assert graph.nodes["b/linear"].shapes == ((2, 4),)
    assert graph.nodes["b/linear"].use(1).weight
    assert graph.nodes["b/linear"].use(7) is None


def test_cat_has_all_its_parts_names(Model):
    net = Model(
        lambda s, x: s.c(torch.cat([s.a(x), s.b(x)], 1)),
        a=nn.Linear(3, 2),
        b=nn.Linear(3, 2),
        c=nn.Linear(4, 1),
    )
    graph = graph_of(net, torch.ones(2, 3))
    assert reads(graph)["c/linear"][0] == "a/linear b/linear"
    assert [n.site for n in graph.readers("a/linear")] == ["c/linear"]


def test_a_module_used_twice_has_two_sites_and_one_weight(Model):
    graph = graph_of(
        Model(lambda s, x: s.a(s.a(x)), a=nn.Linear(3, 3)), torch.ones(2, 3)
    )
    assert reads(graph) == {
        "a/linear": ["a/linear:0", "a.weight", "a.bias"],
        "a/linear#1": ["a/linear", "a.weight", "a.bias"],
    }


def test_origins_of_weights(Model):
    """The parameter itself, or a view, a buffer, a norm: what is stored is not what is read."""

    def forward(self, x):
        y = F.linear(F.linear(F.linear(x, self.w), self.w.t()), self.kept)
        return F.linear(y, self.v * self.g)

    parts = {n: nn.Parameter(torch.randn(4, 4)) for n in "wvg"}
    graph = graph_of(Model(forward, kept=torch.randn(4, 4), **parts), torch.ones(2, 4))
    found = [
        graph.nodes[s].use(1).origin
        for s in ("/linear", "/linear#1", "/linear#2", "/linear#3")
    ]
    assert found == ["parameter", "computed", "computed", "computed"]
    assert graph.of_parameters == {"/mul"}
    assert graph.nodes["/linear"].use(0).origin == "data"


def test_what_is_looked_up_by_the_input_is_data():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, ids):
            return self.head(self.table(ids))

    graph = graph_of(Net(), torch.tensor([0, 3]))
    assert graph.nodes["head/linear"].use(0).origin == "data"
    assert graph.of_parameters == set()


def test_in_place_calls_make_new_values(Model):
    def forward(self, x):
        y = self.a(x)
        y += self.b(x)
        y.relu_()
        return self.a(y)

    graph = graph_of(
        Model(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3)), torch.ones(2, 3)
    )
    assert reads(graph)["/relu"] == ["/add"]
    assert reads(graph)["a/linear#1"][0] == "/relu"


@pytest.mark.parametrize(
    ("layer", "x", "groups"),
    [
        (nn.Conv2d(6, 4, 3, groups=2), torch.ones(2, 6, 5, 5), 2),
        (nn.Conv1d(4, 4, 1, groups=4), torch.ones(2, 4, 5), 4),
        (nn.ConvTranspose2d(6, 4, 3, groups=2, dilation=3), torch.ones(2, 6, 5, 5), 2),
        (nn.Conv3d(2, 4, 1), torch.ones(2, 2, 5, 5, 5), 1),
        (nn.Linear(2, 4), torch.ones(3, 2), 1),
    ],
)
def test_groups_of_convolutions(layer, x, groups):
    (node,) = graph_of(layer, x).nodes.values()
    assert node.groups == groups


def test_groups_of_a_call_with_keywords(Model):
    """The last number among the settings is the stride here."""
    net = Model(
        lambda s, x: F.conv2d(x, s.w, stride=2), w=nn.Parameter(torch.ones(4, 3, 1, 1))
    )
    (node,) = graph_of(net, torch.ones(1, 3, 4, 4)).nodes.values()
    assert node.groups == 1


def test_branches_are_seen(Model):
    def forward(self, x):
        y = self.a(x) if x.sum() > 0 else self.b(x)
        return self.c(y)

    net = Model(forward, a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.Linear(2, 2))
    graph = graph_of(net, torch.ones(1, 2), -torch.ones(1, 2))
    assert graph.changing == {"c/linear"}
    assert graph.occasional == {"a/linear", "b/linear"}
    assert graph_of(net, torch.ones(1, 2)).changing == set()


def test_an_argument_in_another_place_is_a_change(Model):
    """The same values, but the bias comes by name and so in another place."""

    def forward(self, x):
        return (
            F.linear(x, self.w, self.b)
            if x.sum() > 0
            else F.linear(x, bias=self.b, weight=self.w)
        )

    net = Model(
        forward, w=nn.Parameter(torch.ones(2, 2)), b=nn.Parameter(torch.ones(2))
    )
    assert graph_of(net, torch.ones(1, 2), -torch.ones(1, 2)).changing == {"/linear"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_hides_operators_is_listed():
    net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert graph_of(net, torch.ones(1, 2)).hidden == [
        ("0/forward", "TorchScript hides its operators")
    ]
    assert graph_of(nn.Linear(2, 2), torch.ones(1, 2).view(1, 2)).hidden == []


def test_the_model_stays_as_it_was(Model):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = torch.get_rng_state()
    graph_of(net, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert all(m.training for m in net.modules())
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_errors():
    class Numbers(nn.Module):
        def forward(self, x):
            return x.long().sum()

    with pytest.raises(
        QuantizationError, match="no operator of this model can be seen"
    ):
        graph_of(Numbers(), torch.ones(2))
    with pytest.raises(QuantizationError, match="no calibration data"):
        trace(Workload(nn.Linear(2, 2), [torch.ones(1, 2)]), [])
