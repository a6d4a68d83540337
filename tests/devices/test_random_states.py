"""The random states of a device come back with those of the CPU."""

import torch
from torch import nn

from roundoff.ops import describe, restore
from roundoff.preserve import preserve, process_kept, random_states, set_random_states


def draws(device):
    return torch.rand(4, device=device).cpu(), torch.rand(4)


def test_what_is_drawn_inside_is_drawn_again_outside(device):
    model = nn.Linear(2, 1).to(device)
    torch.rand(1, device=device)  # it is in use
    states = random_states()
    expected = draws(device)
    for block in (lambda: preserve(model), process_kept):
        set_random_states(states)
        with block():
            draws(device)
        for got, wanted in zip(draws(device), expected, strict=True):
            assert torch.equal(got, wanted)


def test_a_custom_operator_that_draws_on_the_device_is_not_run_again(device):
    from roundoff.ops import run_again

    @torch.library.custom_op("devices_test::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    x = torch.ones(3, device=device)
    state = random_states()
    answer = run_again(torch.ops.devices_test.noisy.default, (x,), {})
    assert "random" in answer.text
    assert all(map(torch.equal, random_states(), state))


def test_recorded_arguments_go_where_their_tensors_are():
    """A call that was recorded on a GPU runs again where the recording is read."""
    text = describe(([3],), {"device": torch.device("cuda", 1)}, lambda _: None)
    here = torch.device("cpu")
    assert restore(text, int, here) == (([3],), {"device": here})
    assert restore(text, int) == (([3],), {"device": torch.device("cuda", 1)})


def test_a_batch_is_run_again_with_the_same_draws(device):
    from roundoff.budget.run import _restorer

    torch.rand(1, device=device)
    restore_state = _restorer(nn.Linear(2, 1).to(device))
    expected = draws(device)
    restore_state()
    assert all(map(torch.equal, draws(device), expected))
