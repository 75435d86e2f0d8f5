"""Formats and recipes that travel, and what `_core.serialization` refuses to read. No framework."""

import copy
import json
import pickle

import numpy as np
import pytest

from qshard import reference
from qshard._core.quantize_steps import Plane
from qshard._core.serialization import KEY, Description, flat, key_of, parse_metadata, plain, restore, text_of
from qshard._files.reader import CheckpointReader
from qshard.formats import MXFP8_E4M3, NVFP4, Format, Usage
from support.checkpoints import numbers, sharded, write
from support.formats import COMBINED, MIXES, RECIPES

OF_W = Description(format=NVFP4, shape=(4, 32), dtype="bfloat16", planes=(Usage.ROWWISE,))


@pytest.mark.parametrize("travel", [lambda thing: pickle.loads(pickle.dumps(thing)), copy.deepcopy, copy.copy])
def test_formats_and_recipes_come_back_equal(travel):
    for thing in (*COMBINED, *RECIPES.values(), *MIXES.values()):
        again = travel(thing)
        assert (again, hash(again), type(again), str(again)) == (thing, hash(thing), type(thing), str(thing))


def test_descriptions_of_formats_are_json():
    for fmt in COMBINED:
        assert Format.of(json.loads(json.dumps(fmt.description))) == fmt


def test_each_shard_of_a_checkpoint_may_describe_its_tensors(tmp_path):
    """The reader kept the description of the last shard, and read the codes of the others as plain arrays."""
    shards, texts = [], []
    for i, fmt in enumerate((MXFP8_E4M3, NVFP4)):
        found = reference.quantize(numbers((32, 64), i), fmt).rowwise
        planes = {Usage.ROWWISE: Plane(found.data, found.scale_inv, found.global_scale_inv)}
        shards.append({key_of(f"w{i}", part): np.asarray(array) for part, array in flat(planes).items()})
        description = Description(format=fmt, shape=(32, 64), dtype="float32", planes=(Usage.ROWWISE,))
        texts.append(text_of({f"w{i}": description}))

    def save(texts):
        folder = sharded(tmp_path, shards)
        for i, text in enumerate(texts):
            write(folder / f"model-{i + 1:05}-of-00002.safetensors", shards[i], {KEY: text})
        return folder

    read = CheckpointReader(save(texts), "load")
    assert {name: each.format for name, each in read.weights.items()} == {"w0": MXFP8_E4M3, "w1": NVFP4}
    assert read.arrays == {}
    other = texts[1].replace("w1", "w0")
    with pytest.raises(ValueError, match=r"load: .*index.json: two shards describe 'w0' differently; save them again"):
        CheckpointReader(save([texts[0], other]), "load")


def test_what_arrives_is_checked():
    """As what is made here is: other bytes of the same length make a format, and a recipe, that do not exist."""
    for thing in (NVFP4, RECIPES["NVFP4"]):
        with pytest.raises(ValueError, match=r"rounding .'nearesT'. must be 'nearest' or 'stochastic'"):
            pickle.loads(pickle.dumps(thing).replace(b"nearest", b"nearesT"))
    recipe = pickle.dumps(RECIPES["DelayedScaling"])
    with pytest.raises(ValueError, match=r"algorithm \('mix'\) must be 'max' or 'most_recent'"):
        pickle.loads(recipe.replace(b"\x8c\x03max", b"\x8c\x03mix"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": 3}, "name .3. must be a string"),
        ({"element": "float8_e4m3"}, "element .'float8_e4m3'. must be float8_e4m3fn or"),
        ({"element": ["float8_e4m3fn"]}, "element .* must be"),
        ({"element": "float8_e5m2"}, "element .* must be float4_e2m1fn"),
        ({"scale_dtype": "bfloat16"}, "scale_dtype .'bfloat16'. must be float32 or"),
        ({"block": "1x16"}, r"block \('1x16'\) must be None or a pair of positive"),
        ({"block": [1, 16, 1]}, r"block \(\[1, 16, 1\]\) must be None or a pair of positive integers"),
        ({"block": [1, 8]}, "block .* must be"),
        ({"hadamard": "no"}, "hadamard .'no'. must be False or True"),
        ({"scale_max": "much"}, "scale_max .'much'. must be 448 or 256"),
        ({"colour": "red"}, "has no option colour"),
        (None, "name .... must be a string"),
    ],
    ids=str,
)
def test_what_is_no_format(change, text):
    description = None if change is None else {**NVFP4.description, **change}
    with pytest.raises(ValueError, match=text):
        Format.of(description)
    damaged = json.dumps({"version": 1, "tensors": {"w": {**OF_W.terms, "format": description}}})
    with pytest.raises(
        ValueError, match=f"from_plain: format of w is unknown to this version of qshard: Format.*{text}"
    ):
        parse_metadata(damaged)


