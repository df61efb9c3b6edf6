"""Readers' copies of the chapters, in which no prediction has its answer under it.

    python -m book.copy chapters my_chapters [--reset NUMBER]

Copies every chapter that isn't there yet. An existing copy, with its reader's edits, stays as it
is; with `--reset 03` that one chapter is brought back, and nothing else is touched. In a copy
the cells from a prediction to its comparison have no outputs, and the first text ends with how
to start in the middle. The chapters themselves are only read. Needs Python alone.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ASKED = re.compile(r"^(\w+) = views\.predict\(", re.MULTILINE)
IN_THE_MIDDLE = (
    "To start in the middle, click the cell to start from and choose "
    "**Run ▸ Run All Above Selected Cell**."
)


def copy_chapters(source: Path, target: Path, reset: str | None = None) -> list[Path]:
    """Write the copies that are missing, or the one asked for; return what was written.

    FileNotFoundError where `source` has no chapters, ValueError where it has none of that number.
    """
    chapters = sorted(source.glob("*.ipynb"))
    if not chapters:
        raise FileNotFoundError(f"chapters are needed, there are none in {source}")
    if reset is not None:
        wanted = [chapter for chapter in chapters if chapter.name.startswith(f"{reset}_")]
        if not wanted:
            numbers = ", ".join(chapter.name.split("_")[0] for chapter in chapters)
            raise ValueError(f"the number of a chapter is needed: {numbers}; got {reset!r}")
    else:
        wanted = [chapter for chapter in chapters if not (target / chapter.name).exists()]
    target.mkdir(parents=True, exist_ok=True)
    for chapter in wanted:
        notebook = readers_copy(json.loads(chapter.read_text(encoding="utf-8")))
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        (target / chapter.name).write_text(text, encoding="utf-8", newline="\n")
    return [target / chapter.name for chapter in wanted]


def readers_copy(notebook: dict) -> dict:
    """The notebook, changed: outputs from predictions to comparisons gone, one line added.

    ValueError for a prediction that is never compared.
    """
    cells = notebook["cells"]
    for i in answering(cells):
        cells[i]["outputs"], cells[i]["execution_count"] = [], None
    first = next(cell for cell in cells if cell["cell_type"] == "markdown")
    first["source"] = f"{_text(first)}\n\n{IN_THE_MIDDLE}".splitlines(keepends=True)
    return notebook


def answering(cells: list[dict]) -> list[int]:
    """The places of the code cells after a prediction up to its comparison."""
    found = set()
    for asked, cell in enumerate(cells):
        for guess in ASKED.findall(_text(cell)) if cell["cell_type"] == "code" else ():
            after = range(asked + 1, len(cells))
            compared = next((i for i in after if f"{guess}.compare(" in _text(cells[i])), None)
            if compared is None:
                raise ValueError(f"{guess} is asked for in cell {asked} and never compared")
            found |= {i for i in range(asked + 1, compared + 1) if cells[i]["cell_type"] == "code"}
    return sorted(found)


def _text(cell: dict) -> str:
    return "".join(cell["source"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m book.copy", description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="the folder of the chapters")
    parser.add_argument("target", type=Path, help="the folder of the reader's copies")
    parser.add_argument("--reset", metavar="NUMBER", help="bring one chapter back, such as 03")
    given = parser.parse_args(arguments)
    try:
        written = copy_chapters(given.source, given.target, given.reset)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
    for path in written:
        print(path)


if __name__ == "__main__":
    main()
