"""The two training scripts as programs: rejected options, Ctrl-C, and the plot of the report."""

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from support.examples import ENVIRONMENT, EXAMPLES, assert_refused, example, refusals

REFUSED = {
    "--steps 0": "argument --steps: '0' is not a whole number from 1 to 1000000 (--help lists the options)",
    f"--steps {'9' * 5000}": f"argument --steps: '{'9' * 20}' is not a whole number from 1 to 1000000",
    "--batch 1000000000": "argument --batch: '1000000000' is not a whole number from 1 to 65536",
    "--batch 32000 --ranks 1": "--text pydoc_data.topics has ",
    "--ranks 4096 --batch 4096": "--ranks 4096 is more than ",
    "--experts 1": "argument --experts: '1' is not 0, or a whole number from 2 to 256 (--help lists the options)",
    "--experts 257": "argument --experts: '257' is not 0, or a whole number from 2 to 256",
    "--loss fast": "argument --loss: invalid choice: 'fast' (choose from ",
    "--ranks 3": "--batch 32 cannot be divided over 3 ranks",
    "--text empty.txt": "--text empty.txt is empty; give a file of text",
    "--text picture.png": "--text picture.png is not UTF-8 text (byte 0x89 at 0); give a file of text",
    "--text zeros.txt": "--text zeros.txt is not UTF-8 text (byte 0x00 at 4); give a file of text",
    "--text short.txt": "--text short.txt has 5 bytes; ",
    "--log-numerics nowhere/log.jsonl": "argument --log-numerics: cannot write nowhere/log.jsonl: No such file",
    "--log-numerics log.jsonl --experts 4": "--log-numerics is not for --experts 4, whose layers it would",
    "--text nowhere.txt": "argument --text: nowhere.txt is not a file",
    "--weights primary --recipe bf16": "--weights primary is not for bf16, which has no codes to keep; leave bf16 out",
    "--resume": "--resume goes on from a checkpoint; give --checkpoint DIR",
    "--resume --checkpoint none": "--checkpoint none has none of bf16, fp8; leave --resume out",
    "--checkpoint some": "--checkpoint some has some of an earlier run; add --resume, or give another directory",
    "--resume --checkpoint some --steps 7": "--steps 7 is not that of some/fp8/step-4, 6; resume with",
    "--resume --checkpoint some --steps 6 --experts 2": "--experts 2 is not that of some/fp8/step-4, 0; resume with",
    "--resume --checkpoint some --steps 6 --optimizer muon": "--optimizer muon is not that of some/fp8/step-4, adamw",
}

OF_JAX = {
    "--mode shard_map --mesh fsdp,tp": "--mesh fsdp,tp is not for --mode shard_map, whose program would have to say it",
    "--experts 4 --mode explicit": "--experts 4 is not for --mode explicit: JAX types no ragged product; give",
    "--experts 4 --mode auto --mesh fsdp,tp": "--experts 4 is not for --mesh fsdp,tp, whose layers all tokens pass",
    "--mesh hsdp --ranks 2": "--mesh hsdp needs an even number of ranks, 4 or more, not 2; give --ranks 4",
}
OF_TORCH = {
    "--mesh hsdp": "--mesh hsdp needs an even number of ranks, 4 or more, not 2; give --ranks 4",
    "--mesh fsdp,tp": "--mesh fsdp,tp needs an even number of ranks, 4 or more, not 2; give --ranks 4",
    "--mesh fsdp,tp --experts 4": "--experts 4 is not for --mesh fsdp,tp, whose layers all tokens pass",
    "--mesh hsdp --weights zero": "--weights zero cuts weights over all ranks alike, not over --mesh hsdp; leave",
    "--weights zero --formats fp8,bf16": "--weights zero is not for bf16, which has no codes to keep; leave bf16 out",
}
BY_SCRIPT = {"train_jax": REFUSED | OF_JAX, "train_torch": REFUSED | OF_TORCH}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    contents = {"empty.txt": b"", "picture.png": b"\x89PNG\r\n", "zeros.txt": b"text\0text", "short.txt": b"short"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    settings = {"framework": "torch", "text": "pydoc_data.topics", "steps": 6, "batch": 32}
    settings |= {"weights": "shard", "mesh": "fsdp"}
    for step in (2, 4):
        path = folder / "some" / "fp8" / f"step-{step}"
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps({"settings": settings, "run": {}}))
    return folder


@pytest.fixture(scope="module")
def said(texts):
    """Run each script with each of its lines, and return its messages."""
    return {script: refusals(script, lines, texts) for script, lines in BY_SCRIPT.items()}


