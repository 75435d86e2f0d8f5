"""Fixtures of the GPU tests."""

import fcntl
import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def much_memory(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """For a test that takes a large part of a GPU's memory: those of all workers run one by one, and leave none taken.

    Workers have folders beside each other.
    """
    torch = pytest.importorskip("torch")
    own = tmp_path_factory.getbasetemp()
    with (own if worker_id == "master" else own.parent).joinpath("much_memory").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()
