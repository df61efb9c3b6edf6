"""The stored chapters: every gate, the README's picture, and a run from another directory."""

import re
from pathlib import Path

import gates
import nbformat
import pytest
import write_chapters

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_stored_chapter_passes_every_gate(path):
    complaints = gates.complaints(path)
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_written_on_another_laptop_from_any_directory_a_chapter_is_the_same(path, tmp_path):
    """`write` executes in a temporary folder. matplotlib's pictures depend on the machine."""
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    assert write_chapters.write(copy, elsewhere=True) == []
    assert without_png(copy) == without_png(path)


def without_png(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in gates.code_cells(notebook):
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)
    return notebook


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_that_trains_computes_in_one_thread(path):
    cells = gates.code_cells(nbformat.read(path, as_version=4))
    if any("optimizer.step()" in cell.source for cell in cells):
        assert "torch.set_num_threads(1)" in cells[0].source


def test_the_readmes_picture_is_the_one_that_a_chapter_made():
    made = [
        write_chapters.stored_picture(cell)
        for path in CHAPTERS
        for cell in gates.code_cells(nbformat.read(path, as_version=4))
        if "readme" in gates.tags(cell)
    ]
    assert made == [write_chapters.README_PICTURE.read_bytes()]
    assert ".github/readme.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md"])
def test_the_texts_point_only_at_what_is_there(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert "://" in target or (ROOT / name).parent.joinpath(target).exists(), target
    for chapter in re.findall(r"\b(\d\d)_\w+\.ipynb", text):
        assert list((ROOT / "chapters").glob(f"{chapter}_*.ipynb")), f"chapter {chapter}"


def test_the_readme_lists_every_chapter():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in CHAPTERS if path.name not in text] == []


TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORDS = {"fifteen": 15} | {
    ten + unit: 10 * i + 5 * bool(unit) for i, ten in enumerate(TENS, 2) for unit in ("", "-five")
}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_promises_the_minutes_that_the_readme_does_and_that_it_takes_to_read(path):
    """180 words or 15 lines of code are read in a minute; exercises take what is left."""
    notebook = nbformat.read(path, as_version=4)
    words = re.search(r"^\*(\S+) minutes\b", notebook.cells[0].source, re.MULTILINE)[1]
    minutes = WORDS[words.lower()]
    row = re.search(
        rf"^\|.*{path.name}.*\| (\d+) \|$", (ROOT / "README.md").read_text("utf-8"), re.M
    )
    assert int(row[1]) == minutes
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    code = [cell.source for cell in gates.code_cells(notebook)]
    reading = sum(len(t.split()) for t in texts) / 180 + sum(len(c.splitlines()) for c in code) / 15
    assert minutes >= reading
