"""What this computer has, against what the course was tested with."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
TESTED_PYTHON = "3.11"
PAIR = "controls may not appear; ipywidgets and jupyterlab_widgets belong together"
EFFECT = {  # what a difference in this package changes for the reader
    "torch": "byte and FLOP counts may differ from the text",
    "numpy": "random draws, and so losses, may differ from the text",
    "matplotlib": "pictures may look different; the sentences under them don't change",
    "ipywidgets": PAIR,
    "jupyterlab_widgets": PAIR,
    "jupyterlab": "menus may look different",
}
REMEDY = 'To match, in the course folder: python -m pip install -c constraints.txt -e ".[lab]"'


def doctor() -> None:
    """Print versions found against tested, the device, the threads, and what to do. Never fails."""
    print("\n".join(report()))


def report(constraints: Path = CONSTRAINTS) -> list[str]:
    """The lines that `doctor` prints."""
    tested = _tested(constraints)
    lines = [_line("Python", platform.python_version(), _python_verdict())]
    differs = False
    for package, effect in EFFECT.items():
        found, wanted = _found(package), tested.get(package)
        verdict = _verdict(found, wanted, effect)
        differs |= verdict != "as tested"
        lines.append(_line(package, found or "missing", verdict))
    lines += _device_lines()
    environment = Path(sys.prefix).name if sys.prefix != sys.base_prefix else "no virtual one"
    lines.append(_line("environment", environment, ""))
    return lines + ([REMEDY] if differs and tested else [])


def _line(name: str, found: str, verdict: str) -> str:
    return f"{name:<20}{found:<14}{verdict}".rstrip()


def _tested(constraints: Path) -> dict[str, str]:
    try:
        lines = constraints.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip().lower(): version.strip() for name, version in pairs}


def _found(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _verdict(found: str | None, tested: str | None, effect: str) -> str:
    if tested is None:
        return "tested version unknown: constraints.txt is missing or doesn't name it"
    if found is None:
        return f"tested with {tested}: {effect}"
    if found.split("+")[0] == tested:
        return "as tested"
    return f"tested with {tested}: {effect}"


def _python_verdict() -> str:
    if ".".join(platform.python_version_tuple()[:2]) == TESTED_PYTHON:
        return "as tested"
    return f"tested with {TESTED_PYTHON}: 3.11 and newer should do"


def _device_lines() -> list[str]:
    try:
        import torch

        threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
        if torch.cuda.is_available():
            device = _line("device", "cpu", f"{torch.cuda.get_device_name()} for `cuda` cells only")
        else:
            device = _line("device", "cpu", "no CUDA device: every chapter runs without one")
        lines = [device, _line("threads", threads, "")]
        if torch.backends.mps.is_available():
            lines.append(_line("mps", "not used", "its results differ from the text"))
        return lines
    except Exception as error:
        advice = "make a new virtual environment and install as the README says"
        return [_line("device", "unknown", f"torch fails: {type(error).__name__}; {advice}")]
