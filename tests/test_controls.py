"""Every control of every widget, fired in the kernel: what it shows is what it was asked for."""

import pytest

from course_lib.check import Option, Prediction, Question
from course_lib.views import controls, predict, questions, quiz
from course_lib.views.style import Picture, svg, text

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


def test_the_output_holds_widget_picture_and_sentence_together(shown, capsys):
    box = explored()
    (bundle,) = shown
    assert bundle[controls.WIDGET]["model_id"] == box.model_id
    assert bundle["text/html"] == view(3, "red", "here").html == box.image.value
    assert bundle["text/plain"] == "[picture with controls: a test]"
    assert capsys.readouterr().out == "At the start: It says 3 red at here.\n"


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


def test_a_slider_and_its_box_hold_the_same_and_a_typed_number_is_snapped():
    row, box = CONTROLS["size"].build()
    slider = row.children[1]
    slider.value = 7
    assert box.value == 7 and box.description == "size"
    box.value = 4  # between two stops of the slider
    assert box.value == slider.value and box.value in (3, 5)
    box.value = 1000
    assert box.value == slider.value == 9


def test_a_walk_goes_to_its_ends_and_no_further():
    row, here = CONTROLS["stop"].build()
    back, ahead, where = row.children
    assert (back.description, ahead.description) == ("Previous stop", "Next stop")
    assert back.disabled and not ahead.disabled and where.value == "here (1 of 3)"
    for _ in range(5):
        ahead.click()
    assert here.value == "home" and ahead.disabled and where.value == "home (3 of 3)"
    back.click()
    assert here.value == "there" and not back.disabled


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
    guess.control.value = "3,5"
    assert repr(guess) == "Guess(3.5)"
    guess.compare(12)
    assert "You said 3.5 eggs; measured: 12. There are more." in one_line(capsys)
    guess.control.value = "2,048"
    assert repr(guess) == "Guess(2048.0)"
    guess.control.value = "a dozen"
    guess.compare(12)
    assert "A guess is just a number, such as 49.5; this is 'a dozen'." in one_line(capsys)
    guess.control.value = " "
    guess.compare(12)
    assert "No guess given" in one_line(capsys)


def test_a_prediction_by_options_says_nothing_until_it_is_compared(shown, capsys):
    guess = predict(COIN)
    assert shown[0]["text/plain"] == "Heads or tails?\n   ( ) heads\n   ( ) tails"
    guess.control.value = "tails"
    assert capsys.readouterr().out == ""
    guess.compare("heads")
    assert one_line(capsys) == "You said: tails. Measured: heads. Look again."


def test_a_quiz_shows_the_chosen_options_own_feedback(shown, monkeypatch):
    boxes = []
    real = questions.widgets.VBox
    monkeypatch.setattr(questions.widgets, "VBox", lambda rows: boxes.append(rows) or real(rows))
    quiz(COIN, COIN)
    _, first, feedback, _, second, other = boxes[0]
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
