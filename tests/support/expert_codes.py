"""Random codes of experts on a GPU, and their values in fp64."""

from __future__ import annotations

import itertools

import torch

from qshard._core.quantize_steps import Plane


def stops_of(sizes, device="cuda"):
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=device)


def ranges(sizes):
    return [slice(*ends) for ends in itertools.pairwise((0, *itertools.accumulate(sizes)))]


def codes(shape, fmt, seed, experts):
    """Random codes of small numbers, and scales from 1/8 to 1: one for each expert, or of blocks."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(shape, generator=generator).to(getattr(torch, fmt.element.name)).view(torch.uint8)
    grid = (experts,)
    if fmt.block is not None:
        grid = (*shape[:-2], *(-(-size // side) for size, side in zip(shape[-2:], fmt.block, strict=True)))
    return Plane(data.cuda(), (0.125 + 0.875 * torch.rand(grid, generator=generator)).cuda())


def numbers(plane, fmt, by_expert):
    """fp64 values. `by_expert` gives the axis sizes and slices of experts for formats with one scale each."""
    values = plane.data.view(getattr(torch, fmt.element.name)).double()
    if fmt.block is None:
        for scale, where in zip(plane.scale_inv.double(), by_expert, strict=True):
            values[where] *= scale
        return values
    scale = plane.scale_inv.double()
    for axis, side in zip((-2, -1), fmt.block, strict=True):
        scale = scale.repeat_interleave(side, axis)
    return values * scale[..., : values.shape[-2], : values.shape[-1]]
