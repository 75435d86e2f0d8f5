"""Plans: what a report recommends, and the conversions that carry it out."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from qshard import reference
from qshard._core.serialization import KEY, parse_metadata
from support.checkpoints import numbers, ok, read, refused, reported, small_model, write

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)
pytest.importorskip("qshard._ffi")


@pytest.fixture
def model(tmp_path):
    return small_model(tmp_path / "model.safetensors")


def layers_of(rng):
    """Layers with random choices: some of equal size or harm, some of unknown harm; sizes differ a hundredfold."""
    from qshard._plans.layer import Choice

    found = []
    for i in range(rng.integers(1, 5)):
        elements = int(rng.choice([10, 1000]))
        choices = {}
        for j in range(rng.integers(0, 6)):
            harm = None if rng.random() < 0.1 else float(rng.integers(1, 40))
            choices[f"{j}"] = Choice(f"{j}", int(rng.integers(1, 30)) * elements // 10, harm)
        choices["F32"] = Choice("F32", 4 * elements, 0.0)
        entry = SimpleNamespace(name=f"w{i}", elements=elements, dtype="F32", bits=32)
        found.append(SimpleNamespace(entry=entry, choices=choices))
    return found


def test_plans_against_all_mixes():
    """Of random layers: within the budget, of three formats at most, and close to the best of all such mixes.

    A plan takes whole steps, so it lies above the best mix by less than the largest step, and by 0.1 dB for each of the
    two rules that save formats and bytes.
    """
    from qshard._plans import allocation

    rng = np.random.default_rng(0)
    for _ in range(60):
        layers = layers_of(rng)
        sizes = [layer.entry.elements for layer in layers]
        known = []
        for layer in layers:
            some = [each for each in layer.choices.values() if each.harm is not None and each.name != "F32"]
            known.append(some or [layer.choices["F32"]])
        step = max(size * max(c.harm for c in choices) for size, choices in zip(sizes, known, strict=True))
        mixes = []
        for mix in itertools.product(*known):
            if len({choice.name for choice in mix} - {"F32"}) <= 3:
                harm = sum(size * choice.harm for size, choice in zip(sizes, mix, strict=True))
                mixes.append((sum(choice.nbytes for choice in mix), harm))
        for budget in np.linspace(0.1, 3.2, 12):
            most = budget * sum(sizes) * (1 + 1e-9)
            fitting = [harm for nbytes, harm in mixes if nbytes <= most]
            found = allocation.recommend(layers, budget)
            if found is None:
                assert not mixes or most < allocation.tradeoff(layers).curve[0].bytes_per_element * sum(sizes)
                continue
            plan = list(found.choices.values())
            assert list(found.choices) == [layer.entry.name for layer in layers]
            assert len({choice.name for choice in plan} - {"F32"}) <= 3
            nbytes = sum(choice.nbytes for choice in plan)
            assert nbytes <= most
            assert found.point.bytes_per_element == nbytes / sum(sizes)
            harm = sum(size * choice.harm for size, choice in zip(sizes, plan, strict=True))
            assert found.point.harm == pytest.approx(harm / sum(sizes))
            if fitting and not any(choice.name == "F32" and len(k) > 1 for choice, k in zip(plan, known, strict=True)):
                assert harm <= (min(fitting) + step) * 10**0.02


def test_a_plan_counts_elements_and_has_few_formats(tmp_path):
    """The large layer gets the bytes; nothing stays in float32; one format if another one gains less than 0.1 dB."""
    arrays = {"large": numbers((512, 256)), "small": numbers((32, 256), 1), "tiny": numbers((32, 64), 2)}
    path = write(tmp_path / "a.safetensors", arrays)
    plan = reported(path, "--formats", "all", "--budget", "4")["recommendation"]
    assert set(plan["formats"].values()) == {"FP8_E4M3"}  # 8-bit formats gain nothing on each other.
    plan = reported(path, "--formats", "NVFP4,FP8_E4M3", "--budget", "0.98")["recommendation"]
    assert plan["formats"] == {"large": "FP8_E4M3", "small": "NVFP4", "tiny": "FP8_E4M3"}
    for size in np.linspace(0.55, 1.2, 8):
        plan = reported(path, "--budget", size)["recommendation"]
        assert plan["bytes_per_element"] <= size
        assert len(set(plan["formats"].values())) <= 3
        assert "F32" not in plan["formats"].values()
    harms = [point["harm"] for point in reported(path)["tradeoff"]["curve"]]
    assert all(10 * math.log10(high / low) >= 0.1 for high, low in itertools.pairwise(harms))


def test_a_report_and_its_conversion(model, tmp_path):
    """The codes are those of each layer's format; a layer that no format fits stays as it is; bytes are as planned."""
    plan, out = tmp_path / "plan.json", tmp_path / "o.safetensors"
    arguments = ("--formats", "NVFP4,MXFP8_E4M3", "--budget", "1.0")
    found = reported(model, *arguments, "--plan", plan)
    formats = json.loads(plan.read_text())["formats"]
    planned = found["recommendation"]["formats"]
    assert planned == formats | {"odd": "F32"}
    assert set(formats.values()) == {"NVFP4", "MXFP8_E4M3"}
    said = f"qshard convert {model} OUT --plan {plan} carries it out"
    # The console wraps where the path of a temporary folder is long.
    assert "".join(said.split()) in "".join(ok("report", model, *arguments, "--plan", plan).split())
    text = ok("convert", model, out, "--plan", plan)
    assert "kept (no format was given for it): 1: odd" in text
    counts = {name: list(formats.values()).count(name) for name in formats.values()}
    assert all(f"{count} tensor{'s' if count > 1 else ''} in {name}" in text for name, count in counts.items())
    before, (arrays, metadata) = read(model)[0], read(out)
    assert {name: str(each.format) for name, each in parse_metadata(metadata[KEY]).items()} == formats
    for name, fmt in formats.items():
        expected = reference.quantize(before[name], fmt).rowwise
        assert arrays[f"{name}.rowwise.data"].tobytes() == expected.data.tobytes()
    written = sum(x.nbytes for name, x in arrays.items() if name not in ("norm", "ids"))
    elements = sum(before[name].size for name in planned)
    assert written == found["recommendation"]["bytes_per_element"] * elements


