"""Readers' copies: no answer under its question, and everything else as it is.

They are run in test_browser.py, which opens copies.
"""

import hashlib
import json
from pathlib import Path

import nbformat
import pytest

from book.copy import IN_THE_MIDDLE, copy_chapters, main

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))


def code(source, *outputs):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=1)


def said(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def write(folder, *cells, name="00_test.ipynb"):
    folder.mkdir(exist_ok=True)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T"), *cells])
    nbformat.write(notebook, folder / name)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Each chapter's path and its copy's, by name; making copies leaves the chapters alone."""
    target = tmp_path_factory.mktemp("copies") / "my_chapters"
    before = [hashlib.sha256(path.read_bytes()).digest() for path in CHAPTERS]
    assert copy_chapters(ROOT / "chapters", target) == [target / path.name for path in CHAPTERS]
    assert before == [hashlib.sha256(path.read_bytes()).digest() for path in CHAPTERS]
    return {path.stem: (path, target / path.name) for path in CHAPTERS}


def between(cells):
    """An independent reading: every code cell at which some guess is asked for and not compared."""
    open_guesses, found = set(), set()
    for i, cell in enumerate(cells):
        if cell.cell_type == "code" and open_guesses:
            found.add(i)
        for line in cell.source.splitlines():
            if "views.predict(" in line:
                open_guesses.add(line.split(" = ")[0])
            elif ".compare(" in line:
                open_guesses.discard(line.strip().split(".compare(")[0])
    assert not open_guesses
    return found


@pytest.mark.parametrize("stem", [path.stem for path in CHAPTERS])
def test_a_copy_is_its_chapter_without_the_outputs_from_prediction_to_comparison(pairs, stem):
    chapter, copy = (nbformat.read(path, 4) for path in pairs[stem])
    answers = between(chapter.cells)
    assert answers and len(copy.cells) == len(chapter.cells)
    first = next(cell for cell in chapter.cells if cell.cell_type == "markdown")
    first.source += f"\n\n{IN_THE_MIDDLE}"
    for i in answers:
        assert ".check(" not in chapter.cells[i].source  # its "Not attempted yet" would go
        chapter.cells[i].outputs, chapter.cells[i].execution_count = [], None
    assert copy == chapter


@pytest.mark.parametrize("stem", [path.stem for path in CHAPTERS])
def test_a_copy_is_written_as_its_chapter_is(pairs, stem):
    _, path = pairs[stem]
    text = path.read_text("utf-8")
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"
    nbformat.validate(nbformat.read(path, 4))


def test_guesses_that_overlap_hide_both_stretches(tmp_path):
    cells = [code("a = views.predict(x)"), code("b = views.predict(y)", said("shown"))]
    cells += [
        code("a.compare(1)", said("1")),
        code("2", said("2")),
        code("b.compare(3)", said("3")),
    ]
    write(tmp_path / "c", *cells, code("4", said("4")))
    copy_chapters(tmp_path / "c", tmp_path / "m")
    copy = nbformat.read(tmp_path / "m/00_test.ipynb", 4)
    assert [len(cell.get("outputs", [])) for cell in copy.cells] == [0, 0, 0, 0, 0, 0, 1]


def test_a_prediction_that_is_never_compared_is_named(tmp_path):
    write(tmp_path, code("lonely = views.predict(x)"))
    with pytest.raises(ValueError, match="lonely is asked for in cell 1 and never compared"):
        copy_chapters(tmp_path, tmp_path / "m")


def test_a_readers_copy_is_overwritten_only_by_its_number(tmp_path, capsys):
    chapters, copies = tmp_path / "c", tmp_path / "m"
    for name in ("00_a.ipynb", "01_b.ipynb"):
        write(chapters, name=name)
    main([str(chapters), str(copies)])
    for path in copies.iterdir():
        path.write_text("mine", encoding="utf-8")
    main([str(chapters), str(copies)])
    assert {path.read_text("utf-8") for path in copies.iterdir()} == {"mine"}
    main([str(chapters), str(copies), "--reset", "01"])
    assert (copies / "00_a.ipynb").read_text("utf-8") == "mine"
    assert IN_THE_MIDDLE in (copies / "01_b.ipynb").read_text("utf-8")


@pytest.mark.parametrize("number", ["77", "0", "", "00_a"])
def test_a_number_that_no_chapter_has_is_refused_and_nothing_written(tmp_path, number):
    write(tmp_path / "c", name="00_a.ipynb")
    with pytest.raises(SystemExit, match="the number of a chapter is needed: 00"):
        main([str(tmp_path / "c"), str(tmp_path / "m"), "--reset", number])
    assert not (tmp_path / "m").exists()


def test_a_folder_without_chapters_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="chapters are needed, there are none in"):
        main([str(tmp_path), str(tmp_path / "m")])
