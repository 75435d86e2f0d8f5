"""Reports: what they say at any width, on any terminal, and while one waits for them."""

import math
import os
import pty
import re
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

from qshard import formats
from qshard.formats import Usage
from qshard.numerics import Note, compare, report
from qshard.numerics._display import LONG
from support.awkward import awkward_values

FLOOR = formats.MXFP8_E4M3.with_options(scale_rounding="floor")
ROTATED = formats.NVFP4.with_options(hadamard=True, rounding="stochastic")


def block(*values, size=32):
    return np.array([[*values, *[0.0] * (size - len(values))]], np.float32)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def test_report_as_text():
    pytest.importorskip("rich")
    text = str(report(awkward_values((32, 64), kinds=("normal",)), [formats.FP8_E4M3, FLOOR], title="bell"))
    lines = text.splitlines()
    assert lines[0] == "bell"
    assert "MXFP8_E4M3[scale_rounding=floor]" in text
    assert all(line == line.rstrip() for line in lines)
    assert text.isascii()


def test_report_says_what_is_left_out():
    pytest.importorskip("rich")
    shown = report(np.ones((32, 48), np.float16))
    assert list(shown.left_out) == [
        name for name, fmt in formats.FORMATS.items() if fmt.scale_dtype == formats.E8M0.name
    ]
    text = str(shown)
    vectors = [name for name in shown.left_out if formats.FORMATS[name].block == (1, 32)]
    assert (
        f"left out: {', '.join(vectors)}: x (32, 48) is not a whole number of 1x32 blocks; pad the columns to 64"
    ) in " ".join(text.split())
    assert text.startswith("32 x 48, float16\n")
    assert str(report(np.ones((32, 32)), usage=Usage.COLUMNWISE)).startswith("32 x 32, float64, columnwise\n")


def rows_of(x, chosen=("FP8_E4M3", "MXFP8_E4M3")):
    """The cells of each row, under the words of the headings above them, and the lines below the table."""
    lines = str(report(x, list(chosen))).splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("----"))
    cells = [re.split(r"\s+", line) for line in lines[rule + 1 : rule + 1 + len(chosen)]]
    return {cell[0]: cell[1:] for cell in cells}, lines[rule + 1 + len(chosen) :]


@pytest.mark.parametrize(
    ("x", "sqnr", "notes"),
    [
        (block(1.0, 2.0), {"FP8_E4M3": "inf", "MXFP8_E4M3": "inf"}, []),
        (np.full((1, 32), math.inf), {"FP8_E4M3": "- a", "MXFP8_E4M3": "- a"}, [Note.NOTHING_COUNTS]),
        (np.zeros((1, 32)), {"FP8_E4M3": "- a", "MXFP8_E4M3": "- a"}, [Note.ZEROS]),
        (np.zeros((0, 32)), {"FP8_E4M3": "- a", "MXFP8_E4M3": "- a"}, [Note.EMPTY]),
        (
            np.concatenate([block(math.nan, 1.0), block(1.0)]),
            {"FP8_E4M3": "inf a", "MXFP8_E4M3": "inf a,b,c"},
            [Note.NONFINITE_GIVEN, Note.NONFINITE_MADE, Note.SCALES],
        ),
        (np.array([1e300, *[1.0] * 31]), {"FP8_E4M3": "inf a,b"}, [Note.NONFINITE_GIVEN, Note.BEYOND_FLOAT32]),
    ],
    ids=["exact", "infinite", "zeros", "empty", "NaN in one block", "float64"],
)
def test_rows_that_would_mislead_are_marked(x, sqnr, notes):
    """The letter stands beside SQNR, and below the table are the words."""
    pytest.importorskip("rich")
    rows, below = rows_of(x, sqnr)
    for name, expected in sqnr.items():
        found = expected.split(" ")
        assert rows[name][1 : 1 + len(found)] == found
        assert notes or not rows[name][2].startswith("a")
    assert below == [f"{letter} {note}" for letter, note in zip("abc", notes, strict=False)]


