"""`Adam`, `AdamW`, `adam` and `adamw` have the arguments, order and defaults of the same names in each framework."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from qshard.torch_bridge import Adam, AdamW  # noqa: E402

KINDS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]
by_kind = pytest.mark.parametrize(("ours", "theirs"), KINDS, ids=["Adam", "AdamW"])


def arguments(function):
    """Return the positional arguments and their defaults."""
    given = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]


def stepped(kind, steps=3, **options):
    p = torch.nn.Parameter(torch.linspace(-2, 2, 300).view(2, 150))
    optimizer = kind([p], **options)
    for step in range(steps):
        p.grad = torch.cos(p.detach() * (step + 1))
        optimizer.step()
    return p.detach(), optimizer


@by_kind
def test_arguments_are_those_of_torch(ours, theirs):
    names = ["params", "lr", "betas", "eps", "weight_decay"]
    mine = arguments(ours)
    assert [name for name, _ in mine] == names
    assert mine == arguments(theirs)[: len(names)]


@by_kind
def test_defaults_train_as_those_of_torch(ours, theirs):
    """Values up to 2 agree within a few ulps, as roundings differ. A decay of 0.01 changes them by up to 6e-5."""
    torch.testing.assert_close(stepped(ours)[0], stepped(theirs)[0], rtol=0, atol=1e-6)


def test_adamw_is_adam_with_decoupled_weight_decay():
    options = {"lr": 0.1, "weight_decay": 0.1, "exp_avg_dtype": torch.float8_e4m3fn}
    decoupled = stepped(Adam, decoupled_weight_decay=True, **options)[0]
    assert torch.equal(stepped(AdamW, **options)[0], decoupled)
    assert not torch.equal(stepped(Adam, **options)[0], decoupled)


def test_adamw_that_loads_a_state_of_adam_decouples():
    _, adam = stepped(Adam, weight_decay=0.1)
    _, adamw = stepped(AdamW, steps=0, weight_decay=0.1)
    adamw.load_state_dict(adam.state_dict())
    assert adamw.param_groups[0]["decoupled_weight_decay"]


def test_arguments_are_those_of_optax():
    optax = pytest.importorskip("optax")
    from qshard.jax import adam, adamw

    assert arguments(adam) == arguments(optax.adam)[:4]
    mine = dict(arguments(adamw))
    assert mine == {name: inspect.signature(optax.adamw).parameters[name].default for name in mine}
