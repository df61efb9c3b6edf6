"""The drawn graph and every step of the stepper, read back from the SVG."""

import re
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course_lib import models, units
from course_lib.autograd import Tensor
from course_lib.graph import Graph, Node, trace
from course_lib.replay import replay
from course_lib.views import graph as view
from course_lib.views import stepper
from course_lib.views.layout import layout


def elements(svg, kind):
    return [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}" + kind)]


def texts(svg):
    return [element.text for element in elements(svg, "text")]


def boxes(svg):
    """(left, top, right, bottom) of every node."""
    found = []
    for e in elements(svg, "rect"):
        if e.get("data-role"):
            x, y, w, h = (float(e.get(k)) for k in ("x", "y", "width", "height"))
            found.append((x, y, x + w, y + h))
    return found


def mlp_graph(*sizes):
    model = models.mlp(*sizes)
    loss = F.cross_entropy(model(torch.randn(32, sizes[0])), torch.zeros(32).long())
    return trace(loss, model)


def residual_graph(blocks):
    linears = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3 * blocks))
    x = torch.randn(2, 4)
    for i in range(blocks):
        a, b, c = linears[3 * i : 3 * i + 3]
        x = x + torch.relu(a(x)) * torch.tanh(b(x)) + c(x).mean()
    return trace(x.sum(), linears)


def random_graph(seed):
    rng = np.random.default_rng(seed)
    nodes = tuple(Node("op", "operation", ()) for _ in range(20))
    edges = [(int(rng.integers(0, child)), child) for child in range(1, 20) for _ in range(2)]
    return Graph(nodes, tuple(edges))


A = Tensor(3.0, requires_grad=True)
GRAPHS = {
    "MLP": mlp_graph(8, 16, 16, 4),
    "residual": residual_graph(3),
    "a * a": trace(A * A, {"a": A}),
    "leaf": trace(torch.ones(3)),
    **{f"random {seed}": random_graph(seed) for seed in range(5)},
}


# --- places ---


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_edges_go_down_and_nodes_stay_apart(graph):
    places = layout(graph)
    for (parent, child), route in zip(graph.edges, places.edges, strict=True):
        assert route[0] == places.nodes[parent] and route[-1] == places.nodes[child]
        rows = [row for _, row in route]
        assert rows == list(range(rows[0], rows[-1] + 1))  # one place a row, so around the nodes
    for (x, row), (other, other_row) in combinations(places.nodes, 2):
        assert row != other_row or abs(x - other) > 1 - 1e-9
    assert min(x for x, _ in places.nodes) > -1e-9
    assert max(x for x, _ in places.nodes) <= places.width - 1 + 1e-9
    assert {row for _, row in places.nodes} == set(range(places.rows))


def test_a_chain_is_drawn_straight():
    chain = trace(A.tanh().exp().relu())
    assert {x for x, _ in layout(chain).nodes} == {0.0}


def crossings(places):
    """Pairs of edge pieces between the same two rows that cross."""
    pieces = {piece for route in places.edges for piece in zip(route, route[1:], strict=False)}
    return sum(
        (a[0] - c[0]) * (b[0] - d[0]) < -1e-9
        for (a, b), (c, d) in combinations(sorted(pieces), 2)
        if a[1] == c[1]
    )


def test_nodes_are_sorted_so_that_fewer_edges_cross(monkeypatch):
    graphs = [*GRAPHS.values(), *(random_graph(seed) for seed in range(5, 15))]
    sorted_by_neighbours = sum(crossings(layout(graph)) for graph in graphs)
    monkeypatch.setattr("course_lib.views.layout.SWEEPS", 0)
    assert sorted_by_neighbours < 0.6 * sum(crossings(layout(graph)) for graph in graphs)


def test_edges_from_one_node_share_their_way():
    """Else a weight used at every step of a loop would make a picture as wide as it is long."""
    w, h = torch.ones(3, requires_grad=True), torch.zeros(3)
    for _ in range(30):
        h = torch.tanh(h * w)
    assert layout(trace(h)).width < 8


# --- the picture ---


