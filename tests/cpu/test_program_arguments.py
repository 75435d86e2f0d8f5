"""`_ffi.Program` with arbitrary arguments: it raises, or writes only to the memory of its makers."""

import random

import pytest
import torch

from qshard import _ffi

X = torch.tensor([1.0, -3.0, 2.0, 0.5])
GOOD = {
    "platform": "cpu",
    "inputs": 1,
    "makers": [lambda: torch.full((64,), 9, dtype=torch.uint8)],
    "slots": [("float32", (4,), 0, 0), ("float32", (), 1, 32)],
    "steps": [("amax_tensor", [0], [1], {"lead": 0})],
    "results": [1, None],
}


def program(**arguments):
    return _ffi.Program(*{**GOOD, **arguments}.values())


def second_slot(*slot):
    return {"slots": [GOOD["slots"][0], slot]}


class Clears:
    """An integer whose conversion clears the list that holds it."""

    def __init__(self, given):
        self.given = given

    def __index__(self):
        self.given.clear()
        return 0


def slots_with_a_list_that_changes():
    slots = [*GOOD["slots"]]
    shape = [4]
    shape.append(Clears(shape))
    slots[0] = ("float32", shape, 0, 0)
    return slots


WRONG = {
    "a first byte that wraps": second_slot("float32", (), 1, 2**64 - 4),
    "a negative first byte": second_slot("float32", (), 1, -4),
    "a first byte that is no int": second_slot("float32", (), 1, 4.0),
    "sizes that wrap": second_slot("float32", (2**31, 2**31), 1, 0),
    "negative sizes": second_slot("float32", (-1, -1), 1, 0),
    "a shape that changes": {"slots": slots_with_a_list_that_changes()},
    "a slot too short": second_slot("float32", (), 1),
    "a slot of no source": second_slot("float32", (), 2, 0),
    "a dtype that is none": second_slot("float33", (), 1, 0),
    "a negative result": {"results": [-2]},
    "a result of no source": {"results": [2**63]},
    "a result that is no int": {"results": ["1"]},
    "a platform that is none": {"platform": "tpu"},
    "more inputs than there are numbers": {"inputs": 2**64 - 1},
    "a step too short": {"steps": [("amax_tensor", [0], [1])]},
    "a step of an op that is none": {"steps": [("amax", [0], [1], {})]},
    "a step of no slot": {"steps": [("amax_tensor", [0], [2], {"lead": 0})]},
    "a step of a negative slot": {"steps": [("amax_tensor", [-1], [1], {"lead": 0})]},
    "a step that writes to an input": {"steps": [("amax_tensor", [0], [0], {"lead": 0})]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=r"Program: |call: no op|incompatible"):
        program(**WRONG[wrong])


@pytest.mark.parametrize(
    "slot", [("float32", (), 1, 61), ("float32", (), 1, 2**63 - 4), ("float32", (16,), 1, 4)], ids=str
)
def test_slots_that_do_not_fit_are_refused_by_the_call(slot):
    with pytest.raises(ValueError, match="a tensor does not match the program"):
        program(**second_slot(*slot))(X)


def test_makers_run_before_inputs_are_imported():
    """A maker that frees the memory of an input."""
    x = X.clone()

    def maker():
        x.resize_(0)
        x.untyped_storage().resize_(0)
        return torch.zeros(64, dtype=torch.uint8)

    with pytest.raises(ValueError, match="a tensor does not match the program"):
        program(makers=[maker])(x)


def test_attributes_that_grow_while_they_are_read_do_not_overflow():
    class Adds:
        def __index__(self):
            attributes.update({f"more {i}": i for i in range(40)})
            return 0

    attributes = {"lead": (Adds(),)}
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        _ffi.call("amax_tensor", (X,), (torch.zeros(()),), attributes)


NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    8,
    16,
    60,
    64,
    -1,
    -2,
    -(2**63),
    2**31,
    2**32,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 4,
    None,
    1.5,
]


def draw_number(rng, *usual):
    return rng.choice(usual) if rng.random() < 0.97 else rng.choice(NUMBERS)


def draw_arguments(rng, makers):
    """Arguments with few mistakes."""
    dtypes = [*["float32"] * 12, "uint8", "bfloat16", "float64", "nothing"]

    def slot(source):
        shape = [draw_number(rng, 4, 1, 2) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        found = (rng.choice(dtypes), shape, draw_number(rng, source), draw_number(rng, 0, 0, 4, 16, 60))
        return found if rng.random() < 0.98 else found[: rng.randrange(4)]

    slots = [("float32", (4,), 0, 0), ("float32", (), 1, 0), *(slot(i) for i in rng.choices([1, 2], k=2))]
    fp8 = {"element": "float8_e4m3fn", "eps": 0.0, "pow2": False}
    ops = [("amax_tensor", 1, 1, {"lead": 0}), ("scale_from_amax", 1, 2, fp8)]
    steps = []
    for op, taken, written, attributes in rng.choices(ops, weights=[4, 1], k=rng.choice([1, 1, 2, 3])):
        sides = [[draw_number(rng, *range(len(slots))) for _ in range(count)] for count in (taken, written)]
        steps.append((op, *sides, attributes))
    results = [draw_number(rng, 0, 1, None) for _ in range(rng.choice([0, 1, 2]))]
    return ["cpu", draw_number(rng, 1), makers, slots, steps, results]


def test_drawn_programs_do_no_harm():
    rng, ran = random.Random(0), 0
    whole = torch.full((3, 128), 0x5A, dtype=torch.uint8)
    rows = [whole[i, 32:96] for i in range(2)]
    makers = [lambda: rows[0], lambda: rows[1].view(torch.float32)]
    for _ in range(4000):
        x = X.clone()
        try:
            made = _ffi.Program(*draw_arguments(rng, makers))
            results = made(x)
        except (ValueError, TypeError, OverflowError):
            results = None
        ran += results is not None
        edges = torch.cat([whole[:2, :32].flatten(), whole[:2, 96:].flatten(), whole[2]])
        assert bool((edges == 0x5A).all())
        assert torch.equal(x, X)
    assert ran > 100
