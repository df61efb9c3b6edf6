"""The replayed passes, against the engine's own backward and against torch's Jacobians."""

import numpy as np
import pytest
import torch

from course_lib.autograd import Tensor
from course_lib.replay import replay


def seeds_figure():
    x, y = Tensor(2.0), Tensor(1.0)
    w, b = Tensor(0.5, requires_grad=True), Tensor(-0.4, requires_grad=True)
    loss = ((w * x + b).tanh() - y) ** 2
    return loss, {"w": w, "b": b}


def reused():
    a = Tensor(3.0, requires_grad=True)
    return a * a + a * 2.0 + a, {"a": a}


def on_arrays():
    rng = np.random.default_rng(0)
    w, b = Tensor(rng.normal(size=(4, 3)), True), Tensor(rng.normal(size=3), True)
    x = Tensor(rng.normal(size=(2, 4)))
    return ((x @ w + b).relu().exp() / 2.0).mean(), {"w": w, "b": b}


@pytest.mark.parametrize("build", [seeds_figure, reused, on_arrays])
def test_the_gradients_are_those_of_backward(build):
    output, leaves = build()
    run = replay(output, leaves)
    output.backward()
    at_the_end = run.gradients(len(run.steps))
    for name, leaf in leaves.items():
        assert np.allclose(at_the_end[run.labels.index(name)], leaf.grad, rtol=1e-15, atol=0)


@pytest.mark.parametrize("build", [seeds_figure, reused, on_arrays])
def test_what_an_edge_hands_on_is_what_arrived_times_its_local_derivative(build):
    run = replay(*build())
    for done, step in enumerate(run.steps):
        if step.phase == "backward":
            arrived = run.gradients(done).get(step.node, np.ones(())).ravel()
            for handed in (h for h in step.handed if h.local is not None):
                given = arrived @ handed.local
                assert np.allclose(given, handed.gradient.ravel(), rtol=1e-12, atol=1e-15)


def test_a_local_derivative_is_torchs_jacobian():
    a = np.arange(6.0).reshape(2, 3) / 3
    b = np.arange(6.0).reshape(3, 2) - 2
    run = replay((Tensor(a, True) @ Tensor(b, True)).sum(), {})
    product = next(s for s in run.steps if s.phase == "backward" and len(s.handed) == 2)
    jacobians = torch.autograd.functional.jacobian(torch.matmul, (torch.tensor(a), torch.tensor(b)))
    for handed, jacobian in zip(product.handed, jacobians, strict=True):
        assert np.allclose(handed.local, jacobian.reshape(4, 6), rtol=0, atol=1e-12)


def test_a_local_derivative_of_a_number_by_a_number_is_written_out():
    run = replay(*reused())
    handed = [h for step in run.steps for h in step.handed]
    assert handed and all(h.local.shape == (1, 1) for h in handed)


def test_each_result_is_computed_once_and_then_handed_on_once():
    output, names = seeds_figure()
    run = replay(output, names)
    made = [i for i, node in enumerate(run.graph.nodes) if node.role == "operation"]
    phases = [(step.phase, step.node) for step in run.steps]
    forward = [("forward", i) for i in made]
    assert phases == [*forward, *(("backward", i) for i in made[::-1]), ("update", None)]


def test_a_value_used_twice_gets_the_sum_of_both_ways():
    a = Tensor(3.0, requires_grad=True)
    run = replay(a * a, {"a": a})
    assert [float(h.gradient) for h in run.steps[1].handed] == [3.0, 3.0]
    assert float(run.gradients(2)[0]) == 6.0


def test_labels_are_given_or_free():
    x, w = Tensor(2.0), Tensor([1.0, 1.0], requires_grad=True)
    run = replay((w * x * 3.0 + Tensor([0.5, 0.5])).sum(), {"v1": x})
    assert sorted(run.labels) == ["3", "c1", "c2", "v1", "v2", "v3", "v4", "v5"]
    constants = replay((w * x + Tensor([0.5, 0.5])).sum(), {"c1": x}).labels
    assert sorted(constants) == ["c1", "c2", "c3", "v1", "v2", "v3"]


def test_nothing_of_the_reader_s_is_changed():
    output, leaves = seeds_figure()
    run = replay(output, leaves)
    assert all(leaf.grad is None for leaf in leaves.values())
    leaves["w"].data[...] = 7.0
    assert float(run.values[run.labels.index("w")]) == 0.5


@pytest.mark.parametrize(("n", "written"), [(64, (1, 64)), (65, None)])
def test_a_table_of_more_than_64_numbers_is_not_written_out(n, written):
    w = Tensor(np.ones(n), requires_grad=True)
    run = replay((w * 2.0).sum(), {"w": w})
    local = {run.graph.nodes[s.node].op: s.handed[0].local for s in run.steps if s.handed}
    assert local["*"] is None and (written is None) == (local["sum"] is None)
    assert written is None or local["sum"].shape == written


def test_an_empty_array_has_no_table():
    w = Tensor(np.zeros((0, 3)), requires_grad=True)
    run = replay((w * 2.0).sum(), {"w": w})
    assert all(handed.local is None for step in run.steps for handed in step.handed)


W = Tensor(1.0, requires_grad=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(1), {}), TypeError, "got Tensor"),
        ((W, {}), ValueError, "no graph"),
        ((Tensor(1.0) * 2.0, {}), ValueError, "no graph"),
        ((W * np.ones(2), {}), ValueError, "end with .sum"),
        ((W * 2.0, {"w": 3.0}), TypeError, "w must be a tensor"),
        ((W * 2.0, {"x": Tensor(3.0)}), ValueError, "x isn't part of the graph"),
        ((W * 2.0, {}, 0), ValueError, "must be positive"),
        ((W * 2.0, {}, -0.1), ValueError, "must be positive"),
        ((W * 2.0, {}, float("nan")), ValueError, "must be finite"),
        ((W * 2.0, {}, float("inf")), ValueError, "must be finite"),
        ((W * 2.0, {}, Tensor(0.1)), TypeError, "must be a number"),
    ],
)
def test_what_cannot_be_replayed_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        replay(*arguments)
