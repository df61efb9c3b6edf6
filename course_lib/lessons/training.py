"""Chapter 01: predictions, exercises and quiz on the training step."""

from numbers import Integral

import torch
import torch.nn.functional as F

from course_lib import datasets, models, units
from course_lib.check import Challenge, Exercise, Mistake, Option, Question
from course_lib.memory_trace import measure
from course_lib.training import train

after_backward = Question(
    "loss.backward() has run, optimizer.step() has not. What has changed?",
    (
        Option(
            "the weights",
            "backward() touches no weight. It fills .grad; moving the weights by it is the "
            "optimizer's line.",
        ),
        Option("the gradients only", "backward() fills .grad and touches no weight.", True),
        Option(
            "the weights and the gradients",
            "Only half of that: backward() fills .grad, and the weights wait for the optimizer.",
        ),
    ),
)

three_calls = Question(
    "w is 3. (w * w).backward() runs three times, with nothing in between. What is w.grad?",
    (
        Option("6", "6 is what one call gives. Each call adds to what is there: 6 + 6 + 6."),
        Option("18", "Each call adds its 6 to what is there.", True),
        Option(
            "an error: backward() can run only once",
            "Each call computes w * w anew. Only a second backward through the same computation "
            "raises.",
        ),
    ),
)

undivided = Question(
    "Four micro-batches, and you forget to divide each loss by four. How long is AdamW's first "
    "update, compared with the right one?",
    (
        Option(
            "4 times as long",
            "That is SGD, which multiplies the gradient by the rate. AdamW divides it by its own "
            "size first, so a constant factor cancels.",
        ),
        Option(
            "2 times as long",
            "There is a root in AdamW, but of the squared gradient: the factor cancels whole.",
        ),
        Option(
            "as long",
            "AdamW divides the gradient by its own size, and the factor cancels. So the mistake "
            "isn't seen, until clipping or another optimizer meets it.",
            True,
        ),
    ),
)

quiz = (
    Question(
        "zero_grad() stands between backward() and step(). What does SGD do?",
        (
            Option(
                "it trains as usual",
                "The gradient is gone when step() looks for it. Only from step to the next "
                "backward may zero_grad stand anywhere.",
            ),
            Option(
                "nothing: the weights stay",
                "step() finds no gradient, skips every weight, and says nothing.",
                True,
            ),
            Option(
                "it raises an error",
                "A weight without a gradient is skipped, since some may rightly have none. "
                "Nothing checks that all of them lack one.",
            ),
        ),
    ),
    Question(
        "Where does clip_grad_norm_ belong?",
        (
            Option(
                "before backward",
                "Then it clips the gradient of the update before, or none at all; this update's "
                "comes only in backward.",
            ),
            Option(
                "between backward and step",
                "It needs this update's whole gradient, before the weights are moved by it.",
                True,
            ),
            Option(
                "after step",
                "By then the weights have moved, by the unclipped gradient.",
            ),
        ),
    ),
    Question(
        "You halve the batch. Which parts of the step's memory shrink?",
        (
            Option(
                "all of them, by half",
                "Weights, gradients and optimizer state have one number for each parameter, "
                "whatever the batch.",
            ),
            Option(
                "activations, inputs and what is computed from them",
                "They have a row for each example; the rest has a number for each parameter.",
                True,
            ),
            Option(
                "the gradients, since there is less to learn from",
                "A gradient has the shape of its weight: it is a mean over the batch.",
            ),
        ),
    ),
)

one_batch_loss = Exercise(
    lambda losses, counts: sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts),
    (([2.0, 1.0], [1, 9]), ([0.5, 0.25, 4.0], [4, 4, 2]), ([3.0], [7])),
    (
        Mistake(
            lambda losses, counts: sum(losses) / len(losses),
            "That is the mean of the means: the batch with one token gets as much say as the one "
            "with nine.",
        ),
        Mistake(
            lambda losses, counts: (
                sum(x * n for x, n in zip(losses, counts, strict=True)) / len(losses)
            ),
            "The sum over the tokens is right; there are more tokens than micro-batches to share "
            "it out to.",
        ),
        Mistake(
            lambda losses, counts: sum(x * n for x, n in zip(losses, counts, strict=True)),
            "That is the sum over the tokens; the one batch has their mean.",
        ),
        Mistake(lambda losses, counts: sum(losses), "That adds up means; nothing was weighted."),
        Mistake(
            lambda losses, counts: sum(losses) / sum(counts),
            "The losses are means already: bring each back to a sum before you divide.",
        ),
    ),
    tolerance=1e-6,  # float32 answers are right too
)

