"""The chapters in real JupyterLab: opened unrun, run, and used."""

import json
import os
import re
import sys
from pathlib import Path

import browser
import gates
import nbformat
import pytest

from book.copy import readers_copy

CHAPTERS = sorted((Path(__file__).resolve().parent.parent / "chapters").glob("*.ipynb"))

# In CI on Linux a missing browser is a failure; macOS and Windows runners have none.
pytestmark = pytest.mark.skipif(
    browser.EXECUTABLE is None and not (os.environ.get("CI") and sys.platform == "linux"),
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
def test_a_copy_opened_without_running_shows_its_stored_pictures_at_every_width(lab, path):
    chapter = lab(path.name)
    page = chapter.page
    copy = readers_copy(json.loads(path.read_text("utf-8")))
    cells = nbformat.reads(json.dumps(copy), as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    stored = sum(gates.holds_picture(output) for output in outputs)
    page.wait_for_function(browser.PICTURES_SHOWN + f" === {stored}", timeout=10_000)
    controls = [o for o in outputs if "with controls" in o.get("data", {}).get("text/plain", "")]
    offers = page.get_by_text("With a kernel, run this cell to choose")
    assert offers.count() == len(controls)
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0  # no news, no asking
    assert page.get_by_text("model not found").count() == 0
    assert "Run All Above Selected Cell" in page.locator(".jp-MarkdownCell").first.inner_text()
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    for width in (1280, 900, 700):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)  # the layout follows
        cut = page.evaluate(
            """() => [...document.querySelectorAll('.jp-OutputArea-output')]
                .filter(output => output.scrollWidth > output.clientWidth + 1)
                .map(output => output.innerText.slice(0, 60))"""
        )
        assert (width, cut) == (width, [])
    assert_clean(chapter)
    page.close()


def assert_named(chapter, *some):
    """Every control has a name in Chromium's accessibility tree, and these are among them."""
    names = chapter.names()
    assert [role for role, name in names if not name.strip()] == []
    assert set(some) <= set(names)
    groups = [name for role, name in names if role == "radiogroup"]
    assert len(groups) == chapter.page.locator(".widget-radio").count()
    assert all(group in chapter.page.inner_text(".jp-Notebook") for group in groups)


VALUE = "c => c.type === 'radio' ? document.activeElement.value : c.ariaValueNow ?? c.value"


def assert_keys_stay(chapter, control, moves):
    """No key that JupyterLab binds to cells leaves the control; arrows move one that `moves`."""
    page = chapter.page
    control.focus()
    before, seen = chapter.cells(), [control.evaluate(VALUE)]
    assert "c" in before[0] and "m" in before[0]
    for key in ("ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        seen.append(control.evaluate(VALUE))
        assert (key, chapter.cells()) == (key, before)
    assert seen[2] == seen[0] and (seen[1] != seen[0]) == moves
    for key in ("m", "x", "b", "Enter", "Escape"):  # Enter opens a dropdown, Escape closes it
        page.keyboard.press(key)
        assert (key, chapter.cells()) == (key, before)
    assert page.evaluate("() => document.activeElement.closest('.course-controls') !== null")
    page.keyboard.press("Tab")
    assert chapter.cells()[0] == before[0]


def test_chapter_00_runs_and_compares_a_guess(lab):
    chapter = lab("00_start_here.ipynb")
    chapter.run_all("changed = {", "in changed.items()")
    assert_clean(chapter)
    compare = chapter.cell("guess.compare")
    assert "No guess given. Measured: 24.8" in compare.inner_text()

    asked, box = chapter.cell("views.predict"), chapter.page.get_by_label("Your guess")
    assert "No guess is kept yet." in asked.inner_text()
    assert_named(chapter, ("textbox", "Your guess"))
    assert_keys_stay(chapter, box, moves=False)
    for typed, said in (("a lot", "Not kept: "), ("50 %", "Kept: 50 of 100 bytes. Now measure.")):
        box.fill(typed)
        chapter.page.keyboard.press("Enter")
        chapter.settle()
        assert said in asked.inner_text()
    chapter.run_again("guess.compare")
    said = " ".join(compare.inner_text().split())
    assert re.search(r"You said 50 of 100 bytes; measured: 24.8\. That counts a weight and", said)
    assert_clean(chapter)

    # A restarted kernel no longer listens, and that is said.
    notice = "box => getComputedStyle(box, '::after').content"
    controls = asked.locator(".course-controls")
    assert controls.evaluate(notice) == "none"
    chapter.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
    )
    chapter.settle()
    assert "No kernel listens to these controls" in controls.evaluate(notice)
    chapter.page.close()


def test_chapter_01_runs_and_its_controls_questions_and_exercises_answer(lab):
    chapter = lab("01_training_step.ipynb")
    page = chapter.page
    chapter.run_all()
    assert_clean(chapter)

    # The walk: buttons, a slider moved by keys, and the picture and sentence that follow.
    walk = chapter.cell("pictures.walk")
    picture, sentence = walk.locator("img").first, walk.locator("p[role=status]")
    before = picture.get_attribute("src"), sentence.inner_text()
    assert "AdamW, 256 images, second step, after forward" in before[1]
    walk.get_by_role("button", name="Next phase").focus()
    page.keyboard.press("Enter")
    chapter.settle()
    walk.get_by_role("button", name="Next phase").click()
    chapter.settle()
    assert "after backward" in sentence.inner_text()
    walk.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    chapter.settle()
    assert "AdamW, 384 images" in sentence.inner_text()
    assert walk.get_by_role("spinbutton", name="batch, images").input_value() == "384"
    walk.get_by_label("optimizer").select_option("SGD")
    chapter.settle()
    assert "optimizer state" not in sentence.inner_text()
    assert picture.get_attribute("src") != before[0]

    # A prediction by options is compared after the measurement.
    chapter.cell("lesson.three_calls").get_by_label("6", exact=True).check()
    chapter.settle()
    chapter.run_again("guess_calls.compare")
    said = " ".join(chapter.cell("guess_calls.compare").inner_text().split())
    assert "You said: 6. Measured: 18. 6 is what one call gives." in said

    # A wrong quiz answer shows its own feedback, the right one its own.
    quiz = chapter.cell("views.quiz")
    quiz.get_by_label("all of them, by half").check()
    chapter.settle()
    assert "Not this: Weights, gradients and optimizer state" in quiz.inner_text()
    quiz.get_by_label("activations, inputs and what is computed from them").check()
    chapter.settle()
    assert "Right: They have a row for each example" in quiz.inner_text()

    # An exercise: not attempted, a foreseen mistake, passed.
    check = "lesson.one_batch_loss.check(whole_loss)"
    assert "Not attempted yet." in chapter.cell(check).inner_text()
    stub = "def whole_loss(losses, counts):"
    chapter.run_with(stub, f"{stub}\n    return sum(losses) / len(losses)")
    chapter.run_again(check)
    assert "Not yet: That is the mean of the means" in chapter.cell(check).inner_text()
    total = "sum(x * n for x, n in zip(losses, counts))"
    chapter.run_with(stub, f"{stub}\n    return {total} / sum(counts)")
    chapter.run_again(check)
    assert "Passed." in chapter.cell(check).inner_text()
    assert_clean(chapter)

    # The keyboard alone, on every kind of control.
    assert_named(chapter, ("slider", "batch, images"), ("button", "Next phase"))
    assert_keys_stay(chapter, walk.get_by_role("button", name="Previous phase"), moves=False)
    walk.get_by_label("optimizer").select_option("AdamW")
    assert_keys_stay(chapter, walk.get_by_label("optimizer"), moves=True)
    assert_keys_stay(chapter, walk.get_by_role("spinbutton"), moves=True)
    assert_keys_stay(chapter, walk.get_by_role("slider"), moves=True)
    assert_keys_stay(chapter, quiz.get_by_role("radio").nth(1), moves=True)
    box = walk.get_by_role("spinbutton")
    for typed, reached in (("1e9", "512"), ("1e2", "128"), ("300", "256"), ("x", "256")):
        box.fill("")
        page.keyboard.type(typed)
        page.keyboard.press("Enter")
        chapter.settle()
        assert (typed, box.input_value()) == (typed, reached)
    page.close()


def test_chapter_02_runs_and_its_graph_is_stepped_through(lab):
    chapter = lab("02_computational_graph.ipynb")
    page = chapter.page
    chapter.run_all()
    assert_clean(chapter)

    # Every step by keyboard: another picture and another sentence each time, to the end.
    walk = chapter.cell("stepper.step_through")
    picture, sentence = walk.locator("img").first, walk.locator("p[role=status]")
    onward = walk.get_by_role("button", name="Next step")
    seen = {(picture.get_attribute("src"), sentence.inner_text())}
    onward.focus()
    for step in range(2, 13):
        page.keyboard.press("Enter")
        chapter.settle()
        assert f"({step} of 12" in walk.inner_text()
        seen.add((picture.get_attribute("src"), sentence.inner_text()))
    assert len(seen) == 12
    page.keyboard.press("Enter")  # at the end it does nothing, and the focus is still there
    chapter.settle()
    assert "(12 of 12, the last)" in walk.inner_text()
    assert onward.evaluate("button => button === document.activeElement")
    assert_named(chapter, ("button", "Next step"))
    assert "w = 0.5 − 0.1 × (−1.3177) = 0.6318" in sentence.inner_text()

    # The reader's own expression, with a value used twice.
    own = "\n".join(
        (
            "a = number(3.0, requires_grad=True)",
            "_ = stepper.step_through(a * a, a=a)  # stepper.step_through",
        )
    )
    chapter.run_with("stepper.step_through", own)
    walk = chapter.cell("stepper.step_through")
    for _ in range(2):
        walk.get_by_role("button", name="Next step").click()
        chapter.settle()
    assert "which adds to what is there" in walk.locator("p[role=status]").inner_text()

    # A number with a reason, and an exercise.
    chapter.page.get_by_label("Your guess").fill("2")
    page.keyboard.press("Enter")
    chapter.settle()
    chapter.run_again("guess_flops.compare")
    said = " ".join(chapter.cell("guess_flops.compare").inner_text().split())
    assert "You said 2 times forward's; measured: 1.83. Two products for each layer" in said
    check = "lesson.segments.check(plan)"
    chapter.run_with("plan = None", "plan = [16]")
    chapter.run_again(check)
    assert "Not yet: The peak is 5.63 MiB" in chapter.cell(check).inner_text()
    assert_clean(chapter)
    page.close()


def test_chapter_03_runs_and_its_race_is_run(lab):
    chapter = lab("03_optimizers.ipynb")
    page = chapter.page
    chapter.run_all()
    assert_clean(chapter)
    assert_named(chapter, ("slider", "update"))
    race = chapter.cell("pictures.race()")
    picture, sentence = race.locator("img").first, race.locator("p[role=status]")
    before = picture.get_attribute("src")
    assert "theory's best" in sentence.inner_text()
    race.get_by_label("rate, times").select_option("2")
    chapter.settle()
    assert "SGD lost" in sentence.inner_text() and picture.get_attribute("src") != before
    race.get_by_label("landscape").select_option("saddle")
    chapter.settle()
    race.get_by_role("spinbutton", name="update").fill("9999")
    page.keyboard.press("Enter")
    chapter.settle()
    assert "saddle, rates × 2, loss above the minimum's after 150 updates" in sentence.inner_text()
    check = "lesson.kept.check(bytes_of_state)"
    stub = "def bytes_of_state(shapes, optimizer, bytes_per_number):"
    chapter.run_with(stub, f"{stub}\n    return 0 if optimizer == 'SGD' else 8")
    chapter.run_again(check)
    assert (
        "Not yet: For ([(4, 3), (4,)], 'momentum', 4) it gives 8; expected 64."
        in chapter.cell(check).inner_text()
    )
    assert_clean(chapter)
    page.close()


def test_chapter_04_runs_and_a_schedule_is_composed(lab):
    chapter = lab("04_schedules.ipynb")
    page = chapter.page
    chapter.run_all("small = dict(updates=300", "def learns(", "def best(")
    assert_clean(chapter)
    assert_named(chapter, ("slider", "length of the schedule"))
    composer = chapter.cell("pictures.composer()")
    picture, sentence = composer.locator("img").first, composer.locator("p[role=status]")
    before = picture.get_attribute("src")
    assert "Nearest published: llm.c 124M" in sentence.inner_text()
    composer.get_by_label("shape").select_option("linear")
    composer.get_by_label("warmup").select_option("0 %")
    chapter.settle()
    assert "None of the recipes" in sentence.inner_text()
    composer.get_by_role("spinbutton", name="length of the schedule").fill("9999")
    page.keyboard.press("Enter")
    chapter.settle()
    assert "it is 2000 updates long and 1000 are planned" in sentence.inner_text()
    assert picture.get_attribute("src") != before

    # A guess that holds for SGD, and a diagnosis with two faults exchanged.
    page.get_by_label("Your guess").nth(1).fill("1")
    page.keyboard.press("Enter")
    chapter.settle()
    chapter.run_again("guess_spread.compare")
    said = " ".join(chapter.cell("guess_spread.compare").inner_text().split())
    assert "You said 1 times as far; measured: 4.12. For SGD." in said
    check = "lesson.recorder.check(faults)"
    chapter.run_with("faults = None", 'faults = "462315"')
    chapter.run_again(check)
    assert "Not yet: 4 of 6. D isn't 3: with 3," in chapter.cell(check).inner_text()
    chapter.run_with("faults = ", 'faults = "462513"')
    chapter.run_again(check)
    assert "Passed." in chapter.cell(check).inner_text()
    assert_clean(chapter)
    page.close()


def test_chapter_05_runs_a_bit_is_flipped_and_the_scale_is_turned(lab):
    chapter = lab("05_mixed_precision.ipynb")
    page = chapter.page
    chapter.run_all("def train(dtype")
    assert_clean(chapter)
    assert_named(chapter, ("slider", "loss scale: 2 to the"), ("textbox", "value"))
    explorer = chapter.cell("pictures.explorer()")
    picture, sentence = explorer.locator("img").first, explorer.locator("p[role=status]")
    before = picture.get_attribute("src")
    explorer.get_by_label("value").fill("1")
    page.keyboard.press("Enter")
    chapter.settle()
    assert "Beside it, in fp16, lie 0.99951172 and 1.0009766." in sentence.inner_text()
    explorer.get_by_title("exponent, bit 14").click()
    chapter.settle()
    assert "fp16: inf, exactly. bf16: inf" in sentence.inner_text()
    assert picture.get_attribute("src") != before
    explorer.get_by_label("flip bits of").select_option("fp8 e4m3fn")
    explorer.get_by_label("value").fill("one")
    page.keyboard.press("Enter")
    chapter.settle()
    assert "a number is needed, such as 0.1 or 1e-8, not 'one'" in explorer.inner_text()

    dial = chapter.cell("pictures.dial(small)")
    box = dial.get_by_role("spinbutton")
    for typed, said in (("16", "Scale 65,536: "), ("99", "Scale 4,294,967,296: ")):
        box.fill(typed)
        page.keyboard.press("Enter")
        chapter.settle()
        assert said in dial.locator("p[role=status]").inner_text()

    # Half of what is kept, and a loop that moves nothing.
    page.get_by_label("Your guess").nth(2).fill("0.07")
    page.keyboard.press("Enter")
    chapter.settle()
    chapter.run_again("guess_saved.compare")
    said = " ".join(chapter.cell("guess_saved.compare").inner_text().split())
    assert "You said 0.07 MB; measured: 3.74. Activations are halved, but" in said
    stub = "def learn(gain, gradient_of, rate, updates): ..."
    loop = "    for _ in range(updates):\n        gain -= rate * gradient_of(gain)\n    return gain"
    chapter.run_with(stub, f"{stub.removesuffix(' ...')}\n{loop}")
    check = "lesson.learnt_gains.check(learn)"
    chapter.run_again(check)
    assert "Not yet: 0 of 512 gains moved" in chapter.cell(check).inner_text()
    for control in (explorer.get_by_label("value"), explorer.get_by_title("sign, bit 7")):
        assert_keys_stay(chapter, control, moves=False)
    assert_clean(chapter)
    page.close()


def test_chapter_06_runs_and_a_step_is_made_to_fit(lab):
    chapter = lab("06_memory.ipynb")
    page = chapter.page
    chapter.run_all("levers = {")
    assert_clean(chapter)
    assert_named(chapter, ("slider", "batch, each device"))
    calculator = chapter.cell("pictures.calculator()")
    sentence = calculator.locator("p[role=status]")
    before = calculator.locator("img").first.get_attribute("src")
    assert "125.51 GiB at the peak, in step" in sentence.inner_text()
    assert "out of memory by 46.37 GiB" in sentence.inner_text()
    calculator.get_by_label("update").select_option("one tensor at a time")
    chapter.settle()
    assert "101.39 GiB at the peak, in step" in sentence.inner_text()
    for name, choice in (
        ("convention", "zero-fp16"),
        ("checkpointing", "on"),
        ("devices", "8"),
        ("ZeRO stage", "2"),
        ("explain", "gradients"),
    ):
        calculator.get_by_label(name).select_option(choice)
    chapter.settle()
    said = sentence.inner_text()
    assert ": fits, " in said and "gradients: 0.25 B × 6,738,415,616 = 1.57 GiB." in said
    assert calculator.locator("img").first.get_attribute("src") != before
    box = calculator.get_by_role("spinbutton", name="batch, each device")
    for typed, shown in (("0", "1"), ("999", "64")):
        box.fill(typed)
        page.keyboard.press("Enter")
        chapter.settle()
        assert box.input_value() == shown

    page.get_by_label("Your guess").nth(1).fill("51")
    page.keyboard.press("Enter")
    chapter.settle()
    chapter.run_again("guess_autocast.compare")
    said = " ".join(chapter.cell("guess_autocast.compare").inner_text().split())
    assert "You said 51 GiB; measured: 102.8. Half of it all?" in said
    chapter.run_with("plan = None", 'plan = dict(convention="fp32", batch=8)')
    check = "lesson.one_card.check(plan)"
    chapter.run_again(check)
    assert "It peaks at 255.98 GiB, in backward, its beginning," in chapter.cell(check).inner_text()
    assert_clean(chapter)
    page.close()
