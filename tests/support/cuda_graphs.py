"""Capture of CUDA graphs by tests."""

from collections.abc import Callable
from typing import Any

import torch


def capture(function: Callable[[], Any], warm_up: int = 0) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture one call of `function`, after `warm_up` calls on the stream of the capture.

    Threads of XLA and of NCCL may call CUDA meanwhile. torch's default mode forbids that to all threads.

    Returns:
      The graph, and what the captured call returned.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = function()
    return graph, result
