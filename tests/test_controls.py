"""Every control of every widget, fired in the kernel: what it shows is what it was asked for."""

import re
import subprocess
import sys
from pathlib import Path

import ipywidgets as widgets
import nbformat
import pytest

from course_lib.check import Option, Prediction, Question
from course_lib.views import controls, predict, questions, quiz
from course_lib.views.style import Picture, svg, text

ROOT = Path(__file__).resolve().parent.parent
SHOWN = []


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    """What the cell's output would hold."""
    SHOWN.clear()
    for module in (controls, questions):
        monkeypatch.setattr(module, "display", lambda data, raw: SHOWN.append(data))
    return SHOWN


def view(size, colour, stop):
    if size == 9:
        raise ValueError("nine is too much")
    said = f"{size} {colour} at {stop}"
    return Picture(svg(100, 30, text(50, 20, said)), "a test", f"It says {said}.")


CONTROLS = {
    "size": controls.Slider("size", 1, 9, 2, 3),
    "colour": controls.Choice("colour", ("red", "blue"), "red"),
    "stop": controls.Walk("stop", ("here", "there", "home"), "here"),
}


def explored():
    return controls.explore(view, **CONTROLS)


def test_the_output_holds_widget_picture_sentence_and_offer_and_nothing_else(shown, capsys):
    """A sentence beside the live widget would soon be false: it lies where the widget isn't."""
    box = explored()
    (bundle,) = shown
    picture, start = view(3, "red", "here"), "It says 3 red at here."
    assert bundle[controls.WIDGET]["model_id"] == box.model_id
    assert bundle["text/html"].startswith(picture.html) and box.image.value == picture.html
    assert bundle["text/html"].removeprefix(picture.html).count(start) == 1
    assert bundle["text/plain"] == f"[picture with controls: a test]\n{start}"
    assert capsys.readouterr().out == ""


def test_a_reader_with_no_kernel_is_told_every_control_and_its_options(shown):
    many = tuple("abcdefghij")
    more = {"typed": controls.Number("typed", 1), "many": controls.Choice("many", many, "a")}
    controls.explore(lambda typed, many, **state: view(**state), **CONTROLS, **more)
    (offer,) = re.findall("<small>(.*)</small>", shown[0]["text/html"])
    assert offer == (
        "With a kernel, run this cell to choose size: 1 to 9; colour: red, blue; "
        "stop: 3 from here to home; typed: any number; many: a, b, c, d, e, f, g, h and 2 more."
    )


@pytest.mark.parametrize("name", CONTROLS)
def test_each_control_at_its_ends_redraws_picture_and_sentence(name):
    for end in CONTROLS[name].ends():
        box = explored()
        state = {key: holder.value for key, holder in box.values.items()} | {name: end}
        box.values[name].value = end
        if end == 9:
            assert "This can&#x27;t be drawn. ValueError: nine is too much" in box.sentence.value
            assert box.image.value == view(3, "red", "here").html  # the last good picture stays
        else:
            assert box.image.value == view(**state).html
            assert view(**state).sentence in box.sentence.value


def test_after_an_error_the_next_value_draws_again():
    box = explored()
    box.values["size"].value = 9
    box.values["size"].value = 5
    assert "It says 5 red at here." in box.sentence.value


def built_slider():
    row, holder = CONTROLS["size"].build()
    return *row.children, holder


@pytest.mark.parametrize(
    ("typed", "reached"), [(7, 7), (4.2, 5), (1e9, 9), (-3, 1), (2.9, 3), (float("inf"), 9)]
)
def test_a_typed_number_goes_to_the_nearest_that_the_slider_can_reach(typed, reached):
    box, slider, holder = built_slider()
    box.value = typed
    assert box.value == slider.value == holder.value == reached
    assert isinstance(holder.value, int)


def test_the_box_takes_every_way_to_write_a_number():
    """A box for whole numbers drops the e of 1e9 as it is typed, and reads 19."""
    box, _, _ = built_slider()
    assert isinstance(box, widgets.BoundedFloatText)


def test_a_moved_slider_and_its_box_hold_the_same():
    box, slider, _ = built_slider()
    for value in (7, 1, 9):
        slider.value = value
        assert box.value == value
    assert box.description == slider.tooltip == "size"


def test_a_walk_goes_to_its_ends_and_no_further_and_its_buttons_keep_the_focus():
    row, here = CONTROLS["stop"].build()
    back, ahead, where = row.children
    assert (back.description, ahead.description) == ("Previous stop", "Next stop")
    back.click()
    assert here.value == "here" and where.value == "here (1 of 3, the first)"
    ahead.click()
    assert where.value == "there (2 of 3)"
    for _ in range(5):
        ahead.click()
    assert here.value == "home" and where.value == "home (3 of 3, the last)"
    assert not back.disabled and not ahead.disabled  # a disabled button loses the focus
    back.click()
    assert here.value == "there"


