"""What a stored chapter must satisfy, beyond what nbval compares.

Each gate takes a notebook and yields complaints. `complaints` runs them all and names the
cell: its number among the code cells, as nbval counts, and its first line.
"""

import ast
import hashlib
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

TAGS = {"exercise", "solution", "cuda", "nbval-ignore-output", "raises-exception", "readme"}
SECTIONS = ("Where DeepSpeed acts", "Summary", "Sources")
LATER_SECTIONS = ("Exercises", "Check yourself", "Solutions")  # every chapter but 00

Complaint = tuple[nbformat.NotebookNode | None, str]


def complaints(path: Path) -> list[str]:
    """All complaints about one notebook, each with its cell's number and first line."""
    notebook = nbformat.read(path, as_version=4)
    number = {cell["id"]: i for i, cell in enumerate(code_cells(notebook))}
    found = []
    for gate in GATES:
        for cell, message in gate(notebook, path):
            where = path.name
            if cell is not None:
                kind = f"Cell {number[cell['id']]}" if cell["id"] in number else "text"
                where += f", {kind} ({(cell.source.splitlines() or [''])[0][:60]!r})"
            found.append(f"{where}: {message}")
    return found


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


NO_RESULT = re.compile(r"<img [^>]*>|<small>.*?</small>")  # a source; what controls offer


def holds_picture(output) -> bool:
    data = output.get("data", {})
    html = data.get("text/html", "")
    return any(kind.startswith("image/") for kind in data) or "<img " in html or "<svg" in html


