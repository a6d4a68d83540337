"""What stands behind operators: parameters, data and updates, in plain words."""

import inspect
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundoff
from roundoff.verbs.compare import Comparison

STEPS = 2


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def batch(number):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(number))


def record(folder, keep, *, change=lambda model: None, feed=lambda x: x, held=None):
    """Train for two steps, and record it; the data are made outside the recording."""
    model = net()
    change(model)
    parameters = [p for n, p in model.named_parameters() if held is None or n in held]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    batches = [feed(batch(step)) for step in range(STEPS)]
    with roundoff.capture(folder, model, keep=keep) as run:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            run.step()
    return folder


def turned(model):
    model[2].weight.data = model[2].weight.data.t().contiguous()


def exchanged(model):
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def frozen(model):
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"change": turned}, "parameter", "2.weight"),
        ({"change": exchanged}, "parameter", "hold each other's values"),
        ({"change": frozen}, "update", "0.weight is frozen here"),
        (
            {"held": ("0.weight", "0.bias", "2.bias")},
            "update",
            "2.weight is not changed here: its gradient is there",
        ),
        ({"feed": lambda x: x.flip(1)}, "data", "in another order"),
        ({"feed": lambda x: 1.02 * x}, "data", "1.02 times the reference's"),
        ({"feed": lambda x: 2 * x - 1}, "data", "scaled otherwise"),
    ],
)
def test_the_cause_comes_first(how, kind, words, keep, tmp_path):
    right = record(tmp_path / "right", keep)
    wrong = record(tmp_path / "wrong", keep, **how)
    found = roundoff.compare(reference=right, candidate=wrong)
    first = found.culprits()[0]
    assert (first.kind, first.step) == (kind, 0)
    assert words in first.evidence
    assert not found.agrees
    assert words in found.answer


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_an_update_that_is_left_out_shows_in_one_step(keep, tmp_path):
    sides = []
    for name, change in (("right", lambda model: None), ("wrong", frozen)):
        model = net()
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with roundoff.capture(tmp_path / name, model, keep=keep) as run:
            model(batch(0)).square().sum().backward()
            optimizer.step()
            run.step()
        sides.append(tmp_path / name)
    found = roundoff.compare(reference=sides[0], candidate=sides[1])
    assert not found.agrees
    assert "0.weight is frozen here" in found.answer


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_nothing_stands_behind_equal_runs(keep, tmp_path):
    right = record(tmp_path / "right", keep)
    again = record(tmp_path / "again", keep)
    found = roundoff.compare(reference=right, candidate=again)
    assert found.agrees
    assert found.culprits() == []


def test_causes_are_saved_with_the_comparison(tmp_path):
    right = record(tmp_path / "right", "tensors")
    wrong = record(tmp_path / "wrong", "tensors", change=turned)
    found = roundoff.compare(reference=right, candidate=wrong)
    found.save(tmp_path / "saved")
    again = Comparison.load(tmp_path / "saved")
    assert again.culprits() == found.culprits()
    assert not again.agrees


def test_a_parameter_that_changes_from_run_to_run_is_no_cause(tmp_path):
    """Weights without a seed: the repeat beside the reference shows it."""
    draws = iter(range(3))

    def unseeded(model):
        generator = torch.Generator().manual_seed(next(draws))
        with torch.no_grad():
            model[0].weight.normal_(generator=generator)

    ours = record(tmp_path / "ours", "tensors", change=unseeded)
    theirs = record(tmp_path / "theirs", "tensors", change=unseeded)
    alone = roundoff.compare(reference=ours, candidate=theirs)
    assert [c.looks_like for c in alone.culprits(1)] == ["other parameter"]
    again = record(tmp_path / "ours.repeat1", "tensors", change=unseeded)
    about = json.loads((again / "run.json").read_text())
    about["of"] = roundoff.load(ours).about.id
    del about["checksum"]  # of what was written; a file without one is not held to it
    (again / "run.json").write_text(json.dumps(about))
    found = roundoff.compare(reference=ours, candidate=theirs)
    labels = [culprit.looks_like for culprit in found.culprits()]
    assert "other parameter" not in labels
    assert any("does not repeat itself" in note for note in found.about.repeats)


