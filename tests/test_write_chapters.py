"""`make chapters` on a small notebook: what it keeps, what it drops, what it reports."""

import gates
import nbformat
import pytest
import write_chapters
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


@pytest.fixture
def notebook_at(tmp_path):
    def write(*cells):
        path = tmp_path / "90_small.ipynb"
        nbformat.write(new_notebook(cells=list(cells)), path)
        return path

    return write


def code(source, *tags, **metadata):
    return new_code_cell(source, metadata={"tags": list(tags), **metadata} if tags else metadata)


def stored(path):
    return gates.code_cells(nbformat.read(path, as_version=4))


PICTURE = """
import matplotlib.pyplot as plt
_ = plt.plot([1, 2])
plt.show()
print("It rises to 2.")
"""


def test_writing_twice_gives_the_same_bytes_pictures_included(notebook_at):
    path = notebook_at(code(PICTURE), code("print(7)\nprint(8)"), code("import ipywidgets"))
    write_chapters.write(path)
    first = path.read_bytes()
    assert write_chapters.write(path) == []
    assert path.read_bytes() == first
    assert [cell.execution_count for cell in stored(path)] == [1, 2, 3]


def test_widget_views_and_foreign_metadata_are_dropped(notebook_at):
    path = notebook_at(code("import ipywidgets\nipywidgets.IntSlider()", editable=True))
    write_chapters.write(path)
    (cell,) = stored(path)
    assert "application/vnd.jupyter.widget-view+json" not in cell.outputs[0].data
    assert cell.metadata == {}
    assert "widgets" not in nbformat.read(path, as_version=4).metadata


def test_a_pictures_size_is_kept(notebook_at):
    wide = 'from IPython.display import Image\nImage(b"\\x89PNG", width=580, format="png")'
    path = notebook_at(code(wide))
    write_chapters.write(path)
    (cell,) = stored(path)
    assert cell.outputs[0].metadata == {"image/png": {"width": 580}}


COUNTER = "import time\nprint(time.time_ns())"


def test_ignored_output_is_kept_until_its_source_changes_or_fresh_is_asked(notebook_at):
    path = notebook_at(code(COUNTER, "nbval-ignore-output"))
    write_chapters.write(path)
    first = stored(path)[0].outputs
    write_chapters.write(path)
    assert stored(path)[0].outputs == first
    write_chapters.write(path, fresh=True)
    assert stored(path)[0].outputs != first
    again = stored(path)[0].outputs
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source += "  # changed"
    nbformat.write(notebook, path)
    write_chapters.write(path)
    assert stored(path)[0].outputs != again


def test_a_cuda_cell_stays_unrun_until_a_device_records_it(notebook_at):
    path = notebook_at(new_markdown_cell("This has not been recorded."), code("print(5)", "cuda"))
    write_chapters.write(path)
    (cell,) = stored(path)
    assert cell.outputs == [] and cell.execution_count is None and gates.tags(cell) == ["cuda"]

    write_chapters.write(path, device="a GPU")
    (cell,) = stored(path)
    assert cell.outputs[0].text == "5\n" and cell.metadata["recording"]["device"] == "a GPU"
    recorded = path.read_bytes()
    write_chapters.write(path)
    assert path.read_bytes() == recorded


def test_the_report_names_old_and_new_lines_and_the_sentences_that_hold_the_old(notebook_at):
    path = notebook_at(new_markdown_cell("It takes 41 bytes. It is small."), code("print(41)"))
    write_chapters.write(path)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source = "print(42)"
    nbformat.write(notebook, path)
    report = "\n".join(write_chapters.write(path))
    assert "- 41" in report and "+ 42" in report
    assert "in the prose: It takes 41 bytes." in report and "small" not in report


def test_a_changed_picture_is_reported(notebook_at):
    draw = """
from course_lib.views import style
style.show(style.Picture(style.svg(20, 20, style.text(5, 5, "a")), "a letter", "An a."))
"""
    path = notebook_at(code(draw))
    write_chapters.write(path)
    assert write_chapters.write(path) == []
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = draw.replace('"a")', '"b")')
    nbformat.write(notebook, path)
    report = "\n".join(write_chapters.write(path))
    assert report.count("(picture ") == 2 and "An a." not in report


def test_a_cell_that_fails_leaves_the_file_alone(notebook_at):
    path = notebook_at(code("1 / 0"))
    before = path.read_bytes()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        write_chapters.write(path)
    assert path.read_bytes() == before
