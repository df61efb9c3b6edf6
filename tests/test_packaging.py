"""The two commands, what they install, and what they must not overwrite."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_tested_set_is_installed():
    """Byte counts and outputs are compared on this set; the scheduled CI job leaves this out."""
    found = {plain(d.metadata["Name"]): d.version.split("+")[0] for d in metadata.distributions()}
    differs = {
        name: (found[plain(name)], pin)
        for name, pin in pins().items()
        if found.get(plain(name), pin) != pin
    }
    assert differs == {}


def test_every_dependency_is_pinned():
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["lab"], *extras["test"]]
    names = {plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}
    assert names - {plain(name) for name in pins()} == {"training-measured"}


def test_torch_is_pinned_without_a_local_suffix():
    assert pins()["torch"] == "2.13.0"


def test_jupyterlabs_settings_are_installed_without_news_or_update_check():
    installed = Path(sys.prefix) / "etc/jupyter/labconfig/default_setting_overrides.json"
    kept = ROOT / "jupyter/labconfig/default_setting_overrides.json"
    text = kept.read_text(encoding="utf-8")
    assert installed.read_text(encoding="utf-8") == text
    assert '"fetchNews": "false"' in text and '"checkForUpdates": false' in text


def test_jupyterlabs_extension_for_the_controls_is_installed_as_it_is_kept():
    """Where this fails after a change of it, the environment is older: install again."""
    installed = Path(sys.prefix) / "share/jupyter/labextensions/training-measured"
    kept = ROOT / "jupyter/labextension"
    files = sorted(path.relative_to(kept) for path in kept.rglob("*") if path.is_file())
    assert [str(file) for file in files] == ["package.json", str(Path("static/controls.js"))]
    for file in files:
        assert (installed / file).read_text("utf-8") == (kept / file).read_text("utf-8")
    built = json.loads((kept / "package.json").read_text("utf-8"))["jupyterlab"]["_build"]
    assert (kept / built["load"]).is_file()


@pytest.fixture
def make(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copytree(ROOT / "chapters", tmp_path / "chapters")
    shutil.copytree(ROOT / "book", tmp_path / "book")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(*targets):
        return subprocess.run(["make", *targets], cwd=tmp_path, capture_output=True, text=True)

    return tmp_path, run


def test_make_copies_what_is_missing_and_resets_the_one_asked_for(make):
    folder, run = make
    copies = folder / "my_chapters"
    assert run("my_chapters").returncode == 0
    originals = (folder / "chapters").glob("*.ipynb")
    assert {path.name for path in copies.iterdir()} == {path.name for path in originals}
    fresh = {path.name: path.read_bytes() for path in copies.iterdir()}
    for name in ("00_start_here.ipynb", "03_optimizers.ipynb"):
        (copies / name).write_text("edited", encoding="utf-8")
    (copies / "01_training_step.ipynb").unlink()
    assert run("my_chapters").returncode == 0
    assert (copies / "00_start_here.ipynb").read_text("utf-8") == "edited"
    assert run("reset", "CH=00").returncode == 0
    now = {path.name: path.read_bytes() for path in copies.iterdir()}
    assert now == fresh | {"03_optimizers.ipynb": b"edited"}


@pytest.mark.parametrize("targets", [("reset",), ("reset", "CH=77"), ("reset", "CH=0")])
def test_reset_without_a_chapter_says_so_and_changes_nothing(make, targets):
    folder, run = make
    done = run(*targets)
    assert done.returncode != 0 and "make reset CH=00" in done.stdout
    assert not (folder / "my_chapters").exists()


def test_help_names_every_target(make):
    _, run = make
    text = run("help").stdout
    assert all(f"make {name}" in text for name in ("lab", "test", "chapters", "reset", "clean"))


def test_an_old_python_is_refused_by_name(make):
    folder, run = make
    old = folder / "old-python"  # this Python, but it says that it is 3.10
    patched = "import sys; sys.version_info = (3, 10, 0); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{patched}" "$@"\n', encoding="utf-8")
    old.chmod(0o755)
    done = run("lab", f"PYTHON={old}")
    assert done.returncode != 0 and "Python 3.11 or newer is needed" in done.stderr
    assert not (folder / ".venv").exists()
