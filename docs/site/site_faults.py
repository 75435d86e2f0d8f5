"""What is wrong with a built site, as a browser sees it.

Each link leads to a file, and to a place in it, that are there; nothing is loaded from elsewhere; no text was taken for
HTML, as `<name>` outside of code is, of which nothing would show; and no markup was taken for text.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# A quote is not among them: it is a doctest that nobody took for code.
TAGS = frozenset(
    """
    html head link meta title script style body header nav main article footer figure figcaption
    a b br button code dd del div dl dt em form h1 h2 h3 h4 h5 h6 hr img input ins kbd label li ol p pre
    small span strong sub summary sup table tbody td th thead tr ul svg g line path rect text
    """.split()  # noqa: SIM905
)


MARKUP = re.compile(r"\n *(?:[-*]|\d+\.) |```|\]\(|\n *\|.*\|")
"""A list, a block of code, a link or a table, where it is text."""
SHOWN = 60
"""Characters of a text that a fault shows."""
VERBATIM = ("code", "pre", "script", "style")


class _Page(HTMLParser):
    """Where one page leads, what it loads, the places in it, and what is in it that no page has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.unknown: list[str] = []
        self.markup: list[str] = []
        self._verbatim = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._verbatim += tag in VERBATIM
        if tag not in TAGS:
            self.unknown.append(tag)
        self.places |= {place for place in (given.get("id"), given.get("name")) if place}
        target = given.get("href") or given.get("src")
        if target and tag == "a":
            self.links.append(target)
        elif target and given.get("rel") != "canonical":
            self.loaded.append(target)

    def handle_endtag(self, tag: str) -> None:
        self._verbatim -= tag in VERBATIM

    def handle_data(self, data: str) -> None:
        if not self._verbatim and (seen := MARKUP.search(data)):
            self.markup.append(data[max(seen.start(), 0) :][:SHOWN].strip())


def faults(site: Path) -> list[str]:
    """What is wrong with the site in a folder, a line each."""
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        where = path.relative_to(site).as_posix()
        found += [
            f"{where} has <{tag}>, which is text that was taken for markup; put it in backticks" for tag in page.unknown
        ]
        found += [f"{where} shows markup as text: {text!r}; put an empty line before it" for text in page.markup]
        for target in page.links + page.loaded:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loaded and parts.scheme != "data":
                    found.append(f"{where} loads {target}, which is not of the site")
                continue
            base = site if parts.path.startswith("/") else path.parent
            there = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file():
                found.append(f"{where} leads to {target}, which is not there")
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].places:
                found.append(f"{where} leads to {target}, and there is no such place on that page")
    return found
