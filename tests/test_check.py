import functools
import importlib
import pkgutil

import numpy as np
import pytest
import torch

from course_lib import lessons
from course_lib.check import Belief, Challenge, Exercise, Mistake, Prediction
from course_lib.lessons import start

PREDICTIONS = [
    value
    for module in pkgutil.iter_modules(lessons.__path__)
    for value in vars(importlib.import_module(f"course_lib.lessons.{module.name}")).values()
    if isinstance(value, Prediction)
]

EGGS = Prediction(
    "How many?", "eggs", 12, 1, 0, 99, "There are more.", "There are fewer.",
    (Belief(6, "That is half."), Belief(7, "Nearly.")),
)  # fmt: skip


@pytest.mark.parametrize(
    ("guess", "text"),
    [
        (None, "No guess given. Measured: 12 eggs."),
        (..., "No guess given. Measured: 12 eggs."),
        (12, "You said 12 eggs; measured: 12. Right, within 1."),
        (11.2, "You said 11.2 eggs; measured: 12. Right, within 1."),
        (5, "You said 5 eggs; measured: 12. That is half."),
        (6.6, "You said 6.6 eggs; measured: 12. Nearly."),
        (2, "You said 2 eggs; measured: 12. There are more."),
        (40, "You said 40 eggs; measured: 12. There are fewer."),
        (100, "A guess lies between 0 and 99; this is 100."),
        (-1, "A guess lies between 0 and 99; this is -1."),
        (float("nan"), "A guess lies between 0 and 99; this is nan."),
        ("six", "A guess is just a number, such as 49.5; this is 'six'."),
        ([6], "A guess is just a number, such as 49.5; this is [6]."),
        ("12 eggs", "You said 12 eggs; measured: 12. Right, within 1."),
        ("", "No guess given. Measured: 12 eggs."),
        (np.int64(5), "You said 5 eggs; measured: 12. That is half."),
        (np.float32(40), "You said 40 eggs; measured: 12. There are fewer."),
        (True, "A guess is just a number, such as 49.5; this is True."),
    ],
)
def test_a_guess_is_compared_and_its_belief_named(guess, text):
    assert EGGS.compare(guess, 12) == text


def asked(unit, high=1e10):
    return Prediction("How much?", unit, 1, 0.1, 0, high, "More.", "Less.")


@pytest.mark.parametrize(
    ("unit", "text", "guess"),
    [
        ("of 100 bytes", "25 %", 25),
        ("of 100 bytes", "25%", 25),
        ("of 100 bytes", "25 of 100", 25),
        ("of 100 bytes", "25 bytes", 25),
        ("of the peak", "85 %", 0.85),
        ("times forward's", "2 times", 2),
        ("times forward's", "2x", 2),
        ("times forward's", "200 %", 2),
        ("steps", "1 step", 1),
        ("GB", "2,048 gb", 2048),
        ("", "3,5", 3.5),
        ("", "1e9", 1e9),
        ("", "  ", None),
    ],
)
def test_a_guess_is_read_as_it_is_typed(unit, text, guess):
    assert asked(unit).read(text) == guess


