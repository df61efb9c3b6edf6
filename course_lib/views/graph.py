"""A graph as a picture: what each operation keeps for backward, inputs above."""

from collections import Counter
from html import escape

from course_lib import units
from course_lib.graph import Graph, Node
from course_lib.views import style
from course_lib.views.layout import Layout, Place, layout

BORDER = {"parameter": "weights", "leaf": "weights", "operation": "activations"}  # else inputs
LONGEST = 22  # letters of a name in a picture
BOX, GAP, LINE = 54, 18, 16  # pixels: a node's height, between nodes, between lines of text


def show_graph(graph: Graph, title: str) -> None:
    """Show the graph, and say how much it keeps for backward."""
    style.show(graph_picture(graph, title))


def graph_picture(graph: Graph, title: str) -> style.Picture:
    """Each node with its shape and the bytes that it keeps; edges downward, as in forward."""
    if not isinstance(graph, Graph):
        raise TypeError(f"a Graph is needed, as trace gives it, got {type(graph).__name__}")
    lines, places = [_lines(node) for node in graph.nodes], layout(graph)
    canvas = Canvas(places, width_of(lines), between=76, top=44, least=24 + 8.6 * len(title))
    parts = [style.text(12, 22, title, anchor="start", size=15, bold=True)]
    parts += [canvas.edge(route) for route in canvas.routes(graph.edges, places.edges)]
    for node, place, said in zip(graph.nodes, places.nodes, lines, strict=True):
        parts.append(
            canvas.node(place, said, node.role, swatch="activations" if node.saved_bytes else "")
        )
    return style.Picture(
        style.svg(canvas.width, canvas.height, *parts), "the graph", graph_sentence(graph)
    )


def graph_sentence(graph: Graph) -> str:
    """How many nodes and edges, how much they keep for backward, and which keeps the most."""
    counts = Counter(node.role for node in graph.nodes)
    listed = ", ".join(f"{n} {role}{'s' * (n > 1)}" for role, n in counts.items())
    nodes, edges = _plural(len(graph.nodes), "node"), _plural(len(graph.edges), "edge")
    said = f"{nodes} ({listed}) and {edges}; {units.binary(graph.saved_bytes)} kept for backward"
    most = max(graph.nodes, key=lambda node: node.saved_bytes)
    if most.saved_bytes:
        said += f", the most by {most.op}: {units.binary(most.saved_bytes)}"
    if graph.hiding:
        said += f" (not counted: what {' and '.join(graph.hiding)} may keep and don't show)"
    return said + "."


