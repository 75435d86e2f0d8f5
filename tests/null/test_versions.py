"""Versions and workflows: pyproject.toml and the Makefile have them, and every other place agrees."""

import csv
import re
import tomllib
from pathlib import Path

import pytest

from qshard._core.environment import OLDEST

REPOSITORY = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
FRAMEWORKS = PYPROJECT["tool"]["qshard"]["frameworks"]
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PYPROJECT["project"]["classifiers"]))


def pins(name: str) -> dict[str, str]:
    """Pinned versions in a file of requirements/."""
    lines = (REPOSITORY / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_one_list_of_versions(name):
    versions = FRAMEWORKS[name]
    assert OLDEST[name] == versions["oldest"]
    assert EXTRAS[name] == [f"{name}>={versions['oldest']}"]
    assert pins("oldest")[name].startswith(versions["oldest"])
    assert pins("run")[name] == versions["tested"]
    assert numbers(versions["oldest"]) <= min(numbers(versions["tested"]), numbers(versions["measured"]))
    assert numbers(versions["newest"]) >= max(numbers(versions["tested"]), numbers(versions["measured"]))


def test_packages_of_jax_are_those_of_jax():
    """The plugin that compiles for H100s has the version of JAX, and the CUDA of the extra."""
    tested = FRAMEWORKS["jax"]["tested"]
    assert pins("run")["jaxlib"] == tested
    cuda = re.search(r"\[(cuda\d+)\]", EXTRAS["jax-cuda"][0])[1]
    assert EXTRAS["jax-cuda"] == [f"jax[{cuda}]>={FRAMEWORKS['jax']['oldest']}"]
    assert pins("h100") == {f"jax-{cuda}-plugin": tested, f"jax-{cuda}-pjrt": tested}


def test_the_matrix_begins_at_the_oldest():
    admitted = dict(requirement.split(">=") for requirement in PYPROJECT["project"]["dependencies"])
    oldest = pins("oldest")
    assert {name: oldest[name][: len(version)] for name, version in admitted.items()} == admitted


def test_rows_of_gpus_have_the_measured_versions():
    files = (REPOSITORY / "benchmarks/results").glob("*.csv")
    rows = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
    stacks = {row["versions"] for row in rows if row["machine"].startswith("NVIDIA")}
    for name, versions in FRAMEWORKS.items():
        found = {match[1] for stack in stacks for match in re.finditer(rf"\b{name} ([\d.]+\d)", stack)}
        assert found == {versions["measured"]}, name


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_name_the_versions(page):
    text = (REPOSITORY / page).read_text()
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in text
    for name, versions in FRAMEWORKS.items():
        assert f"{name} {versions['oldest']} or newer" in text
    if page == "docs/install.md":
        for name, versions in FRAMEWORKS.items():
            cells = " | ".join(versions[kind] for kind in ("oldest", "tested", "measured", "newest"))
            assert f"| {name} | {cells} |" in text


def test_makefile_and_workflows_know_every_python():
    assert PYPROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    makefile = (REPOSITORY / "Makefile").read_text()
    assert f"for python in {' '.join(f'python{version}' for version in PYTHONS)};" in makefile
    wheels = (REPOSITORY / ".github/workflows/wheels.yml").read_text()
    assert [version for version in PYTHONS if version not in wheels] == []


def test_workflows_run_targets_of_make():
    """What GitHub runs, anybody can run: each step is one target, .ci/run, or a test of a file name."""
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([a-z%-][a-z %-]*):", makefile, re.MULTILINE) for name in line.split()}
    workflows = list((REPOSITORY / ".github/workflows").glob("*.yml"))
    commands = [line for path in workflows for line in re.findall(r"- run: (.+)", path.read_text())]
    assert len(workflows) == 3
    assert len(commands) >= 5
    for command in commands:
        program, argument = command.split()[:2]
        if program == "make":
            assert argument in targets or re.sub(r"-\$\{\{", "-%", argument) in targets, command
        else:
            assert program == "test" or command == "bash .ci/run"


def test_issue_templates_ask_for_qshard_info():
    forms = [path for path in (REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 2
    for form in forms:
        assert "`qshard info`" in form.read_text()


def test_citation_has_the_version():
    (entry,) = (entry for entry in PYPROJECT["tool"]["dynamic-metadata"] if "version" in entry)
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert f"\nversion: {entry['version']}\n" in citation
    assert f'name: "{PYPROJECT["project"]["authors"][0]["name"]}"' in citation
