"""A program that calls every op while allocations fail: each call is right or raises, and no other memory changes.

    python limited_calls.py address torch|jax DRAWS [OP ...]    under limits of the address space
    python limited_calls.py new LIBRARY                         with one failing allocation (ffi/tests/failing_new.cc)

It needs its own process: a defect would end it, or corrupt memory of later calls.
"""

import concurrent.futures
import contextlib
import ctypes
import faulthandler
import functools
import itertools
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from qshard import _ffi
from support.draw_values import filled
from support.draws import SPECS, Call, draw

THREADS = (1, 2, 4)
ROOM = (0, 2**16, 2**18, 2**20, 2**22)
"""Bytes of address space that a call may add: none, enough for some results, enough for all of them."""
NO_MEMORY = ("memory", "alloc", "RESOURCE_EXHAUSTED")
"""Errors of failed allocations contain one of these."""
CANARY = 0x5A


def size_now() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def limited(room: int):
    """Under a limit on the address space."""
    ctypes.CDLL(None).malloc_trim(0)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size_now() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def calls(draws, names):
    """Drawn calls of each op, and large calls of ops that need scratch."""
    for name in names or SPECS:
        numbers = (n for n in itertools.count() if name != "adam" or not draw(SPECS[name], n).options["update"])
        for number in itertools.islice(numbers, draws):
            yield filled(draw(SPECS[name], number), number)
    wide, rows = 2**18, 8
    x, weight = np.ones((rows, wide), np.float32), np.ones(wide, np.float16)
    rstd, whole = np.ones(rows, np.float32), ((rows, wide), "float32")
    of = [[whole], [((wide,), "float16")]]
    if not names or "rms_norm" in names:
        yield Call(SPECS["rms_norm"], {"eps": 1e-6, "lead": 0}, of, [x, weight])
    if not names or "rms_norm_grad" in names:
        given = [*of, [((rows,), "float32")], [whole]]
        yield Call(SPECS["rms_norm_grad"], {"lead": 0, "rows": 16}, given, [x, weight, rstd, x])


class Watch:
    """Canaries: arrays that are allocated after a call, and that later writes of its threads would change."""

    def __init__(self):
        self.canaries = []

    def take(self, sizes):
        self.canaries.append([np.full(max(1, size), CANARY, np.uint8) for size in sizes])
        if len(self.canaries) > 16:
            self.check(self.canaries.pop(0))

    def check(self, arrays):
        for array in arrays:
            if not (array == CANARY).all():
                sys.exit("a call wrote outside its results")

    def finish(self):
        time.sleep(0.3)
        for arrays in self.canaries:
            self.check(arrays)


def check_message(error: Exception, made: Call) -> None:
    text = str(error)
    if not any(word in text for word in NO_MEMORY):
        sys.exit(f"{text!r} does not say that an allocation failed: {made}")


def check_results(got, want, made: Call) -> None:
    for a, b in zip(got, want, strict=True):
        if a != b:
            sys.exit(f"a wrong result of {made}")


class Torch:
    def __init__(self, made: Call):
        import qshard.torch_bridge  # noqa: F401  defines the ops
        from support.op_calls import attributes_of, placed

        self.made, self.attributes = made, attributes_of(made)
        self.placed = placed

    def __call__(self, limit) -> list[bytes]:
        import torch

        from support.op_calls import to_numpy

        inputs, outputs = self.placed(self.made)
        if self.made.spec.many:
            with limit:
                _ffi.call(self.made.spec.name, inputs, [x for x, _ in outputs], self.attributes)
            return [to_numpy(x).tobytes() for x, _ in outputs]
        keywords = {**self.made.options}
        if "dtype" in keywords:
            keywords["dtype"] = getattr(torch, keywords["dtype"])
        with limit:
            results = getattr(torch.ops.qshard, self.made.spec.name).default(*inputs, **keywords)
        return [to_numpy(x).tobytes() for x in ([results] if isinstance(results, torch.Tensor) else results)]


class Jax:
    def __init__(self, made: Call):
        import jax

        from qshard.jax import ops as jax_ops
        from qshard.jax._sharding import multi_tensor

        op = multi_tensor.bind(made.spec.name) if made.spec.many else getattr(jax_ops, made.spec.name)
        self.operands = jax.device_put(made.operands)
        self.run = jax.jit(functools.partial(op, **made.options)).lower(*self.operands).compile()

    def __call__(self, limit) -> list[bytes]:
        import jax

        with limit:
            results = jax.block_until_ready(self.run(*self.operands))
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(results)]


def under_limits(framework, draws, names) -> None:
    watch, right, failed = Watch(), 0, 0
    for made in calls(draws, names):
        call = framework(made)
        want = call(contextlib.nullcontext())
        large = sum(map(len, want)) > 2**23
        rooms = [sum(map(len, want)) + room for room in (2**16, 2**21)] if large else ROOM
        for threads, room in itertools.product(THREADS if framework is Torch else (0,), rooms):
            if threads:
                _ffi.set_num_threads(threads)
            try:
                got = call(limited(room))
            except (RuntimeError, MemoryError, ValueError) as error:  # The last is JAX's for RESOURCE_EXHAUSTED.
                check_message(error, made)
                failed += 1
            else:
                check_results(got, want, made)
                right += 1
            watch.take(map(len, want))
        del call
    watch.finish()
    print(right, failed)


def with_failing_allocations(library) -> None:
    from support.op_calls import attributes_of, placed, to_numpy

    lib, watch, failed = ctypes.CDLL(library), Watch(), 0
    for made in calls(2, SPECS):
        if made.spec.name.startswith("rms_norm") and made.operands[0].size > 2**20:
            continue

        def call(number, made=made):
            inputs, outputs = placed(made)
            given = [x for x, _ in outputs]
            lib.fail_allocation(number)
            try:
                _ffi.call(made.spec.name, inputs, given, attributes_of(made))
            finally:
                left = lib.allocations_left()
                lib.fail_allocation(0)
            return [to_numpy(x).tobytes() for x in given], left

        want, _ = call(0)
        for threads in THREADS:
            _ffi.set_num_threads(threads)
            for number in itertools.count(1):
                try:
                    got, left = call(number)
                except (RuntimeError, MemoryError) as error:
                    check_message(error, made)
                    failed += 1
                else:
                    check_results(got, want, made)
                    if left > 0:
                        break
                watch.take(map(len, want))
    watch.finish()
    print(failed)


def main() -> None:
    if sys.argv[1] == "new":
        with_failing_allocations(sys.argv[2])
    else:
        under_limits({"torch": Torch, "jax": Jax}[sys.argv[2]], int(sys.argv[3]), sys.argv[4:])


if __name__ == "__main__":
    faulthandler.enable()
    # A first thread that needs more stack under a limit dies. Stacks of other threads are mapped whole.
    threading.stack_size(2**26)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(main).result()