@pytest.mark.parametrize(
    ("unit", "text", "said"),
    [
        ("GB", "a lot", "A guess is just a number, such as 50; this is 'a lot'."),
        ("GB", "nan", "A guess is just a number, such as 50; this is 'nan'."),
        ("GB", "1e9", r"A guess lies between 0 and 100; this is 1e\+09."),
        ("GB", "-1", "A guess lies between 0 and 100; this is -1."),
        ("GB", "3 GiB", "This guess is a number such as 50 GB; 'GiB' is another unit."),
        ("GB", "25 %", "This guess is a number such as 50 GB; '%' is another unit."),
        ("", "25 eggs", "This guess is a number such as 50; 'eggs' is another unit."),
        ("of the peak", "10100 %", "A guess lies between 0 and 100; this is 101."),
    ],
)
def test_a_guess_that_cannot_be_used_is_refused_with_what_to_type(unit, text, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        asked(unit, high=100).read(text)


@pytest.mark.parametrize("prediction", PREDICTIONS, ids=lambda p: p.question[:30])
def test_every_prediction_takes_its_own_answer_with_its_unit(prediction):
    answer = prediction.expected
    assert prediction.read(f"{answer:g}") == prediction.read(f"{answer} {prediction.unit}")


def test_feedback_is_for_the_experiment_it_was_written_for():
    assert EGGS.compare(6, 30) == "You said 6 eggs; measured: 30. (The experiment was changed.)"
    assert EGGS.compare(30, 30) == "You said 30 eggs; measured: 30. Right, within 1."


@pytest.mark.parametrize("guess", range(101))
def test_every_guess_of_chapter_00_is_answered_with_a_reason(guess):
    said = start.weights_share.compare(guess, 24.8)
    assert said.endswith("Right, within 4.") or len(said.split(". ", 1)[1]) > 60


@pytest.mark.parametrize("belief", start.weights_share.beliefs, ids=lambda b: f"{b.value:g}")
def test_each_foreseen_guess_of_chapter_00_gets_its_own_feedback(belief):
    said = start.weights_share.compare(belief.value, 24.8)
    assert said.endswith(belief.feedback)
    assert sum(b.feedback in said for b in start.weights_share.beliefs) == 1


def test_the_right_guess_of_chapter_00_is_no_belief():
    assert start.weights_share.compare(25, 24.8).endswith("Right, within 4.")


STATE_BYTES = Exercise(
    lambda n: 8 * n,
    ((1000,), (7,)),
    (
        Mistake(lambda n: 4 * n, "That is one moment; Adam keeps two."),
        Mistake(lambda n: 0, "That is the SGD count."),
    ),
)


def never_finished(n):
    raise NotImplementedError


def documented(n):
    """What is asked for."""


def passed_over(n):
    # not yet
    pass


def placeheld(n):
    total = 8 * n  # noqa: F841
    return ...


STUBS = [None, ..., lambda n: None, lambda n: ..., documented, passed_over]


@pytest.mark.parametrize("attempt", [*STUBS, never_finished, placeheld])
def test_an_untouched_stub_is_not_attempted(attempt):
    assert repr(STATE_BYTES.check(attempt)) == "Not attempted yet."


@pytest.mark.parametrize("attempt", STUBS)
def test_an_open_task_isn_t_tried_on_a_stub(attempt):
    tried = []
    assert repr(Challenge(tried.append).check(attempt)) == "Not attempted yet." and not tried
    assert repr(Challenge(tried.append).check(lambda n: 0)) == "Passed." and tried


def prints(n):
    print(8 * n)


def assigns(n):
    total = 8 * n  # noqa: F841


@pytest.mark.parametrize("attempt", [prints, assigns, print, functools.partial(prints)])
def test_a_function_with_a_body_that_returns_nothing_hears_that(attempt):
    said = "Not yet: It returned nothing. End it with `return` and the answer."
    assert repr(STATE_BYTES.check(attempt)) == said


@pytest.mark.parametrize(
    "attempt", [lambda n: 8 * n, lambda n: n + 7.0 * n, lambda n: np.int64(8 * n)]
)
def test_a_right_answer_passes(attempt):
    assert repr(STATE_BYTES.check(attempt)) == "Passed."


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (lambda n: n * 4, "Not yet: That is one moment; Adam keeps two."),
        (lambda n: 0.0, "Not yet: That is the SGD count."),
        (lambda n: 9 * n, "Not yet: For (1000) it gives 9000; expected 8000."),
        (lambda n: 8000, "Not yet: For (7) it gives 8000; expected 56."),
        (lambda n: 8000 if n == 1000 else None, "Not yet: For (7) it gives None; expected 56."),
        (lambda n: "8000", "Not yet: For (1000) it gives '8000'; expected 8000."),
        (lambda n: {"bytes": n}, "Not yet: For (1000) it gives {'bytes': 1000}; expected 8000."),
        (lambda n: [[n], []], "Not yet: For (1000) it gives [[1000], []]; expected 8000."),
        (lambda n: [8 * n], "Not yet: For (1000) it gives [8000]; expected 8000."),
        (lambda: 8000, "Not yet: It raised TypeError"),
        (lambda n: 1 / 0, "Not yet: It raised ZeroDivisionError: division by zero"),
        (8000, "Not yet: A function is needed; this is int."),
    ],
)
def test_a_wrong_answer_is_told_why(attempt, text):
    assert repr(STATE_BYTES.check(attempt)).startswith(text)


