"""Predictions, questions and exercises: an answer, the truth, and the belief behind the answer.

Pure logic: no display, no torch. A wrong answer that was foreseen gets its own feedback.
"""

import copy
import dis
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from course_lib import units

NOT_ATTEMPTED, WRONG, PASSED = "Not attempted yet", "Not yet", "Passed"


@dataclass(frozen=True)
class Belief:
    """A wrong guess that was foreseen, and what to say to it."""

    value: float
    feedback: str


@dataclass(frozen=True)
class Prediction:
    """A question asked before a measurement.

    Guesses lie between `low` and `high`; within `tolerance` of a value they meet it. A wrong
    guess gets the feedback of the belief that it meets, else `too_low` or `too_high`. All of
    it is written for the measured value `expected`: once the reader has changed the
    experiment, guess and measurement are only set side by side.

    >>> eggs = Prediction("How many?", "eggs", 12, 1, 0, 99, "More.", "Fewer.",
    ...                   (Belief(6, "That is half."),))
    >>> eggs.compare(6, 12), eggs.compare(40, 12)
    ('You said 6 eggs; measured: 12. That is half.', 'You said 40 eggs; measured: 12. Fewer.')
    """

    question: str
    unit: str
    expected: float
    tolerance: float
    low: float
    high: float
    too_low: str
    too_high: str
    beliefs: tuple[Belief, ...] = ()

    def read(self, text: str) -> float | None:
        """The guess that was typed, with or without its unit; None where nothing was.

        ValueError, with a sentence for the reader, for what is no number, has another unit or
        lies outside `low` to `high`.

        >>> share = Prediction("How many?", "of 100", 12, 1, 0, 99, "More.", "Fewer.")
        >>> share.read("25 %"), share.read("2,5"), share.read(" ")
        (25.0, 2.5, None)
        """
        if not text.strip():
            return None
        try:
            number, unit = units.typed(text)
        except ValueError:
            raise ValueError(self._no_number(text)) from None
        return self._within(number * self._factor(unit))

    def compare(self, guess: float | str | None, measured: float) -> str:
        """The guess, a number or as it was typed, the measurement, and what the guess left out."""
        try:
            guess = self.read(guess) if isinstance(guess, str) else guess
            if guess is None or guess is ...:
                return f"No guess given. Measured: {self._with_unit(measured)}."
            if isinstance(guess, bool) or not isinstance(guess, Real):
                return self._no_number(guess)
            self._within(guess)
        except ValueError as error:
            return str(error)
        said = f"You said {self._with_unit(guess)}; measured: {measured:g}."
        if abs(guess - measured) <= self.tolerance:
            return f"{said} Right, within {self.tolerance:g}."
        if abs(measured - self.expected) > self.tolerance:
            return f"{said} (The experiment was changed.)"
        return f"{said} {self._feedback(guess, measured)}"

    def _no_number(self, guess: Any) -> str:
        return f"A guess is just a number, such as {self.high / 2:g}; this is {guess!r}."

    def _within(self, guess: float) -> float:
        if not self.low <= guess <= self.high:
            between = f"A guess lies between {self.low:g} and {self.high:g}"
            raise ValueError(f"{between}; this is {guess:g}.")
        return guess

    def _factor(self, typed: str) -> float:
        """1 for a unit that is a part of this one, and per cent of what has the unit 1."""
        hundred = "100" in self.unit
        if typed == "%" and (hundred or self.unit.startswith(("of ", "times "))):
            return 1 if hundred else 0.01
        said = [{"x": "times", "×": "times"}.get(word, word) for word in typed.casefold().split()]
        known = self.unit.casefold().split()
        if all(any(word.startswith(part) for word in known) for part in said):
            return 1
        asked = self._with_unit(self.high / 2)
        raise ValueError(f"This guess is a number such as {asked}; {typed!r} is another unit.")

    def _with_unit(self, value: float) -> str:
        return f"{value:g} {self.unit}".rstrip()

    def _feedback(self, guess: float, measured: float) -> str:
        def distance(belief: Belief) -> float:
            return abs(guess - belief.value)

        near = min(self.beliefs, key=distance, default=None)
        if near is not None and distance(near) <= self.tolerance:
            return near.feedback
        return self.too_low if guess < measured else self.too_high


@dataclass(frozen=True)
class Option:
    """One answer of a question to choose from, and what to say to it."""

    text: str
    feedback: str
    right: bool = False