def test_shares_that_do_not_count_have_a_column():
    pytest.importorskip("rich")
    rows, _ = rows_of(np.concatenate([block(math.nan, 1.0), block(1.0)]))
    assert rows["MXFP8_E4M3"][3] == "50.00%"
    assert rows["FP8_E4M3"][3] == "1.56%"
    assert "counted" not in str(report(block(1.0)))
    assert "non-finite" not in str(report(block(1.0)))


def test_small_shares_are_not_none():
    pytest.importorskip("rich")
    x = np.ones((1024, 32))
    x[0, 0] = 2.0**-40
    rows, _ = rows_of(x)
    assert "<0.01%" in rows["FP8_E4M3"]


def widths(x, chosen, usage, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    return str(report(x, chosen, usage)).splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 160])
@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.COLUMNWISE])
def test_names_are_whole_and_lines_fit(width, spoiled, usage, monkeypatch):
    pytest.importorskip("rich")
    x = awkward_values((128, 128), kinds=("normal", "outlier"))
    if spoiled:
        x[0, 0], x[5, 5] = math.nan, math.inf
    lines = widths(x, None, usage, width, monkeypatch)
    assert max(map(len, lines)) <= width
    starts = [line.split(" ")[0] for line in lines]
    assert [start for start in starts if start in formats.FORMATS] == list(formats.FORMATS)
    shown = " ".join(" ".join(lines).split())
    headings = ["bits", "max", "zeros", "saturated", "subnormal", "scale", *(["counted", "non-finite"] * spoiled)]
    for heading in headings:  # In the table, or among those that the last lines say are not.
        assert heading in shown
    assert ("not shown at a width of" in shown) == (width <= 80)


def test_the_largest_error_gives_way_before_the_worst_block(monkeypatch):
    """It is 100 % wherever an element became 0."""
    pytest.importorskip("rich")
    x, shown = awkward_values((128, 128), kinds=("normal",)), set()
    for width in range(60, 121, 5):
        absent = " ".join(widths(x, ["NVFP4", "MXFP8_E4M3"], Usage.ROWWISE, width, monkeypatch)).partition("not shown")[
            2
        ]
        assert "max error" in absent or "worst block" not in absent
        shown.add(("max error" in absent, "worst block" in absent))
    assert (True, False) in shown


@pytest.mark.parametrize("width", [60, 80, 120])
def test_long_names_break_between_their_options(width, monkeypatch):
    pytest.importorskip("rich")
    chosen = [ROTATED.with_options(nonfinite="nan"), FLOOR.with_options(nonfinite="nan"), formats.NVFP4]
    lines = widths(np.ones((128, 128)), chosen, Usage.COLUMNWISE, width, monkeypatch)
    assert max(map(len, lines)) <= width
    for fmt in chosen:
        for part in str(fmt).split(" "):
            assert any(part in line.split("  ")[0] for line in lines)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_rich_prints_the_same_at_any_width(width):
    rich_console = pytest.importorskip("rich.console")
    import io

    shown = report(np.ones((128, 128)))
    for encoding in ("utf-8", "ascii"):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        rich_console.Console(file=file, width=width, legacy_windows=False).print(shown)
        file.flush()
        text = file.buffer.getvalue().decode(encoding)
        assert max(map(len, text.splitlines())) <= width
        assert all(re.search(rf"^{name}\b", text, re.MULTILINE) for name in formats.FORMATS)
        assert ("\N{BOX DRAWINGS LIGHT HORIZONTAL}" in text) == (encoding == "utf-8")


SHOW = "import numpy as np; from qshard.numerics import report; print(report(np.ones((128, 128))))"


def test_a_pipe_and_a_dumb_terminal_get_plain_text():
    pytest.importorskip("rich")
    for extra in ({}, {"TERM": "dumb", "COLUMNS": "80"}):
        environment = os.environ | {"PYTHONIOENCODING": "ascii"} | extra
        run = subprocess.run([sys.executable, "-P", "-c", SHOW], capture_output=True, env=environment, check=False)
        assert run.returncode == 0, run.stderr
        assert not run.stderr
        text = run.stdout.decode("ascii")
        assert "\x1b" not in text
        assert re.search(r"^-{60,}$", text, re.MULTILINE)


