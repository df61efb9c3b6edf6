"""The two passes over a graph of our engine, one node at a time.

Forward gives each node its value. Backward takes what has arrived at a node, multiplies it by
the local derivative of each edge into it, and hands the products to its parents, where they
add up. Then every leaf that needs a gradient moves against it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import numpy as np

from course_lib.autograd import Tensor, last_to_first, unbroadcast
from course_lib.checks import number
from course_lib.graph import Graph, trace

MOST_ENTRIES = 64  # of a local derivative; larger ones aren't written out


@dataclass(frozen=True)
class Handed:
    """What backward hands along one edge, given by its index in the graph's edges.

    `local` has a row for each number of the result and a column for each of the parent, or is
    None where that is too large; `gradient`, shaped like the parent, is what arrived times it.
    """

    edge: int
    local: np.ndarray | None
    gradient: np.ndarray


@dataclass(frozen=True)
class Step:
    """`phase` is "forward", "backward" or "update"; an update has no node of its own."""

    phase: str
    node: int | None
    handed: tuple[Handed, ...] = ()


@dataclass(frozen=True)
class Replay:
    """Every node's label and value, and the steps. `rate` is that of the update."""

    graph: Graph
    labels: tuple[str, ...]
    values: tuple[np.ndarray, ...]
    steps: tuple[Step, ...]
    rate: float

    def gradients(self, done: int) -> dict[int, np.ndarray]:
        """The gradient that has arrived at each node once `done` steps are done."""
        arrived = {}
        for step in self.steps[:done]:
            if step.phase == "backward" and not arrived:
                arrived[step.node] = np.ones_like(self.values[step.node])
            for handed in step.handed:
                parent = self.graph.edges[handed.edge][0]
                arrived[parent] = arrived.get(parent, 0.0) + handed.gradient
        return arrived


def replay(output: Tensor, names: Mapping[str, Tensor], rate: float = 0.1) -> Replay:
    """Both passes to a scalar `output`, and the update of its leaves by `rate`.

    Values are read as they are now, so build the expression anew after a weight has changed.
    `names` labels some of the tensors; other results are called v1, v2, …, a constant number by
    its value, other leaves and constants c1, c2, …. Raises TypeError for what isn't our Tensor,
    ValueError for an output without a graph or with more than one number, a name for what isn't
    in the graph, a rate that isn't positive.
    """
    if not isinstance(output, Tensor):
        raise TypeError(f"replay needs a Tensor of our engine, got {type(output).__name__}")
    if not output.parents:
        raise ValueError("nothing it was made from has requires_grad=True: there is no graph")
    if output.data.size != 1:
        raise ValueError(f"replay needs a scalar, got shape {output.shape}: end with .sum()")
    if number("the rate", rate) <= 0:
        raise ValueError(f"the rate must be positive, got {rate}")
    graph = trace(output, names)
    tensors = last_to_first([output], lambda tensor: tensor.parents)[::-1]  # as trace has them
    index = {tensor: i for i, tensor in enumerate(tensors)}
    for name, tensor in names.items():
        if tensor not in index:
            raise ValueError(f"{name} isn't part of the graph")
    steps = [Step("forward", i) for i, tensor in enumerate(tensors) if tensor.parents]
    steps += _backward(graph, tensors, index)
    values = tuple(tensor.data.copy() for tensor in tensors)
    return Replay(graph, _labels(tensors, names), values, (*steps, Step("update", None)), rate)


def _backward(graph: Graph, tensors: list[Tensor], index: dict[Tensor, int]) -> list[Step]:
    last = len(tensors) - 1
    arrived, steps = {last: np.ones_like(tensors[last].data)}, []
    into = [[] for _ in tensors]
    for edge, (_, child) in enumerate(graph.edges):
        into[child].append(edge)
    for i in range(last, -1, -1):
        tensor = tensors[i]
        if not tensor.parents or i not in arrived:
            continue
        handed = []
        for k, (edge, parent) in enumerate(zip(into[i], tensor.parents, strict=True)):
            if parent.requires_grad:
                part = unbroadcast(tensor.gradients(arrived[i])[k], parent.shape)
                handed.append(Handed(edge, _local(tensor, k), np.array(part)))
                arrived[index[parent]] = arrived.get(index[parent], 0.0) + part
        steps.append(Step("backward", i, tuple(handed)))
    return steps


def _local(tensor: Tensor, k: int) -> np.ndarray | None:
    """The local derivative by the k-th parent, a row at a time: backward from one result."""
    parent = tensor.parents[k]
    if not 0 < tensor.data.size * parent.data.size <= MOST_ENTRIES:
        return None
    rows = np.eye(tensor.data.size).reshape(-1, *tensor.shape)
    return np.stack([unbroadcast(tensor.gradients(row)[k], parent.shape).ravel() for row in rows])


def _labels(tensors: list[Tensor], names: Mapping[str, Tensor]) -> tuple[str, ...]:
    given = {id(tensor): name for name, tensor in names.items()}
    results, constants = _free("v", names), _free("c", names)
    labels = []
    for tensor in tensors:
        if id(tensor) in given:
            labels.append(given[id(tensor)])
        elif tensor.parents:
            labels.append(next(results))
        elif tensor.data.ndim or tensor.requires_grad:
            labels.append(next(constants))
        else:
            labels.append(plain(tensor.data))
    return tuple(labels)


def plain(value: float, decimals: int = 4) -> str:
    """A number with few decimals; a small one with as many digits as it needs to be told from 0.

    >>> plain(-0.46304), plain(2.0), plain(1e-8)
    ('−0.463', '2', '1e−08')
    """
    small = 0 < abs(value) < 10.0 ** (1 - decimals)
    written = f"{value:.2g}" if small else f"{round(float(value), decimals) + 0.0:g}"
    return written.replace("-", "−")


def _free(letter: str, names: Mapping[str, Tensor]) -> Iterator[str]:
    return (f"{letter}{k}" for k in count(1) if f"{letter}{k}" not in names)
