"""Our engine against torch, finite differences and its own rules."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from course_lib.autograd import Tensor

SHAPES = [(3, 4), (1, 4), (3, 1), (4,), (1,), ()]
UNARY = {
    "neg": lambda x: -x,
    "tanh": lambda x: x.tanh(),
    "relu": lambda x: x.relu(),
    "exp": lambda x: (x * 0.3).exp(),
    "log": lambda x: (x * x + 1.0).log(),
    "square": lambda x: x**2,
    "root": lambda x: (x * x + 1.0) ** 0.5,
    "reversed": lambda x: 1.5 - x,
    "over": lambda x: 2.0 / (x * x + 1.0),
}
BINARY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / (b * b + 1.0),
}


def close(ours, theirs):
    """|a − b| ≤ 1e-12 · (1 + max|b|): relative, since exp and division make large gradients."""
    theirs = theirs.numpy()
    return np.abs(ours - theirs).max(initial=0) <= 1e-12 * (1 + np.abs(theirs).max(initial=0))


@settings(max_examples=200)
@given(data=st.data())
def test_random_expressions_have_torchs_gradients(data):
    """Shapes that broadcast, tensors used again, branches that are cut off."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=4))
    leaves = [rng.normal(size=shape) for shape in shapes]
    ours = [Tensor(leaf, requires_grad=True) for leaf in leaves]
    theirs = [torch.tensor(leaf, requires_grad=True) for leaf in leaves]
    our_values, their_values = list(ours), list(theirs)
    for _ in range(draw(st.integers(1, 8))):
        pick = st.integers(0, len(our_values) - 1)
        if draw(st.booleans()):
            f, i = UNARY[draw(st.sampled_from(sorted(UNARY)))], draw(pick)
            new = f(our_values[i]), f(their_values[i])
        else:
            f, i, j = BINARY[draw(st.sampled_from(sorted(BINARY)))], draw(pick), draw(pick)
            new = f(our_values[i], our_values[j]), f(their_values[i], their_values[j])
        assume(np.abs(new[0].data).max() < 1e3)  # no overflow, and no cancelling of large numbers
        if draw(st.integers(0, 5)) == 0:
            new = Tensor(new[0].data), new[1].detach()
        our_values.append(new[0])
        their_values.append(new[1])
    our_sum, their_sum = (
        sum((value.sum() for value in values[1:]), values[0].sum())
        for values in (our_values, their_values)
    )
    assert close(our_sum.data, their_sum.detach())
    our_sum.backward()
    their_sum.backward()
    for a, b in zip(ours, theirs, strict=True):
        assert close(a.grad, b.grad)
    once = [a.grad.copy() for a in ours]
    our_sum.backward()
    for a, before in zip(ours, once, strict=True):
        assert np.array_equal(a.grad, 2 * before)  # a second backward doubles the leaves exactly


def leaf(*shape, seed=0):
    array = np.random.default_rng(seed).normal(size=shape)
    return Tensor(array, requires_grad=True), torch.tensor(array, requires_grad=True)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum(0).tanh().sum(),
        lambda x: x.sum(-1).exp().sum(),
        lambda x: (x * x.mean(0)).sum(),
        lambda x: (x * x.mean((0, 1))).sum(),
        lambda x: x.mean() * 3.0,
    ],
)
def test_sums_and_means_along_axes(f):
    ours, theirs = leaf(3, 4)
    a, b = f(ours), f(theirs)
    a.backward()
    b.backward()
    assert close(a.data, b.detach()) and close(ours.grad, theirs.grad)


@pytest.mark.parametrize("shapes", [((3, 4), (4, 2)), ((5, 3, 4), (4, 2)), ((5, 3, 4), (5, 4, 2))])
def test_matrix_products(shapes):
    (a, ta), (b, tb) = leaf(*shapes[0]), leaf(*shapes[1], seed=1)
    ((a @ b) ** 2).sum().backward()
    ((ta @ tb) ** 2).sum().backward()
    assert close(a.grad, ta.grad) and close(b.grad, tb.grad)


