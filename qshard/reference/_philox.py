"""Random bits for stochastic rounding: a function of the seed and of an element's index in the whole tensor."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: ArrayLike, key: tuple[int, int], *, rounds: int = 10) -> NDArray[np.uint32]:
    """Compute Philox4x32: four random uint32 `[..., 4]` from a counter of four uint32 and a key. qshard uses 10 rounds.

    >>> [hex(word) for word in philox4x32([0, 0, 0, 0], (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']

    Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    k0, k1 = np.array(key, np.uint64)
    for _ in range(rounds):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            product1 >> _WORD ^ c1 ^ k0,
            product1 & _LOW,
            product0 >> _WORD ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = k0 + _KEY_STEPS[0] & _LOW, k1 + _KEY_STEPS[1] & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_bytes(seed: int, index: ArrayLike) -> NDArray[np.uint8]:
    """Return the random byte of each element, given its row-major index in the whole tensor.

    One Philox call serves 16 elements. For a uint64 index `i` and a uint64 seed, low words first:

        key = (seed mod 2**32, seed >> 32);   counter = (i >> 4 mod 2**32, i >> 36, 0, 0)
        word = (i >> 2) % 4;   byte = i % 4, the least significant is byte 0

    >>> [hex(byte) for byte in random_bytes(0, [0, 1, 2, 3, 4, 15])]
    ['0xd5', '0xe8', '0x27', '0x66', '0x8d', '0x9b']
    """
    i = np.asarray(index, np.uint64)
    call = i >> np.uint64(4)
    zero = np.zeros_like(call)
    words = philox4x32(np.stack([call & _LOW, call >> _WORD, zero, zero], axis=-1), (seed & 0xFFFFFFFF, seed >> 32))
    of_call = words.astype("<u4").view(np.uint8)  # `[..., 16]`: the bytes of a call in element order
    return np.take_along_axis(of_call, (i % np.uint64(16)).astype(np.intp)[..., None], axis=-1)[..., 0]