def test_a_report_of_no_format_is_empty():
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    shown = report(np.ones(16), [])
    assert str(shown).splitlines()[2].startswith("format")
    assert "<img" in shown._repr_html_()


def test_reports_of_names():
    pytest.importorskip("rich")
    shown = report(np.ones(64), ["NVFP4", "MXFP8_E4M3[scale_rounding=floor]"])
    assert [row.format for row in shown.stats] == [formats.NVFP4, FLOOR]


# --- while one waits ---

WAIT = """
import sys, numpy as np
from qshard.numerics import _display as progress, compare
progress.LONG = {long}
compare(np.ones((512, 2048), np.float32), ["FP8_E4M3", "MXFP8_E4M3[scale_rounding=floor]"], progress={progress})
"""


def on_terminal(code, **environment):
    """What a program writes to a terminal on its standard error."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stderr=theirs, env=os.environ | {"TERM": "xterm"} | environment) as child:
        os.close(theirs)
        written = b""
        while True:
            try:
                some = os.read(ours, 4096)
            except OSError:  # Linux's word for the end.
                break
            if not some:
                break
            written += some
    os.close(ours)
    assert child.returncode == 0, written
    return written.decode()


def test_progress_on_a_terminal():
    pytest.importorskip("rich")
    seen = on_terminal(WAIT.format(long=1, progress=None))
    assert "MXFP8_E4M3[scale_rounding=floor], 2 of 2" in seen
    assert seen.rstrip().endswith("\x1b[2K")  # It goes when all is done.


@pytest.mark.parametrize(
    ("long", "progress", "environment"),
    [(LONG, None, {}), (1, False, {}), (1, None, {"TERM": "dumb"})],
    ids=["short", "unwanted", "dumb"],
)
def test_no_progress(long, progress, environment):
    pytest.importorskip("rich")
    assert on_terminal(WAIT.format(long=long, progress=progress), **environment) == ""


def test_progress_in_lines_where_asked_for(capfd):
    pytest.importorskip("rich")
    compare(np.ones(64), ["FP8_E4M3", "NVFP4"], progress=True)
    assert capfd.readouterr() == ("", "FP8_E4M3, 1 of 2\nNVFP4, 2 of 2\n")
    report(np.ones(64), ["FP8_E4M3"], progress=False)
    compare([], ["FP8_E4M3"], progress=True)
    compare(np.ones(64), [], progress=True)
    assert capfd.readouterr() == ("", "")


INTERRUPT = """
import os, signal, threading, time
import numpy as np
import qshard
from qshard.numerics import _display as progress, compare
progress.LONG = 1
qshard.set_num_threads(2)
x = np.ones((2048, 2048), np.float32)
compare(x[:64], ["FP8_E4M3"])
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    compare(x, ["FP8_E4M3"] * 1000)
except KeyboardInterrupt:
    end = time.monotonic() + 10
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.01)
    threads = [thread.name for thread in threading.enumerate()]
    assert threads == ["MainThread"], threads
    raise
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_leaves_no_thread(terminal):
    pytest.importorskip("rich")
    if terminal:
        code = INTERRUPT.replace("    raise\n", "    print('interrupted', file=__import__('sys').stderr)\n")
        assert "interrupted" in on_terminal(code)
        return
    run = subprocess.run([sys.executable, "-P", "-c", INTERRUPT], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert run.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert run.stderr.count("Traceback") == 1


def test_an_error_ends_the_threads(monkeypatch):
    def broken(elements):
        raise ValueError("broken")

    from qshard.numerics import _statistics as measures

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="broken"):
        measures.stats_of(
            measures.as_float(np.ones((2048, 2048), np.float32), ""), formats.FP8_E4M3, Usage.ROWWISE, 0, "", broken
        )
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    "x", [np.random.default_rng(0).standard_t(3, (128, 128)), np.zeros((16, 16)), np.ones((0, 32))]
)
def test_report_in_a_notebook(x):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        html = report(x)._repr_html_()
    assert html.startswith("<pre")
    assert "font-family:monospace" in html.partition(">")[0]  # Pages of nbconvert have another one.
    assert "NVFP4_16x16" in html
    assert html.count("data:image/png;base64,iVBOR") == 1