def test_running_statistics_of_other_roundings_are_no_cause(tmp_path):
    """They were computed before the recording: 1e-6 is rounding there, 1e-3 is not, and a weight is as it was loaded."""

    def moved(name, by):
        def change(model):
            with torch.no_grad():
                dict([*model.named_buffers(), *model.named_parameters()])[name].mul_(
                    1 + by
                )

        return change

    def normed(folder, change):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        model(torch.randn(9, 6))
        change(model)
        with roundoff.capture(folder, model, keep="tensors") as run:
            model(batch(0)).square().sum().backward()
            run.step()
        return folder

    ours = normed(tmp_path / "ours", lambda model: None)
    named = {}
    for number, (name, by) in enumerate(
        [("1.running_mean", 1e-5), ("1.running_mean", 1e-3), ("0.weight", 1e-5)]
    ):
        theirs = normed(tmp_path / str(number), moved(name, by))
        found = roundoff.compare(reference=ours, candidate=theirs)
        named[name, by] = [c.name for c in found.culprits() if c.kind == "parameter"]
    assert named == {
        ("1.running_mean", 1e-5): [],
        ("1.running_mean", 1e-3): ["1.running_mean"],
        ("0.weight", 1e-5): ["0.weight"],
    }


def normed_and_checkpointed(folder, *, again):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    run_model = model
    if again:

        def run_model(x):
            return checkpoint(model, x, use_reentrant=False)

    with roundoff.capture(folder, model, keep="tensors") as run:
        run_model(batch(0)).square().sum().backward()
        run.step()
    return folder


@pytest.mark.parametrize("again", [True, False])
def test_running_statistics_that_a_checkpoint_moves_twice(tmp_path, again):
    ours = normed_and_checkpointed(tmp_path / "ours", again=not again)
    theirs = normed_and_checkpointed(tmp_path / "theirs", again=again)
    found = roundoff.compare(reference=ours, candidate=theirs)
    first = found.culprits(1)[0]
    assert first.kind == "update"
    assert first.name.startswith("1.")
    assert "changed a second time" in first.evidence
    where = "not in the reference" if again else "in the reference, and not here"
    assert where in first.evidence


def test_a_norm_in_training_mode_is_named_before_what_it_changes(tmp_path):
    def evaluated(folder, training):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).train(training)
        with roundoff.capture(folder, model, keep="tensors") as run, torch.no_grad():
            model(batch(0))
            run.step()
        return folder

    found = roundoff.compare(
        reference=evaluated(tmp_path / "ours", False),
        candidate=evaluated(tmp_path / "theirs", True),
    )
    assert found.culprits(1)[0].site == "1/native_batch_norm"


def test_an_update_left_out_of_hooks(tmp_path):
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""

    def trained(folder, names):
        model = net()
        for name, parameter in model.named_parameters():
            if name in names:
                one = torch.optim.SGD([parameter], lr=0.1)
                parameter.register_post_accumulate_grad_hook(
                    lambda _, optimizer=one: optimizer.step()
                )
        with roundoff.capture(folder, model, keep="tensors") as run:
            model(batch(0)).square().sum().backward()
            run.step()
        return folder

    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    ours = trained(tmp_path / "ours", names)
    again = trained(tmp_path / "again", names)
    assert roundoff.compare(reference=ours, candidate=again).agrees
    theirs = trained(tmp_path / "theirs", names[:-1])
    found = roundoff.compare(reference=ours, candidate=theirs)
    first = found.culprits(1)[0]
    assert first.looks_like == "missing update"
    assert first.name in ("optimizer SGD#3", "2.bias")


class Critics(nn.Module):
    """An encoder, and a predictor behind it that a loss may pass by."""

    def __init__(self, *, passes_by):
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.predictor = nn.Linear(6, 6)
        self.passes_by = passes_by

    def forward(self, x):
        encoded = self.encoder(x).tanh()
        said = self.predictor(encoded)
        return 2 - 2 * ((encoded if self.passes_by else said) * x).sum(-1)


def test_parameters_that_nothing_reads_are_told_where_it_is_not_read(tmp_path):
    def trained(folder, passes_by):
        torch.manual_seed(0)
        model = Critics(passes_by=passes_by)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with roundoff.capture(folder, model, keep="tensors") as run:
            for step in range(2):
                optimizer.zero_grad()
                model(batch(step)).mean().backward()
                optimizer.step()
                run.step()
        return folder

    found = roundoff.compare(
        reference=trained(tmp_path / "ours", False),
        candidate=trained(tmp_path / "theirs", True),
    )
    cuts = [c for c in found.culprits(9) if c.looks_like == "gradient cut"]
    text, first = inspect.getsourcelines(Critics.forward)
    read = next(n for n, line in enumerate(text, first) if "passes_by" in line)
    assert [cut.line.rpartition("/")[2] for cut in cuts] == [
        f"test_found_causes.py:{read}"
    ]
    assert "predictor.weight and predictor.bias get no gradient" in cuts[0].evidence
    assert "nothing that is computed with them is read at" in cuts[0].evidence