def _plural(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _lines(node: Node) -> list[str]:
    name = f"from {node.op}" if node.role == "input" else node.name or node.op or node.role
    if len(name) > LONGEST:  # the ends tell a weight from a bias
        name = f"{name[: LONGEST // 2 - 1]}…{name[-LONGEST // 2 :]}"
    shape = f"({', '.join(map(str, node.shape))})" if node.shape else "a number"
    return [name, shape, *([f"keeps {units.binary(node.saved_bytes)}"] if node.saved_bytes else [])]


def width_of(lines: list[list[str]]) -> float:
    """A width in pixels that holds every line: an ample guess, fonts aren't measured."""
    return max(60, 6.8 * max(len(line) for node in lines for line in node) + 26)


class Canvas:
    """Pixels for a layout: nodes of one width, rows `between` apart, the first at `top`.

    No wider than it need be, or `least`, so that text stays readable in a narrow window.
    """

    def __init__(self, places: Layout, wide: float, between: int, top: int, least: float = 0):
        self.wide, self.between, self.top = wide, between, top
        total = places.width * (wide + GAP)
        self.width = round(max(least, total + 24))
        self.height = round(top + (places.rows - 1) * between + BOX + 14)
        self.left = (self.width - total) / 2

    def middle(self, place: Place) -> tuple[float, float]:
        x, row = place
        return (
            self.left + (x + 0.5) * (self.wide + GAP),
            self.top + row * self.between + BOX / 2,
        )

    def routes(self, edges, through) -> list[list[tuple[float, float]]]:
        """Each edge's points, from the parent's lower border to the child's upper one. Edges
        between the same two nodes lie side by side."""
        uses, met, routes = Counter(edges), Counter(), []
        for edge, places in zip(edges, through, strict=True):
            twins = uses[edge] - 1
            aside = 0.6 * self.wide * (met[edge] / twins - 0.5) if twins else 0
            met[edge] += 1
            (x0, y0), *bends, (x1, y1) = [self.middle(place) for place in places]
            between = []
            for x, y in bends:  # straight past the nodes of the row, curved between rows
                between += [(x, y - BOX / 2), (x, y + BOX / 2)]
            after, before = [*between, (x1, y1)][0][0], [(x0, y0), *between][-1][0]
            start = (x0 + self._port(after - x0) + aside / 2, y0 + BOX / 2)
            end = (x1 + self._port((before - x1) / 2) + aside, y1 - BOX / 2)
            routes.append([start, *between, end])
        return routes

    def _port(self, towards: float) -> float:
        """How far from its node's middle an edge ends that comes from this side."""
        return max(-self.wide / 4, min(self.wide / 4, towards / 2))

    def edge(self, route, name: str = "", *, up: bool = False, faint: bool = False) -> str:
        """A curve with its arrow at the lower end, or `up`; thick in the colour of `name`."""
        color, thick = (style.COLOR[name], 2.4) if name else ("#555555", 1.2)
        d = f"M{route[0][0]:.1f} {route[0][1]:.1f}"
        for (x0, y0), (x1, y1) in zip(route, route[1:], strict=False):
            half = (y0 + y1) / 2
            d += f"C{x0:.1f} {half:.1f} {x1:.1f} {half:.1f} {x1:.1f} {y1:.1f}"
        x, y = route[0] if up else route[-1]
        head = f"M{x:.1f} {y:.1f}l-4 {8 if up else -8}h8Z"
        return (
            f'<g opacity="{0.35 if faint else 1}">'
            f'<path d="{d}" fill="none" stroke="{color}" stroke-width="{thick}"/>'
            f'<path d="{head}" fill="{color}"/></g>'
        )

    def label_spots(self, labelled) -> list[tuple[float, float]]:
        """For each (route, text) the middle of the text, on the edge or beside it in the gap above
        the child, where it covers no text before it, if there is such a place."""
        taken: list[tuple[float, float, int]] = []
        for route, said in labelled:
            points = [self._along(route, t) for t in (0.5, 0.8, 0.2)]
            beside = 3.4 * len(said) + 3
            spots = [(x + aside, y) for aside in (0, beside, -beside) for x, y in points]
            free = [
                (x, y)
                for x, y in spots
                if all(
                    abs(x - other) > 3.4 * (len(said) + n) or abs(y - height) > 14
                    for other, height, n in taken
                )
            ]
            taken.append((*(free or spots)[0], len(said)))
        return [(x, y) for x, y, _ in taken]

    def _along(self, route, t: float) -> tuple[float, float]:
        """The point at 0 < t < 1 of an edge's last curve."""
        (x0, y0), (x1, y1) = route[-2:]
        across, down = t * t * (3 - 2 * t), t * (1.5 - 1.5 * t + t * t)
        return x0 + (x1 - x0) * across, y0 + (y1 - y0) * down

    def node(self, place: Place, lines, role: str, *, marked=False, waits=False, swatch="") -> str:
        """A box, round for what is given; dashed while it waits; a swatch names a category."""
        x, y = self.middle(place)
        left, top = x - self.wide / 2, y - BOX / 2
        color = style.COLOR["moment" if marked else BORDER.get(role, "inputs")]
        dash = ' stroke-dasharray="5 3"' if waits else ""
        drawn = [
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{self.wide:.1f}" height="{BOX}" '
            f'rx="{3 if role == "operation" else 14}" fill="white" stroke="{color}" '
            f'stroke-width="{3 if marked else 1.6}"{dash} data-role="{escape(role)}"/>'
        ]
        if swatch:
            drawn.append(style.bar(left + 5, top + BOX - 19, 8, 14, swatch))
        first = y + 4.5 - LINE / 2 * (len(lines) - 1)
        for k, line in enumerate(lines):
            drawn.append(style.text(x, first + LINE * k, line, size=12, bold=k == 0))
        return "".join(drawn)