def drawn_edges(svg):
    """Points along every curve: 21 on each piece."""
    t = np.linspace(0, 1, 21)[:, None]
    for path in elements(svg, "path"):
        if path.get("fill") == "none":
            xy = np.array([float(n) for n in re.findall(r"-?[\d.]+", path.get("d"))]).reshape(-1, 2)
            for i in range(0, len(xy) - 1, 3):
                start, c, d, end = xy[i : i + 4]
                near_start = (1 - t) ** 2 * ((1 - t) * start + 3 * t * c)
                yield from near_start + t**2 * (3 * (1 - t) * d + t * end)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_no_edge_is_drawn_through_a_node(graph):
    svg = view.graph_picture(graph, "").svg
    inside = [(left + 1, top + 1, right - 1, bottom - 1) for left, top, right, bottom in boxes(svg)]
    for x, y in drawn_edges(svg):
        assert not any(x0 < x < x1 and y0 < y < y1 for x0, y0, x1, y1 in inside)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_node_and_edge_is_drawn_inside_the_picture(graph):
    svg = view.graph_picture(graph, "a title").svg
    width, height = (float(ElementTree.fromstring(svg).get(k)) for k in ("width", "height"))
    assert len(boxes(svg)) == len(graph.nodes)
    assert len(elements(svg, "g")) == len(graph.edges)
    for left, top, right, bottom in boxes(svg):
        assert 0 <= left < right <= width and 30 < top < bottom <= height
    assert "a title" in texts(svg)


@pytest.mark.parametrize("graph", [GRAPHS["MLP"], GRAPHS["residual"]])
def test_the_picture_says_shapes_and_kept_bytes(graph):
    picture = view.graph_picture(graph, "")
    written = texts(picture.svg)
    for node in graph.nodes:
        if node.saved_bytes:
            assert f"keeps {units.binary(node.saved_bytes)}" in written
        assert (node.name or node.op) in written
    assert f"{units.binary(graph.saved_bytes)} kept for backward" in picture.sentence
    assert picture.sentence.startswith(f"{len(graph.nodes)} nodes (")


def test_text_stays_inside_its_node():
    graph = GRAPHS["MLP"]
    svg = view.graph_picture(graph, "").svg
    lines = [text for text in elements(svg, "text") if text.get("text-anchor") == "middle"]
    for text in lines:
        x, y, half = float(text.get("x")), float(text.get("y")), 3.3 * len(text.text)
        assert any(
            left <= x - half and x + half <= right and top < y - 9 and y <= bottom
            for left, top, right, bottom in boxes(svg)
        ), text.text


def test_the_two_edges_of_a_times_a_can_be_told_apart():
    svg = view.graph_picture(GRAPHS["a * a"], "").svg
    curves = [e.get("d") for e in elements(svg, "path") if e.get("fill") == "none"]
    assert len(set(curves)) == 2


def test_one_node_makes_a_picture_and_a_sentence():
    picture = view.graph_picture(GRAPHS["leaf"], "")
    assert picture.sentence == "1 node (1 constant) and 0 edges; 0 B kept for backward."


def test_a_long_name_keeps_both_its_ends():
    linear = torch.nn.Linear(2, 2)
    outer = torch.nn.ModuleDict({"a_rather_long_name": torch.nn.ModuleDict({"inside": linear})})
    written = texts(view.graph_picture(trace(linear(torch.ones(1, 2)), outer), "names").svg)
    long = [line for line in written if "…" in line]
    assert len(set(long)) == 2 and all(line.startswith("a_rather") for line in long)
    assert {line.split(".")[-1] for line in long} == {"weight", "bias"}


def test_an_input_says_where_it_came_from_and_hiding_is_said():
    nodes = (Node("exp", "input", (2,)), Node("copy_slices", "operation", (2,)))
    picture = view.graph_picture(Graph(nodes, ((0, 1),)), "")
    assert "from exp" in texts(picture.svg)
    assert "not counted: what copy_slices may keep" in picture.sentence


def test_what_keeps_has_a_swatch_and_what_is_given_is_round():
    graph = GRAPHS["MLP"]
    svg = view.graph_picture(graph, "").svg
    drawn = [e for e in elements(svg, "rect") if e.get("data-name") == "activations"]
    assert len(drawn) == sum(node.saved_bytes > 0 for node in graph.nodes)
    corners = {e.get("data-role"): e.get("rx") for e in elements(svg, "rect") if e.get("data-role")}
    assert corners["operation"] != corners["parameter"]


def test_only_a_graph_can_be_drawn():
    with pytest.raises(TypeError, match="got Linear"):
        view.show_graph(torch.nn.Linear(2, 2), "")


# --- the stepper ---


def seeds_figure():
    x, y = Tensor(2.0), Tensor(1.0)
    w, b = Tensor(0.5, requires_grad=True), Tensor(-0.4, requires_grad=True)
    z = w * x + b
    y_hat = z.tanh()
    loss = (y_hat - y) ** 2
    return loss, {"w": w, "x": x, "b": b, "z": z, "y_hat": y_hat, "y": y, "L": loss}


def reused():
    a = Tensor(3.0, requires_grad=True)
    return (a * a + 2.0) * a, {"a": a}