def test_a_control_is_a_control():
    with pytest.raises(TypeError, match="size must be a Slider, Choice, Walk or Number"):
        controls.explore(view, size=3, colour="red", stop="here")


COIN = Question(
    "Heads or tails?", (Option("heads", "It was heads.", True), Option("tails", "Look again."))
)
EGGS = Prediction("How many?", "eggs", 12, 1, 0, 99, "There are more.", "There are fewer.")


def test_a_prediction_keeps_the_guess_and_compares_it_later(shown, capsys):
    guess = predict(EGGS)
    assert shown[0]["text/plain"].startswith("How many?") and controls.WIDGET in shown[0]
    guess.compare(12)
    assert capsys.readouterr().out == "No guess given. Measured: 12 eggs.\n"
    assert repr(guess) == "Guess(none yet)"
    guess.control.value = "3,5 eggs"
    assert repr(guess) == "Guess(3.5)"
    guess.compare(12)
    assert "You said 3.5 eggs; measured: 12. There are more." in one_line(capsys)


SHARE = Prediction("Of 100 bytes?", "of 100 bytes", 24.8, 1, 0, 100, "More.", "Fewer.")


@pytest.mark.parametrize(
    ("typed", "kept", "said"),
    [
        ("25 %", 25, "Kept: 25 of 100 bytes. Now measure."),
        ("12.5", 12.5, "Kept: 12.5 of 100 bytes. Now measure."),
        ("a lot", None, "Not kept: "),
        ("101", None, "Not kept: "),
        ("  ", None, "No guess is kept yet."),
    ],
)
def test_a_guess_is_kept_or_refused_at_once(rows, typed, kept, said):
    guess = predict(SHARE)
    _, control, below = rows[0]
    assert "No guess is kept yet." in below.value
    control.value = "50"
    control.value = typed
    assert guess.value == kept and said in below.value


def test_a_prediction_by_options_says_nothing_until_it_is_compared(shown, capsys):
    guess = predict(COIN)
    assert shown[0]["text/plain"] == "Heads or tails?\n   ( ) heads\n   ( ) tails"
    guess.control.value = "tails"
    assert capsys.readouterr().out == ""
    guess.compare("heads")
    assert one_line(capsys) == "You said: tails. Measured: heads. Look again."


@pytest.fixture
def rows(monkeypatch):
    """The rows of each question's box."""
    boxes = []
    real = questions.widgets.VBox
    monkeypatch.setattr(questions.widgets, "VBox", lambda rows: boxes.append(rows) or real(rows))
    return boxes


def test_a_quiz_shows_the_chosen_options_own_feedback(shown, rows):
    quiz(COIN, COIN)
    _, first, feedback, _, second, other = rows[0]
    assert shown[0]["text/plain"].count("( )") == 4
    first.value = "tails"
    assert "Not this: Look again." in feedback.value and other.value == ""
    first.value = "heads"
    assert "Right: It was heads." in feedback.value
    second.value = "tails"
    assert "Not this: Look again." in other.value


@pytest.mark.parametrize("call", [lambda: predict("How many?"), lambda: quiz(), lambda: quiz(EGGS)])
def test_what_is_no_question_is_refused(call):
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize(
    "options",
    [
        (Option("a", ""),),
        (Option("a", ""), Option("b", "")),
        (Option("a", "", True), Option("b", "", True)),
        (Option("a", "", True), Option("a", "")),
    ],
)
def test_a_question_has_one_right_option_among_different_ones(options):
    with pytest.raises(ValueError, match="a question needs"):
        Question("?", options)


def one_line(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_nbconvert_keeps_a_picture_with_controls_where_no_widget_state_is_stored(tmp_path):
    """The README's command; with the widgets' state stored, the page shows neither."""
    pictures = "from course_lib.views import optimizers\nrace = optimizers.race()"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(pictures)])
    nbformat.write(notebook, tmp_path / "race.ipynb")
    readme = (ROOT / "README.md").read_text("utf-8")
    (options,) = re.findall(r"jupyter (nbconvert .*) chapters/\S+ --output-dir \S+\n", readme)
    command = [sys.executable, "-m", *options.split(), "race.ipynb"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    page = (tmp_path / "race.html").read_text("utf-8")
    assert "widget-view+json" not in page
    assert re.search(r'<img alt="ill-conditioned bowl.{40,300}src="data:image/svg', page, re.DOTALL)
    assert "run this cell to choose landscape" in page