def test_a_plain_value_can_be_the_answer():
    half = Exercise(lambda: 0.5, mistakes=(Mistake(lambda: 2, "Upside down."),))
    assert repr(half.check(0.5)) == "Passed."
    assert repr(half.check(torch.tensor(0.5))) == "Passed."
    assert repr(half.check(2)) == "Not yet: Upside down."
    assert repr(half.check(3)) == "Not yet: 3 is not it."  # the answer isn't given away
    assert repr(half.check(None)) == "Not attempted yet."


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_tensor_on_a_graph_or_in_half_precision_is_a_number_too(dtype):
    answer = torch.tensor(0.5, dtype=dtype, requires_grad=True)
    assert repr(Exercise(lambda: 0.5).check(answer)) == "Passed."


def test_arrays_are_compared_number_by_number():
    double = Exercise(lambda x: 2 * x, ((np.arange(3.0),),))
    assert repr(double.check(lambda x: [0, 2, 4])) == "Passed."
    assert repr(double.check(lambda x: x + x + 1e-6)).startswith("Not yet")
    assert repr(double.check(lambda x: 4)).startswith("Not yet")


def test_a_number_near_0_is_right_within_a_thousandth_of_the_tolerance():
    zero = Exercise(lambda x: 0.0, ((1,),), tolerance=1e-6)
    assert repr(zero.check(lambda x: 0.9e-9)) == "Passed."
    assert repr(zero.check(lambda x: 1.1e-9)) == "Not yet: For (1) it gives 1.1e-09; expected 0.0."


@pytest.mark.parametrize("expected", [1e-2, 1.0, 1e8])
def test_a_number_is_right_within_the_relative_tolerance(expected):
    task = Exercise(lambda x: expected, ((1,),), tolerance=1e-6)
    for off in (-1e-6, 1e-6):
        assert task.check(lambda x, off=off: expected * (1 + 0.9 * off)).status == "Passed"
        assert task.check(lambda x, off=off: expected * (1 + 1.2 * off)).status == "Not yet"


def test_a_difference_too_small_to_show_is_said():
    halves = Exercise(lambda x: torch.tensor([0.5]), ((1,),))
    said = str(halves.check(lambda x: torch.tensor([0.5 + 1e-6])))
    assert said.endswith("gives tensor([0.5000]); the difference from what was expected is too "
                         "small to show.")  # fmt: skip


def test_truth_values_and_words_must_be_the_same_kind():
    fits = Exercise(lambda gb: gb <= 80, ((79,), (81,)))
    assert repr(fits.check(lambda gb: gb < 80.5)) == "Passed."
    assert repr(fits.check(lambda gb: np.float64(gb) <= 80)) == "Passed."
    assert repr(fits.check(lambda gb: int(gb <= 80))).endswith("(79) it gives 1; expected True.")


def test_an_attempt_cannot_spoil_the_cases():
    total = Exercise(lambda xs: sum(xs), (([1, 2],),))
    assert repr(total.check(lambda xs: xs.clear())).startswith("Not yet: It returned nothing.")
    assert repr(total.check(lambda xs: sum(xs))) == "Passed."


def test_an_operation_that_torch_lacks_is_an_error_and_no_stub():
    shift = lambda x: torch.ones(1, dtype=torch.bfloat16) >> 1  # noqa: E731
    for task in (Exercise(lambda x: x, ((1,),)), Challenge(lambda attempt: attempt(1))):
        assert str(task.check(shift)).startswith("Not yet: It raised NotImplementedError: ")
        assert str(task.check(never_finished)) == "Not attempted yet."
