"""The documentation site, as far as a mistake in it could be silent. `make docs` builds it, and follows its links."""

import doctest
import importlib
import re
import tomllib
from xml.etree import ElementTree

import numpy as np
import pytest
import site_api
import site_docstrings
import site_faults
import site_markdown
import site_ops
import site_pages
import site_pictures

from qshard import reference
from qshard.formats import ELEMENTS, FORMATS, Usage
from qshard.layout import plane
from qshard.op_table import multi_table, table
from support.pages import REPOSITORY, Page

DOCS = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").glob("*.md"))
OPS = {**table(), **multi_table()}
NEED = {"qshard.jax": "jax", "qshard.torch_bridge": "torch", "qshard.jax.linen": "flax", "qshard.jax.nnx": "flax"}


def in_nav() -> list[str]:
    pages = [page for section in site_pages.nav() for inside in section.values() for page in inside]
    return [next(iter(page.values())) if isinstance(page, dict) else page for page in pages]


# --- pages ---


def test_every_page_is_in_the_nav_once():
    assert sorted(in_nav()) == sorted(site_pages.pages())
    assert set(DOCS) <= set(in_nav())
    assert set(site_pages.TITLES) <= set(in_nav())


def test_a_page_that_no_section_names_is_under_more(monkeypatch):
    there = site_pages.pages() | {"docs/new.md": str, "docs/numerics.md": str}
    monkeypatch.setattr(site_pages, "pages", lambda: there)
    sections = {title: inside for section in site_pages.nav() for title, inside in section.items()}
    assert sections["More"] == ["docs/new.md"]
    assert sections["Numerics"][0] == "docs/numerics.md"


def test_the_nav_names_no_page_that_is_not_there(monkeypatch):
    there = site_pages.pages()
    del there["docs/fsdp2.md"]
    monkeypatch.setattr(site_pages, "pages", lambda: there)
    with pytest.raises(ValueError, match=r"PyTorch names docs/fsdp2.md, which is no page"):
        site_pages.nav()


def test_no_line_of_the_readme_is_lost():
    """It is on two pages, and every heading is on one of them."""
    shown = [line.strip() for line in site_pages.home().splitlines() + site_pages.start().splitlines()]
    for line in (REPOSITORY / "README.md").read_text().splitlines():
        assert line.strip() in shown or (line.startswith("##") and line[1:] in shown)
    assert site_pages.start().startswith(f"# {site_pages.STEPS}\n")


@pytest.mark.parametrize("path", site_pages.pages())
def test_links_lead_to_pages_or_files(path):
    """Also where the site is not built: to what the site has, by the same path."""
    there = {*site_pages.pages(), *site_pages.linked_files()}
    markdown = site_pages.pages()[path]()
    for target in re.findall(
        r"\]\(([^)#\s]+\.\w+)(?:#[^)\s]*)?\)", re.sub(r"^```.*?^```$", "", markdown, flags=re.M | re.S)
    ):
        if not target.startswith("https://"):
            where = (REPOSITORY / path).parent.joinpath(target).resolve().relative_to(REPOSITORY)
            assert where.as_posix() in there, f"{path} leads to {target}"


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
    assert all(f"{{{value}}}" in site_pages.cite() for value in (version, project["project"]["license"]))
    assert "title = {qshard: sharded weights" in site_pages.cite()


def test_what_belongs_to_an_item_is_indented_by_four():
    text = """\
- one
  goes on

      code
  text
  1. inner

     its text
- two

after, with
- three
lazily
```
- code
  as it is
```
"""
    made = """\
- one
    goes on

        code
    text
    1. inner

        its text
- two

after, with
- three
    lazily
```
- code
  as it is
```
"""
    assert site_markdown.with_indented_lists(text) == made


# --- the API ---


