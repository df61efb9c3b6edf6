"""Proof that the gates bite: a fault is planted in a copy, and the run turns red and says why."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gates
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

ROOT = Path(__file__).resolve().parent.parent
CHAPTER = "00_start_here.ipynb"


# --- each gate, with faults planted in the chapter and the complaint it must give ---


def cell_with(notebook, text):
    return next(cell for cell in notebook.cells if text in cell.source)


def code(source, output=None, tags=(), count=1, **metadata):
    cell = new_code_cell(source, execution_count=count, metadata={"tags": list(tags), **metadata})
    if output is not None:
        cell.outputs = [new_output("stream", name="stdout", text=output)]
    return cell


STUB = "answer = ..."
CHECK = "from course_lib.check import Exercise\ntask = Exercise(lambda: 3)\ntask.check(answer)"
SOLUTION = "solved = 3\ntask.check(solved)"


def exercise(stub_says="Not attempted yet.", solution_says="Passed.", solution=SOLUTION):
    return [
        code(STUB, tags=["exercise"]),
        code(CHECK, stub_says),
        code(solution, solution_says, tags=["solution"], jupyter={"source_hidden": True}),
    ]


def strip(notebook):
    for cell in gates.code_cells(notebook):
        cell.outputs, cell.execution_count = [], None


def append(*cells):
    return lambda notebook: notebook.cells.extend(cells)


def many(new_cell, number):
    return lambda notebook: notebook.cells.extend(new_cell() for _ in range(number))


def edit(text, change):
    return lambda notebook: change(cell_with(notebook, text))


def add_source(text, more):
    return edit(text, lambda cell: cell.update(source=cell.source + more))


def offer_as_an_option(number):
    def plant(notebook):
        notebook.cells.append(code("views.quiz(question)", f"( ) {number}"))
        cell_with(notebook, PROSE).source += f" It is {number}."

    return plant


def show_elsewhere(number, prose):
    """A cell of the first section prints the number, a later section says it."""

    def plant(notebook):
        notebook.cells.insert(1, code(f"print({number})", number))
        cell_with(notebook, PROSE).source += prose

    return plant


def add_output(output):
    return edit("views.predict", lambda cell: cell.outputs.append(output))


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def lengthen(cell):
    cell.source = cell.source.replace("## Summary", "word " * 81 + "\n## Summary")


PRINTS = "trace = measure("
PROSE = "## Your guess"
EXCEPT = "<!-- not measured:"
RECORDING = {"device": "a GPU", "torch": "2.13.0", "hash": "of older code"}

FAULTS = [
    (gates.was_run, strip, "stored without being run"),
    (gates.was_run, edit(PRINTS, lambda c: c.update(execution_count=None)), "without being run"),
    (gates.was_run, edit(PRINTS, lambda c: c.update(execution_count=40)), "has count 40"),
    (gates.outputs_are_the_same_anywhere, add_output(stream("oh", "stderr")), "stderr"),
    (gates.outputs_are_the_same_anywhere, add_output(stream("<f at 0x7f00aa11bb>")), "an address"),
    (gates.outputs_are_the_same_anywhere, add_output(stream("/home/me/x.py")), "a path"),
    (gates.outputs_are_the_same_anywhere, add_output(stream("error, line 12")), "a line number"),
    (gates.outputs_are_the_same_anywhere, add_output(stream("at 12:30:01")), "a time of day"),
    (
        gates.outputs_are_the_same_anywhere,
        add_output(new_output("error", ename="E", evalue="in /home/me/x.py", traceback=[])),
        "a path",
    ),
    (gates.outputs_are_the_same_anywhere, add_output(stream("\x1b[31mred")), "a terminal colour"),
    (
        gates.outputs_are_the_same_anywhere,
        add_output(new_output("error", ename="ValueError", evalue="", traceback=[])),
        "stores an error",
    ),
    (
        gates.outputs_are_the_same_anywhere,
        add_output(
            new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"a": 1}})
        ),
        "a widget view",
    ),
    (gates.source_repeats, add_source(PRINTS, ";"), "ends with a semicolon"),
    (gates.source_repeats, add_source(PRINTS, "\n# NBVAL_SKIP"), "steers nbval by a comment"),
    (gates.source_repeats, add_source(PRINTS, "\nclear_output()"), "updates an output"),
    (gates.source_repeats, add_source(PRINTS, "\ninput('?')"), "asks for input"),
    (gates.source_repeats, add_source(PRINTS, "\ntorch.set_default_dtype(1)"), "default dtype"),
    (gates.source_repeats, add_source(PRINTS, "\nfor _ in tqdm([]): pass"), "progress bar"),
    (gates.source_repeats, add_source(PRINTS, "\nimport pickle"), "unpickles"),
    (gates.source_repeats, add_source(PRINTS, "\nsys.path.append('..')"), "changes sys.path"),
    (gates.is_well_formed, lambda n: n.metadata.update(widgets={}), "widget state"),
    (gates.is_well_formed, lambda n: n.metadata.kernelspec.update(name="my-env"), "python3"),
    (gates.is_well_formed, append(code("1", tags=["solutoin"])), "unknown tag 'solutoin'"),
    (
        gates.pictures_have_sentences,
        edit("show_timeline", lambda c: c.update(outputs=c.outputs[:1])),
        "without a printed sentence",
    ),
    (
        gates.pictures_have_sentences,
        add_output(new_output("display_data", {"image/png": "aGk="})),
        "without a printed sentence",
    ),
    (
        gates.pictures_have_sentences,
        add_output(new_output("display_data", {"text/html": "<svg></svg>"})),
        "without a printed sentence",
    ),
    (gates.prose_numbers, add_source(PROSE, " It takes 31.7 GiB."), "says 31.7"),
    (gates.prose_numbers, add_source(PROSE, " It has 2,049 tokens."), "says 2049"),
    (gates.prose_numbers, add_source(PROSE, " | 17% | 3x |"), "says 17"),
    (gates.prose_numbers, add_source(PROSE, " About 96–108."), "says 96"),
    (gates.prose_numbers, add_source(PROSE, " By −31.7 or “18.3 GiB”."), "says 18.3"),
    (gates.prose_numbers, add_source(PROSE, " By −31.7 or “18.3 GiB”."), "says 31.7"),
    (gates.prose_numbers, add_source(PROSE, " It takes&nbsp;31.7 GiB."), "says 31.7"),
    (gates.prose_numbers, add_source(PROSE, " It holds 2049 bytes."), "says 2049"),
    (gates.prose_numbers, add_source(PROSE, " They are\n17. Then more."), "says 17"),
    (gates.prose_numbers, add_source(PROSE, "\n\n### Sources of noise\n\nAt 31.7."), "says 31.7"),
    (gates.prose_numbers, offer_as_an_option("31.7"), "says 31.7"),
    (gates.prose_numbers, show_elsewhere("17", " It is 17."), "says 17, which no output or"),
    (
        gates.prose_numbers,
        show_elsewhere("31.7", f" It is 31.7. {EXCEPT} 31.7 -->"),
        "excepts 31.7, which is shown: it hides errors",
    ),
    (gates.prose_numbers, add_source(PROSE, f" {EXCEPT} 31.7 -->"), "31.7, which isn't there"),
    (gates.lists_are_meant, add_source(PROSE, "\n\nIt is 4\n+ 4 + 8."), "'+ 4 + 8.'"),
    (gates.lists_are_meant, add_source(PROSE, "\n\nIt is 4\n- 3 at most."), "'- 3 at most.'"),
    (gates.lists_are_meant, add_source(PROSE, "\n\nIn all\n12. Then more."), "'12. Then more.'"),
    (gates.lists_are_meant, add_source(PROSE, "\n\nWhere it is\n> 4."), "'> 4.'"),
    (gates.lists_are_meant, add_source(PROSE, "\n\n- It is 4\n+ 4."), "'+ 4.'"),
    (gates.lists_are_meant, add_source(PROSE, "\n\n- It is 4\n  + 4."), "'+ 4.'"),
    (
        gates.exercises_are_proven,
        append(*exercise()[:2], code(SOLUTION, "Passed.", tags=["solution"])),
        "isn't folded",
    ),
    (gates.exercises_are_proven, append(*exercise(solution_says="Not yet: no.")), "doesn't pass"),
    (
        gates.exercises_are_proven,
        append(exercise()[0], code("task.check(other)", "Not attempted yet."), exercise()[2]),
        "checks another name",
    ),
    (gates.exercises_are_proven, append(*exercise(stub_says="Passed.")), "untouched stub"),
    (gates.exercises_are_proven, append(*exercise()[:2]), "no solution that passes task.check"),
    (gates.exercises_are_proven, append(exercise()[0], exercise()[2]), "untouched stub"),
    (gates.exercises_are_proven, append(exercise()[0]), "no check in the next cell"),
    (
        gates.exercises_are_proven,
        append(*exercise(solution="answer = 3\ntask.check(answer)")),
        "overwrites the reader's 'answer'",
    ),
    (
        gates.recordings_are_fresh,
        append(code("print(facts.model('gpt2'))", "1", tags=["cuda"], recording=RECORDING)),
        "stale recording",
    ),
    (
        gates.recordings_are_fresh,
        append(code("print(2)", tags=["cuda"], count=None, recording=RECORDING)),
        "its output is gone",
    ),
    (
        gates.recordings_are_fresh,
        append(new_markdown_cell("On a GPU."), code("1", tags=["cuda"], count=None)),
        "doesn't say so",
    ),
    (
        gates.recordings_are_fresh,
        append(new_markdown_cell("It has not been recorded."), code("1", "2", tags=["cuda"])),
        "no recording of the device",
    ),
    (
        gates.imported_names_exist,
        add_source("import torch", "\nfrom course_lib.facts import gpu"),
        "imports course_lib.facts.gpu",
    ),
    (gates.imported_names_exist, add_source(PRINTS, "\nfacts.gpu('A100')"), "uses facts.gpu"),
    (gates.links_lead_somewhere, add_source(PROSE, " [next](77_next.ipynb)"), "links to 77_next"),
    (gates.links_lead_somewhere, add_source(PROSE, " See chapter 77."), "points at chapter 77"),
    (
        gates.links_lead_somewhere,
        add_source(PROSE, " See chapters 00, 77."),
        "points at chapter 77",
    ),
    (
        gates.is_small_enough,
        append(*[new_markdown_cell("a") for _ in range(40)]),
        "the limit is 60",
    ),
    (gates.is_small_enough, append(new_markdown_cell("word " * 3001)), "words of prose"),
    (gates.is_small_enough, append(new_markdown_cell("x" * 400_001)), "the limit is 400,000"),
    (
        gates.is_small_enough,
        append(*[code("1", tags=["nbval-ignore-output"]) for _ in range(3)]),
        "limit is 3",
    ),
    (gates.is_small_enough, append(code("a = 1\n" * 31)), "more than 30 lines"),
    (
        gates.has_its_sections,
        edit("## Summary", lambda c: c.update(source=c.source.replace("## Summary", "## End"))),
        "must have these sections",
    ),
    (gates.has_its_sections, edit("# Start here", lambda c: c.update(source="Hi")), "its title"),
    (
        gates.has_its_sections,
        edit("# Start here", lambda c: c.update(source="# Start here")),
        "doesn't ask a question",
    ),
    (
        gates.has_its_sections,
        edit(
            "## Where DeepSpeed acts",
            lambda c: c.update(
                source=c.source.replace("## Summary", "word " * 81 + "\n## Summary")
            ),
        ),
        "more than 80 words",
    ),
]


@pytest.mark.parametrize(
    ("gate", "plant", "message"), FAULTS, ids=[f"{g.__name__}: {m}" for g, _, m in FAULTS]
)
def test_a_planted_fault_is_found_and_named(gate, plant, message, tmp_path):
    copy = tmp_path / "chapters" / CHAPTER
    shutil.copytree(ROOT / "chapters", copy.parent)  # its links lead to its neighbours
    assert list(gate(nbformat.read(copy, as_version=4), copy)) == []
    notebook = nbformat.read(copy, as_version=4)
    plant(notebook)
    nbformat.write(notebook, copy)
    said = [text for _, text in gate(notebook, copy)]
    assert any(message in text for text in said), said


def test_every_gate_has_a_planted_fault():
    assert {gate for gate, _, _ in FAULTS} == set(gates.GATES)


def test_a_good_exercise_and_a_fresh_recording_pass(tmp_path):
    notebook = nbformat.read(ROOT / "chapters" / CHAPTER, as_version=4)
    cuda = code("print(facts.model('gpt2'))", "1", tags=["cuda"])
    notebook.cells += [*exercise(), cuda]
    cuda.metadata["recording"] = {**RECORDING, "hash": gates.recording_hash(notebook, cuda)}
    assert list(gates.exercises_are_proven(notebook, tmp_path)) == []
    assert list(gates.recordings_are_fresh(notebook, tmp_path)) == []


def test_a_recording_is_stale_once_the_library_or_a_cell_that_it_uses_changes(monkeypatch):
    notebook = nbformat.read(ROOT / "chapters" / CHAPTER, as_version=4)
    cell = code("print(measure(llama, batch, loss_fn, adamw))")
    before = gates.recording_hash(notebook, cell)
    other = cell_with(notebook, "notation = {")
    other.source += "  # no name of it is used"
    assert gates.recording_hash(notebook, cell) == before
    cell_with(notebook, "def llama").source += "  # changed"
    changed = gates.recording_hash(notebook, cell)
    assert changed != before
    source = gates.inspect.getsource
    monkeypatch.setattr(gates.inspect, "getsource", lambda module: source(module) + "# changed")
    assert gates.recording_hash(notebook, cell) not in (before, changed)


def test_a_recording_of_a_lessons_object_is_the_same_in_every_process(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[code("from course_lib.lessons import training")])
    cell = code("training.one_batch_loss.check(3)")
    script = tmp_path / "hash.py"
    nbformat.write(nbformat.v4.new_notebook(cells=[*notebook.cells, cell]), tmp_path / "n.ipynb")
    script.write_text(
        "import sys, nbformat\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import gates\n"
        f"notebook = nbformat.read({str(tmp_path / 'n.ipynb')!r}, as_version=4)\n"
        "print(gates.recording_hash(notebook, notebook.cells[1]))\n",
        encoding="utf-8",
    )
    hashes = {
        subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "prose",
    [
        "In `x = 17`, $y = 18$ and\n```\n19\n```\n",
        "## 17 of them",
        "Since 2017, an A100-SXM4-17GB or fp17",
        "1. First",
        "It is 17.5. <!-- not measured: 17.5 -->",
        "see [there](https://example.org/17)",
        "## Sources\n- Volume 17",
    ],
)
def test_what_is_no_claim_needs_no_cell(prose, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[new_markdown_cell(prose)])
    assert list(gates.prose_numbers(notebook, tmp_path)) == []


def test_a_number_may_be_asserted_instead_of_printed(tmp_path):
    cells = [code("assert 41 == 40 + 1.5 - 0.5"), new_markdown_cell("It is 41, not 1.50.")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert list(gates.prose_numbers(notebook, tmp_path)) == []


@pytest.mark.parametrize(
    "prose",
    [
        "Two kinds:\n- one\n- and\n  another\n\n  - deeper\n",
        "1. First,\n   then\n2. second\n\nIt is −4\nand +4.",
        "> **Note.** Two\n> lines.",
        "```\nx\n- y\n```\n$$\nx\n+ y\n$$",
        "## Heading\n- item\n\n* another list",
    ],
)
def test_lists_that_are_meant_pass(prose, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[new_markdown_cell(prose)])
    assert list(gates.lists_are_meant(notebook, tmp_path)) == []


def test_a_sum_up_may_say_a_small_number_of_any_section(tmp_path):
    cells = [code("print(17)", "17"), new_markdown_cell("## More\n\n## Summary\n- It is 17.")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert list(gates.prose_numbers(notebook, tmp_path)) == []
    cells[1].source = "## More\nIt is 17.\n\n## Summary\n"
    assert [text for _, text in gates.prose_numbers(notebook, tmp_path)] == [
        "says 17, which no output or assertion of its section contains"
    ]


# --- the run itself, on a copy of the whole project ---


@pytest.fixture
def project(tmp_path):
    """A copy of what the run needs, and a function that runs pytest in it."""
    copy = tmp_path / "project"
    keep_out = shutil.ignore_patterns(".*", "__pycache__", "my_chapters", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=keep_out)
    shutil.copytree(ROOT / ".github", copy / ".github")

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return copy, run


def change_chapter(copy, plant):
    path = copy / "chapters" / CHAPTER
    notebook = nbformat.read(path, as_version=4)
    plant(notebook)
    nbformat.write(notebook, path)


def change_text(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_static_faults_turn_the_run_red_and_are_all_named(project):
    copy, run = project
    for plant in (
        edit("views.predict", lambda cell: cell.update(execution_count=None, outputs=[])),
        add_source(PRINTS, ";"),
        add_source(PROSE, " It takes 31.7 GiB."),
        append(*exercise(solution_says="Not yet: no.")),
        append(*exercise(stub_says="Passed.")),
        append(code("facts.model('gpt2')", "1", tags=["cuda"], recording=RECORDING)),
    ):
        change_chapter(copy, plant)
    change_text(copy / "course_lib" / "units.py", "import re", "import course_lib.training, re")
    status, output = run("tests/test_chapters.py", "tests/test_layers.py", "-k", "gate or import")
    assert status == 1
    for reason in (
        "stored without being run",
        "ends with a semicolon",
        "says 31.7",
        "is a solution that doesn't pass its check",
        "answers an untouched stub",
        "has a stale recording",
        "units.py imports training, which isn't below it",
    ):
        assert reason in output, reason


def test_a_changed_digit_in_a_stored_output_turns_nbval_red(project):
    copy, run = project
    change_text(copy / "chapters" / CHAPTER, "in float32: 26.95 GB", "in float32: 26.96 GB")
    status, output = run(f"chapters/{CHAPTER}", "-x")
    assert status == 1 and "26.96 GB" in output and "1 failed" in output


def test_a_changed_formula_in_course_lib_turns_nbval_red(project):
    copy, run = project
    change_text(copy / "course_lib" / "models.py", "return x + self.ffn(", "return self.ffn(")
    status, output = run(f"chapters/{CHAPTER}", "-x")
    assert status == 1 and "allocations and frees" in output


def test_a_solution_that_no_longer_passes_turns_nbval_red(project):
    """The stored output says Passed; running it says otherwise."""
    copy, run = project
    cells = exercise(solution="solved = 4\ntask.check(solved)")
    for count, cell in enumerate(cells, 1):
        cell.execution_count = count
        if cell.outputs:
            text = cell.outputs[0].text
            cell.outputs = [
                new_output("execute_result", {"text/plain": text}, execution_count=count)
            ]
    change_chapter(copy, lambda notebook: notebook.update(cells=cells))
    status, output = run(f"chapters/{CHAPTER}")
    assert status == 1 and "Not yet: 4 is not it." in output and "1 failed" in output


def test_a_chapter_that_reaches_for_the_network_turns_nbval_red(project):
    copy, run = project
    source = "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)"
    change_chapter(copy, lambda notebook: notebook.update(cells=[code(source, "")]))
    status, output = run(f"chapters/{CHAPTER}")
    assert status == 1 and "must not touch the network" in output


def test_a_cuda_cell_is_skipped_with_its_reason(project):
    copy, run = project
    cell = code("raise RuntimeError", tags=["cuda"], count=None)
    change_chapter(copy, lambda notebook: notebook.update(cells=[cell]))
    status, output = run(f"chapters/{CHAPTER}")
    assert status == 0 and "1 skipped" in output and "needs CUDA; what is stored stays" in output
