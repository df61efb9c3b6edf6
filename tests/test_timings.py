"""No cell and no test says which of two timings is the longer: another machine turns it round."""

import ast
from pathlib import Path

import gates
import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "process_time", "timeit", "seconds"}
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def names_in(node) -> set[str]:
    """Every name and attribute that is read or called in a piece of code."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def timed_names(nodes, timed: frozenset = frozenset()) -> set[str]:
    """The names that these statements give to a clock's reading, or to what is made of one."""
    timed = set(CLOCKS | timed)
    while True:
        found = set(timed)
        for node in (each for top in nodes for each in ast.walk(top)):
            if isinstance(node, ast.FunctionDef) and names_in(node) & timed:
                found.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AugAssign)) and names_in(node.value) & timed:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        if found == timed:
            return timed
        timed = found


def ordered_timings(nodes, timed) -> list[str]:
    """The assertions that put a timing in order with anything but 0, below which none can be."""
    return [
        ast.unparse(statement)
        for top in nodes
        for statement in ast.walk(top)
        if isinstance(statement, ast.Assert)
        for node in ast.walk(statement)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS)
        if names_in(node) & timed and ast.unparse(node.comparators[0]) != "0"
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "chapters").glob("*.ipynb")), ids=lambda p: p.stem)
def test_no_cell_asserts_an_order_of_timings(path):
    cells = gates.code_cells(nbformat.read(path, as_version=4))
    bodies = [ast.parse(cell.source).body for cell in cells]
    functions = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
    timers = frozenset(timed_names(functions) & {node.name for node in functions})
    assert [
        order for body in bodies for order in ordered_timings(body, timed_names(body, timers))
    ] == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("test_*.py")), ids=lambda p: p.stem)
def test_no_test_asserts_an_order_of_timings(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert [order for node in body for order in ordered_timings([node], timed_names([node]))] == []


@pytest.mark.parametrize(
    "code",
    [
        "a, b = timeit.timeit(f), timeit.timeit(g)\nassert a > b",
        "def fastest(f):\n    return min(timeit.repeat(f))\nassert fastest(f) / fastest(g) < 2",
        "spent = {}\nfor p in phases:\n    spent[p] = p.seconds\nassert spent[1] < spent[2]",
    ],
)
def test_an_order_of_timings_is_noticed(code):
    body = ast.parse(code).body
    assert len(ordered_timings(body, timed_names(body))) == 1