@pytest.mark.parametrize("module", site_api.MODULES)
def test_every_public_name_is_on_its_page(module):
    """What the sources say without being imported is what an import gives."""
    for needs, framework in NEED.items():
        if module.startswith(needs):
            pytest.importorskip(framework)
    there = importlib.import_module(module)
    names = site_api.public_names(module)
    if hasattr(there, "__all__"):
        assert sorted(names) == sorted(there.__all__)
    page = site_api.page(module)
    for name in names:
        home = site_api.home_of(module, name)
        if site_api.source_of(home):
            assert f"]({home}.md)" in page
        else:
            inside, _, defined = home.rpartition(".")
            assert getattr(importlib.import_module(inside), defined) is getattr(there, name)
            assert f"      heading: {module}.{name}\n" in page or f"## {module}.{name} " in page


def test_modules_that_users_are_told_of_have_a_page():
    import qshard

    for name in qshard.__all__:
        home = site_api.home_of("qshard", name)
        assert site_api.source_of(home) is None or home in site_api.MODULES
    told = "".join(path.read_text() for path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
    used = set(re.findall(r"^(?:from|import) (qshard(?:\.\w+)*)", told, re.MULTILINE))
    assert "qshard.jax" in used
    assert not used - set(site_api.MODULES), "pages import these: give them a place in MODULES of docs/site/site_api.py"


def test_a_name_is_shown_in_one_place():
    """Elsewhere is a link to it."""
    shown = [
        home for module in site_api.MODULES for home in re.findall(r"^::: (\S+)$", site_api.page(module), re.MULTILINE)
    ]
    assert len(shown) == len(set(shown))
    assert "`qshard.formats.Usage`](qshard.formats.md#qshard.formats.Usage)" in site_api.page("qshard")


def test_docstrings_as_markdown():
    text = """One line.

    Args:
      a, b: two
        in one.
      c: another.

    Returns:
      what: of this
        and that.
      A pair: told in prose.

    >>> 1 + 1
    2

    Then text, such as a, b: no arguments.
    >>> 2
    2
    """
    assert site_docstrings.as_markdown(text).splitlines() == [
        "One line.",
        "",
        "Args:",
        "  a: two",
        "    in one.",
        "  b: see `a`.",
        "  c: another.",
        "",
        "**Returns:**",
        "",
        "- `what`: of this",
        "  and that.",
        "A pair: told in prose.",
        "",
        "```pycon",
        ">>> 1 + 1",
        "2",
        "```",
        "",
        "Then text, such as a, b: no arguments.",
        "```pycon",
        ">>> 2",
        "2",
        "```",
    ]


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
    drawn = site_pictures.drawn(text)
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


# --- what is wrong with a built site ---


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="b.html#there">x</a><a href="#own" id="own">y</a><a href="https://a.org/">z</a>', None),
        ('<a href="c.html">x</a>', "a.html leads to c.html, which is not there"),
        ('<a href="b.html#gone">x</a>', "a.html leads to b.html#gone, and there is no such place on that page"),
        ('<a href="#gone">x</a>', "a.html leads to #gone, and there is no such place on that page"),
        ('<img src="gone.png">', "a.html leads to gone.png, which is not there"),
        ('<script src="https://a.org/x.js"></script>', "a.html loads https://a.org/x.js, which is not of the site"),
        ("<p>x\n- y</p>", "a.html shows markup as text: '- y'; put an empty line before it"),
        ("<p>[x](y.md)</p>", "a.html shows markup as text: '](y.md)'; put an empty line before it"),
        ("<pre>\n- y\n```</pre><p>x - y | z</p>", None),
        ("<p>torch.ops.<op></p>", "a.html has <op>, which is text that was taken for markup; put it in backticks"),
        (
            "<blockquote>1 + 1</blockquote>",
            "a.html has <blockquote>, which is text that was taken for markup; put it in backticks",
        ),
    ],
)
def test_faults_of_a_site(body, fault, tmp_path):
    (tmp_path / "a.html").write_text(f"<html><body>{body}</body></html>")
    (tmp_path / "b.html").write_text('<html><body><p id="there">x</p></body></html>')
    assert site_faults.faults(tmp_path) == ([fault] if fault else [])
