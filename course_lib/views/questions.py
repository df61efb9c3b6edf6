"""Predictions and quizzes with controls. What is right, and what to say, lies in `check`."""

import ipywidgets as widgets
from IPython.display import display

from course_lib.check import Prediction, Question
from course_lib.views.controls import WIDGET, html
from course_lib.views.style import say


class Guess:
    """A guess that is kept until the measurement; `value` is None while there is none."""

    def __init__(self, question: Prediction | Question):
        self.question = question
        self.value: float | str | None = None

    def __repr__(self) -> str:
        return "Guess(none yet)" if self.value is None else f"Guess({self.value})"

    def compare(self, measured: float | str) -> None:
        """Print the guess beside the measurement, and what the guess left out."""
        say(self.question.compare(self.value, measured))


def predict(question: Prediction | Question) -> Guess:
    """Ask before a measurement, with a number box or options, and keep the guess."""
    guess = Guess(question)
    if isinstance(question, Question):
        control = _options(question)
        prompt, listed = question.prompt, _listed(question)
    elif isinstance(question, Prediction):
        control = widgets.Text(
            placeholder="a number, then Enter",
            description="Your guess",
            continuous_update=False,
            style={"description_width": "initial"},
        )
        prompt, listed = question.question, f"{question.question}\n  Your guess: "
    else:
        raise TypeError(f"a Prediction or a Question is needed, got {type(question).__name__}")
    kept = widgets.HTML(html("No guess is kept yet."))

    def keep(change):
        guess.value, kept.value = _kept(question, change.new)

    control.observe(keep, "value")
    _show([_text(prompt), control, kept], listed)
    guess.control = control
    return guess


def _kept(question: Prediction | Question, typed: str) -> tuple[float | str | None, str]:
    """The guess, None if it is none, and what is said below the control."""
    try:
        value = question.read(typed) if isinstance(question, Prediction) else typed
    except ValueError as error:
        return None, html(f"Not kept: {error}")
    if value is None:
        return None, html("No guess is kept yet.")
    said = value if isinstance(value, str) else f"{value:.10g} {question.unit}".rstrip()
    return value, html(f"Kept: {said}. Now measure.")


def quiz(*questions: Question) -> None:
    """Show questions with options; the chosen option's feedback stands below it at once."""
    if not questions or not all(isinstance(question, Question) for question in questions):
        raise TypeError("a quiz takes one or more Questions")
    rows, listed = [], []
    for number, question in enumerate(questions, 1):
        control, feedback = _options(question), widgets.HTML()
        control.observe(_feedback(question, feedback), "value")
        rows += [_text(f"{number}. {question.prompt}"), control, feedback]
        listed.append(f"{number}. {_listed(question)}")
    _show(rows, "\n".join(listed))


def _feedback(question: Question, shown: widgets.HTML):
    def show(change):
        shown.value = html(question.answer(change.new))

    return show


def _options(question: Question) -> widgets.RadioButtons:
    return widgets.RadioButtons(
        options=[option.text for option in question.options],
        value=None,
        tooltip=question.prompt,  # the group's name: see jupyter/labextension
        layout={"width": "max-content"},
    )


def _text(text: str) -> widgets.HTML:
    return widgets.HTML(html(text, status=False))


def _listed(question: Question) -> str:
    return "\n".join([question.prompt, *(f"   ( ) {option.text}" for option in question.options)])


def _show(rows: list[widgets.Widget], plain: str) -> None:
    """The widgets, and for a reader with no kernel the same as text."""
    box = widgets.VBox(rows)
    box.add_class("course-controls")
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    display({WIDGET: view, "text/plain": plain}, raw=True)
