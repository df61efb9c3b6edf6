"""The stepper: both passes over a graph of our engine, node by node, and the update."""

from collections.abc import Callable

import numpy as np

from course_lib.autograd import Tensor
from course_lib.replay import Replay, Step, plain, replay
from course_lib.views import controls, style
from course_lib.views.graph import LONGEST, Canvas, width_of
from course_lib.views.layout import Layout, layout

FEW = 3  # numbers that are written out; of a larger array the shape is
LEAVES = ("parameter", "leaf")
SIGNS = {"+": "+", "-": "−", "*": "×", "/": "/", "@": "@"}


def step_through(output: Tensor, /, rate: float = 0.1, **names: Tensor):
    """Walk through forward, backward and update of our engine's `output`, node by node.

    The names label the tensors that they are given for: step_through(loss, w=w, x=x).
    """
    view = step_view(replay(output, names, rate))
    return controls.explore(view, step=controls.Walk("step", view.stops, view.stops[0]))


def show_step(output: Tensor, stop: str, /, rate: float = 0.1, **names: Tensor) -> None:
    """Show one stop of that walk, such as "update", without controls."""
    style.show(step_view(replay(output, names, rate))(stop))


def step_view(run: Replay) -> Callable[[str], style.Picture]:
    """The stepper's view, with its `stops`: "start", then one for each step."""
    places = layout(run.graph)
    stops = ("start", *(_stop(run, step) for step in run.steps))
    most = width_of([_widest(run, i) for i in range(len(run.values))])

    def view(step: str) -> style.Picture:
        if step not in stops:
            raise ValueError(f"step must be one of {list(stops)}, got {step!r}")
        done = stops.index(step)
        drawing = _draw(run, done, Canvas(places, max(112, most), between=92, top=14), places)
        return style.Picture(drawing, "a graph, step by step", step_sentence(run, done))

    view.stops = stops
    return view


def _stop(run: Replay, step: Step) -> str:
    return "update" if step.node is None else f"{step.phase}, {run.labels[step.node]}"


# --- in words ---


def step_sentence(run: Replay, done: int) -> str:
    """What the last of the first `done` steps did."""
    if done == 0:
        given = [i for i, node in enumerate(run.graph.nodes) if node.role != "operation"]
        given = [(run.labels[i], _number(run.values[i])) for i in given]
        listed = [f"{label} = {value}" for label, value in given if label != value]
        return f"Given: {', '.join(listed)}. Nothing is computed yet."
    step = run.steps[done - 1]
    if step.phase == "forward":
        return f"Forward: {run.labels[step.node]} = {_formula(run, step.node)}."
    return _update_sentence(run) if step.phase == "update" else _backward_sentence(run, done)


def _formula(run: Replay, node: int) -> str:
    """How a value is made: from names, and from numbers where they are few."""
    op, parents = run.graph.nodes[node].op, _parents(run, node)
    forms = [_written(op, [run.labels[p] for p in parents])]
    if all(run.values[p].size <= FEW for p in parents):
        numbers = [_number(run.values[p]) for p in parents]
        called = op not in SIGNS and not op.startswith("**")
        forms.append(
            _written(op, [f"({n})" if n.startswith("−") and not called else n for n in numbers])
        )
    return " = ".join([*dict.fromkeys(forms), _number(run.values[node])])


def _written(op: str, of: list[str]) -> str:
    if op in SIGNS:
        return f"{of[0]} {SIGNS[op]} {of[1]}"
    if op.startswith("**"):
        return f"{of[0]} ** {op[2:]}"
    return f"−({of[0]})" if op == "neg" else f"{op}({of[0]})"


def _backward_sentence(run: Replay, done: int) -> str:
    step, before = run.steps[done - 1], run.gradients(done - 1)
    label = run.labels[step.node]
    if not before:
        begins = f"Backward begins with d{label}/d{label} = 1"
    else:
        begins = f"Backward: at {label}, {_number(before[step.node])} has arrived"
    said, there = [begins], set(before)
    for handed in step.handed:
        parent = run.graph.edges[handed.edge][0]
        said.append(
            f"times {_times(handed.local)} it hands "
            f"{_number(handed.gradient)} to {run.labels[parent]}"
            + (", which adds to what is there" if parent in there else "")
        )
        there.add(parent)
    return "; ".join(said) + "."


def _update_sentence(run: Replay) -> str:
    arrived, moved = run.gradients(len(run.steps)), []
    for i in _leaves(run):
        old, new = _number(run.values[i]), _number(run.values[i] - run.rate * arrived[i])
        gradient = _number(arrived[i])
        gradient = f"({gradient})" if gradient.startswith("−") else gradient
        moved.append(f"{run.labels[i]} = {old} − {run.rate:g} × {gradient} = {new}")
    return f"Update, against the gradient: {'; '.join(moved)}."