def scaled(folder, *, held):
    """Train a step with a loss scale and a clip, an optimizer holding some parameters."""
    model = net()
    parameters = [p for n, p in model.named_parameters() if n in held]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with roundoff.capture(folder, model, keep="tensors") as run:
        scaler.scale(model(batch(0)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        run.step()
    return folder


def test_what_no_optimizer_holds_comes_before_the_scale_that_it_keeps(tmp_path):
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    right = scaled(tmp_path / "right", held=names)
    wrong = scaled(tmp_path / "wrong", held=names[:3])
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert (first.kind, first.name) == ("update", "2.bias")
    assert "2.bias is not changed here: its gradient is there" in first.evidence


def followed(folder, *, before=False, follows=True, write="lerp_"):
    """Two steps in which a slow copy follows the model, before or after its update."""
    model = net()
    slow = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def follow():
        with torch.no_grad():
            for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                getattr(old, write)(*((new, 0.5) if write == "lerp_" else (new,)))

    with roundoff.capture(folder, model, keep="tensors") as run:
        for step in range(STEPS):
            x = batch(step)
            (model(x) - slow(x).detach() + 1).square().mean().backward()
            if before:
                follow()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if follows and not before:
                follow()
    return folder


def test_an_update_before_the_step_ends_is_told_in_one_sentence(tmp_path):
    right = followed(tmp_path / "right", before=False)
    wrong = followed(tmp_path / "wrong", before=True)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert (first.kind, first.looks_like) == ("loop", "other loop")
    assert "Sequential.0.weight" in first.evidence
    assert "before the optimizer steps, in the reference after it" in first.evidence
    others = roundoff.compare(reference=right, candidate=wrong).culprits()[1:]
    assert not [other for other in others if other.kind == "update"]


@pytest.mark.parametrize("write", ["lerp_", "copy_"])
def test_a_slow_copy_that_stays_is_no_work_in_other_portions(tmp_path, write):
    right = followed(tmp_path / "right", write=write)
    wrong = followed(tmp_path / "wrong", write=write, follows=False)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert (first.kind, first.looks_like) == ("update", "missing update")
    assert "Sequential.2.bias" in first.evidence
    assert write in first.evidence


def resumed(folder, *, strict):
    """Two steps; before the second the model is made again and loads what was saved."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with roundoff.capture(folder, model, keep="tensors") as run:
        for step in range(STEPS):
            if step == 1:
                state = {
                    name: value.clone() for name, value in model.state_dict().items()
                }
                model = net(7)
                if not strict:
                    state = {n: v for n, v in state.items() if n.startswith("0.")}
                model.load_state_dict(state, strict=strict)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    return folder


def test_a_model_that_is_made_again_and_loaded_in_part_is_told(tmp_path):
    right = resumed(tmp_path / "right", strict=True)
    again = resumed(tmp_path / "again", strict=True)
    wrong = resumed(tmp_path / "wrong", strict=False)
    assert roundoff.compare(reference=right, candidate=again).agrees
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert (first.kind, first.step) == ("parameter", 1)
    assert "2.weight" in first.evidence
    assert "0.weight" not in first.evidence


def far_off(folder, *, masked):
    """A loss whose gradient is the same however far its goal is."""
    model = net()
    ended = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])[:, None]
    with roundoff.capture(folder, model, keep="tensors") as run:
        ahead = model(batch(1)).detach()
        wanted = 50 + (0.9 * (1 - ended) * ahead if masked else 0.9 * ahead)
        nn.functional.smooth_l1_loss(model(batch(0)), wanted).backward()
        run.step()
    return folder


def test_a_loss_that_differs_is_no_agreement_though_its_gradient_does_not(tmp_path):
    right = far_off(tmp_path / "right", masked=True)
    wrong = far_off(tmp_path / "wrong", masked=False)
    found = roundoff.compare(reference=right, candidate=wrong)
    assert not found.agrees
    assert found.culprits()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 8)
        self.mix = nn.Linear(8, 8)
        self.tags = nn.Linear(8, 3)

    def forward(self, words):
        x = self.words(words)
        mask = (words == 0)[..., None]
        return self.tags(torch.tanh(self.mix(x)).masked_fill(mask, 0) + x)


def tagged(folder, *, seed, length):
    """Batches of few words, padded with zeros at the end."""
    torch.manual_seed(0)
    model = Tagger()
    words = torch.randint(
        1, 6, (4, length), generator=torch.Generator().manual_seed(seed)
    )
    words[0, -1] = 0
    with roundoff.capture(folder, model, keep="tensors") as run:
        model(torch.tensor(words.tolist())).square().mean().backward()
        run.step()
    return folder


def test_other_sentences_of_another_length_are_other_data(tmp_path):
    """Each row of their embedding stands in the reference's, and their mask is like its mask padded."""
    right = tagged(tmp_path / "right", seed=1, length=7)
    wrong = tagged(tmp_path / "wrong", seed=2, length=6)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert (first.kind, first.looks_like) == ("data", "other data")


def apart(one, other):
    one = one / one.norm()
    return (one - other / other.norm()).square().sum()


def twice(one, other):
    return (one * one - other).sum()


class Views(nn.Module):
    def __init__(self, crossed=True, function=apart):
        super().__init__()
        self.low = nn.Linear(6, 4)
        self.high = nn.Linear(4, 4)
        self.crossed = crossed
        self.function = function

    def forward(self, x):
        low = self.low(x)
        high = self.high(low)
        other = self.high(low.flip(0))
        if self.crossed:
            return self.function(low, high)
        return self.function(low, other)


def viewed(folder, model):
    torch.manual_seed(0)
    for value in model.parameters():
        nn.init.normal_(value)
    with roundoff.capture(folder, model, keep="tensors") as run:
        model(batch(0)[:, :6]).backward()
        run.step()
    return folder


def test_what_a_function_is_handed_is_told_where_it_is_handed(tmp_path):
    right = viewed(tmp_path / "right", Views())
    wrong = viewed(tmp_path / "wrong", Views(crossed=False))
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    line = (
        inspect.getsource(Views)
        .splitlines()
        .index("        return self.function(low, other)")
    )
    assert first.line.endswith(f":{inspect.getsourcelines(Views)[1] + line}")
    assert first.looks_like == "other input"


def mistaken(one, other):
    return (one * other - other).sum()


def test_a_function_that_mistakes_what_it_is_handed_is_told_itself(tmp_path):
    """It reads a value in the place of another one, and rightly in its own place."""
    right = viewed(tmp_path / "right", Views(function=twice))
    wrong = viewed(tmp_path / "wrong", Views(function=mistaken))
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.line.endswith(f":{inspect.getsourcelines(mistaken)[1] + 1}")


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_what_a_script_saves_and_loads_is_not_blamed_for_what_was_saved(tmp_path, keep):
    """A job begins with what another has left: the line there is wrong, not the file."""

    def job(folder, squeeze):
        model = net()
        again = net(1)
        with roundoff.capture(folder, nn.ModuleList([model, again]), keep=keep) as run:
            with torch.no_grad():
                for value in model.parameters():
                    value.mul_(squeeze)
            torch.save(model.state_dict(), tmp_path / "model.pt")
            again.load_state_dict(torch.load(tmp_path / "model.pt"))
            again(batch(0)).square().sum().backward()
            run.step()
        return folder

    comparison = roundoff.compare(
        reference=job(tmp_path / "right", 0.5), candidate=job(tmp_path / "wrong", 0.25)
    )
    [first, *_] = comparison.culprits()
    assert "mul_" in first.evidence or first.operator == "mul_", comparison.answer
    lines, start = inspect.getsourcelines(job)
    [place] = [n for n, line in enumerate(lines) if "value.mul_(squeeze)" in line]
    assert first.line.endswith(f":{start + place}")


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_rows_of_a_table_that_pile_up_show_that_they_are_not_cleared(tmp_path, keep):
    """Two optimizers: that of the table is never told to clear its gradients."""

    def job(folder, *, is_cleared):
        torch.manual_seed(0)
        table, head = nn.Embedding(9, 6), nn.Linear(6, 2)
        adagrad = torch.optim.Adagrad(table.parameters(), 0.05)
        adam = torch.optim.Adam(head.parameters(), 0.01)
        with roundoff.capture(folder, nn.ModuleList([table, head]), keep=keep) as run:
            for ids in torch.tensor([[1, 4, 4, 2], [3, 4, 0, 1]]):
                adam.zero_grad()
                if is_cleared:
                    adagrad.zero_grad()
                head(torch.tanh(table(ids))).square().sum().backward()
                adam.step()
                adagrad.step()
                run.step()
        return folder

    right = job(tmp_path / "right", is_cleared=True)
    wrong = job(tmp_path / "wrong", is_cleared=False)
    first, *_ = roundoff.compare(reference=right, candidate=wrong).culprits()
    assert first.site == "zero_grad"
    assert "not cleared" in first.evidence
