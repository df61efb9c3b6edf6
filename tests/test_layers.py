"""Imports run one way: each module imports only from above it or from its left."""

import ast
import subprocess
import sys
from pathlib import Path

import course_lib

PACKAGE = Path(course_lib.__file__).parent
TOPS = ("lessons", "views")


def order() -> list[str]:
    """The modules in the package docstring's list, lowest first."""
    block = course_lib.__doc__.split("reads this list.")[1]
    rows = [line.split("  ") for line in block.splitlines() if line.startswith("    ")]
    return [name for row in rows for name in next(part for part in row if part).split()]


def imported(path: Path) -> set[str]:
    """The course_lib modules that a file imports, as their first name below the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            parts = (node.module or "").split(".")
            if parts[0] == "course_lib":
                found |= {parts[1]} if parts[1:] else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("course_lib.")}
    return found


def backward_arrows() -> list[str]:
    names, found = order(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE).parts
        if inside == ("__init__.py",):
            continue
        own = inside[0].removesuffix(".py")
        for other in imported(path) - {own}:
            if names.index(other) > names.index(own) or other in TOPS:
                found.append(f"{'/'.join(inside)} imports {other}, which isn't below it")
    return found


def test_the_list_names_every_module_once():
    there = {p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__"}
    there |= {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert sorted(order()) == sorted(there)


def test_no_import_runs_back():
    assert backward_arrows() == []


def test_importing_the_package_loads_neither_torch_nor_matplotlib():
    code = "import course_lib, sys; print({'torch', 'matplotlib'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
