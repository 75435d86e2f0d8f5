"""The graphs that `torch.compile` makes of a call."""

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition


def compile_and_keep(call, dynamic=None):
    """Compile a call as one graph. Also return the list of its graphs of ops, forward and then backward."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    return torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic), graphs


def calls_of(graph, op):
    """Return the nodes of a graph that call an op of qshard."""
    return [node for node in graph.graph.nodes if str(node.target) == f"qshard.{op}.default"]
