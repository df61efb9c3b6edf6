"""The graph behind a tensor: what torch recorded for backward, or our own engine did.

A node is an operation, a leaf, or a constant; an edge leads from a node to one that used its
result. In torch the nodes are the backward functions, and a leaf is the function that adds to
its `.grad`; what needs no gradient has no node there.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from course_lib import autograd, units

# Operations that keep tensors and don't show them: in-place changes of a view, and many at once.
HIDING = ("copy_slices", "foreach_")


@dataclass(frozen=True)
class Saved:
    """A tensor that an operation keeps for backward, by torch's name for it, such as "result".

    `num_bytes` is its whole storage at the first operation that keeps it; 0 at later ones, and
    for a parameter or a model's buffer, which are there anyway.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Node:
    """`role` is "parameter", "leaf", "constant", "operation", or "input" of a module.

    `shape` is that of the (first) result; `name` is given or empty.
    """

    op: str
    role: str
    shape: tuple[int, ...]
    name: str = ""
    saved: tuple[Saved, ...] = ()

    @property
    def saved_bytes(self) -> int:
        return sum(saved.num_bytes for saved in self.saved)


@dataclass(frozen=True, repr=False)
class Graph:
    """Nodes, each after what it was made from, and edges as pairs of indices into them.

    An edge stands once for each use: a * a has two.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for backward: each storage once, parameters and buffers left out."""
        return sum(node.saved_bytes for node in self.nodes)

    @property
    def hiding(self) -> list[str]:
        """Operations that don't show what they keep, and are missing in `saved_bytes`."""
        return sorted({node.op for node in self.nodes if node.op.startswith(HIDING)})

    def __repr__(self) -> str:
        kept = units.binary(self.saved_bytes)
        return f"Graph({len(self.nodes)} nodes, {len(self.edges)} edges, {kept} kept)"


def trace(tensor: Any, parameters: nn.Module | Mapping[str, Any] | None = None) -> Graph:
    """The graph behind a torch tensor or one of ours. Nothing is computed and nothing changes.

    `parameters` is a model, or tensors by name. They, its buffers, and every nn.Parameter that is
    a leaf, are left out of `saved_bytes`; frozen ones and buffers are known only if they are
    given. What `hiding` names isn't counted, nor a checkpoint's random state. A tensor without a
    graph is a single node. Raises TypeError for what is no tensor, ValueError for a cycle, for
    sparse tensors, and for a result of torch's in `parameters`.

    >>> a = autograd.Tensor(3.0, requires_grad=True)
    >>> graph = trace(a * a, {"a": a})
    >>> [(node.role, node.name or node.op) for node in graph.nodes], graph.edges
    ([('parameter', 'a'), ('operation', '*')], ((0, 1), (0, 1)))
    """
    return _graph([_root(tensor)], _named(parameters), _buffers(parameters), stops=())


def trace_module(module: nn.Module, run: Callable[[], object]) -> Graph:
    """What one module recorded when `run()` called it, from its inputs to its outputs.

    `run` computes something with the model that the module is part of. Raises ValueError unless
    it calls the module exactly once and with gradients on.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"trace_module needs a module, got {type(module).__name__}")
    began, graphs = [], []

    def before(_, args, kwargs):  # in-place changes will give these tensors other functions
        began.append([x.grad_fn for x in _tensors([args, kwargs]) if x.grad_fn is not None])

    def after(_, args, out):
        roots = [_root(tensor) for tensor in _tensors(out) if tensor.requires_grad]
        graphs.append(_graph(roots, _named(module), _buffers(module), began[-1]))

    hooks = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(graphs) != 1:
        raise ValueError(
            f"run() called the module {len(graphs)} times; once is needed (backward calls a "
            "checkpointed module again: leave it out)"
        )
    if not graphs[0].nodes:
        raise ValueError("nothing was recorded: no output tensor was found that needs a gradient")
    return graphs[0]


def _root(tensor: Any) -> Any:
    """Where the walk begins: our tensor, torch's backward function, or a tensor that has none."""
    if isinstance(tensor, nn.Module):
        raise TypeError("trace needs a tensor, such as the model's loss, not the model itself")
    if isinstance(tensor, autograd.Tensor):
        return tensor
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"trace needs a tensor of torch or of ours, got {type(tensor).__name__}")
    if tensor.requires_grad:
        return torch.autograd.graph.get_gradient_edge(tensor).node
    return tensor


def _named(parameters) -> dict[str, Any]:
    """The given parameters as tensors by name."""
    if parameters is None:
        return {}
    if isinstance(parameters, nn.Module):
        return dict(parameters.named_parameters())
    if not isinstance(parameters, Mapping):
        kind = type(parameters).__name__
        raise TypeError(f"parameters must be a model or tensors by name, got {kind}")
    for name, tensor in parameters.items():
        if not isinstance(tensor, (torch.Tensor, autograd.Tensor)):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:
            raise ValueError(f"{name} is a result, not a leaf: only leaves have names in torch")
    return dict(parameters)


def _buffers(parameters) -> list[torch.Tensor]:
    return list(parameters.buffers()) if isinstance(parameters, nn.Module) else []


