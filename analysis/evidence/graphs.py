"""GCN (Kipf and Welling 2017), GAT (Velickovic et al. 2018) and GCNII (Chen et al. 2020) on Planetoid's citation
graphs, in plain PyTorch.

N nodes, E edges (both directions, and from each node to itself), F features, H heads.
"""

import math
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.evidence.loop import Problem
from analysis.evidence.suite import Task

#: nodes after the labeled ones, by Planetoid's split
VALIDATION = 500


@dataclass(frozen=True)
class Graph:
    x: Tensor  #: (N, F), each row sums to 1
    source: Tensor  #: (E,)
    target: Tensor  #: (E,)
    y: Tensor  #: (N,)
    train: Tensor  #: indices of nodes: 20 a class
    held_out: Tensor  #: Planetoid's 500 for validation and 1,000 for the test


def gather(messages_ED: Tensor, target_E: Tensor, nodes: int) -> Tensor:
    """The sum of the messages that reach each node."""
    return messages_ED.new_zeros(nodes, *messages_ED.shape[1:]).index_add(0, target_E, messages_ED)


class Propagation(nn.Module):
    """Sum over neighbors j of x_j / sqrt(degree_i degree_j)."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, degree_N = graph, torch.bincount(graph.target).float()
        self.weight_E1 = (degree_N[graph.source] * degree_N[graph.target]).rsqrt()[:, None]

    def forward(self, x_NF: Tensor) -> Tensor:
        return gather(x_NF[self.graph.source] * self.weight_E1, self.graph.target, len(x_NF))


class GATLayer(nn.Module):
    """Sum over neighbors j of a_ij W x_j, with a_ij the softmax over j of LeakyReLU(s_i + t_j), by heads."""

    def __init__(self, inner: int, outer: int, heads: int, dropout: float, graph: Graph) -> None:
        super().__init__()
        self.linear, self.graph, self.heads = nn.Linear(inner, heads * outer), graph, heads
        self.source = nn.Parameter(torch.randn(heads, outer) * outer**-0.5)
        self.target = nn.Parameter(torch.randn(heads, outer) * outer**-0.5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NF: Tensor) -> Tensor:
        x_NHF = self.linear(x_NF).unflatten(1, (self.heads, -1))
        source_E, target_E, nodes = self.graph.source, self.graph.target, len(x_NF)
        scores_EH = (x_NHF * self.source).sum(-1)[source_E] + (x_NHF * self.target).sum(-1)[target_E]
        scores_EH = F.leaky_relu(scores_EH, 0.2).float()
        weights_EH = (scores_EH - scores_EH.detach().max()).exp()
        weights_EH = weights_EH / gather(weights_EH, target_E, nodes)[target_E]
        return gather(self.dropout(weights_EH)[..., None] * x_NHF[source_E], target_E, nodes).flatten(1)


class GraphModel(nn.Module):
    """Two layers with dropout before each: GCN's, the propagation of W x, or GAT's where there are heads."""

    def __init__(self, graph: Graph, width: int, classes: int, heads: int, dropout: float) -> None:
        super().__init__()
        features = graph.x.shape[1]
        if heads:
            first: nn.Module = GATLayer(features, width // heads, heads, dropout, graph)
            self.layers = nn.ModuleList([first, GATLayer(width, classes, 1, dropout, graph)])
        else:
            sizes = (features, width), (width, classes)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(*size), Propagation(graph)) for size in sizes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NF: Tensor) -> Tensor:
        hidden_NF = F.elu(self.layers[0](self.dropout(x_NF)))
        logits: Tensor = self.layers[1](self.dropout(hidden_NF))
        return logits


class GCNIILayer(nn.Module):
    """relu((1 - b) y + b W y), with y = 0.9 P h + 0.1 h_0, P the propagation and b = log(0.5 / number + 1)."""

    def __init__(self, width: int, number: int, graph: Graph) -> None:
        super().__init__()
        self.linear, self.propagate = nn.Linear(width, width, bias=False), Propagation(graph)
        self.share = math.log(0.5 / number + 1)

    def forward(self, x_NF: Tensor, first_NF: Tensor) -> Tensor:
        mixed_NF = 0.9 * self.propagate(x_NF) + 0.1 * first_NF
        return F.relu((1 - self.share) * mixed_NF + self.share * self.linear(mixed_NF))


class GCNII(nn.Module):
    """A linear layer makes h_0 of the features, GCNIILayers follow, a linear layer makes the logits; dropout before
    each of them."""

    def __init__(self, graph: Graph, width: int, classes: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(graph.x.shape[1], width), nn.Linear(width, classes)
        self.layers = nn.ModuleList(GCNIILayer(width, number, graph) for number in range(1, layers + 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NF: Tensor) -> Tensor:
        hidden_NF = first_NF = F.relu(self.first(self.dropout(x_NF)))
        for layer in self.layers:
            hidden_NF = layer(self.dropout(hidden_NF), first_NF)
        logits: Tensor = self.last(self.dropout(hidden_NF))
        return logits


def nodes(task: Task, generator: torch.Generator, files: Sequence[Path]) -> Problem:
    """Full-batch training on a graph's labeled nodes, of GCNII where ``sizes`` has layers.

    ``generator`` decides nothing.
    """
    graph, width = read_planetoid(files[0]), task.sizes["width"]
    classes = int(graph.y.max()) + 1
    model: nn.Module
    if "layers" in task.sizes:
        model = GCNII(graph, width, classes, task.sizes["layers"], task.dropout)
    else:
        model = GraphModel(graph, width, classes, task.sizes["heads"], task.dropout)

    def predict(nodes: Tensor) -> tuple[Tensor, Tensor]:
        return model(graph.x)[nodes], graph.y[nodes]

    return Problem(model, predict, repeat(graph.train), [graph.held_out])


class _Matrix:
    """The pickled fields of scipy's sparse matrix (CSR): data, indices, indptr, _shape."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def dense(self) -> np.ndarray:
        matrix = np.zeros(self.__dict__["_shape"], np.float32)
        rows = np.repeat(np.arange(len(matrix)), np.diff(self.__dict__["indptr"]))
        matrix[rows, self.__dict__["indices"]] = self.__dict__["data"]
        return matrix


