"""What mkdocs calls: pages and nav are made of the repository, and what was built is looked at."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import site_faults
import site_pages
from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.hooks.qshard")


def on_config(config: Any) -> Any:
    # mkdocs took this folder off the path when it had read this file; docstrings.py imports from it, later.
    sys.path.append(str(Path(__file__).parent))
    config.nav = site_pages.nav()
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, markdown in site_pages.pages().items():
        files.append(File.generated(config, path, content=markdown()))
    for path in site_pages.linked_files():
        files.append(File.generated(config, path, content=(site_pages.REPOSITORY / path).read_bytes()))
    return files


def on_post_build(config: Any) -> None:
    for fault in site_faults.faults(Path(config.site_dir)):
        log.warning(fault)  # Which strict makes an error.