def test_an_option_of_another_type():
    with pytest.raises(ValueError, match=r"Format FP8_E4M3: eps \('0'\) must be 0 or a positive finite number"):
        Format.of({"name": "FP8_E4M3", "element": "float8_e4m3fn", "scale_dtype": "float32", "block": None, "eps": "0"})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": [4, -32]}, "shape of w .* is not a list of sizes"),
        ({"shape": [4, 32.0]}, "shape of w .* is not a list of sizes"),
        ({"shape": [4, True]}, "shape of w .* is not a list of sizes"),
        ({"shape": "4"}, "shape of w .* is not a list of sizes"),
        ({"dtype": "float64"}, "dtype of w .'float64'. is not float32 or bfloat16 or float16"),
        ({"planes": []}, "planes of w .* is not"),
        ({"planes": ["columnwise", "rowwise"]}, "planes of w .* is not"),
        ({"planes": ["diagonal"]}, "planes of w .* is not"),
        ({"owner": "me"}, "description of w .format, shape, dtype, planes, owner. does not have"),
    ],
    ids=str,
)
def test_what_is_no_description(change, text):
    terms = {**OF_W.terms, **change}
    with pytest.raises(ValueError, match=f"from_plain: {text}"):
        parse_metadata(json.dumps({"version": 1, "tensors": {"w": terms}}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "is not the metadata of to_plain"),
        ("[1]", "is not the metadata of to_plain"),
        ("[" * 100_000, "is not the metadata of to_plain"),
        ('{"tensors": {}}', "is not the metadata of to_plain"),
        ('{"version": 2, "tensors": {}, "more": 1}', "version .2. is not 1, which this version of qshard reads"),
        ('{"version": 1, "tensors": []}', "is not a version and a dict of tensors"),
        ('{"version": 1, "tensors": {}, "more": 1}', "is not a version and a dict of tensors"),
        ('{"version": 1, "tensors": {"w": 3}}', "description of w .int. does not have"),
    ],
)
def test_what_is_no_metadata(text, error):
    with pytest.raises(ValueError, match=f"from_plain: .*{error}"):
        parse_metadata(text)
    with pytest.raises(ValueError, match=f"from_plain: .*{error}"):
        restore({}, {KEY: text}, lambda *_: None)


def planes_of(description):
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in description.arrays().items()}
    return description.take(arrays)


def test_there_and_back():
    planes, b = planes_of(OF_W), np.ones(3, np.float32)
    arrays, metadata = plain({"w": planes, "b": b}, lambda name, value: (OF_W, value) if name == "w" else None)
    assert list(arrays) == ["w.rowwise.data", "w.rowwise.scale_inv", "w.rowwise.global_scale_inv", "b"]
    assert parse_metadata(metadata[KEY]) == {"w": OF_W}
    again = restore(arrays, {**metadata, "format": "pt"}, lambda name, each, found: (each, found))
    assert again["w"] == (OF_W, planes)
    assert again["b"] is b
    assert restore(arrays, None, lambda *_: None) == restore(arrays, {"format": "pt"}, lambda *_: None) == arrays
    with pytest.raises(ValueError, match=r"to_plain: w\.rowwise\.data would be stored as 'w\.rowwise\.data', a name"):
        plain({"w": planes, "w.rowwise.data": b}, lambda name, value: (OF_W, value) if name == "w" else None)


@pytest.mark.parametrize(
    ("key", "array", "text"),
    [
        ("data", None, r"w.rowwise.data is missing, but the metadata"),
        ("data", np.zeros((4, 15), np.uint8), r"w.rowwise.data \(uint8 \(4, 15\)\) is not uint8 \(4, 16\)"),
        ("data", np.zeros((4, 16), np.int8), r"w.rowwise.data \(int8 \(4, 16\)\) is not uint8"),
        ("scale_inv", np.zeros((4, 2), np.float32), r"w.rowwise.scale_inv \(float32 \(4, 2\)\) is not uint8 \(4, 2\)"),
        ("global_scale_inv", np.zeros(1, np.float32), r"global_scale_inv \(float32 \(1,\)\) is not float32 \(\)"),
    ],
)
def test_arrays_of_something_else(key, array, text):
    arrays = {f"w.{name}": found for name, found in flat(planes_of(OF_W)).items()}
    arrays[f"w.rowwise.{key}"] = array
    with pytest.raises(ValueError, match=f"from_plain: .*{text}"):
        restore(arrays, {KEY: text_of({"w": OF_W})}, lambda *_: None)


def test_a_shape_that_the_format_cannot_hold():
    of_w = Description(format=MXFP8_E4M3, shape=(4, 33), dtype="float32", planes=(Usage.ROWWISE,))
    with pytest.raises(ValueError, match=r"from_plain: w \(4, 33\) is not a whole number of 1x32 blocks"):
        restore({}, {KEY: text_of({"w": of_w})}, lambda *_: None)
    assert isinstance(planes_of(OF_W)[Usage.ROWWISE], Plane)


@pytest.mark.parametrize("part", list(OF_W.arrays()))
@pytest.mark.parametrize(("value", "text"), [(3, "3"), (1.5, "1.5"), ("x", "'x'"), ([1, 2], "[1, 2]")])
def test_a_number_is_no_array(part, value, text):
    arrays = {f"w.{name}": np.zeros(shape, dtype) for name, (dtype, shape) in OF_W.arrays().items()}
    metadata = {KEY: text_of({"w": OF_W})}
    restore(arrays, metadata, lambda *made: made)
    with pytest.raises(TypeError) as error:
        restore(arrays | {f"w.{part}": value}, metadata, lambda *made: made)
    said = f"from_plain: w.{part} ({text}) is not an array; pass the output of to_plain unchanged"
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("arrays", "metadata", "name"), [(None, None, "arrays"), ([], {}, "arrays"), ({}, 5, "metadata")]
)
def test_arguments_that_are_no_dicts(arrays, metadata, name):
    with pytest.raises(
        TypeError, match=rf"^from_plain: {name} \(.*\) is not a dict; pass the output of to_plain unchanged$"
    ):
        restore(arrays, metadata, lambda *made: made)