def on_arrays():
    w = Tensor(np.arange(12.0).reshape(4, 3), requires_grad=True)
    x = Tensor(np.ones((2, 4)))
    return (x @ w).tanh().sum() / 2.0 - Tensor([[1.0]]).sum(), {"w": w, "x": x}


def on_vectors():
    a = Tensor([1 / 3, 2 / 3, -1 / 3], requires_grad=True)
    v = a * a + np.array([3.0, 6.0, 9.0])
    return (v / np.array([3.0, 3.0, 3.0]) + v / np.array([1.5, 1.5, 1.5])).sum(), {"a": a}


def used_three_times():
    a = Tensor(3.0, requires_grad=True)
    return a * a + 2.0 * a, {"a": a}


def used_by_many():
    a, b = Tensor(0.5, requires_grad=True), Tensor(-1.25, requires_grad=True)
    c = (a * b + a) * (b * b - a) + (a / b) * (a + b)
    return (c.tanh() + a) * (c.exp() + b), {"a": a, "b": b}


STEPPED = {
    "seed": seeds_figure,
    "reused": reused,
    "three times": used_three_times,
    "many": used_by_many,
    "arrays": on_arrays,
    "vectors": on_vectors,
}


@pytest.fixture(scope="module", params=STEPPED.values(), ids=STEPPED)
def run(request):
    return replay(*request.param())


def test_every_step_of_the_seeds_figure_is_said():
    view = stepper.step_view(replay(*seeds_figure()))
    assert [view(stop).sentence for stop in view.stops] == [
        "Given: w = 0.5, x = 2, b = −0.4, y = 1. Nothing is computed yet.",
        "Forward: v1 = w × x = 0.5 × 2 = 1.",
        "Forward: z = v1 + b = 1 + (−0.4) = 0.6.",
        "Forward: y_hat = tanh(z) = tanh(0.6) = 0.537.",
        "Forward: v2 = y_hat − y = 0.537 − 1 = −0.463.",
        "Forward: L = v2 ** 2 = (−0.463) ** 2 = 0.2143.",
        "Backward begins with dL/dL = 1; times the local derivative −0.9259 it hands −0.9259 to "
        "v2.",
        "Backward: at v2, −0.9259 has arrived; times the local derivative 1 it hands −0.9259 to "
        "y_hat.",
        "Backward: at y_hat, −0.9259 has arrived; times the local derivative 0.7116 it hands "
        "−0.6589 to z.",
        "Backward: at z, −0.6589 has arrived; times the local derivative 1 it hands −0.6589 to "
        "v1; times the local derivative 1 it hands −0.6589 to b.",
        "Backward: at v1, −0.6589 has arrived; times the local derivative 2 it hands −1.3177 to w.",
        "Update, against the gradient: w = 0.5 − 0.1 × (−1.3177) = 0.6318; b = −0.4 − 0.1 × "
        "(−0.6589) = −0.3341.",
    ]


def test_every_step_draws_the_values_and_gradients_known_so_far(run):
    view = stepper.step_view(run)
    for done, stop in enumerate(view.stops):
        svg = view(stop).svg
        written = texts(svg)
        computed = [s.node for s in run.steps[:done] if s.phase == "forward"]
        made = sum(node.role == "operation" for node in run.graph.nodes)
        assert written.count("?") == made - len(computed)
        for node in computed:
            assert stepper._boxed(run.values[node]) in written
        gradients = run.gradients(done)
        assert sum(line.startswith("grad ") for line in written) == len(gradients)
        for gradient in gradients.values():
            assert f"grad {stepper._boxed(gradient)}" in written
        handed = [h for step in run.steps[:done] for h in step.handed]
        assert sum(line.startswith("× ") for line in written) == len(handed)
        for h in handed:
            assert stepper._on_edge(h.local) in written
        arrows = [float(re.search(r"l-4 (-?8)", e.get("d"))[1]) for e in elements(svg, "path")
                  if re.search(r"l-4 -?8h8Z", e.get("d"))]  # fmt: skip
        assert sum(up > 0 for up in arrows) == len(handed)
        waiting = [e for e in elements(svg, "rect") if e.get("stroke-dasharray")]
        assert len(waiting) == made - len(computed)
        swatches = [e for e in elements(svg, "rect") if e.get("data-name") == "gradients"]
        assert len(swatches) == len(gradients)
        marked = [e for e in elements(svg, "rect") if e.get("stroke-width") == "3"]
        leaves = sum(node.role in ("leaf", "parameter") for node in run.graph.nodes)
        assert len(marked) == (0 if done == 0 else leaves if stop == "update" else 1)