def output_text(cell) -> str:
    """All that a cell's stored outputs say in text; what a picture's source holds is left out."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "error":
            parts += [output.evalue, *output.traceback]
        if output.output_type == "stream":
            parts.append(output.text)
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                parts.append(NO_RESULT.sub("", value))
    return "\n".join(parts)


# --- stored as run ---


def was_run(notebook, path) -> Iterator[Complaint]:
    """nbval compares nothing with a cell that was stored without having been run."""
    expected = 1
    for cell in code_cells(notebook):
        if "cuda" in tags(cell) and cell.execution_count is None:
            continue
        if cell.execution_count is None:
            yield cell, "was stored without being run: make chapters"
        elif cell.execution_count != expected:
            yield cell, f"has count {cell.execution_count}, not {expected}: make chapters"
        expected += 1


OUTPUT_TRAPS = {
    r"\b0x[0-9a-fA-F]{6,}": "an address",
    r"(?<![\w.])/(home|root|tmp|usr|Users|private|var|work)/|[A-Z]:\\": "a path",
    r"\bline \d+": "a line number",
    r"\b\d\d:\d\d:\d\d\b": "a time of day",
    r"\x1b\[": "a terminal colour",
}


def outputs_are_the_same_anywhere(notebook, path) -> Iterator[Complaint]:
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                yield cell, "stores something on stderr"
            if output.output_type == "error" and "raises-exception" not in tags(cell):
                yield cell, f"stores an error: {output.ename}"
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                yield cell, "stores a widget view: make chapters drops it"
        for pattern, what in OUTPUT_TRAPS.items():
            if re.search(pattern, output_text(cell)):
                yield cell, f"stores {what} in its output"


SOURCE_TRAPS = {
    r"NBVAL_|PYTEST_VALIDATE": "steers nbval by a comment: use a tag",
    r";\s*\Z": "ends with a semicolon: nbval shows the value all the same; use `_ =`",
    r"\bclear_output\b|\bdisplay_id\b": "updates an output, which nbval doesn't follow",
    r"\binput\(": "asks for input",
    r"set_default_dtype": "changes torch's default dtype: pass dtype=",
    r"\btqdm\b": "shows a progress bar",
    r"^\s*[!%]": "uses the shell or a magic",
    r"sys\.path": "changes sys.path: course_lib is installed",
    r"allow_pickle\s*=\s*True|\bpickle\b|weights_only\s*=\s*False": "unpickles",
}


def source_repeats(notebook, path) -> Iterator[Complaint]:
    for cell in code_cells(notebook):
        for pattern, message in SOURCE_TRAPS.items():
            if re.search(pattern, cell.source, re.MULTILINE if pattern.startswith("^") else 0):
                yield cell, message


def is_well_formed(notebook, path) -> Iterator[Complaint]:
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield None, f"is not a valid notebook: {error.message}"
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield None, "must name the kernel python3"
    if "widgets" in notebook.metadata:
        yield None, "stores widget state, for which GitHub refuses the file"
    for cell in notebook.cells:
        for tag in set(tags(cell)) - TAGS:
            yield cell, f"has the unknown tag {tag!r}"


# --- pictures and prose ---


def pictures_have_sentences(notebook, path) -> Iterator[Complaint]:
    """Each picture has its sentence in its own output, or printed after it in the same cell."""
    for cell in code_cells(notebook):
        for output, following in zip(cell.outputs, [*cell.outputs[1:], None], strict=False):
            said = following is not None and following.output_type == "stream" and following.text
            own = "<p" in output.get("data", {}).get("text/html", "")
            if holds_picture(output) and not own and not (said and said.strip()):
                yield cell, "shows a picture without a printed sentence after it"


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
NOT_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$"  # code and mathematics
    r"|<!--.*?-->|<[^>\n]*>|\]\([^)]*\)|https?://\S+"  # HTML, links' targets
    r"|^#.*?$|[Cc]hapters? \d\d\b(?:(?:,| and| or| to) \d\d\b)*",  # headings, chapter numbers
    re.DOTALL | re.MULTILINE,
)


YEAR = re.compile(r"(?:\b[Ii]n |\b[Ss]ince |, |\()((?:19|20)\d\d)(?![\d,.]*\d)")


def numbers(text: str) -> set[float]:
    """The numbers in a text; 2,048 is one number, the 100 of A100 none."""
    found = set()
    for word in re.split(
        r"[\s|/–—×=]+", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.replace("&nbsp;", " "))
    ):
        word = re.sub(r"^[^\w]+", "", word)
        if re.match(r"\d", word):
            found |= {float(number) for number in NUMBER.findall(word)}
    return found


SMALL = 20  # whole numbers below it are everywhere: only their own section shows them
SUMS_UP = ("Where DeepSpeed acts", "Summary", "Check yourself", "Solutions")


def prose_numbers(notebook, path) -> Iterator[Complaint]:
    """Each number in the prose is in an output or an assertion of the notebook.

    A small whole number is looked for in its own section only, from heading to heading; the
    sections that sum up see the whole notebook. Code, mathematics, headings, years and the sources
    are left out. A deliberate exception is named in its cell, <!-- not measured: 80, 7 -->, and
    one that isn't needed is a complaint, since it would hide a later error.
    """
    sections = list(_sections(notebook))
    everywhere = set().union(*(_shown(section) for section in sections))
    said, missing = {}, {}  # by the id of a text cell, which may end one section and begin another
    for section in sections:
        if section.heading == "Sources":
            break
        near = everywhere if section.heading in SUMS_UP else _shown(section)
        for cell, text in section.texts:
            new = _prose_numbers(text)
            found = {n for n in new if n in (near if n < SMALL and n % 1 == 0 else everywhere)}
            said.setdefault(cell["id"], set()).update(new)
            missing.setdefault(cell["id"], set()).update(new - found)
    for cell in notebook.cells:
        excepted = _excepted(cell) if cell["id"] in said else set()
        for number in sorted(missing.get(cell["id"], set()) - excepted):
            where = "its section" if number in everywhere else "the notebook"
            yield cell, f"says {number:g}, which no output or assertion of {where} contains"
        for number in sorted(excepted - missing.get(cell["id"], set())):
            why = "is shown: it hides errors" if number in said[cell["id"]] else "isn't there"
            yield cell, f"excepts {number:g}, which {why}"


@dataclass
class _Section:
    """From one heading of the second level to the next: its texts with their cells, its code."""

    heading: str
    texts: list = field(default_factory=list)
    code: list = field(default_factory=list)


def _sections(notebook) -> Iterator[_Section]:
    section = _Section("")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            section.code.append(cell)
        if cell.cell_type != "markdown":
            continue
        before, *parts = re.split(r"^## ", cell.source, flags=re.MULTILINE)
        section.texts.append((cell, before))
        for part in parts:
            yield section
            heading, _, text = part.partition("\n")
            section = _Section(heading.strip(), [(cell, text)])
    yield section


def _excepted(cell) -> set[float]:
    listed = re.findall(r"<!-- not measured:(.*?)-->", cell.source)
    return set().union(*map(numbers, listed))


def _shown(section: _Section) -> set[float]:
    """The numbers that a section's cells print or assert."""
    shown = set()
    for cell in section.code:
        # What a question offers as options shows nothing: most of it is wrong.
        asks = re.search(r"\bviews\.(predict|quiz)\(", cell.source)
        if "nbval-ignore-output" not in tags(cell) and not asks:
            shown |= numbers(output_text(cell))
        shown |= _asserted(cell.source)
    return shown


def _prose_numbers(text: str) -> set[float]:
    prose = _without_list_numbers(NOT_PROSE.sub(" ", text))
    return numbers(prose) - {float(year) for year in YEAR.findall(prose)}


MARKER = re.compile(r"(\s*)([-+*>]|\d{1,9}[.)])\s")


