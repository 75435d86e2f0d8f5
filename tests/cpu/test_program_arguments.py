"""`run_program` with arbitrary texts: it raises, or writes only to the memory that it allocates."""

import json
import random

import pytest
import torch

from qshard import _ffi
from qshard.torch_bridge._ops.programs import run_program

X = torch.tensor([1.0, -3.0, 2.0, 0.5])
GOOD = {
    "platform": "cpu",
    "inputs": 1,
    "outputs": [["float32", []]],
    "scratch": 64,
    "slots": [["float32", [4], 0, 0], ["float32", [], 2, 32], ["float32", [], 1, 0]],
    "steps": [["amax_tensor", [0], [1], {"lead": 0}], ["amax_tensor", [1], [2], {"lead": 0}]],
}


def run(**changes):
    return run_program([X.clone()], json.dumps({**GOOD, **changes}))


def second_slot(*slot):
    return {"slots": [GOOD["slots"][0], slot, GOOD["slots"][2]]}


def first_step(*step):
    return {"steps": [step, GOOD["steps"][1]]}


WRONG = {
    "a first byte that wraps": second_slot("float32", [], 2, 2**64 - 4),
    "a negative first byte": second_slot("float32", [], 2, -4),
    "a first byte that is no int": second_slot("float32", [], 2, 4.0),
    "a first byte after the scratch memory": second_slot("float32", [], 2, 61),
    "a first byte far after it": second_slot("float32", [], 2, 2**63 - 4),
    "a slot larger than the scratch memory": second_slot("float32", [16], 2, 4),
    "sizes that wrap": second_slot("float32", [2**31, 2**31], 2, 0),
    "negative sizes": second_slot("float32", [-1, -1], 2, 0),
    "a shape that is no list": second_slot("float32", 4, 2, 0),
    "a slot too short": second_slot("float32", [], 2),
    "a slot of no source": second_slot("float32", [], 3, 0),
    "a dtype that is none": second_slot("float33", [], 2, 0),
    "a dtype that is no text": second_slot(3, [], 2, 0),
    "an output that is none": {"outputs": [["float32"]]},
    "an output with a negative size": {"outputs": [["float32", [-1]]]},
    "an output larger than memory": {"outputs": [["float32", [2**40, 2**40]]]},
    "an output with too many axes": {"outputs": [["float32", [1] * 65]]},
    "negative scratch memory": {"scratch": -1},
    "a platform that is none": {"platform": "tpu"},
    "a platform that is no text": {"platform": 3},
    "more inputs than there are numbers": {"inputs": 2**64 - 1},
    "more inputs than given": {"inputs": 2},
    "no inputs": {"inputs": 0},
    "a step too short": first_step("amax_tensor", [0], [1]),
    "a step of an op that is none": first_step("amax", [0], [1], {}),
    "a step of no slot": first_step("amax_tensor", [0], [3], {"lead": 0}),
    "a step of a negative slot": first_step("amax_tensor", [-1], [1], {"lead": 0}),
    "a step that writes to an input": first_step("amax_tensor", [0], [0], {"lead": 0}),
    "a step without its operand": first_step("amax_tensor", [], [1], {"lead": 0}),
    "attributes that are no object": first_step("amax_tensor", [0], [1], [1]),
    "an attribute that is none": first_step("amax_tensor", [0], [1], {"lead": None}),
}


def test_a_program_runs():
    assert run() == [torch.tensor(3.0)]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_programs_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=r"program|no op|amax_tensor"):
        run(**WRONG[wrong])


@pytest.mark.parametrize("text", ["", "3", "[]", "{", "{}", '{"platform": "cpu"}'])
def test_texts_that_are_no_programs_are_refused(text):
    with pytest.raises(ValueError, match="program"):
        run_program([X], text)


def test_attributes_that_grow_while_they_are_read_do_not_overflow():
    class Adds:
        def __index__(self):
            attributes.update({f"more {i}": i for i in range(40)})
            return 0

    attributes = {"lead": (Adds(),)}
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        _ffi.call("amax_tensor", (X,), (torch.zeros(()),), attributes)


def test_the_cache_of_programs_is_bounded():
    """More texts than the cache holds: each still runs, also those that were dropped."""
    texts = [json.dumps({**GOOD, "scratch": 64 + i}) for i in range(4200)]
    assert all(run_program([X], text) == [torch.tensor(3.0)] for text in (*texts, *texts[:10]))


NUMBERS = [0, 1, 2, 3, 4, 8, 16, 60, 64, -1, -2, -(2**63), 2**31, 2**32, 2**61, 2**62, 2**63, 2**64 - 4, None, 1.5]


def draw_number(rng, *usual):
    return rng.choice(usual) if rng.random() < 0.97 else rng.choice(NUMBERS)


def draw_program(rng):
    """A program with few mistakes."""
    dtypes = [*["float32"] * 12, "uint8", "bfloat16", "float64", "nothing"]

    def slot(source):
        shape = [draw_number(rng, 4, 1, 2) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        found = [rng.choice(dtypes), shape, draw_number(rng, source), draw_number(rng, 0, 0, 4, 16, 60)]
        return found if rng.random() < 0.98 else found[: rng.randrange(4)]

    slots = [["float32", [4], 0, 0], ["float32", [], 1, 0], *(slot(i) for i in rng.choices([1, 2], k=2))]
    fp8 = {"element": "float8_e4m3fn", "eps": 0.0, "pow2": False}
    ops = [("amax_tensor", 1, 1, {"lead": 0}), ("scale_from_amax", 1, 2, fp8)]
    steps = []
    for op, taken, written, attributes in rng.choices(ops, weights=[4, 1], k=rng.choice([1, 1, 2, 3])):
        sides = [[draw_number(rng, *range(len(slots))) for _ in range(count)] for count in (taken, written)]
        steps.append([op, *sides, attributes])
    outputs = [["uint8", [64]], ["float32", [16]]][: draw_number(rng, 1, 2, 2) or 0]
    return {
        "platform": "cpu",
        "inputs": draw_number(rng, 1),
        "outputs": outputs,
        "scratch": rng.choice([0, 64, 64]),
        "slots": slots,
        "steps": steps,
    }


def test_drawn_programs_do_no_harm():
    """Inputs keep their bits, and so does the memory around them."""
    rng, ran = random.Random(0), 0
    whole = torch.full((192,), 0x5A, dtype=torch.uint8)
    x = whole[64:80].view(torch.float32)
    for _ in range(4000):
        x.copy_(X)
        try:
            results = run_program([x], json.dumps(draw_program(rng)))
        except (ValueError, TypeError, OverflowError):
            results = None
        ran += results is not None
        assert bool((torch.cat([whole[:64], whole[80:]]) == 0x5A).all())
        assert torch.equal(x, X)
    assert ran > 100
