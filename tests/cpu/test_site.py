"""The documentation site, as far as a mistake in it could be silent. `make docs` builds it and checks links."""

import doctest
import re
import tomllib
from xml.etree import ElementTree

import numpy as np
import pytest
import site_ops
import site_pictures

from qshard import reference
from qshard.formats import ELEMENTS, FORMATS, Usage
from qshard.layout import plane
from qshard.op_table import multi_table, table
from support.pages import REPOSITORY, Page

DOCS = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").glob("*.md"))
OPS = {**table(), **multi_table()}


# --- pages ---


@pytest.mark.parametrize("path", DOCS)
def test_code_fits_the_column(path):
    """A page of the site is 80 columns wide; longer lines of code would be cut."""
    blocks = re.findall(r"^```.*?^```$", Page(path).text, re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("path", DOCS)
def test_a_page_says_first_whom_it_serves(path):
    assert re.match(r"# .*\n\nFor people (?:who|whose) ", Page(path).text)


@pytest.mark.parametrize("path", DOCS)
def test_a_page_is_in_the_nav(path):
    assert path in (REPOSITORY / "docs/site/mkdocs.yml").read_text()


@pytest.mark.parametrize("path", DOCS)
def test_examples_of_pages_are_true(path):
    blocks = re.findall(r"^```pycon\n(.*?)^```$", Page(path).text, re.MULTILINE | re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, path, path, 0)
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test).failed == 0
    assert blocks or path not in ("docs/formats.md", "docs/sharding.md")


def test_citation_is_of_this_version():
    said = (REPOSITORY / "CITATION.cff").read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    version = project["tool"]["dynamic-metadata"][0]["version"]
    assert f"\nversion: {version}\n" in said
    assert f"\nlicense: {project['project']['license']}\n" in said