@pytest.mark.parametrize("name", UNARY)
def test_slopes_at_0_are_torchs(name):
    at_0 = np.array([0.0, -0.0])
    ours, theirs = Tensor(at_0, requires_grad=True), torch.tensor(at_0, requires_grad=True)
    UNARY[name](ours).sum().backward()
    UNARY[name](theirs).sum().backward()
    assert np.array_equal(ours.grad, theirs.grad.numpy())


@pytest.mark.parametrize("n", [0, 1, 2, 3, -1, 0.5, np.int64(2), np.float32(0.5)])
def test_powers_are_torchs_from_0_on(n):
    bases = np.array([1.0, 2.5] if n < 1 and n else [0.0, 1.0, 2.5])
    ours, theirs = Tensor(bases, requires_grad=True), torch.tensor(bases, requires_grad=True)
    (ours**n).sum().backward()
    (theirs ** float(n)).sum().backward()
    assert close(ours.grad, theirs.grad)


def test_a_quotient_of_large_numbers_has_torchs_gradient():
    a, b = (Tensor(x, requires_grad=True) for x in (2e200, 1e200))
    ta, tb = (torch.tensor(t.data, requires_grad=True) for t in (a, b))
    (a / b).backward()
    (ta / tb).backward()
    assert close(a.grad, ta.grad) and a.grad == 1e-200
    assert close(b.grad, tb.grad) and b.grad == -2e-200


def test_finite_differences_agree():
    def f(x):
        return ((x @ x).tanh() * x.exp().sum()).mean()

    x = np.random.default_rng(3).normal(size=(3, 3))
    t = Tensor(x, requires_grad=True)
    f(t).backward()
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-6
        slope = (f(Tensor(x + step)).data - f(Tensor(x - step)).data) / 2e-6
        assert abs(slope - t.grad[index]) < 1e-7


def test_leaves_add_up_and_interior_tensors_keep_nothing():
    w = Tensor(3.0, requires_grad=True)
    square = w * w
    for expected in (6.0, 12.0, 18.0):
        square.backward()
        assert w.grad == expected and square.grad is None
    w.backward()
    assert w.grad == 19.0


def test_a_chain_of_10_000_additions_has_gradient_1_and_needs_no_recursion():
    w = Tensor(0.0, requires_grad=True)
    total = w
    for _ in range(10_000):
        total = total + 1.0
    total.backward()
    assert w.grad == 1.0 and total.data == 10_000
    del total


def test_memory_returns_when_the_result_is_dropped_without_the_collector():
    gc.disable()
    try:
        w = Tensor(np.ones(3), requires_grad=True)
        middle = (w * 2.0).exp()
        gone = weakref.ref(middle.data)
        loss = middle.tanh().sum()
        loss.backward()
        del middle, loss
        assert gone() is None
    finally:
        gc.enable()


def cycle():
    a = Tensor(1.0, requires_grad=True)
    b = a * 2.0
    b.parents = (b,)
    b.backward()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: (leaf(3)[0] * 2.0).backward(), ValueError, "no scalar"),
        (lambda: leaf()[0] ** True, TypeError, "exponent must be a number"),
        (lambda: leaf()[0] ** float("nan"), ValueError, "exponent must be finite"),
        (lambda: Tensor(1.0).backward(), ValueError, "no graph"),
        (lambda: Tensor(leaf(3)[0].data).sum().backward(), ValueError, "no graph"),
        (lambda: leaf(3)[0] + leaf(4)[0], ValueError, r"\+: shapes \(3,\) and \(4,\) don't"),
        (lambda: leaf(3, 4)[0] @ leaf(3, 4)[0], ValueError, r"got \(3, 4\) and \(3, 4\)"),
        (lambda: leaf(3)[0] @ leaf(3)[0], ValueError, "@ needs"),
        (lambda: leaf(3)[0] ** leaf(3)[0], TypeError, "must be a number"),
        (cycle, ValueError, "cycle"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_numpy_on_the_left_works():
    w = Tensor(np.ones(2), requires_grad=True)
    (np.array([2.0, 30.0]) * w).sum().backward()
    assert w.grad.tolist() == [2.0, 30.0]
