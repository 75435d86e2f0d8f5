"""Interfaces of JAX that it does not document are used in one file."""

import re
from pathlib import Path

import pytest

import qshard

FOLDER = Path(qshard.__file__).parent / "jax"
PRIVATE = re.compile(
    r"(?<![.\w])(?:jax|jnp|lax|nnx|flax)\._[a-z]|module_context|cached_primitive_lowerings|meta_path"
    r"|frontend_attributes|\"primal\"|_pytree__"
)


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: str(file.relative_to(FOLDER)))
def test_private_interfaces_are_in_one_file(file):
    found = [f"{i}: {line}" for i, line in enumerate(file.read_text().splitlines(), 1) if PRIVATE.search(line)]
    assert file.name == "_jax_internals.py" or not found, f"move these to _jax_internals.py: {found}"
