"""Places for the nodes and edges of a graph: rows from its inputs down, few crossings.

After Sugiyama, Tagawa and Toda, https://doi.org/10.1109/TSMC.1981.4308636: rows by the longest
path, a bend for every row that an edge crosses (edges from one node share them), an order by
neighbours' means, then the places nearest to those means that leave each its width.
"""

from collections import defaultdict
from dataclasses import dataclass

from course_lib.graph import Graph

BEND = 0.2  # the width of an edge on its way, in nodes
SWEEPS = 2


Place = tuple[float, int]  # x in node widths, the leftmost at 0, and the row


@dataclass(frozen=True)
class Layout:
    """A place for each node; for each edge its places, from parent to child."""

    nodes: tuple[Place, ...]
    edges: tuple[tuple[Place, ...], ...]
    width: float
    rows: int


def layout(graph: Graph) -> Layout:
    """A place for each node and a route for each edge."""
    row = _rows(graph)
    routes, row_of = _with_bends(graph, row)
    above, below = defaultdict(list), defaultdict(list)
    pieces = {piece for route in routes for piece in zip(route, route[1:], strict=False)}
    for upper, lower in sorted(pieces):
        above[lower].append(upper)
        below[upper].append(lower)
    order = [[] for _ in range(max(row_of) + 1)]
    for point, at in enumerate(row_of):
        order[at].append(point)
    wide = [1.0 if point < len(graph.nodes) else BEND for point in range(len(row_of))]
    x = _placed(order, above, below, wide)
    places = list(zip(x, row_of, strict=True))
    return Layout(
        tuple(places[: len(graph.nodes)]),
        tuple(tuple(places[point] for point in route) for route in routes),
        max(a + w / 2 for a, w in zip(x, wide, strict=True)) + 0.5,
        len(order),
    )


def _rows(graph: Graph) -> list[int]:
    """Each node just above its first use; what nothing uses stands in the last row."""
    row = [0] * len(graph.nodes)
    for parent, child in reversed(graph.edges):  # sorted by child, so each row is final in time
        row[parent] = min(row[parent], row[child] - 1)
    return [at - min(row) for at in row]


def _with_bends(graph: Graph, row: list[int]) -> tuple[list[list[int]], list[int]]:
    """Each edge as a route through points, one a row, and the row of every point."""
    row_of, routes, trunks = list(row), [], defaultdict(list)
    for parent, child in graph.edges:
        trunk, crossed = trunks[parent], row[child] - row[parent] - 1
        while len(trunk) < crossed:
            trunk.append(len(row_of))
            row_of.append(row[parent] + len(trunk))
        routes.append([parent, *trunk[:crossed], child])
    return routes, row_of


def _placed(order, above, below, wide) -> list[float]:
    """x of every point: rows sorted and placed by their neighbours, down and up in turns."""
    x = [0.0] * len(wide)
    for points in order:
        for place, point in enumerate(points):
            x[point] = float(place)
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for points in order if down else order[::-1]:
            wish = {p: _mean([x[n] for n in neighbours[p]], x[p]) for p in points}
            if sweep < SWEEPS:
                points.sort(key=wish.__getitem__)
            places = _apart([wish[p] for p in points], [wide[p] for p in points])
            for point, at in zip(points, places, strict=True):
                x[point] = at
    left = min(at - w / 2 for at, w in zip(x, wide, strict=True))
    return [at - left - 0.5 for at in x]


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _apart(wishes: list[float], wide: list[float]) -> list[float]:
    """The places nearest to the wishes, in least squares, that don't overlap and keep the order.

    With the widths taken off, the places must only not fall: runs that do are pooled.
    """
    offset, offsets = 0.0, []
    for i, w in enumerate(wide):
        offset += w / 2 if i else 0.0
        offsets.append(offset)
        offset += w / 2
    pools = []  # mean and size
    for wish, off in zip(wishes, offsets, strict=True):
        pools.append((wish - off, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    flat = [mean for mean, size in pools for _ in range(size)]
    return [f + off for f, off in zip(flat, offsets, strict=True)]