@pytest.mark.parametrize(
    ("script", "line"),
    [pytest.param(script, line, id=f"{script}-{line[:48]}") for script, lines in BY_SCRIPT.items() for line in lines],
)
def test_refused_in_one_line(script, line, said):
    if script == "train_jax" and "--checkpoint" in line:
        pytest.importorskip("orbax.checkpoint")
        pytest.importorskip("safetensors")
    assert_refused(said[script][line], BY_SCRIPT[script][line])


ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def alive(group: int) -> list[str]:
    """Return the running processes of a group, without zombies."""
    command = ["ps", "-A", "-o", "pgid=,stat=,args="]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if line.split()[0] == str(group) and not line.split()[1].startswith("Z")]


COMPILES = "to MLIR module conversion jit(step)"  # XLA comes next, and takes at least 5 s


@pytest.mark.parametrize(
    ("script", "moment"),
    [
        pytest.param("train_jax", "", id="jax-importing"),
        pytest.param("train_jax", COMPILES, id="jax-compiling", marks=pytest.mark.slow),
        pytest.param("train_torch", "", id="torch-importing"),
        pytest.param("train_torch", "compiling", id="torch-starting", marks=pytest.mark.slow),
    ],
)
def test_control_c(script, moment, tmp_path):
    """On a terminal, Ctrl-C ends a script at once with one line and status 130, shows the cursor and ends all ranks."""
    terminal, side = pty.openpty()
    command = [sys.executable, EXAMPLES / f"{script}.py", "--formats", "nvfp4", "--out", str(tmp_path / "out")]
    environment = ENVIRONMENT | {"TERM": "xterm", "JAX_LOG_COMPILES": "1", "XLA_FLAGS": ""}
    process = subprocess.Popen(command, env=environment, stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    output, decoder = "", codecs.getincrementaldecoder("utf-8")()  # A read may end within a character.

    def read(seconds: float) -> bool:
        nonlocal output
        if not select.select([terminal], [], [], seconds)[0]:
            return True
        try:
            output += decoder.decode(os.read(terminal, 65536))
        except OSError:  # The other end of the terminal is closed.
            return False
        return True

    try:
        deadline = time.monotonic() + 150
        # The second thread is that of interrupt.py, the first thing that a script starts. A busy machine takes a while.
        while moment not in ESCAPES.sub("", output) or len(os.listdir(f"/proc/{process.pid}/task")) < 2:
            assert time.monotonic() < deadline, output
            assert read(1), output
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        started = time.monotonic()
        while read(0.1) and process.poll() is None and time.monotonic() < started + 60:
            pass
        status = process.wait(timeout=60)
        seconds = time.monotonic() - started
        while select.select([terminal], [], [], 0)[0] and read(0):
            pass
        while left := alive(process.pid):
            assert time.monotonic() < started + 3, left
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(terminal)
    assert status == 130, output
    assert seconds < 3
    assert ESCAPES.sub("", output).splitlines()[-1] == f"{script}.py: stopped; nothing was written"
    assert output.count("stopped") == 1
    assert "Traceback" not in output
    assert output.rfind("\x1b[?25h") >= output.rfind("\x1b[?25l")  # the cursor is shown after it was hidden
    assert list((tmp_path / "out").glob("*")) == []


@pytest.fixture(scope="module")
def report():
    return example("report")


def test_plot_has_a_panel_of_differences(report):
    """The panel shows each recipe minus bf16 of the same framework, step by step, for training and held-out text."""
    losses = {"bf16": [4.0, 3.0, 2.5, 2.0], "fp8": [4.5, 3.25, 2.5, 2.25]}
    runs = [
        report.Run(framework, name, "2", "text", 4, losses=values, validation=[(2, values[1]), (4, values[3])])
        for framework in report.FRAMEWORKS
        for name, values in losses.items()
    ]
    both, difference = report.plot(runs).axes
    assert len(both.lines) == 2 * len(runs)
    zero = difference.lines[-1]
    assert list(zero.get_ydata()) == [0, 0]
    assert len(difference.lines) == 5
    for curve, points in (difference.lines[:2], difference.lines[2:4]):
        assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([1, 2, 3, 4], [0.5, 0.25, 0, 0.25])
        assert (list(points.get_xdata()), list(points.get_ydata())) == ([2, 4], [0.25, 0.25])
    assert len(report.plot([run for run in runs if run.format == "fp8"]).axes) == 1
