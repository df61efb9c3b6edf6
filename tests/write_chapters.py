"""Write the chapters' outputs: execute, normalise, store, and say what changed.

    python tests/write_chapters.py [NUMBER ...]      FRESH=1 renews cells with ignored output too

The notebook is the only source; this writes nothing into it but outputs. Cells whose output is
ignored by nbval, and `cuda` cells, keep what is stored while their source is unchanged. Where
there is a GPU, `cuda` cells with no fresh recording are run and recorded.
"""

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

import nbformat
from gates import code_cells, numbers, output_text, recording_hash, tags
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
README_PICTURE = ROOT / ".github" / "readme.svg"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT_METADATA = ("tags", "recording", "source_hash", "jupyter")
# Another laptop: the plainest kernels, one thread. Outputs must not change.
ELSEWHERE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}
DROPPED_OUTPUT = "application/vnd.jupyter.widget-view+json"


def write(
    path: Path, *, fresh: bool = False, device: str | None = None, elsewhere: bool = False
) -> list[str]:
    """Execute a notebook, store its outputs, and return lines that say what changed.

    `device` names the GPU on which `cuda` cells are recorded; None leaves them alone. With
    `elsewhere` the kernel computes as another laptop would.
    """
    notebook = nbformat.read(path, as_version=4)
    before = [_said(cell) for cell in code_cells(notebook)]
    kept = {
        cell["id"]: (cell.outputs, cell.execution_count)
        for cell in code_cells(notebook)
        if _keeps_output(notebook, cell, fresh, device)
    }
    for cell in code_cells(notebook):
        if "cuda" in tags(cell) and (device is None or cell["id"] in kept):
            cell.metadata["tags"] = [*tags(cell), "skip-execution"]
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            store_widget_state=False,
            resources={"metadata": {"path": folder}},
        ).execute(env=os.environ | (ELSEWHERE if elsewhere else {}))
    _normalise(notebook, kept, device)
    nbformat.write(notebook, path)
    return _changes(notebook, before)


def _keeps_output(notebook, cell, fresh: bool, device: str | None) -> bool:
    if "cuda" in tags(cell):
        recording = cell.metadata.get("recording")
        stale = recording is None or recording["hash"] != recording_hash(notebook, cell)
        return device is None or not stale
    if "nbval-ignore-output" in tags(cell) and not fresh:
        return cell.metadata.get("source_hash") == _hash(cell.source)
    return False


def _hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _normalise(notebook, kept: dict, device: str | None) -> None:
    """Counts 1 … n, no timing, no widget state or view, a fixed kernel, tags and records only.

    Of an output's metadata the size of a picture is kept, else it is shown as large as its pixels.
    """
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    count = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in KEPT_METADATA if key in cell.metadata}
        )
        if cell.cell_type != "code":
            continue
        if "skip-execution" in tags(cell):
            cell.metadata["tags"] = [tag for tag in tags(cell) if tag != "skip-execution"]
        if cell["id"] in kept:
            cell.outputs, cell.execution_count = kept[cell["id"]]
        elif "cuda" in tags(cell):
            _record(notebook, cell, device)
        if "nbval-ignore-output" in tags(cell):
            cell.metadata["source_hash"] = _hash(cell.source)
        if "cuda" not in tags(cell) or "recording" in cell.metadata:
            count += 1
            cell.execution_count = count
        for output in cell.outputs:
            output.get("data", {}).pop(DROPPED_OUTPUT, None)
            if "execution_count" in output:
                output.execution_count = cell.execution_count
            if "metadata" in output:
                sizes = {k: v for k, v in output.metadata.items() if k.startswith("image/")}
                output.metadata = nbformat.from_dict(sizes)


def _record(notebook, cell, device: str) -> None:
    from importlib.metadata import version

    cell.metadata["recording"] = {
        "device": device,
        "torch": version("torch"),
        "hash": recording_hash(notebook, cell),
    }


def _said(cell) -> list[str]:
    """The lines of a cell's outputs, and a hash for each picture drawn as SVG."""
    drawn = [o.data["text/html"] for o in cell.outputs if "text/html" in o.get("data", {})]
    return output_text(cell).splitlines() + [f"(picture {_hash(html)})" for html in drawn]


def _changes(notebook, before: list[list[str]]) -> list[str]:
    """What each cell said and says now, and the sentences that hold a number now gone."""
    lines, gone = [], set()
    cells = code_cells(notebook)
    for i, (cell, old) in enumerate(zip(cells, before, strict=True)):
        if old == _said(cell):
            continue
        first = (cell.source.splitlines() or [""])[0]
        lines.append(f"  Cell {i}: {first}")
        lines += [f"    - {line}" for line in old if line not in _said(cell)]
        lines += [f"    + {line}" for line in _said(cell) if line not in old]
        gone |= numbers("\n".join(old))
    gone -= set().union(*(numbers(output_text(cell)) for cell in cells), set())
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for sentence in re.split(r"(?<=[.?!:])\s+", cell.source):
                if numbers(sentence) & gone:
                    lines.append(f"    in the prose: {sentence.strip()}")
    return lines


def copy_readme_picture(path: Path) -> None:
    """The picture of the cell tagged `readme`, where the README finds it."""
    for cell in code_cells(nbformat.read(path, as_version=4)):
        if "readme" in tags(cell):
            README_PICTURE.write_bytes(stored_picture(cell))


def stored_picture(cell) -> bytes:
    """The SVG in a cell's stored HTML image."""
    html = next(o.data["text/html"] for o in cell.outputs if "text/html" in o.get("data", {}))
    return unquote(re.search(r'src="data:image/svg\+xml,([^"]*)"', html)[1]).encode()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main(wanted: list[str]) -> None:
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        if wanted and not path.name.startswith(tuple(wanted)):
            continue
        changes = write(path, fresh=os.environ.get("FRESH") == "1", device=_gpu())
        copy_readme_picture(path)
        print(f"{path.name}: {'changed' if changes else 'the same'}", *changes, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