def lists_are_meant(notebook, path) -> Iterator[Complaint]:
    """No line of a paragraph begins with a list's or a quotation's marker: Markdown would make one.

    In a list each item has the same kind of marker: another kind is a line that was wrapped there.
    """
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        before, kinds = "", {}  # the kinds of marker of the list at hand, by indentation
        for line in re.sub(r"```.*?```|\$\$.*?\$\$", "", cell.source, flags=re.DOTALL).splitlines():
            marker = MARKER.match(line)
            if marker:
                deep, kind = len(marker[1]), "1" if marker[2][0].isdigit() else marker[2]
                if not before.strip() or re.match(r"#|<|.*:$", before):
                    kinds = {d: k for d, k in kinds.items() if d < deep} | {deep: kind}
                elif kinds.get(deep) != kind:
                    yield cell, f"has a line that Markdown makes a list: {line.strip()[:40]!r}"
            elif line.strip() and not line.startswith(" ") and not before.strip():
                kinds = {}
            before = line


def _without_list_numbers(text: str) -> str:
    """A number and a full stop count a list's item only after a blank line or another item."""
    lines, in_list = [], True
    for line in text.splitlines():
        item = re.match(r"(?:\*\*)?\d+\.\s", line)
        if item and in_list:
            line = line[item.end() :]
        elif line.strip() and not line.startswith(" "):
            in_list = False
        if not line.strip():
            in_list = True
        lines.append(line)
    return "\n".join(lines)


def _asserted(source: str) -> set[float]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    return {
        float(constant.value)
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Assert)
        for constant in ast.walk(statement)
        if isinstance(constant, ast.Constant) and type(constant.value) in (int, float)
    }


# --- exercises and recordings ---


def exercises_are_proven(notebook, path) -> Iterator[Complaint]:
    """A stub isn't attempted, and each check that follows one is passed by a solution."""
    cells = code_cells(notebook)
    wanted, passed = {}, set()
    stub_names = set()
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        if "exercise" in tags(cell):
            check = _checks(following)
            if not check:
                yield cell, "is an exercise with no check in the next cell"
                continue
            wanted |= dict.fromkeys(check, following)
            stub_names |= _assigned(cell.source)
            if not _assigned(cell.source) & _read_names(following.source):
                yield following, "checks another name than the stub before it defines"
            if not output_text(following).startswith("Not attempted yet"):
                yield following, "answers an untouched stub with something else than not attempted"
    for cell in cells:
        if "solution" in tags(cell):
            if not cell.metadata.get("jupyter", {}).get("source_hidden"):
                yield cell, "is a solution that isn't folded (jupyter.source_hidden)"
            for name in _assigned(cell.source) & stub_names:
                yield cell, f"overwrites the reader's {name!r}"
            checks = _checks(cell)
            if output_text(cell).count("Passed.") == len(checks):
                passed |= checks
            else:
                yield cell, "is a solution that doesn't pass its check"
    for check in wanted.keys() - passed:
        yield wanted[check], f"has no solution that passes {check}.check"


def _checks(cell) -> set[str]:
    return set() if cell is None else set(re.findall(r"([\w.]+)\.check\(", cell.source))