STATE_NUMBERS = {"SGD": 0, "momentum": 1, "AdamW": 2}


def _held(num_parameters: int, num_tensors: int, optimizer: str) -> int:
    """Bytes after zero_grad in float32: weights, moments, AdamW's counter for each tensor."""
    counters = 4 * num_tensors if optimizer == "AdamW" else 0
    return 4 * num_parameters * (1 + STATE_NUMBERS[optimizer]) + counters


held_between_steps = Exercise(
    _held,
    ((1000, 4, "SGD"), (1000, 4, "momentum"), (1000, 4, "AdamW"), (7, 2, "AdamW")),
    (
        Mistake(
            lambda n, t, o: _held(n, t, o) + 4 * n,
            "That counts the gradients too: after zero_grad there are none.",
        ),
        Mistake(
            lambda n, t, o: 4 * n * (2 + STATE_NUMBERS[o]),
            "That counts the gradients too: after zero_grad there are none. (AdamW has a counter "
            "for each tensor besides.)",
        ),
        Mistake(
            lambda n, t, o: 4 * n * STATE_NUMBERS[o],
            "That is the optimizer's state alone, without AdamW's counters; the weights stay as "
            "well.",
        ),
        Mistake(
            lambda n, t, o: 4 * n * (1 + STATE_NUMBERS[o]),
            "Nearly: AdamW also keeps a counter of its steps, 4 bytes for each tensor.",
        ),
        Mistake(
            lambda n, t, o: 4 * n * (1 + min(1, STATE_NUMBERS[o])),
            "AdamW keeps two numbers for each parameter, not one as momentum does.",
        ),
        Mistake(
            lambda n, t, o: _held(n, t, o) - 4 * n,
            "That is the optimizer's state alone; the weights stay as well.",
        ),
        Mistake(lambda n, t, o: 4 * n, "That is the weights alone; some optimizers keep more."),
    ),
)

EXAMPLES, BUDGET, UPDATES = 512, 600 * units.KiB, 50


def _trained_within_budget(plan) -> str | None:
    """`plan` is (micro_batch, build_optimizer). The peak first, since it is cheap."""
    if not isinstance(plan, tuple) or len(plan) != 2 or not callable(plan[1]):
        return f"A plan is (micro-batch size, function from model to optimizer), not {plan!r}."
    micro_batch, build_optimizer = plan
    if not isinstance(micro_batch, Integral) or micro_batch < 16 or EXAMPLES % micro_batch:
        return (
            f"A micro-batch has a whole number of images, 16 or more, that divides {EXAMPLES}: "
            f"not {micro_batch!r}."
        )
    micro_batch = int(micro_batch)
    peak = measure(
        lambda: models.mlp(64, 128, 128, 10),
        lambda: (torch.zeros(micro_batch, 64), torch.zeros(micro_batch, dtype=torch.int64)),
        _loss,
        build_optimizer,
        accumulate=EXAMPLES // micro_batch,
    )
    if peak.peak_bytes > BUDGET:
        largest = max(peak.peak_by, key=peak.peak_by.get)
        return (
            f"It peaks at {units.binary(peak.peak_bytes)}, over {units.binary(BUDGET, 0)}, in the "
            f"phase {peak.peak_at.phase}. The largest part there: {largest}."
        )
    reached = _accuracy_after_training(micro_batch, build_optimizer)
    if reached >= 0.95:
        return None
    said = f"It fits, but after {UPDATES} updates only {100 * reached:.1f} % are right."
    if not peak.live["optimizer state"].any():
        said += (
            " This optimizer keeps nothing from step to step: one that does needs fewer updates."
        )
    return said


def _accuracy_after_training(micro_batch: int, build_optimizer) -> float:
    split, generator = datasets.digits(), torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.mlp(64, 128, 128, 10)

    def batches():
        for _ in range(UPDATES):
            chosen = torch.randint(0, len(split.train_x), (EXAMPLES,), generator=generator)
            yield [(split.train_x[i], split.train_y[i]) for i in chosen.split(micro_batch)]

    train(model, batches(), _loss, build_optimizer(model), steps=UPDATES)
    with torch.no_grad():
        right = model(split.test_x).argmax(1) == split.test_y
    return right.float().mean().item()


def _loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


within_budget = Challenge(_trained_within_budget)
