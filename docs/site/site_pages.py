"""Which pages the site has, of what, and in which order. Needs neither mkdocs nor a framework.

A page has the path in the site that its source has in the repository, so links between sources hold on both. Of
README.md the first steps are a page of their own; the rest is the first page.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import site_api
import site_markdown
import site_ops
import site_pictures

REPOSITORY = Path(__file__).parents[2]
STEPS = "First steps"
"""The section of README.md that is a page."""

NAV: dict[str, list[str]] = {
    "Start": ["README.md", "start.md"],
    "Concepts": ["docs/formats.md", "docs/sharding.md"],
    "PyTorch": ["docs/fsdp2.md", "docs/fsdp1_ddp.md"],
    "JAX": ["docs/jax_pytrees.md", "docs/jax_flax.md", "docs/jax_shard_map.md"],
    "Both frameworks": ["docs/zero.md", "docs/tensor_parallel.md", "docs/experts.md", "docs/cross_entropy.md"],
    "Numerics": ["docs/numerics*.md", "docs/command*.md", "NUMERICS.md"],
    "More": ["docs/*.md"],
    "Reference": ["ops.md", *(f"api/{module}.md" for module in site_api.MODULES)],
    "About": ["ARCHITECTURE.md", "RESULTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "cite.md"],
}
"""Sections and their pages, or patterns of pages. A page is where it is named first."""

TITLES = {"README.md": "qshard", "NUMERICS.md": "Every formula", "cite.md": "How to cite"}
"""Of pages that the nav calls something else than their first heading does."""

_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def text_of(path: str) -> str:
    return (REPOSITORY / path).read_text()


def pages() -> dict[str, Callable[[], str]]:
    """The pages of the site by path, each as a function that makes its Markdown."""
    docs = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").glob("*.md"))
    own: dict[str, Callable[[], str]] = {
        "README.md": home,
        "start.md": start,
        "ops.md": site_ops.page,
        "cite.md": cite,
    }
    own |= {f"api/{module}.md": lambda module=module: site_api.page(module) for module in site_api.MODULES}
    taken = [*(name for name in NAV["About"] if name not in own), "NUMERICS.md", *docs]
    return own | {path: lambda path=path: as_page(text_of(path)) for path in taken}


def as_page(text: str) -> str:
    """A text of the repository as mkdocs is to read it, with its pictures."""
    return site_pictures.drawn(site_markdown.with_indented_lists(text))


def nav() -> list[dict[str, list[str | dict[str, str]]]]:
    """What mkdocs takes as its nav: every page once.

    Raises:
      ValueError: NAV names a page that there is not, or leaves one out.
    """
    left, sections = list(pages()), []
    for title, patterns in NAV.items():
        inside = []
        for pattern in patterns:
            found = fnmatch.filter(left, pattern)
            if not found and "*" not in pattern:
                raise ValueError(f"nav: {title} names {pattern}, which is no page, or is named before")
            inside += found
            left = [path for path in left if path not in found]
        if inside:
            sections.append({title: [{TITLES[path]: path} if path in TITLES else path for path in inside]})
    if left:
        raise ValueError(f"nav: no section has {', '.join(left)}; add them to NAV")
    return sections


def linked_files() -> list[str]:
    """Files of the repository, other than pages, that pages link to: the site has copies of them."""
    there, found = pages(), set()
    for path, markdown in there.items():
        for target in _LINK.findall(_CODE.sub("", markdown())):
            name = (REPOSITORY / path).parent.joinpath(target).resolve()
            if name.is_file() and name.is_relative_to(REPOSITORY):
                found.add(name.relative_to(REPOSITORY).as_posix())
    return sorted(found - set(there))


def home() -> str:
    """README.md without its first steps, with the way into the site in their place."""
    before, _, after = readme()
    return as_page(before + text_of("docs/site/ways.md") + "\n" + after)


def start() -> str:
    """The first steps of README.md, a level up."""
    return as_page(re.sub(r"^##(?=#* )", "#", readme()[1], flags=re.MULTILINE))


def readme() -> tuple[str, str, str]:
    """README.md before its first steps, these, and what comes after."""
    text = text_of("README.md")
    begin = text.index(f"## {STEPS}\n")
    end = text.index("\n## ", begin) + 1
    return text[:begin], text[begin:end], text[end:]


def cite() -> str:
    """How to cite, of CITATION.cff and the version that is built."""
    said = dict(re.findall(r'^[ -]*([\w-]+): "?(.*?)"?$', text_of("CITATION.cff"), re.MULTILINE))
    version = tomllib.loads(text_of("pyproject.toml"))["tool"]["dynamic-metadata"][0]["version"]
    return f"""# How to cite

```bibtex
@software{{qshard,
  title = {{{said["title"]}}},
  author = {{{{{said["name"]}}}}},
  version = {{{version}}},
  license = {{{said["license"]}}},
}}
```

`CITATION.cff`, at the root of the repository, says the same to tools. Formats and methods have sources of their own,
which [Every formula](NUMERICS.md#sources) lists, and docstrings name beside what they are used for: cite those too.
"""