@dataclass(frozen=True)
class Question:
    """A question with one right option, each with its own feedback.

    >>> coin = Question("Heads or tails?", (Option("heads", "It was.", True),
    ...                                     Option("tails", "Look again.")))
    >>> coin.answer("tails")
    'Not this: Look again.'
    """

    prompt: str
    options: tuple[Option, ...]

    def __post_init__(self):
        texts = [option.text for option in self.options]
        if len(set(texts)) < len(texts) or len(texts) < 2:
            raise ValueError(f"a question needs two options or more, all different, got {texts}")
        if sum(option.right for option in self.options) != 1:
            raise ValueError(f"a question needs exactly one right option: {self.prompt!r}")

    def answer(self, text: str | None) -> str:
        """The feedback for the option with this text; None is no answer yet."""
        if text is None:
            return "Not answered yet."
        option = self._option(text)
        return f"{'Right' if option.right else 'Not this'}: {option.feedback}"

    def compare(self, guess: str | None, measured: str) -> str:
        """As a prediction: the guess beside what was measured, with the guess's feedback."""
        if guess is None:
            return f"No guess given. Measured: {measured}."
        option = self._option(guess)
        verdict = "Right. " if option.right else ""
        return f"You said: {guess}. Measured: {measured}. {verdict}{option.feedback}"

    def _option(self, text: str) -> Option:
        for option in self.options:
            if option.text == text:
                return option
        raise ValueError(f"{text!r} is none of {[option.text for option in self.options]}")


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that was foreseen: a function that makes it, and what to say to it."""

    answer: Callable[..., Any]
    feedback: str


@dataclass(frozen=True, repr=False)
class Result:
    """What came of a check: a status and a message."""

    status: str
    message: str

    def __repr__(self) -> str:
        return f"{self.status}: {self.message}" if self.message else f"{self.status}."


@dataclass(frozen=True)
class Exercise:
    """A task whose answer is a value, or a function that is tried on `cases`.

    `answer` gives the right answer by a way of its own; each mistake's function gives a wrong
    one. Numbers are equal within the relative `tolerance`.

    >>> double = Exercise(lambda x: 2 * x, ((3,), (0.5,)),
    ...                   (Mistake(lambda x: x**2, "That squares x."),))
    >>> double.check(lambda x: x * x)
    Not yet: That squares x.
    """

    answer: Callable[..., Any]
    cases: tuple[tuple, ...] = ((),)
    mistakes: tuple[Mistake, ...] = ()
    tolerance: float = 1e-9

    def check(self, attempt: Any) -> Result:
        """Not attempted, not yet with a reason, or passed. An error in the attempt is a reason."""
        if untouched(attempt):
            return Result(NOT_ATTEMPTED, "")
        takes_nothing = self.cases == ((),)
        if not callable(attempt):
            if not takes_nothing:
                return Result(WRONG, f"A function is needed; this is {type(attempt).__name__}.")
            value = attempt
            attempt = lambda: value  # noqa: E731
        try:
            given = [attempt(*copy.deepcopy(case)) for case in self.cases]
        except Exception as error:
            return _raised(error)
        if all(value is ... for value in given):
            return Result(NOT_ATTEMPTED, "")
        if all(value is None for value in given):
            return Result(WRONG, "It returned nothing. End it with `return` and the answer.")
        right = self._answers(self.answer)
        if self._equal(given, right):
            return Result(PASSED, "")
        for mistake in self.mistakes:
            if self._equal(given, self._answers(mistake.answer)):
                return Result(WRONG, mistake.feedback)
        if takes_nothing:
            return Result(WRONG, f"{_short(given[0])} is not it.")
        case = next(
            i for i, pair in enumerate(zip(given, right, strict=True)) if not self._same(*pair)
        )
        arguments = ", ".join(_short(argument) for argument in self.cases[case])
        return Result(WRONG, f"For ({arguments}) it gives {_unlike(given[case], right[case])}.")

    def _answers(self, function: Callable[..., Any]) -> list:
        return [function(*copy.deepcopy(case)) for case in self.cases]

    def _equal(self, given: list, expected: list) -> bool:
        return all(self._same(g, e) for g, e in zip(given, expected, strict=True))

    def _same(self, given: Any, expected: Any) -> bool:
        given = given.item() if isinstance(given, np.generic) else given
        if isinstance(expected, (bool, str)) or isinstance(given, str) or expected is None:
            return type(given) is type(expected) and given == expected
        try:
            given, expected = _numbers(given), _numbers(expected)
        except (TypeError, ValueError, RuntimeError):
            return False
        if given.shape != expected.shape:
            return False
        return all(
            math.isclose(g, e, rel_tol=self.tolerance, abs_tol=self.tolerance * 1e-3)
            for g, e in zip(given.flat, expected.flat, strict=True)
        )


@dataclass(frozen=True)
class Challenge:
    """An open task: `verify(attempt)` gives None when it is met, else what is missing.

    A stub isn't given to it. A bare NotImplementedError says that the attempt is one all the same.

    >>> even = Challenge(lambda n: "That is odd." if n % 2 else None)
    >>> even.check(3), even.check(4), even.check(None)
    (Not yet: That is odd., Passed., Not attempted yet.)
    """

    verify: Callable[[Any], str | None]

    def check(self, attempt: Any) -> Result:
        if untouched(attempt):
            return Result(NOT_ATTEMPTED, "")
        try:
            missing = self.verify(attempt)
        except Exception as error:
            return _raised(error)
        return Result(PASSED, "") if missing is None else Result(WRONG, missing)


def untouched(attempt: Any) -> bool:
    """Whether this is None, `...`, or a function without a body: `...`, `pass`, a docstring.

    >>> untouched(lambda n: ...), untouched(print), untouched(lambda n: 8 * n)
    (True, False, False)
    """
    if attempt is None or attempt is ...:
        return True
    if not hasattr(attempt, "__code__"):
        return False
    steps = [step for step in dis.get_instructions(attempt) if step.opname not in ("RESUME", "NOP")]
    empty = all(step.opname in ("LOAD_CONST", "RETURN_CONST", "RETURN_VALUE") for step in steps)
    return empty and all(step.argval is None or step.argval is ... for step in steps)


def _raised(error: Exception) -> Result:
    """A stub may raise NotImplementedError; torch raises it too, and says what it hasn't."""
    if isinstance(error, NotImplementedError) and not str(error):
        return Result(NOT_ATTEMPTED, "")
    return Result(WRONG, f"It raised {type(error).__name__}: {error}")


def _numbers(value: Any) -> np.ndarray:
    """As float64; a torch tensor is taken off its graph first."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double()
    return np.asarray(value, dtype=float)


def _unlike(given: Any, expected: Any) -> str:
    if _short(given) == _short(expected):
        return f"{_short(given)}; the difference from what was expected is too small to show"
    return f"{_short(given)}; expected {_short(expected)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