def _graph(roots: list, parameters: dict[str, Any], buffers: list, stops) -> Graph:
    stopped = set(stops)

    def parents_of(found):
        return [] if found in stopped else _parents(found)

    order = autograd.last_to_first(roots, parents_of)[::-1]
    index = {found: i for i, found in enumerate(order)}
    edges = [(index[p], i) for i, found in enumerate(order) for p in parents_of(found)]
    names = {id(tensor): name for name, tensor in parameters.items()}
    own = [leaf for leaf in map(_leaf, order) if isinstance(leaf, nn.Parameter)]
    own += [tensor for tensor in parameters.values() if not getattr(tensor, "parents", ())]
    counted = {_storage(tensor)[0] for tensor in own + buffers}
    nodes = [_node(found, names, counted, found in stopped) for found in order]
    return Graph(tuple(nodes), tuple(edges))


def _parents(found: Any) -> list:
    if isinstance(found, autograd.Tensor):
        return list(found.parents)
    return [function for function, _ in getattr(found, "next_functions", ()) if function]


def _node(found: Any, names: dict[int, str], counted: set, stop: bool) -> Node:
    tensor = _leaf(found)
    if tensor is not None:
        name, role = names.get(id(tensor), ""), "constant"
        if tensor.requires_grad:
            role = "parameter" if name or isinstance(tensor, nn.Parameter) else "leaf"
        return Node("", role, tuple(tensor.shape), name)
    op, shape = _operation(found)
    if stop:
        return Node(op, "input", shape)
    kept = _kept_by_ours(found) if isinstance(found, autograd.Tensor) else _kept_by_torch(found)
    saved = []
    for name, array in kept:
        storage, num_bytes = _storage(array)
        saved.append(Saved(name, 0 if storage in counted else num_bytes))
        counted.add(storage)
    return Node(op, "operation", shape, names.get(id(found), ""), tuple(saved))


def _leaf(found: Any) -> Any:
    """The tensor of a leaf or a constant; None for an operation."""
    if isinstance(found, autograd.Tensor):
        return None if found.parents else found
    if isinstance(found, torch.Tensor):
        return found
    return found.variable if type(found).__name__ == "AccumulateGrad" else None


def _operation(found: Any) -> tuple[str, tuple[int, ...]]:
    """Its name, as torch.log_softmax is called and not LogSoftmaxBackward0, and its shape."""
    if isinstance(found, autograd.Tensor):
        return found.op, found.shape
    plain = re.sub(r"Backward\d*$", "", type(found).__name__)
    op = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\dD)(?=[A-Z])", "_", plain).lower()
    results = found._input_metadata  # what arrives in backward is shaped like the results
    return op, tuple(results[0].shape) if results else ()


def _storage(array: Any) -> tuple[tuple, int]:
    """A key for the memory that an array or tensor lies in, and the bytes of all of it."""
    if isinstance(array, autograd.Tensor):
        array = array.data
    if isinstance(array, torch.Tensor):
        if array.layout is not torch.strided:
            raise ValueError(f"only strided tensors can be counted, got {array.layout}")
        storage = array.untyped_storage()
        return ("torch", storage._cdata), storage.nbytes()
    while isinstance(array.base, np.ndarray):
        array = array.base
    return ("numpy", id(array)), array.nbytes


def _kept_by_ours(tensor: autograd.Tensor) -> Iterator[tuple[str, np.ndarray]]:
    """Our engine is wasteful: it keeps every parent, and what its backward function refers to."""
    for parent in tensor.parents:
        yield "parent", parent.data
    functions = [tensor.gradients]
    while functions:
        for cell in functions.pop().__closure__ or ():
            for value in tree_leaves(cell.cell_contents):
                if isinstance(value, (np.ndarray, autograd.Tensor)):
                    yield "kept", value.data if isinstance(value, autograd.Tensor) else value
                elif callable(value) and hasattr(value, "__closure__"):
                    functions.append(value)


def _kept_by_torch(function: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a backward function saved. It is read raw: to unpack it would compute a checkpointed
    block again."""
    for attribute in dir(function):
        if not attribute.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(function, attribute)
        except RuntimeError:  # a custom function whose backward has run: freed
            continue
        for saved in raw if isinstance(raw, (tuple, list)) else [raw]:
            for tensor in _behind(saved):
                yield attribute.removeprefix("_raw_saved_"), tensor
    for name, value in getattr(function, "__dict__", {}).items():  # a custom function's own ctx
        yield from ((name, tensor) for tensor in _tensors(value))


def _behind(saved: Any) -> Iterator[torch.Tensor]:
    """The tensors that one saved entry holds on to, or what a hook packed in their place.

    What a checkpoint packs leads to its frame and the inputs kept there, which are packed again
    if the checkpoint lies in another one.
    """
    yield from (tensor for tensor in _tensors(saved.data) if not _is_python_number(tensor))
    for frame in _closed_over(saved.unpack_hook).values():
        if hasattr(frame, "saved_args"):
            by_name = _closed_over(frame.recompute_fn).get("kwargs")
            for held in tree_leaves([frame.saved_args, by_name]):
                yield from _behind(held) if hasattr(held, "unpack_hook") else _tensors(held)


def _closed_over(function: Any) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names, found = function.__code__.co_freevars if cells else (), {}
    for name, cell in zip(names, cells, strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            found[name] = cell.cell_contents
    return found


NARROWER = {
    torch.float64: torch.float32,
    torch.int64: torch.int32,
    torch.complex128: torch.complex64,
}


def _is_python_number(tensor: torch.Tensor) -> bool:
    """The 2 of x / 2: torch wraps it in a tensor that gives way to any other's dtype."""
    narrow = NARROWER.get(tensor.dtype)
    if tensor.dim() or narrow is None:
        return False
    return torch.result_type(tensor, torch.zeros((), dtype=narrow)) == narrow


def _tensors(values) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