def test_planes_of_a_plan(model, tmp_path):
    plan, out = tmp_path / "plan.json", tmp_path / "o.safetensors"
    ok(
        "report",
        model,
        "--formats",
        "NVFP4",
        "--layers",
        "layers.*",
        "--usage",
        "both",
        "--budget",
        "2",
        "--plan",
        plan,
    )
    ok("convert", model, out, "--plan", plan)
    assert "layers.0.w.columnwise.data" in read(out)[0]
    said = "--usage rowwise is not that of"
    assert said in refused("convert", model, tmp_path / "p.safetensors", "--plan", plan, "--usage", "rowwise")


def test_formats_by_name(model, tmp_path):
    """The first pattern that matches gives the format; a format without a pattern is for the rest."""
    out = tmp_path / "o.safetensors"
    rules = ("layers.0.*=MXFP8_E4M3", "layers[:2].*=NVFP4[global_scale=row]", "MXFP4")
    ok("convert", model, out, *(each for rule in rules for each in ("--format", rule)))
    found = {name: str(each.format) for name, each in parse_metadata(read(out)[1][KEY]).items()}
    assert found == {
        "layers.0.w": "MXFP8_E4M3",
        "layers.1.w": "NVFP4[global_scale=row]",
        "layers.2.w": "MXFP4",
        "layers.3.w": "MXFP4",
    }


def test_mistakes(model, tmp_path):
    """One line each, and no file."""
    plan, out = tmp_path / "plan.json", tmp_path / "o.safetensors"
    both = ("--format", "NVFP4", "--format", "FP8_E4M3")
    same = ("--format", "odd=NVFP4", "--format", "odd=FP8_E4M3")
    late = ("--format", "layers*=NVFP4", "--format", "layers.0*=FP8_E4M3")
    said = {
        both: "--format gives all tensors two formats, NVFP4 and FP8_E4M3; use one, or 'PATTERN=FORMAT'",
        same: "--format gives odd two formats",
        late: "--format: pattern 'layers.0*' has no effect: 'layers*' before it matches all of its tensors, such as ",
        ("--format", "layer.0*=NVFP4"): "--format: pattern 'layer.0*' matches no tensor; the closest are ",
        ("--format", "odd=NVFP4"): "--format odd=NVFP4: NVFP4: shape (33, 50) is not a whole number of 1x16 blocks; ",
        ("--format", "norm=NVFP4"): "--format norm=NVFP4: fewer than 2 axes; choose another format, or leave it out",
        ("--format", "a=b=NVFP5"): "--format ('NVFP5') is not a format name",
        ("--format", "NVFP4", "--plan", plan): "--format and --plan exclude each other; use one",
        (): "no format was given for it; give one by --format, such as --format NVFP4, or by --plan",
        ("--plan", tmp_path / "no.json"): "No such file",
    }
    for arguments, text in said.items():
        assert text in refused("convert", model, out, *arguments, status=1 if "no.json" in str(arguments) else 2)
    good = {"version": 1, "usage": "rowwise", "formats": {"layers.*": "NVFP4"}}
    for changes, text in (
        ({"version": 2}, "its version is 2 instead of 1"),
        ({"usage": "up"}, "usage (up) is none of rowwise, columnwise, both"),
        ({"formats": {}}, "formats does not map names to formats"),
        ({"formats": {"layers.*": 4}}, "formats does not map names to formats"),
        ({"formats": {"layers.*": "NVFP"}}, "--plan ('NVFP') is not a format name"),
        ({"formats": {"lay": "NVFP4"}}, "--plan: pattern 'lay' matches no tensor"),
        ({"more": 1}, "it does not have exactly the keys version, usage, formats"),
    ):
        plan.write_text(json.dumps(good | changes))
        assert text in refused("convert", model, out, "--plan", plan)
    for text in ("{", '{"version": 1, "version": 1}', "[" * 10**5):
        plan.write_text(text)
        assert "is not a plan of qshard report --plan" in refused("convert", model, out, "--plan", plan)
    plan.unlink()
    assert "--plan needs a size; add --budget" in refused("report", model, "--plan", plan)
    assert "does not end in .json" in refused("report", model, "--plan", tmp_path / "plan", "--budget", "1")
    alone = ("--layers", "odd", "--formats", "FP8_E4M3", "--budget", "1.1")
    ok("report", model, *alone, "--plan", plan)
    plan.unlink()
    alone = ("--layers", "odd", "--formats", "NVFP4", "--budget", "4")
    assert "--plan: no layer would get a format" in refused("report", model, *alone, "--plan", plan)
    assert list(tmp_path.iterdir()) == [model]


def test_a_plan_replaces_a_plan_and_no_other_file(model, tmp_path):
    """`config.json` and the index of a checkpoint end in .json too."""
    arguments = ("--formats", "FP8_E4M3", "--budget", "1.1", "--layers", "odd", "--plan")
    config, plan = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text('{"model_type": "llama"}')
    assert "config.json exists and is not a plan; write to another name" in refused("report", model, *arguments, config)
    assert config.read_text() == '{"model_type": "llama"}'
    plan.touch()
    for _ in range(2):
        ok("report", model, *arguments, plan)
