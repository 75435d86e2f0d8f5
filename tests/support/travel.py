"""Serialization tests: objects to send, ways to send them, and code that other processes import by name."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

from qshard.formats import FP8_E4M3, Usage
from qshard.torch_bridge import QuantizedTensor, convert, quantize, update_scales
from support.formats import stochastic


def quantized(fmt=FP8_E4M3, usage=Usage.BOTH, shape=(32, 64), dtype=torch.bfloat16):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return quantize(x, fmt, usage=usage, seed=1 if stochastic(fmt) else None)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def bytes_of(q):
    return [getattr(q, name) for name in q.__tensor_flatten__()[0]]


def assert_same(got, want):
    assert (type(got), got.shape, got.stride()) == (type(want), want.shape, want.stride())
    assert got.__tensor_flatten__() == want.__tensor_flatten__()
    assert (got.requires_grad, isinstance(got, nn.Parameter)) == (want.requires_grad, isinstance(want, nn.Parameter))
    for a, b in zip(bytes_of(got), bytes_of(want), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: torch.load(saved(value), weights_only=False),
}


def model_of(recipe, seed=0):
    """Build layers with a shared and a frozen weight, and the recipe's state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 32))
    model[4].weight = model[2].weight
    model[3].weight.requires_grad_(False)
    return convert(model, recipe)


def batches(count=2, seed=0):
    return torch.randn(count, 32, 32, generator=torch.Generator().manual_seed(seed))


def learn(model: nn.Module, xs: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train the identity and return the loss of each batch."""
    losses = []
    for x in xs:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        update_scales(model)
        losses.append(loss.detach())
    return losses


def serve(inbox: Any, outbox: Any) -> None:
    """Process commands until None arrives.

    "run" returns a model's output. "read" returns a tensor's values and sets them to zero. "train" trains a model in
    shared memory in a forked process.
    """
    torch.set_num_threads(1)
    while (order := inbox.get()) is not None:
        what, *given = order
        if what == "run":
            model, x = given
            outbox.put(model(x).detach())
        elif what == "read":
            (q,) = given
            assert isinstance(q, QuantizedTensor)
            outbox.put(q.dequantize())
            q.rowwise.data.view(torch.uint8).zero_()
            outbox.put(copy.deepcopy(q) if q.is_cuda else q)  # A receiver cannot send shared GPU memory on.
        elif what == "train":
            model, xs = given
            worker = torch.multiprocessing.get_context("fork").Process(target=train, args=(model, xs, outbox))
            worker.start()
            worker.join()
            outbox.put(worker.exitcode)


def train(model: nn.Module, xs: torch.Tensor, outbox: Any) -> None:
    learn(model, xs, torch.optim.SGD(model.parameters(), lr=0.1))
