"""The programs of docs/trainers.md and docs/trainers_jax.md, with the libraries themselves.

Skipped without these libraries; `make trainers` installs them and runs this file.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from support.pages import Page, run

LIBRARIES = Path(__file__).parents[2] / "build" / "trainers"
SCRIPTS = [code for page in ("docs/trainers.md", "docs/trainers_jax.md") for code in Page(page).scripts]
PROGRAMS = {re.findall(r"^# (\w+)\.py", code)[0]: code for code in SCRIPTS}
del PROGRAMS["own_configs"]  # test_torchtitan_trainer.py runs it.
MESHES = [name for name, code in PROGRAMS.items() if "make_mesh" in code]
FLAX_EXAMPLES = LIBRARIES / "flax_examples"
EXAMPLES = {"transformer", "transformer_cfg", "models"}  # modules in it
RECIPES = ("CurrentScaling", "DelayedScaling", "NVFP4")

ON_CPUS = """
import sys, types
sys.modules["torchvision._meta_registrations"] = types.ModuleType("")  # It needs the CUDA libraries of torchvision.
import accelerate.state
from accelerate.utils import DistributedType
made = accelerate.state.PartialState.__init__
def init(self, *args, **options):  # accelerate shards models on GPUs alone.
    made(self, *args, **options)
    if self._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU
accelerate.state.PartialState.__init__ = init
"""
"""Lets the libraries run without GPUs."""

WITHOUT_TENSORFLOW = """
import importlib.machinery, sys, unittest.mock
for name in ("tensorflow", "tensorflow_datasets"):  # gemma imports them for its data.
    sys.modules[name] = unittest.mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
"""


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(LIBRARIES))
    monkeypatch.setattr(sys, "path", [*sys.path, str(LIBRARIES)])


def run_program(name, folder, command):
    code = PROGRAMS[name]
    needed = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)) - {"qshard"}
    missing = [module for module in needed - EXAMPLES if importlib.util.find_spec(module) is None]
    if needed & EXAMPLES and not FLAX_EXAMPLES.exists():
        missing.append("the source release of flax")
    if missing:
        pytest.skip(f"{missing[0]} is not installed; make trainers")
    script = folder / f"{name}.py"
    before = WITHOUT_TENSORFLOW if "gemma" in needed else ON_CPUS if "torch" in needed else ""
    script.write_text(before + code)
    if FLAX_EXAMPLES.exists():
        (folder / FLAX_EXAMPLES.name).symlink_to(FLAX_EXAMPLES)
    result = run(script, [*command, script.name])
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name, tmp_path):
    run_program(name, tmp_path, ["python", "-P"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_trainer_of_transformers_on_ranks(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPE", recipe)
    run_program("transformers_trainer", tmp_path, ["torchrun", "--nproc-per-node", "2"])


def test_lightning_on_ranks(tmp_path):
    run_program("lightning_module", tmp_path, ["torchrun", "--nproc-per-node", "2"])


@pytest.mark.parametrize("name", MESHES)
def test_a_program_on_a_mesh(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    run_program(name, tmp_path, ["python", "-P"])
