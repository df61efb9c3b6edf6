import sys
from importlib import metadata

import pytest

import course_lib
from course_lib.doctor import EFFECT, REMEDY, report


def test_on_the_tested_set_every_version_is_as_tested(tmp_path):
    installed = {package: metadata.version(package).split("+")[0] for package in EFFECT}
    text = "\n".join(report(pins(tmp_path, **installed)))
    assert text.count("as tested") >= len(EFFECT) and REMEDY not in text
    assert not any(effect in text for effect in EFFECT.values())


def test_doctor_prints_the_report(capsys):
    course_lib.doctor()
    assert capsys.readouterr().out.splitlines() == report()


def pins(tmp_path, **versions):
    file = tmp_path / "constraints.txt"
    file.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    return file


@pytest.mark.parametrize("package", EFFECT)
def test_a_difference_is_named_with_its_effect_and_the_remedy(package, tmp_path):
    lines = report(pins(tmp_path, **{package: "0.0.1"}))
    line = next(line for line in lines if line.startswith(package + " "))
    assert "tested with 0.0.1" in line and EFFECT[package] in line
    assert lines[-1] == REMEDY


def test_a_missing_constraints_file_is_said(tmp_path):
    assert "tested version unknown" in "\n".join(report(tmp_path / "nowhere.txt"))


def test_a_missing_package_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(EFFECT, "no-such-package", "nothing works")
    lines = report(pins(tmp_path, **{"no-such-package": "1.0"}))
    assert any("missing" in line and "nothing works" in line for line in lines)


def test_a_torch_that_fails_to_import_is_reported_and_not_raised(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert any("torch fails: ModuleNotFoundError" in line for line in report())


def test_no_line_holds_a_path():
    assert not any("/" in line.split("tested")[0] for line in report())
