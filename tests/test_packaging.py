"""The two commands, what they install, and what they must not overwrite."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import nbformat
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


@pytest.fixture
def make(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copytree(ROOT / "chapters", tmp_path / "chapters")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(*targets):
        return subprocess.run(["make", *targets], cwd=tmp_path, capture_output=True, text=True)

    return tmp_path, run


def test_a_readers_edit_is_kept_until_reset(make):
    folder, run = make
    copy, original = (folder / kind / "00_start_here.ipynb" for kind in ("my_chapters", "chapters"))
    assert run("my_chapters").returncode == 0
    assert copy.read_bytes() == original.read_bytes()
    notebook = nbformat.read(copy, as_version=4)
    notebook.cells[0].source = "My own title"
    nbformat.write(notebook, copy)
    edited = copy.read_bytes()
    (folder / "chapters" / "99_new.ipynb").write_bytes(original.read_bytes())
    assert run("my_chapters").returncode == 0
    assert copy.read_bytes() == edited
    assert (folder / "my_chapters" / "99_new.ipynb").exists()
    assert run("reset", "CH=00").returncode == 0
    assert copy.read_bytes() == original.read_bytes()


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