def test_plots_name_every_format_and_draw_no_two_alike():
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    names = list(formats.FORMATS)
    x = np.random.default_rng(0).standard_t(3, (128, 128))
    figure = report(x).figure()
    bars, *lines = figure.axes
    assert [label.get_text() for label in bars.get_yticklabels()] == names
    fills = {(bar.get_facecolor(), bar.get_hatch()) for bar in bars.patches}
    assert len(fills) == len(names)
    for axes in lines:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == names
        drawn = [(line.get_color(), line.get_linestyle()) for line in axes.get_lines()]
        assert len(set(drawn)) == len(drawn) == len(names)


def test_lines_show_family_by_color_and_block_shape_by_dash():
    from qshard.numerics._plots import line_styles

    changed = formats.NVFP4.with_options(nonfinite="nan")
    chosen = [*formats.FORMATS.values(), changed]
    styles = {str(fmt): style for fmt, style in zip(chosen, line_styles(chosen), strict=True)}
    colors = {name: style["color"] for name, style in styles.items()}
    families = ["FP8_E4M3", "MXFP8_E4M3", "MXFP6_E2M3", "MXFP4", "NVFP4"]
    assert len({colors[name] for name in families}) == len(families)
    assert colors["FP8_E4M3"] == colors["FP8_1x128"] == colors["FP8_128x128"]
    assert colors["NVFP4"] == colors["NVFP4_16x16"] == colors[str(changed)]
    assert colors["FP8_E5M2"] not in [colors[name] for name in families]  # a lighter shade
    for name, style in styles.items():
        fmt = formats.FORMATS.get(name, changed)
        dash = "-" if fmt.block is None else "--" if fmt.block[0] == 1 else ":"
        assert style["linestyle"] == dash
    looks = [(style["color"], style["linestyle"], style["marker"]) for style in styles.values()]
    assert len(set(looks)) == len(looks)


def test_nothing_in_the_plots_overlaps():
    """Titles, labels and legends, at the size in which Jupyter shows them."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    long = formats.NVFP4.with_options(hadamard=True, rounding="stochastic", nonfinite="nan")
    x = np.random.default_rng(0).standard_t(3, (128, 128))
    for chosen in (None, [long, FLOOR], ["NVFP4"]):
        figure = report(x, chosen, Usage.COLUMNWISE).figure()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        boxes = []
        for axes in figure.axes:
            parts = [axes.title, axes.xaxis.label, axes.yaxis.label, axes.patch, axes.get_legend()]
            boxes += [part.get_window_extent(renderer) for part in parts if part is not None]
        boxes = [box for box in boxes if box.width > 1 and box.height > 1]
        width, height = canvas.get_width_height()
        for i, box in enumerate(boxes):
            assert box.x0 >= 0
            assert box.x1 <= width
            assert box.y0 >= 0
            assert box.y1 <= height
            assert not any(box.overlaps(other) for other in boxes[:i])
        names = figure.axes[0].get_yticklabels()
        assert all(name.get_window_extent(renderer).x0 >= 0 for name in names)


def test_scales_that_are_absent_have_no_share():
    """Blocks of 2**0 and of 2**8, and none between them."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    x = np.concatenate([np.full(32, 448.0), np.full(32, 448.0 * 2**8)])
    line = report(x, ["MXFP8_E4M3"]).figure().axes[2].get_lines()[0]
    assert dict(zip(*line.get_data(), strict=True)) == {0: 0.5, **dict.fromkeys(range(1, 8), 0), 8: 0.5}


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra(missing, monkeypatch):
    if missing == "matplotlib":
        pytest.importorskip("rich")
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"^report: {missing} is not installed; pip install 'qshard\[notebooks\]'$"):
        report(np.ones(16), [formats.FP8_E4M3]).figure()
