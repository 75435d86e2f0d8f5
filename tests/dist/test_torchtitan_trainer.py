"""torchtitan's own trainer, data loader and checkpoints with the configs of docs/trainers.md, on two ranks.

Skipped without torchtitan; `make titan` installs it and runs this file. `support/titan_trainer.py` says what CPUs lack.
The data are this project's pages, and the tokenizer is trained on them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import Page

ROOT = Path(__file__).parents[2]
LIBRARIES = ROOT / "build" / "titan"
LAUNCHER = ROOT / "tests" / "support" / "titan_trainer.py"
sys.path.append(str(LIBRARIES))
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None or importlib.util.find_spec("datasets") is None,
    reason="torchtitan is not installed; make titan",
)
(CONFIGS,) = [code for code in Page("docs/trainers.md").python if code.startswith("# own_configs.py")]
STEPS, VOCABULARY, TIMEOUT = 6, 1024, 3000
PLAIN = {
    "llama3": "llama3_debugmodel",
    "qwen3": "qwen3_debugmodel",
    "deepseek_v3": "deepseek_v3_debugmodel",
    "gpt_oss": "gpt_oss_debugmodel",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the configs, the tokenizer and the data."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("titan")
    (folder / "own_configs.py").write_text(CONFIGS)
    texts = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<bos>", "<eos>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (folder / "text").mkdir()
    paragraphs = [part for text in texts for part in text.split("\n\n") if len(part) > 60]
    lines = [json.dumps({"text": part}) for part in paragraphs]
    (folder / "text" / "data.json").write_text("\n".join(lines))
    return folder


def run_of(folder, name, module, config, *options, recipe="MXFP8", saves_initial=False, into=None):
    arguments = [
        *("--module", module, "--config", config, "--dump_folder", str(folder / "out" / (into or name))),
        *("--hf_assets_path", str(folder), "--dataloader.dataset_path", str(folder / "text")),
        *("--training.steps", str(STEPS), "--training.seq_len", "64", "--training.local_batch_size", "4"),
        *("--training.disable_cuda_graphs", "--debug.seed", "0", "--parallelism.spmd_backend", "partial_dtensor"),
        *("--checkpoint.enable", *options),
    ]
    environment = {"RECIPE": recipe}
    return {
        "name": name,
        "ranks": 2,
        "arguments": arguments,
        "environment": environment,
        "saves_initial": saves_initial,
    }


def train(folder, runs):
    """Run them one after another, and return the result of each."""
    (folder / "runs.json").write_text(json.dumps(runs))
    paths = [LIBRARIES, ROOT / "examples", folder]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HOME": str(folder / "cache"),
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-P", str(LAUNCHER), "runs.json"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{run['name']}.json").read_text()) for run in runs]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama3", ["--compile.enable"]),
        ("qwen3", []),
        ("deepseek_v3", ["--parallelism.expert_parallel_degree", "2"]),
        ("gpt_oss", ["--parallelism.expert_parallel_degree", "2"]),
    ],
)
def test_trains_as_in_bf16(folder, family, options):
    """From the initial values of the bf16 run, which the converted model loads from its checkpoint.

    Llama 3 is compiled in a second run, and mixtures of experts are sharded by experts.
    """
    initial = ["--checkpoint.initial_load_path", str(folder / "out" / family / "checkpoint" / "step-0")]
    runs = [
        # A checkpoint with optimizer states would initialize them by a step, which Adam counts.
        run_of(folder, family, family, PLAIN[family], "--checkpoint.last_save_model_only", saves_initial=True),
        run_of(folder, f"{family}_own", "own_configs", family, *initial),
    ]
    if options:
        runs.append(run_of(folder, f"{family}_other", "own_configs", family, *initial, *options))
    plain, *own = [result["losses"] for result in train(folder, runs)]
    assert len(plain) == STEPS
    assert plain[-1] < plain[0] - 0.1
    for losses in own:
        assert losses != plain
        # Measured: at most 0.1 %.
        assert max(abs(a / b - 1) for a, b in zip(losses, plain, strict=True)) < 0.005


@pytest.mark.parametrize("recipe", ["DelayedScaling", "NVFP4"])
def test_resumes_bit_for_bit(folder, recipe):
    """From torchtitan's checkpoint in the middle: weights, optimizer, data, scales and seeds."""
    half = STEPS // 2
    saves = ["--checkpoint.interval", str(half)]
    name = f"llama3_{recipe}"
    runs = [
        run_of(folder, name, "own_configs", "llama3", *saves, recipe=recipe),
        run_of(
            folder, f"{name}_on", "own_configs", "llama3", "--checkpoint.load_step", str(half), recipe=recipe, into=name
        ),
    ]
    through, resumed = train(folder, runs)
    assert resumed["losses"] == through["losses"][half:]
    assert resumed["norms"] == through["norms"][half:]
    assert resumed["digest"] == through["digest"]
