"""What the other processes of tests of travelling objects do. Importable, for a spawned process finds it by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qshard.torch_bridge import QuantizedTensor


def learn(model: nn.Module, xs: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Losses of learning the identity, one for each batch."""
    losses = []
    for x in xs:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def serve(inbox: Any, outbox: Any) -> None:
    """Answers until it is sent None: a model with an input, by its output; a tensor, by its values, and by zeros in
    its place; a model with batches, by training it in a forked process, in the memory that all share."""
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
            outbox.put(q)
        elif what == "train":
            model, xs = given
            worker = torch.multiprocessing.get_context("fork").Process(target=train, args=(model, xs, outbox))
            worker.start()
            worker.join()
            outbox.put(worker.exitcode)


def train(model: nn.Module, xs: torch.Tensor, outbox: Any) -> None:
    learn(model, xs, torch.optim.SGD(model.parameters(), lr=0.1))