#: what Planetoid's pickles are made of, but for the matrices
_PARTS = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
}


class _Unpickler(pickle.Unpickler):
    """Reads Planetoid's pickles without scipy, and no classes but those that are in them."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "csr_matrix":
            return _Matrix
        part = _PARTS.get((module.partition(".")[0], name))
        if part is None:
            raise pickle.UnpicklingError(f"{module}.{name} is none of Planetoid's")
        return part


def read_planetoid(graph: Path) -> Graph:
    """The graph of NAME.graph and the files beside it: x, y, tx, ty, allx, ally, test.index.

    Test nodes stand in the order of test.index; those that it leaves out (Citeseer's without an edge) have no feature.
    """

    def load(part: str) -> Any:
        with graph.with_suffix(f".{part}").open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
        return content.dense() if isinstance(content, _Matrix) else content

    order = np.array([int(line) for line in graph.with_suffix(".test.index").read_text().split()])
    labeled = load("allx").shape[0]
    test = np.arange(labeled, order.max() + 1)
    x_NF, y_NC = (
        np.concatenate([load(f"all{name}"), np.zeros((len(test), load(name).shape[1]), np.float32)])
        for name in ("x", "y")
    )
    x_NF[order], y_NC[order] = load("tx"), load("ty")
    neighbors = load("graph")
    pairs = {(a, b) for a, ends in neighbors.items() for b in ends}
    pairs |= {(b, a) for a, b in pairs} | {(node, node) for node in range(len(x_NF))}
    source_E, target_E = torch.tensor(sorted(pairs)).T
    labeled = load("y").shape[0]
    x_NF = x_NF / np.maximum(x_NF.sum(1, keepdims=True), 1)
    return Graph(
        torch.from_numpy(x_NF.astype(np.float32)),
        source_E.contiguous(),
        target_E.contiguous(),
        torch.from_numpy(y_NC.argmax(1)),
        torch.arange(labeled),
        torch.cat([torch.arange(labeled, labeled + VALIDATION), torch.from_numpy(np.sort(order))]),
    )
