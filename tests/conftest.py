"""Test session set-up: devices, hypothesis profiles, the gpu marker and the `front` fixture.

Imports neither jax nor torch, so that tests/null runs where they are not installed. What must be known before JAX
starts is put into the environment here, unless the caller has set it.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hypothesis import settings

from support.fronts import FRONTS, Front

GPU_TESTS = Path(__file__).parent / "gpu"
OF_DOCS = ("_page", "_pages", "_site", "_readme")
"""The last words of modules that test documentation."""
HIDDEN = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
HAS_NVIDIA = not HIDDEN and any(Path("/dev").glob("nvidia[0-9]*"))
JAX_HAS_CUDA = HAS_NVIDIA and any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))

# Eight host devices stand in for eight accelerators. CPU comes first also where CUDA is present: jax.devices() is then
# the same on every machine, and a GPU test names its device.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if JAX_HAS_CUDA else "cpu")
# XLA compiles for CPUs in two thirds of the time if LLVM does not optimize. `make nightly` runs all tests as users run.
if not HAS_NVIDIA:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Torch and JAX share the GPU in one process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# What a shell runs in the background ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# CI draws the same examples in every run and keeps none; a slow, shared machine must not fail a test by its pace.
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="GPU tests fail, not skip, where there is no CUDA device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `front` runs in each framework, on the CPU and, where there is one, on the GPU.

    Tests in tests/gpu run on the GPU alone. The GPU runs carry the gpu marker, so `-m gpu` picks them from all tests.
    """
    if "front" not in metafunc.fixturenames:
        return
    only_gpu = GPU_TESTS in metafunc.definition.path.parents
    cuda = HAS_NVIDIA or only_gpu or metafunc.config.getoption("--gpu")
    devices = [*([] if only_gpu else ["cpu"]), *(["cuda"] if cuda else [])]
    params = [
        pytest.param((name, device), id=f"{name}-{device}", marks=[pytest.mark.gpu] if device == "cuda" else [])
        for name in FRONTS
        for device in devices
    ]
    metafunc.parametrize("front", params, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.path.stem.endswith(OF_DOCS):
            item.add_marker(pytest.mark.docs)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not HAS_NVIDIA:
        absent(item.config, "no CUDA device")


def absent(config: pytest.Config, what: str) -> None:
    """Skip a GPU test, or fail it under --gpu, where a skip would pass for a run."""
    if config.getoption("--gpu"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(autouse=True)
def first_gpu(request: pytest.FixtureRequest) -> None:
    """JAX leaves a GPU current on which it worked last, but torch captures graphs on that of its first capture."""
    torch = sys.modules.get("torch")
    if request.node.get_closest_marker("gpu") and torch is not None:
        torch.cuda.set_device(0)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Programs that JAX compiles in a test are those of users, with all optimizations of XLA."""
    if importlib.util.find_spec("jax") is None:
        yield
        return
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


@pytest.fixture
def front(request: pytest.FixtureRequest) -> Front:
    """A front end (see support/fronts.py), bound to a device."""
    name, device = request.param
    pytest.importorskip(name)
    front = FRONTS[name](device)
    if not front.devices():
        absent(request.config, f"{name} finds no {device} device")
    return front
