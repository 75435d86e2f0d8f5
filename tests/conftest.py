"""Session set-up: devices, hypothesis profiles, the gpu marker and the `front` fixture.

Imports neither jax nor torch, so that tests/null runs without them. Sets the environment variables that JAX reads at
start-up, unless the caller has set them.
"""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from qshard.formats import Format
from support.formats import OFTEN, RARE_MIXES, is_alike
from support.fronts import FRONTS, Front
from support.pairs import mark_repeated
from support.torch_ranks import SELDOM

GPU_TESTS = Path(__file__).parent / "gpu"
OF_DOCS = ("_page", "_pages", "_site", "_readme")
"""Name suffixes of modules that test documentation."""
HIDDEN = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
HAS_NVIDIA = not HIDDEN and any(Path("/dev").glob("nvidia[0-9]*"))
# Workers share GPUs. Each sees all of them, and its first is another: tests of one device take the first. The process
# that starts workers sets nothing, because they would inherit it.
if HAS_NVIDIA and "CUDA_VISIBLE_DEVICES" not in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    GPUS = len([*Path("/dev").glob("nvidia[0-9]*")])
    FIRST = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((FIRST + i) % GPUS) for i in range(GPUS))
JAX_HAS_CUDA = HAS_NVIDIA and any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def jaxlib_is_before(*release: int) -> bool:
    """Return True if a jaxlib of an earlier release is installed."""
    try:
        installed = version("jaxlib")
    except PackageNotFoundError:
        return False
    return tuple(map(int, installed.split(".")[: len(release)])) < release


# Eight host devices stand in for eight accelerators. CPU comes first even with CUDA, so that jax.devices() is the same
# on every machine; a GPU test names its device.
XLA_FLAGS = ["--xla_force_host_platform_device_count=8"]
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if JAX_HAS_CUDA else "cpu")
# Without LLVM optimizations, and with LLVM's emitters of fusions in place of MLIR's, XLA compiles for CPUs in a quarter
# of the time. `make nightly` compiles as users do.
EMITTERS = "xla_cpu_use_fusion_emitters"  # a flag of jaxlib before 0.11; XLA aborts at flags that it does not know
if not HAS_NVIDIA and os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0":
    XLA_FLAGS += [f"--{EMITTERS}=false"] if jaxlib_is_before(0, 11) else []
    XLA_FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
# A collective of XLA holds a thread of its pool until all devices have come. With one thread a core, 2 devices on 2
# cores waited for one another in one run of ten.
os.environ.setdefault("NPROC", "16")
# OpenMP threads that wait sleep. By default they spin: two workers on two cores ran small ops of torch 20 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("BENCH_DEVICE", "cpu")
# Torch and JAX share the GPU in one process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Background jobs of a shell ignore SIGINT, and the programs that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# CI runs the same examples every time and stores none. No deadline: machines may be slow and shared.
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="GPU tests fail, not skip, where there is no CUDA device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests with `front` over frameworks and over the CPU and, if present, the GPU.

    Tests in tests/gpu run on the GPU only. GPU cases carry the gpu marker, so `-m gpu` selects them from all tests.
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
        params = item.callspec.params if hasattr(item, "callspec") else {}
        fmt, recipe = params.get("fmt"), params.get("recipe")
        is_rare = (isinstance(fmt, Format) and fmt not in OFTEN) or recipe in RARE_MIXES.values()
        if is_rare and params.get("front") == ("jax", "cpu"):
            item.add_marker(pytest.mark.slow)
        takes_seconds = item.path.match("dist/*") or item.path.stem.startswith("test_jax")
        if takes_seconds and any(map(is_alike, params.values())):
            item.add_marker(pytest.mark.slow)
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.path.stem.endswith(OF_DOCS):
            item.add_marker(pytest.mark.docs)
    mark_repeated(items)
    # Tests of ranks wait for other processes. At the beginning of the list one worker gets them all, and the others
    # compute meanwhile.
    items.sort(key=lambda item: item.path.parent.name != "dist")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not HAS_NVIDIA:
        absent(item.config, "no CUDA device")


def absent(config: pytest.Config, what: str) -> None:
    """Skip a GPU test, or fail it under --gpu, where a skip would look like a pass."""
    if config.getoption("--gpu"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Exempt the objects of earlier modules, gigabytes of JAX programs, from garbage collection.

    Checks for leaked tracers and counts of tensors collect all garbage many times. By itself, Python collects seldom.
    """
    gc.set_threshold(*SELDOM)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def first_gpu(request: pytest.FixtureRequest) -> None:
    """Reset the current GPU: JAX changes it, but torch captures graphs on the GPU of its first capture."""
    torch = sys.modules.get("torch")
    if request.node.get_closest_marker("gpu") and torch is not None:
        torch.cuda.set_device(0)


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile the JAX programs of a test with all XLA optimizations, as users do."""
    if importlib.util.find_spec("jax") is None:
        yield
        return
    import jax
    from jax._src import compiler  # JAX has no public option for all programs of a process.

    options_of = compiler.get_compile_options

    def with_emitters(*args: Any, **kwargs: Any) -> Any:
        options = options_of(*args, **kwargs)
        options.env_option_overrides = [*options.env_option_overrides, (EMITTERS, True)]
        return options

    if EMITTERS in os.environ["XLA_FLAGS"]:
        monkeypatch.setattr(compiler, "get_compile_options", with_emitters)
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
