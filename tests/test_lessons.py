"""Each foreseen belief gets its own feedback, and what a lesson calls right is measured."""

import pytest
import torch

from course_lib import models
from course_lib.check import NOT_ATTEMPTED, PASSED, WRONG, Exercise, Question
from course_lib.lessons import training as lesson
from course_lib.training import train_step

EXERCISES = [value for value in vars(lesson).values() if isinstance(value, Exercise)]
QUESTIONS = [value for value in vars(lesson).values() if isinstance(value, Question)]
QUESTIONS += lesson.quiz


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_right_answer_passes_and_each_mistake_hears_its_own_feedback(exercise):
    assert exercise.check(exercise.answer).status == PASSED
    for mistake in exercise.mistakes:
        result = exercise.check(mistake.answer)
        assert (result.status, result.message) == (WRONG, mistake.feedback)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.prompt[:30])
def test_every_option_has_its_own_feedback(question):
    said = [question.answer(option.text) for option in question.options]
    assert len(set(said)) == len(said)
    assert sum(text.startswith("Right: ") for text in said) == 1
    assert question.answer(None) == "Not answered yet."
    assert all(option.feedback in question.compare(option.text, "7") for option in question.options)
    with pytest.raises(ValueError, match="is none of"):
        question.answer("something else")


def right(question):
    return next(option.text for option in question.options if option.right)


def test_what_the_predictions_call_right_is_what_torch_does():
    w = torch.tensor(3.0, requires_grad=True)
    for _ in range(3):
        (w * w).backward()
    assert right(lesson.three_calls) == f"{w.grad.item():g}"

    weight, lengths = torch.nn.Parameter(torch.ones(1)), []
    for factor in (1, 4):
        weight.data.fill_(1)
        weight.grad = torch.full((1,), 0.5 * factor)
        torch.optim.AdamW([weight], lr=0.01).step()
        lengths.append(1 - weight.item())
    assert right(lesson.undivided) == "as long" and abs(lengths[1] / lengths[0] - 1) < 1e-5


def test_a_step_without_gradients_moves_nothing_and_says_nothing():
    model = models.mlp(4, 2)
    before = [p.clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_right_answer_in_float32_passes():
    given = lesson.one_batch_loss.check(
        lambda losses, counts: (torch.tensor(losses) * torch.tensor(counts)).sum() / sum(counts)
    )
    assert given.status == PASSED


@pytest.mark.parametrize(
    ("plan", "status", "message"),
    [
        (None, NOT_ATTEMPTED, ""),
        ((512, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)), WRONG, "peaks at 1.43 MiB"),
        ((64, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)), WRONG, "optimizer state"),
        ((64, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3)), WRONG, "It fits, but"),
        ((100, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), WRONG, "that divides 512"),
        ((8, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), WRONG, "16 or more"),
        (("64", lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), WRONG, "not '64'"),
        (64, WRONG, "A plan is"),
        ((lambda m: m, 64), WRONG, "A plan is"),
        ((64, torch.optim.SGD), WRONG, "lambda model"),
        ((128, lambda m: torch.optim.SGD(m.parameters(), lr=0.5)), PASSED, ""),
    ],
)
def test_the_budget_says_what_is_missing(plan, status, message):
    result = lesson.within_budget.check(plan)
    assert result.status == status and message in result.message


def test_the_budget_leaves_the_readers_random_numbers_alone():
    before = torch.get_rng_state()
    lesson.within_budget.check((128, lambda m: torch.optim.SGD(m.parameters(), lr=0.5)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("optimizer", "name"), [("SGD", "SGD"), ("AdamW", "AdamW")])
def test_what_is_held_between_steps_is_what_torch_holds(optimizer, name):
    model = models.mlp(5, 7, 3)
    adam = getattr(torch.optim, optimizer)(model.parameters())
    train_step(model, [torch.ones(2, 5)], lambda m, x: m(x).mean(), adam)
    held = sum(p.nbytes for p in model.parameters())
    for state in adam.state.values():
        held += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    n, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    assert lesson.held_between_steps.answer(n, tensors, name) == held