def _assigned(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def recordings_are_fresh(notebook, path) -> Iterator[Complaint]:
    """A `cuda` cell keeps an output from a real device, or is stored unrun and says so."""
    previous = None
    for cell in notebook.cells:
        if cell.cell_type == "code" and "cuda" in tags(cell):
            recording = cell.metadata.get("recording")
            if recording is None:
                if cell.outputs or cell.execution_count is not None:
                    yield cell, "has an output, but no recording of the device it came from"
                if previous is None or "not been recorded" not in previous.source:
                    yield cell, "has not been recorded, and the text before it doesn't say so"
            elif not cell.outputs or cell.execution_count is None:
                yield cell, "has a recording, but its output is gone"
            elif recording["hash"] != recording_hash(notebook, cell):
                yield cell, f"has a stale recording: its code changed since {recording['device']}"
        previous = cell


def recording_hash(notebook, cell) -> str:
    """A hash of the cell's source, of the notebook's cells that define names it uses, and of the
    library modules that hold what they name: what a function calls lies mostly beside it."""
    used = _cells_used(notebook, cell)
    parts = [cell.source for cell in used]
    modules = {}
    for each in used:
        for value in _library_objects(notebook, each).values():
            module = inspect.getmodule(value) or inspect.getmodule(type(value))
            modules[module.__name__] = module
    parts += [inspect.getsource(module) for _, module in sorted(modules.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cells_used(notebook, cell) -> list:
    """The cell, and the earlier cells that define the names that it or they use."""
    used, wanted = [cell], _read_names(cell.source)
    cells = code_cells(notebook)
    before = cells[: next((i for i, c in enumerate(cells) if c is cell), len(cells))]
    for earlier in reversed(before):
        if _assigned(earlier.source) & wanted:
            used.insert(0, earlier)
            wanted |= _read_names(earlier.source)
    return used


def _read_names(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def _library_objects(notebook, cell) -> dict[str, object]:
    """The course_lib objects that a cell names: `facts.model`, or `train_step` imported alone."""
    known, _ = _imports(notebook)
    found = {}
    for node in ast.walk(ast.parse(cell.source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = known.get(node.value.id)
            if inspect.ismodule(owner) and hasattr(owner, node.attr):
                found[f"{node.value.id}.{node.attr}"] = getattr(owner, node.attr)
        elif isinstance(node, ast.Name) and node.id in known:
            value = known[node.id]
            if not inspect.ismodule(value):
                found[node.id] = value
    return found


# --- names, links, sizes, order ---


def _imports(notebook) -> tuple[dict[str, object], list[str]]:
    """What a notebook imports from course_lib, by name, and what isn't there."""
    known, missing = {}, []
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("course_lib"):
                for alias in node.names:
                    value = _resolve(node.module, alias.name)
                    if value is None:
                        missing.append(f"{node.module}.{alias.name}")
                    else:
                        known[alias.asname or alias.name] = value
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "course_lib":
                        named = alias.name if alias.asname else "course_lib"
                        known[alias.asname or "course_lib"] = importlib.import_module(named)
    return known, missing


def _resolve(module: str, name: str):
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    if hasattr(owner, name):
        return getattr(owner, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return None


def imported_names_exist(notebook, path) -> Iterator[Complaint]:
    known, missing = _imports(notebook)
    for name in missing:
        yield None, f"imports {name}, which doesn't exist"
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = known.get(node.value.id)
                if inspect.ismodule(owner) and not hasattr(owner, node.attr):
                    yield cell, f"uses {node.value.id}.{node.attr}, which doesn't exist"


def links_lead_somewhere(notebook, path) -> Iterator[Complaint]:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#]+)[^)]*\)", cell.source):
                if "://" not in target and not (path.parent / target).exists():
                    yield cell, f"links to {target}, which doesn't exist"
            listed = re.findall(
                r"[Cc]hapters? (\d\d\b(?:(?:, | and | or | to )\d\d\b)*)", cell.source
            )
            for chapter in re.findall(r"\d\d", " ".join(listed)):
                if not list(path.parent.glob(f"{chapter}_*.ipynb")):
                    yield cell, f"points at chapter {chapter}, which doesn't exist"


def is_small_enough(notebook, path) -> Iterator[Complaint]:
    size, most_ignored = path.stat().st_size, 8 if path.name.startswith("07") else 3
    if size > 400_000:
        yield None, f"has {size:,} bytes; the limit is 400,000"
    if len(notebook.cells) > 60:
        yield None, f"has {len(notebook.cells)} cells; the limit is 60"
    words = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    if words > 3_000:
        yield None, f"has {words:,} words of prose; the limit is 3,000"
    ignored = [cell for cell in code_cells(notebook) if "nbval-ignore-output" in tags(cell)]
    if len(ignored) > most_ignored:
        yield None, f"has {len(ignored)} cells with ignored output; the limit is {most_ignored}"
    for cell in code_cells(notebook):
        if len(cell.source.splitlines()) > 30:
            yield cell, "has more than 30 lines"


def has_its_sections(notebook, path) -> Iterator[Complaint]:
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        yield None, "must begin with its title"
    elif not re.search(r"^# .*\?\s*$", notebook.cells[0].source, re.MULTILINE):
        yield notebook.cells[0], "has a title that doesn't ask a question"
    wanted = [*SECTIONS] if path.name.startswith("00") else [SECTIONS[0], SECTIONS[1]]
    if not path.name.startswith("00"):
        wanted += [*LATER_SECTIONS, SECTIONS[2]]
    if [heading for heading in headings if heading in wanted] != wanted:
        yield None, f"must have these sections, in this order: {', '.join(wanted)}"
    acts = re.search(r"^## Where DeepSpeed acts\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    prose = [line for line in (acts[1] if acts else "").splitlines() if not line.startswith("|")]
    if len(" ".join(prose).split()) > 80:
        yield None, "says more than 80 words on where DeepSpeed acts"


GATES = (
    was_run,
    outputs_are_the_same_anywhere,
    source_repeats,
    is_well_formed,
    pictures_have_sentences,
    prose_numbers,
    lists_are_meant,
    exercises_are_proven,
    recordings_are_fresh,
    imported_names_exist,
    links_lead_somewhere,
    is_small_enough,
    has_its_sections,
)
