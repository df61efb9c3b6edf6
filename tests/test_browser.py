"""The chapters in real JupyterLab: opened unrun, run, and used."""

import os
import re
import shutil
from pathlib import Path

import browser
import gates
import nbformat
import pytest

CHAPTERS = sorted((Path(__file__).resolve().parent.parent / "chapters").glob("*.ipynb"))

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None and not os.environ.get("CI"),
    reason="chromium is not installed: apt-get install chromium",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with browser.jupyterlab(tmp_path_factory.mktemp("lab")) as base, browser.chromium() as chrome:
        yield lambda name, **options: browser.Chapter(chrome, base, name, **options)


def assert_clean(chapter):
    assert chapter.outside == []
    assert chapter.errors == []
    assert chapter.error_outputs() == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_opened_without_running_shows_its_stored_pictures(lab, path):
    chapter = lab(path.name)
    cells = gates.code_cells(nbformat.read(path, as_version=4))
    stored = sum(gates.holds_picture(output) for cell in cells for output in cell.outputs)
    assert stored > 0
    chapter.page.wait_for_timeout(500)
    assert chapter.pictures() == stored
    assert chapter.page.locator(".jp-Dialog, .Toastify__toast").count() == 0  # no news, no asking
    assert chapter.page.get_by_text("model not found").count() == 0
    assert_clean(chapter)
    chapter.page.close()


def test_chapter_00_runs_and_compares_a_guess(lab):
    chapter = lab("00_start_here.ipynb")
    chapter.run_all()
    assert_clean(chapter)
    compare = chapter.cell("guess.compare")
    assert "No guess given. Measured: 24.8" in compare.inner_text()

    chapter.page.get_by_label("Your guess").fill("50")
    chapter.page.keyboard.press("Enter")
    chapter.settle()
    assert "Kept: 50.0. Now measure." in chapter.cell("views.predict").inner_text()
    chapter.run_with("guess.compare", "guess.compare(round(share, 1))")
    said = " ".join(compare.inner_text().split())
    assert re.search(r"You said 50 of 100 bytes; measured: 24.8\. That counts a weight and", said)
    assert_clean(chapter)
    chapter.page.close()