def test_modules_that_users_are_told_of_have_a_page():
    nav = (REPOSITORY / "docs/site/mkdocs.yml").read_text()
    told = "".join(path.read_text() for path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
    used = set(re.findall(r"^(?:from|import) (qshard(?:\.\w+)*)", told, re.MULTILINE))
    assert "qshard.jax" in used
    assert not used - set(re.findall(r"api/([\w.]+)\.md", nav)), "give these a place in the nav of docs/site/mkdocs.yml"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_a_page_with_its_outputs(path):
    pytest.importorskip("nbconvert")
    pytest.importorskip("latex2mathml")
    import site_notebooks

    page, *pictures = site_notebooks.page(path).items()
    assert page[0] == f"{path.stem}.md"
    assert len(pictures) >= 3
    assert all(f"]({name})" in page[1] for name, _ in pictures)
    prose = re.sub(r"^```.*?^```$|`[^`]*`", "", page[1], flags=re.MULTILINE | re.DOTALL)
    assert "$" not in re.sub(r"<div.*?</div>", "", prose, flags=re.DOTALL)


# --- ops ---


def test_every_op_is_on_the_page_with_all_it_takes():
    parts = re.split(r"^### ", site_ops.page(), flags=re.MULTILINE)
    found = {part.split("\n")[0]: part for part in parts[1:]}
    assert set(found) == set(OPS)
    for name, spec in OPS.items():
        cells = re.findall(r"^\| (\w*) \| <code>(.*?)</code> \| (.*) \|$", found[name], re.MULTILINE)
        names = [cell for _, cell, _ in cells]
        operands = [f"{each.name}[]" if each.many else each.name for each in (*spec.inputs, *spec.outputs)]
        given = [attribute.partition(": ")[0] for attribute in spec.attribute_types.split(", ") if attribute]
        assert names == operands + given
        assert f"[`{name}`](#{name})" in parts[0]


@pytest.mark.parametrize("op", OPS)
def test_every_op_says_what_it_does(op):
    """In the comment above its body."""
    assert len(site_ops.bodies()[op]) > 20, f"write a comment above QSHARD_DEFINE_OP({op})"


def test_groups_of_ops_have_names_of_their_own():
    _, groups = site_ops.groups()
    assert len({group.title for group in groups}) == len(groups)
    assert all(group.ops for group in groups)
    assert [op for group in groups for op in group.ops] == list(
        dict.fromkeys(op for group in groups for op in group.ops)
    )


def test_arithmetic_in_comments_is_no_markup():
    assert site_ops.prose("// x[i] * y[i] of `*lead`\n// and <b>") == r"x\[i\] \* y\[i\] of `*lead` and \<b>"


# --- pictures ---


def test_every_format_has_its_picture():
    shown = re.findall(r"<!-- picture: planes (\w+) -->", Page("docs/formats.md").text)
    assert sorted(shown) == sorted(FORMATS)


@pytest.mark.parametrize("path", DOCS)
def test_pictures_are_drawn(path):
    text = Page(path).text
    drawn = site_pictures.draw_pictures(text)
    figures = re.findall(r"^<figure.*</figure>$", drawn, re.MULTILINE)
    assert len(figures) == text.count("<!-- picture:")
    assert "<!-- picture:" not in drawn
    for picture in figures:
        ElementTree.fromstring(picture)


@pytest.mark.parametrize("usage", Usage.BOTH.planes, ids=lambda usage: usage.name)
@pytest.mark.parametrize("name", FORMATS)
def test_a_picture_of_planes_is_of_what_is_stored(name, usage):
    """Its words have the shapes, dtypes and bytes of a plane of zeros; it fills one block and its scales."""
    fmt = FORMATS[name]
    shape = site_pictures.shape_of(fmt)
    made = reference.quantize(np.zeros(shape, np.float32), fmt, usage)
    stored = made.rowwise or made.columnwise
    words = " ".join(site_pictures.panel(0, fmt, plane(fmt, shape, usage)))
    assert f"{list(stored.data.shape)}" in words
    assert f"scale_inv: {fmt.scale_dtype} {list(stored.scale_inv.shape)}" in words
    scales = [scale for scale in (stored.scale_inv, stored.global_scale_inv) if scale is not None]
    size = stored.data.nbytes + sum(scale.nbytes for scale in scales)
    assert f"{size} bytes, {8 * size / np.prod(shape):.4g} bits an element" in words
    assert words.count('class="first"') == 1 + len(scales)
    assert ("stored as x.T" in words) == (stored.data.shape[0] == shape[1])


@pytest.mark.parametrize("name", ELEMENTS)
def test_bits_of_a_picture_are_those_of_codes(name):
    """What a code stands for, made of the fields that the picture names, is what it is decoded to."""
    element = ELEMENTS[name]
    fields = site_pictures.fields(element)
    assert len(fields) == element.bits
    assert len(site_pictures.byte_of(element)) == 8
    for code in range(element.max_code + 1):
        bits = f"{code:0{element.bits}b}"
        of = {kind: "".join(b for b, f in zip(bits, fields, strict=True) if f == kind) for kind in set(fields)}
        e, m = int(of["exponent"], 2), int(of.get("mantissa") or "0", 2)
        value = 2.0 ** (max(e, 1) - element.bias) * ((e > 0) + m / 2**element.mantissa_bits)
        if element.signed:
            assert int(of["sign"], 2) == 0
            assert reference.decode(np.uint8(code), element) == value
            assert reference.decode(np.uint8(code | 1 << element.bits - 1), element) == -value
        else:
            assert reference.decode(np.uint8(code), element) == 2.0 ** (code - element.bias)


def test_the_low_code_of_a_byte_has_the_even_index():
    (packed,) = reference.pack(np.array([0x7, 0x0], np.uint8))
    assert packed == 0x07
    svg = site_pictures.elements()
    assert svg.index("element 1") < svg.index("element 0")  # The high bit is first.


def test_cut_blocks_are_those_that_ranks_share():
    """300 rows on 4 ranks: cuts at 75, 150 and 225 run through the blocks of rows 0 and 128."""
    svg = site_pictures.cuts("FP8_128x128", "300", "256", "4")
    assert svg.count('class="shared"') == 4
    assert svg.count('class="block"') == 2
    whole = site_pictures.cuts("FP8_128x128", "256", "256", "2")
    assert 'class="shared"' not in whole
    assert site_pictures.cuts("FP8_128x128", "128", "128", "200").count("no rows") == 72