def _number(value: np.ndarray, decimals: int = 4, array: str = "an array ") -> str:
    """A scalar or a few numbers; else `array` and its shape."""
    value = np.asarray(value, dtype=float)
    if value.size > FEW or value.size == 0:
        return f"{array}({', '.join(map(str, value.shape))})"
    if value.ndim == 0:
        return plain(value, decimals)
    return f"[{', '.join(_number(part, decimals) for part in value)}]"


def _local(local: np.ndarray | None, decimals: int = 4) -> str:
    """The numbers of a local derivative, one for each element if they are few; else empty."""
    if local is None or len(local) != local.shape[1] or len(local) > FEW:
        return ""
    diagonal = np.diag(local)
    if not np.array_equal(local, np.diag(diagonal), equal_nan=True):
        return ""
    return _number(diagonal[0] if len(local) == 1 else diagonal, decimals)


def _times(local: np.ndarray | None) -> str:
    if _local(local):
        return f"the local derivative {_local(local)}"
    size = "" if local is None else f"{len(local)} × {local.shape[1]} "
    return f"a {size}table of local derivatives"


def _on_edge(local: np.ndarray | None) -> str:
    if _local(local):
        return f"× {_local(local, 3)}" if len(local) == 1 else f"× {len(local)} slopes"
    return "× a table" if local is None else f"× {len(local)} × {local.shape[1]} table"


def _parents(run: Replay, node: int) -> list[int]:
    return [parent for parent, child in run.graph.edges if child == node]


def _leaves(run: Replay) -> list[int]:
    return [i for i, node in enumerate(run.graph.nodes) if node.role in LEAVES]


# --- as a picture ---


def _draw(run: Replay, done: int, canvas: Canvas, places: Layout) -> str:
    """Values and gradients known so far; the last step's nodes and edges marked."""
    steps = run.steps[:done]
    last = steps[-1] if steps else Step("", None)
    known = {step.node for step in steps if step.phase == "forward"}
    handed = {h.edge: h for step in steps for h in step.handed}
    now = {h.edge for h in last.handed}
    current = set(_leaves(run)) if last.phase == "update" else {last.node}
    parts, routes = [], canvas.routes(run.graph.edges, places.edges)
    for edge, route in enumerate(routes):
        if edge in handed:
            parts.append(canvas.edge(route, "moment" if edge in now else "gradients", up=True))
        else:
            parts.append(canvas.edge(route, faint=run.graph.edges[edge][1] not in known))
    gradients = run.gradients(done)
    for i, node in enumerate(run.graph.nodes):
        waits = node.role == "operation" and i not in known
        parts.append(
            canvas.node(
                places.nodes[i],
                _lines(run, i, gradients.get(i), i in known, last.phase == "update"),
                node.role,
                marked=i in current,
                waits=waits,
                swatch="gradients" if i in gradients else "",
            )
        )
    said = {h.edge: _on_edge(h.local) for step in run.steps for h in step.handed}
    spots = canvas.label_spots([(routes[edge], text) for edge, text in said.items()])
    for (edge, text), (x, y) in zip(said.items(), spots, strict=True):
        if edge in handed:  # placed among all, so that it stays where it is
            parts.append(style.text(x, y + 4, text, size=12, box=True))
    return style.svg(canvas.width, canvas.height, *parts)


def _lines(run: Replay, node: int, gradient, known: bool, updated: bool) -> list[str]:
    """What a node's box says: how it is made, its value, its gradient."""
    role, value = run.graph.nodes[node].role, _boxed(run.values[node])
    if role == "operation" and not known:
        value = "?"
    elif updated and role in LEAVES:
        value += f" → {_boxed(run.values[node] - run.rate * gradient)}"
    grad = [] if gradient is None else [f"grad {_boxed(gradient)}"]
    return [_head(run, node), *([value] if value != run.labels[node] else []), *grad]


def _widest(run: Replay, node: int) -> list[str]:
    """Lines as wide as any that its box will hold: at the end, and with long numbers."""
    gradient = run.gradients(len(run.steps)).get(node)
    size = run.values[node].size
    numbers = "−0.123, " * size if 1 < size <= FEW else ""
    return [*_lines(run, node, gradient, True, True), f"grad {numbers}"]


def _boxed(value: np.ndarray) -> str:
    return _number(value, decimals=3, array="")


def _head(run: Replay, node: int) -> str:
    """The label and, if that is short, how it is made."""
    op, label = run.graph.nodes[node].op, run.labels[node]
    if not op:
        return label
    whole = f"{label} = {_written(op, [run.labels[p] for p in _parents(run, node)])}"
    return whole if len(whole) <= LONGEST else f"{label} = {op}"