def test_the_stepper_s_picture_keeps_its_size_and_its_text_inside(run):
    view = stepper.step_view(run)
    sizes = set()
    for stop in view.stops:
        svg = view(stop).svg
        sizes.add(tuple(ElementTree.fromstring(svg).get(k) for k in ("width", "height")))
        inside = [t for t in elements(svg, "text") if not t.text.startswith("× ")]
        for text in inside:
            x, y, half = float(text.get("x")), float(text.get("y")), 3.2 * len(text.text)
            assert any(
                left <= x - half and x + half <= right and top < y - 9 and y <= bottom
                for left, top, right, bottom in boxes(svg)
            ), text.text
    assert len(sizes) == 1


def test_local_derivatives_don_t_cover_each_other_or_a_node(run):
    svg = stepper.step_view(run)("update").svg
    labels = [t for t in elements(svg, "text") if t.text.startswith("× ")]
    spots = [(float(t.get("x")), float(t.get("y")), 3.3 * len(t.text)) for t in labels]
    for (x, y, half), (other_x, other_y, other_half) in combinations(spots, 2):
        assert abs(x - other_x) > half + other_half or abs(y - other_y) > 14
    for x, y, half in spots:
        for left, top, right, bottom in boxes(svg):
            assert x + half < left or x - half > right or y < top or y - 10 > bottom


def test_the_sentence_says_when_gradients_add_up():
    a = Tensor(3.0, requires_grad=True)
    view = stepper.step_view(replay(a * a, {"a": a}))
    assert view("backward, v1").sentence == (
        "Backward begins with dv1/dv1 = 1; times the local derivative 3 it hands 3 to a; times "
        "the local derivative 3 it hands 3 to a, which adds to what is there."
    )


@pytest.mark.parametrize(
    ("local", "said"),
    [
        (None, "a table of local derivatives"),
        (np.array([[0.5]]), "the local derivative 0.5"),
        (np.diag([1.0, 0.0]), "the local derivative [1, 0]"),
        (np.ones((2, 2)), "a 2 × 2 table of local derivatives"),
        (np.ones((1, 3)), "a 1 × 3 table of local derivatives"),
        (np.eye(4), "a 4 × 4 table of local derivatives"),
    ],
)
def test_a_local_derivative_is_said_as_shortly_as_it_can_be(local, said):
    assert stepper._times(local) == said


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda w: w * 1e-8, "Forward: v1 = w × 1e−08 = 3 × 1e−08 = 3e−08."),
        (lambda w: w * (1 / 3), "Forward: v1 = w × 0.3333 = 3 × 0.3333 = 1."),
        (lambda w: -w, "Forward: v1 = −(w) = −(3) = −3."),
        (lambda w: w ** 2, "Forward: v1 = w ** 2 = 3 ** 2 = 9."),
        (lambda w: w.log(), "Forward: v1 = log(w) = log(3) = 1.0986."),
    ],
)  # fmt: skip
def test_numbers_are_said_so_that_the_arithmetic_holds(build, sentence):
    w = Tensor(3.0, requires_grad=True)
    view = stepper.step_view(replay(build(w), {"w": w}))
    assert view(view.stops[1]).sentence == sentence
    assert view("start").sentence == "Given: w = 3. Nothing is computed yet."


def test_a_small_arrays_shape_can_be_read():
    assert stepper._number(np.array([[1.0], [2.0]])) == "[[1], [2]]"
    assert stepper._number(np.array([1.0, 2.0])) == "[1, 2]"
    assert stepper._number(np.ones((2, 2))) == "an array (2, 2)"


def test_a_step_to_infinity_is_shown(recwarn):
    with np.errstate(all="ignore"):
        x = Tensor(0.0, requires_grad=True)
        view = stepper.step_view(replay(x.log(), {"x": x}))
    assert "times the local derivative inf it hands inf to x" in view("backward, v1").sentence
    assert not recwarn.list


def test_the_walk_shows_every_stop_and_refuses_others(monkeypatch):
    monkeypatch.setattr("course_lib.views.controls.display", lambda *a, **k: None)
    loss, names = seeds_figure()
    box = stepper.step_through(loss, **names)
    view, seen = stepper.step_view(replay(loss, names)), set()
    for stop in view.stops:
        box.values["step"].value = stop
        assert stop == "start" or box.image.value not in seen
        seen.add(box.image.value)
        assert re.sub("<.*?>", "", box.sentence.value) == view(stop).sentence
    with pytest.raises(ValueError, match="step must be one of"):
        view("nowhere")
    with pytest.raises(TypeError, match="our engine"):
        stepper.step_through(torch.ones(1))
