"""Steps of sharded models in CUDA graphs, and on streams of the user: the bits of eager steps, as of plain layers.

If FSDP2 cannot capture the same model with plain layers, the test is skipped.
"""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from qshard.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling  # noqa: E402
from qshard.torch_bridge import AdamW, convert, update_scales  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.torch_models import shard, whole  # noqa: E402
from support.torch_ranks import run  # noqa: E402

RECIPES = {
    "plain": None,
    "fp8": CurrentScaling(),
    "delayed": DelayedScaling(),
    "blocks": BlockScaling(),
    "mxfp8": MXFP8(),
    "nvfp4": NVFP4(),
}
WARM, STEPS = 3, 4


def made(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda()
    model = shard(model if recipe is None else convert(model, recipe))
    lr = torch.tensor(1e-2, device="cuda")
    kind = torch.optim.AdamW if recipe is None else AdamW
    options = {"capturable": True} if recipe is None else {}
    return model, kind(model.parameters(), lr=lr, **options)


def step(model, optimizer, x):
    """Run a full step. Gradients are freed first, so a graph allocates them in its own pool."""
    optimizer.zero_grad(set_to_none=True)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    update_scales(model)
    return loss.detach()


def inputs(number):
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(128, 512, generator=generator).cuda() * (1 + number)


def state_of(model, optimizer):
    states = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [*whole(model).values(), *(t.full_tensor() for t in states), *(b.clone() for b in model.buffers())]


def replay_is_eager(recipe):
    """The weights change in each step, and inputs do; so codes and scales of older steps would show."""
    eager, its_optimizer = made(recipe)
    x = inputs(0)
    for _ in range(WARM):
        step(eager, its_optimizer, x)
    model, optimizer = made(recipe)
    given = inputs(0)
    graph, loss = capture(lambda: step(model, optimizer, given), warm_up=WARM)
    for number in range(1, STEPS):
        given.copy_(inputs(number))
        graph.replay()
        want = step(eager, its_optimizer, inputs(number))
        assert torch.equal(loss, want), f"loss of step {number}"
        for a, b in zip(state_of(model, optimizer), state_of(eager, its_optimizer), strict=True):
            assert torch.equal(a, b), f"state after step {number}"
    torch.cuda.synchronize()
    del graph  # Before the group whose collectives it holds.


def can_capture_plain_layers():
    """Raises `Refused` where FSDP2 cannot be captured at all."""
    try:
        replay_is_eager(None)
    except (RuntimeError, AssertionError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


class Refused(Exception):
    pass


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_a_captured_step_is_an_eager_one(name, world):
    try:
        run(world, "gpu/test_capture_gpu.py::can_capture_plain_layers", on="cuda")
    except AssertionError as error:
        if "Refused" not in str(error):
            raise
        pytest.skip(f"FSDP2 of this torch cannot be captured with plain layers on {world} GPUs: {str(error)[-300:]}")
    if name != "plain":
        run(world, "gpu/test_capture_gpu.py::replay_is_eager", on="cuda", recipe=RECIPES[name])


def on_streams(recipe):
    """Steps on a stream of the user, and each on another one, wait for each other as those on the default stream."""
    results = []
    for streams in ([torch.cuda.default_stream()], [torch.cuda.Stream()], [torch.cuda.Stream() for _ in range(3)]):
        model, optimizer = made(recipe)
        losses = []
        for number in range(STEPS):
            stream = streams[number % len(streams)]
            x = inputs(number)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # What does not wait for this stream comes too early.
                losses.append(step(model, optimizer, x))
            torch.cuda.current_stream().wait_stream(stream)
            x.record_stream(stream)
        results.append([*losses, *state_of(model, optimizer)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_steps_on_streams_of_the_user(name, world):
    run(world, "gpu/test_capture_gpu.py::on_streams", on="cuda", recipe=RECIPES[name])


MODES = {
    "wire": ("test_gradients_travel_as_those_of_plain_layers", {"dtype": torch.bfloat16}),
    "inference": ("test_inference_mode", {"name": "fp8"}),
    "averages": ("test_averages_of_models", {"name": "mxfp8"}),
    "fewer": ("test_fewer_ranks_after_forward_are_refused", {"name": "nvfp4"}),
}
FUNCTIONAL = {
    "law": ("test_what_is_gathered_is_the_whole_quantized", {"name": "MXFP8"}),
    "training": ("test_training_is_that_of_weights_gathered_in_high_precision", {"name": "fp8"}),
    "codes": ("test_codes_travel", {"name": "nvfp4"}),
}
STATES = {
    "remainder": ("test_a_full_state_goes_on", {"name": "remainder"}),
    "fp8": ("test_a_full_state_goes_on", {"name": "fp8"}),
}
CASES = {
    **{name: ("dist/test_torch_modes.py", *case) for name, case in MODES.items()},
    **{name: ("dist/test_torch_functional.py", *case) for name, case in FUNCTIONAL.items()},
    **{f"state-{name}": ("dist/test_torch_optimizer_state.py", *case) for name, case in STATES.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_cases_of_gloo_over_nccl(name):
    file, case, arguments = CASES[name]
    world = 4 if name == "fewer" else 2
    run(world, f"{file}::{case}", on="cuda", **arguments)
