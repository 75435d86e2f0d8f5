"""Plans: the format of each tensor of a conversion, from `--format` options or from a JSON file.

    {"version": 1, "usage": "rowwise", "formats": {"layers.0.weight": "NVFP4", "embed*": "FP8_E4M3"}}

`qshard report --plan` writes such a file with the name of each layer, and `qshard convert --plan` reads it. A file may
also have patterns, like `--format 'embed*=FP8_E4M3'`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qshard._cli.errors import Misuse
from qshard._cli.options import USAGES, checked_patterns, format_of
from qshard._files.checkpoint import unique_keys
from qshard._files.names import quote
from qshard.formats import Format, Usage

VERSION = 1
KEYS = ("version", "usage", "formats")
LARGEST = 2**26  # bytes of a file; a plan of 100,000 layers has about 2**23
RULE = re.compile(r"(?:(?P<glob>.*)=)?(?P<format>[A-Za-z0-9_]+(?:\[[^\]]*\])?)", re.DOTALL)
NOT_PLANNED = "no format was given for it"


@dataclass(frozen=True)
class Plan:
    """Formats of tensors.

    Attributes:
      rules: pattern of names -> format, in order of precedence.
      rest: format of the tensors that no pattern matches; None: they are not converted.
      origin: the option that gave the rules, for errors.
    """

    rules: Mapping[str, Format]
    rest: Format | None = None
    origin: str = "--format"

    def formats(self, names: Iterable[str]) -> dict[str, Format]:
        """Return the formats of tensors by name, without the tensors that are not converted.

        Raises Misuse if a pattern matches no name, or none that earlier patterns left.
        """
        names = list(names)
        patterns = checked_patterns(self.rules, names, self.origin)
        chosen = ((name, patterns.first(name)) for name in names)
        found = {name: self.rest if pattern is None else self.rules[pattern] for name, pattern in chosen}
        return {name: fmt for name, fmt in found.items() if fmt is not None}


def plan_of(texts: Iterable[str]) -> Plan:
    """Parse the values of `--format`: a format for all tensors, and `PATTERN=FORMAT`.

    Raises Misuse if two values have no pattern, or the same one.

    >>> plan = plan_of(["embed*=FP8_E4M3", "NVFP4[global_scale=row]"])
    >>> {name: str(fmt) for name, fmt in plan.formats(["embed.weight", "0.weight"]).items()}
    {'embed.weight': 'FP8_E4M3', '0.weight': 'NVFP4[global_scale=row]'}
    """
    rules: dict[str | None, Format] = {}
    for text in texts:
        found = RULE.fullmatch(text)
        glob, name = (found["glob"], found["format"]) if found else (None, text)
        fmt = format_of(name, "--format")
        if glob in rules:
            what = "all tensors" if glob is None else quote(glob)
            raise Misuse(f"--format gives {what} two formats, {rules[glob]} and {fmt}; use one, or 'PATTERN=FORMAT'")
        rules[glob] = fmt
    rest = rules.pop(None, None)
    return Plan({glob: fmt for glob, fmt in rules.items() if glob is not None}, rest)


def text_of(formats: Mapping[str, str], usage: Usage) -> str:
    """Return the plan file for formats by name."""
    return json.dumps({"version": VERSION, "usage": str(usage.name).lower(), "formats": formats}, indent=1) + "\n"


def check_replaceable(path: Path) -> None:
    """Raise Misuse if the file at `path` is not a plan, such as `config.json` or the index of a checkpoint."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        read_plan(path)
    except Misuse:
        raise Misuse(f"--plan {quote(path)} exists and is not a plan; write to another name") from None


def read_plan(path: Path) -> tuple[Plan, Usage]:
    """Read a plan file.

    Raises Misuse if it is none.
    """
    problem = f"{quote(path)} is not a plan of qshard report --plan"
    try:
        with path.open("rb") as file:
            read: Any = json.loads(file.read(LARGEST), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise Misuse(f"{problem}: {quote(error)}; write it again") from None
    if not isinstance(read, dict) or set(read) != set(KEYS):
        raise Misuse(f"{problem}: it does not have exactly the keys {', '.join(KEYS)}; write it again")
    formats = read["formats"]
    if read["version"] != VERSION:
        raise Misuse(f"{problem}: its version is {quote(read['version'])} instead of {VERSION}; write it again")
    if read["usage"] not in USAGES:
        raise Misuse(f"{problem}: usage ({quote(read['usage'])}) is none of {', '.join(USAGES)}; correct it")
    if not isinstance(formats, dict) or not formats or not all(isinstance(each, str) for each in formats.values()):
        raise Misuse(f"{problem}: formats does not map names to formats; write it again")
    rules = {pattern: format_of(name, "--plan") for pattern, name in formats.items()}
    return Plan(rules, origin="--plan"), USAGES[read["usage"]]
