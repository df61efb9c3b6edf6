"""A reverse-mode engine on numpy arrays: what torch.autograd does, in one sitting.

An operation keeps its parents and a function from its output's gradient to theirs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from course_lib.checks import number


class Tensor:
    """A float64 array that can remember how it was made.

    >>> w = Tensor(3.0, requires_grad=True)
    >>> (w * w).backward()
    >>> float(w.grad)
    6.0
    """

    __slots__ = ("data", "requires_grad", "grad", "op", "parents", "gradients")
    __array_ufunc__ = None  # with numpy on the left, the op is ours
    shape = property(lambda self: self.data.shape)

    def __init__(self, data: Any, requires_grad: bool = False):
        self.data = np.asarray(data, dtype=np.float64)
        self.requires_grad, self.grad = requires_grad, None
        self.op, self.parents, self.gradients = "", (), None

    def __repr__(self) -> str:
        return f"Tensor({np.array2string(self.data, precision=4, separator=', ')})"

    def backward(self) -> None:
        """Add this scalar's gradient to `.grad` of every leaf that needs one.

        Raises ValueError for no graph, more than one number, a cycle.
        """
        if not self.requires_grad:
            raise ValueError("this tensor has no graph: nothing it was made from needs a gradient")
        if self.data.size != 1:
            raise ValueError(f"shape {self.shape} is no scalar: end with .sum() or .mean()")
        arrived = {id(self): np.ones(self.shape)}
        for tensor in last_to_first([self], lambda t: [p for p in t.parents if p.requires_grad]):
            g = arrived.pop(id(tensor))
            if tensor.gradients is None:
                tensor.grad = g.copy() if tensor.grad is None else tensor.grad + g
                continue
            for parent, part in zip(tensor.parents, tensor.gradients(g), strict=True):
                if parent.requires_grad:
                    key, part = id(parent), unbroadcast(part, parent.data.shape)
                    arrived[key] = arrived[key] + part if key in arrived else part

    def __add__(self, other: Any) -> "Tensor":
        return _binary("+", np.add, self, other, lambda g, a, b: (g, g))

    def __sub__(self, other: Any) -> "Tensor":
        return _binary("-", np.subtract, self, other, lambda g, a, b: (g, -g))

    def __mul__(self, other: Any) -> "Tensor":
        return _binary("*", np.multiply, self, other, lambda g, a, b: (g * b, g * a))

    def __truediv__(self, other: Any) -> "Tensor":
        return _binary("/", np.divide, self, other, lambda g, a, b: (g / b, -g * (a / b / b)))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Tensor":
        return _elementwise("neg", self, -self.data, lambda x, y: -1.0)

    def __rsub__(self, other: Any) -> "Tensor":
        return Tensor(other) - self

    def __rtruediv__(self, other: Any) -> "Tensor":
        return Tensor(other) / self

    def __pow__(self, n: float) -> "Tensor":
        n = number("the exponent", n)

        def slope(x, y):
            return n * x ** (n - 1) if n else np.zeros_like(x)  # 0 · 0⁻¹ would be NaN

        return _elementwise(f"**{n:g}", self, self.data**n, slope)

    def __matmul__(self, other: Any) -> "Tensor":
        other = other if isinstance(other, Tensor) else Tensor(other)
        a, b = self.data, other.data
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            raise ValueError(f"@ needs (…, n, m) and (…, m, p), got {a.shape} and {b.shape}")
        swap = partial(np.swapaxes, axis1=-1, axis2=-2)
        return _made("@", a @ b, (self, other), lambda g: (g @ swap(b), swap(a) @ g))

    def sum(self, axis: int | tuple[int, ...] | None = None) -> "Tensor":
        y, shape = self.data.sum(axis=axis), self.data.shape
        kept = self.data.sum(axis=axis, keepdims=True).shape
        return _made("sum", y, (self,), lambda g: (np.broadcast_to(g.reshape(kept), shape),))

    def mean(self, axis: int | tuple[int, ...] | None = None) -> "Tensor":
        return self.sum(axis) * (self.data.sum(axis=axis).size / self.data.size)

    def relu(self) -> "Tensor":
        return _elementwise("relu", self, np.maximum(self.data, 0), lambda x, y: x > 0)

    def tanh(self) -> "Tensor":
        return _elementwise("tanh", self, np.tanh(self.data), lambda x, y: 1 - y * y)

    def exp(self) -> "Tensor":
        return _elementwise("exp", self, np.exp(self.data), lambda x, y: y)

    def log(self) -> "Tensor":
        return _elementwise("log", self, np.log(self.data), lambda x, y: 1 / x)


def _made(op: str, data: Any, parents: tuple, gradients: Callable) -> Tensor:
    out = Tensor(data)
    if any(parent.requires_grad for parent in parents):
        out.requires_grad, out.op, out.parents, out.gradients = True, op, parents, gradients
    return out


def _binary(op: str, compute: Callable, a: Tensor, b: Any, gradients: Callable) -> Tensor:
    b = b if isinstance(b, Tensor) else Tensor(b)
    x, y = a.data, b.data
    try:
        data = compute(x, y)
    except ValueError as error:
        raise ValueError(f"{op}: shapes {x.shape} and {y.shape} don't broadcast") from error
    return _made(op, data, (a, b), lambda g: gradients(g, x, y))


def _elementwise(op: str, a: Tensor, y: Any, slope: Callable) -> Tensor:
    return _made(op, y, (a,), lambda g: (g * slope(a.data, y),))


def unbroadcast(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if g.shape == shape:  # else sum over the axes along which the tensor was repeated
        return g
    g = g.sum(axis=tuple(range(g.ndim - len(shape))))
    return g.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def last_to_first(roots: list, parents_of: Callable) -> list:
    """All that the roots were made from, each before its parents, without recursion."""
    order, entered, left, stack = [], set(), set(), [(root, False) for root in roots]
    while stack:
        node, leaving = stack.pop()
        if leaving:
            left.add(node)
            order.append(node)
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack += [(parent, False) for parent in parents_of(node)[::-1]]
        elif node not in left:
            raise ValueError("the graph has a cycle: a tensor is its own ancestor")
    return order[::-1]
