"""Chapter 04: predictions, exercises and quiz on learning-rate schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from course_lib.check import Belief, Challenge, Exercise, Mistake, Option, Prediction, Question
from course_lib.schedules import as_torch, cosine, record_rates

beyond_the_end = Prediction(
    question="torch's CosineAnnealingLR with T_max=10 goes from 1 to 0 in ten updates. The run "
    "goes on. What is the rate at update 15?",
    unit="of the peak",
    expected=0.5,
    tolerance=0.02,
    low=0,
    high=10,
    too_low="It is a whole cosine, of which T_max is half: it climbs back, and is at the top at "
    "update 20.",
    too_high="It climbs back the way it came: half way up at 15, at the top at 20.",
    beliefs=(
        Belief(0, "It doesn't stay down. T_max is half of a whole cosine, and it climbs back."),
        Belief(1, "It doesn't start again either: it returns the way it came."),
    ),
)

adams_spread = Prediction(
    question="Gradients are pure noise. The batch grows from 1 to 16, and so does Adam's rate, by "
    "the linear rule. After the same examples, how far do the weights stray, compared with batch "
    "1? (1 means equally far.)",
    unit="times as far",
    expected=4,
    tolerance=0.4,
    low=0,
    high=100,
    too_low="Adam divides the noise by its own size: the smaller noise of a larger batch makes no "
    "smaller steps. Only their number falls.",
    too_high="There are 16 times fewer steps, and random steps add up like the root of their "
    "number.",
    beliefs=(
        Belief(1, "For SGD. Adam has scaled the smaller noise up again before the rate acts."),
        Belief(
            16,
            "Each step is 16 times as long, but there are 16 times fewer, and random steps "
            "add up like a root: 16 / 4.",
        ),
        Belief(
            0.25,
            "That is Adam with the old rate: a 16th of the steps, each as long, and random "
            "steps add up like a root.",
        ),
    ),
)

counted_in_batches = Prediction(
    question="1,000 batches, an update every 4 of them, and a cosine to 0 of 1,000 steps that is "
    "stepped once after each update. Where does the rate end, as a part of the peak?",
    unit="of the peak",
    expected=0.85,
    tolerance=0.02,
    low=0,
    high=1,
    too_low="Only 250 updates happened, a quarter of the cosine, and a cosine begins flat.",
    too_high="A quarter of the cosine was used.",
    beliefs=(
        Belief(0, "It isn't finished: only 250 of its 1,000 steps happened."),
        Belief(0.75, "A quarter of a straight line is 25 % down; a cosine begins flatter."),
    ),
)

quiz = (
    Question(
        "scheduler.step() stands before optimizer.step(). What is lost?",
        (
            Option("nothing but a warning", "The rates that the updates use are shifted by one."),
            Option(
                "one use of the first rate; every change comes one update early",
                "The schedule moves on before its first rate has been used at all.",
                True,
            ),
            Option("the last rate only", "The last comes early too, as all changes do."),
        ),
    ),
    Question(
        "A run with a cosine of 100 updates is at 50 and gets extended to 200. The schedule is "
        "built anew for 200. What happens to the rate?",
        (
            Option(
                "it goes on from half of the peak",
                "A cosine is a function of the share that is done, and that share has halved.",
            ),
            Option(
                "it jumps up, to 0.85 of the peak",
                "A quarter of the new cosine is done, and a quarter of a cosine is 0.85.",
                True,
            ),
            Option(
                "it begins anew at the peak",
                "Only if the position is lost too: the update number goes on.",
            ),
        ),
    ),
    Question(
        "A recipe says: 8 GPUs with 2 images each, a rate of 0.02. You have one GPU and use 16 "
        "images. Which rate does the recipe mean for you?",
        (
            Option("0.02", "The update sees 16 images in both cases.", True),
            Option("0.0025", "An eighth of the GPUs, but not of the images in an update."),
            Option("0.16", "Nothing in the update has grown."),
        ),
    ),
)


def _updates(examples, epochs, batch, devices, accumulate, *, last=math.ceil):
    """`batch` is of one device; the last update of an epoch may be smaller."""
    return epochs * last(examples / (batch * devices * accumulate))


updates = Exercise(
    _updates,
    ((1000, 3, 10, 1, 1), (1030, 3, 10, 4, 1), (1030, 3, 10, 4, 5), (1001, 2, 10, 1, 1)),
    (
        Mistake(
            lambda n, e, b, d, a: e * math.ceil(n / (b * d)),
            "Those are batches: an update is made of several where gradients accumulate.",
        ),
        Mistake(
            lambda n, e, b, d, a: e * math.ceil(n / (b * a)),
            "All devices work on the same update: each brings a batch to it.",
        ),
        Mistake(
            lambda n, e, b, d, a: e * math.ceil(n / b),
            "An update sees batch · devices · accumulate examples.",
        ),
        Mistake(
            lambda *case: _updates(*case, last=math.floor),
            "The last, smaller update of an epoch counts too.",
        ),
        Mistake(
            lambda n, e, b, d, a: math.ceil(e * n / (b * d * a)),
            "Nearly: each epoch ends with its own smaller update.",
        ),
        Mistake(
            lambda n, e, b, d, a: d * _updates(n, e, b, d, a),
            "The devices make each update together, not one each.",
        ),
        Mistake(
            lambda n, e, b, d, a: math.ceil(n / (b * d * a)),
            "That is one epoch.",
        ),
        Mistake(
            lambda n, e, b, d, a: e * n / (b * d * a),
            "There is no part of an update: in each epoch the last one is smaller, but whole.",
        ),
        Mistake(lambda n, e, b, d, a: e, "Those are epochs."),
    ),
)

UPDATES = 100  # that the six loops of the recorder mean to make


def _optimizer() -> tuple[Optimizer, list[float]]:
    """An optimizer with a rate of 1 and one weight that has no gradient, and its recorder."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    return optimizer, record_rates(optimizer)


def too_short() -> list[float]:
    optimizer, rates = _optimizer()
    scheduler = CosineAnnealingLR(optimizer, T_max=UPDATES // 2)
    for _ in range(UPDATES):
        optimizer.step()
        scheduler.step()
    return rates


def once_an_epoch() -> list[float]:
    optimizer, rates = _optimizer()
    scheduler = CosineAnnealingLR(optimizer, T_max=UPDATES)
    for _ in range(10):
        for _ in range(UPDATES // 10):
            optimizer.step()
        scheduler.step()
    return rates


def in_batches() -> list[float]:
    optimizer, rates = _optimizer()
    scheduler = CosineAnnealingLR(optimizer, T_max=UPDATES)
    for batch in range(UPDATES):
        if batch % 4 == 3:
            optimizer.step()
            scheduler.step()
    return rates


def by_each_process() -> list[float]:
    optimizer, rates = _optimizer()
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=UPDATES)
    for _ in range(UPDATES):
        optimizer.step()
        for _ in range(4):
            scheduler.step()
    return rates


def lost_position() -> list[float]:
    rates = []
    for _ in range(2):  # the second time, the run is resumed from its weights
        optimizer, part = _optimizer()
        scheduler = CosineAnnealingLR(optimizer, T_max=UPDATES)
        for _ in range(UPDATES // 2):
            optimizer.step()
            scheduler.step()
        rates += part
    return rates


def lengthened() -> list[float]:
    optimizer, rates = _optimizer()
    scheduler = as_torch(cosine(1.0, total_steps=UPDATES), optimizer)
    for k in range(2 * UPDATES):
        if k == UPDATES // 2:  # resumed, to go on for twice as long
            position = scheduler.state_dict()
            scheduler = as_torch(cosine(1.0, total_steps=2 * UPDATES), optimizer)
            scheduler.load_state_dict(position)
        optimizer.step()
        scheduler.step()
    return rates


@dataclass(frozen=True)
class Fault:
    """What a loop does wrong, its number in the list, and how that shows in its curve."""

    loop: Callable[[], list[float]]
    number: int
    shows: str


FAULTS = {
    "A": Fault(once_an_epoch, 4, "the rate stands still for a whole epoch, then moves a little"),
    "B": Fault(
        lost_position, 6, "after 50 updates it is at its first rate again, and does the same"
    ),
    "C": Fault(by_each_process, 2, "it has come to its end after a quarter of the updates"),
    "D": Fault(
        lengthened, 5, "after 50 updates it jumps up, but not to the peak, and goes on to 0"
    ),
    "E": Fault(too_short, 1, "it reaches 0 after 50 updates, and climbs back without a jump"),
    "F": Fault(in_batches, 3, "there are fewer updates, and it has hardly left the peak"),
}


def recordings() -> dict[str, list[float]]:
    """The rate of every update, as recorded, of the loops A to F."""
    return {letter: fault.loop() for letter, fault in FAULTS.items()}


def _diagnosed(numbers) -> str | None:
    if isinstance(numbers, str):
        numbers = [int(digit) for digit in numbers if digit.isdigit()]
    if not isinstance(numbers, (list, tuple)) or set(numbers) != {1, 2, 3, 4, 5, 6}:
        return 'Write the six faults\' numbers, for A to F, as six digits in quotes: "123456".'
    given = list(numbers)
    shows = {fault.number: fault.shows for fault in FAULTS.values()}
    wrong = {
        letter: n
        for (letter, fault), n in zip(FAULTS.items(), given, strict=True)
        if fault.number != n
    }
    if not wrong:
        return None
    letter, number = next(iter(wrong.items()))
    return f"{6 - len(wrong)} of 6. {letter} isn't {number}: with {number}, {shows[number]}."


recorder = Challenge(_diagnosed)

STEPS, GOOD = 300, 0.0065


def noisy_loss(rate) -> float:
    """The loss that SGD reaches in STEPS updates with these rates, on a bowl of 50 weights with a
    curvature of 1, from 1 in each, when every gradient carries noise of size 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(50, dtype=torch.float64)
    for k in range(STEPS):
        noise = torch.randn(50, generator=generator, dtype=torch.float64)
        x -= rate(k) * (x + noise)
    return x.square().mean().item()


def _falls_below(rate) -> str | None:
    if not callable(rate):
        return f"A schedule is a function of the update's number, not {rate!r}."
    given = [rate(k) for k in range(STEPS)]
    for k, r in enumerate(given):
        if isinstance(r, bool) or not isinstance(r, Real) or not 0 <= r <= 1:
            return f"Every rate must be a number between 0 and 1; that of update {k} is {r!r}."
    rates = [float(r) for r in given]
    loss = noisy_loss(rates.__getitem__)
    if loss < GOOD:
        return None
    start, noise = _shares(rates)
    said = (
        f"The loss is {loss:.4f}, not below {GOOD}. In the mean, {start:.4f} is left of the start "
        f"and noise adds {noise:.4f}: "
    )
    if max(rates) == 0:
        return said + "it has to travel."
    if max(rates) == min(rates) and start <= noise:
        return said + "a constant rate has to choose between the two."
    factor, begin, end = best_change(rates)
    change = "twice the rates" if factor > 1 else "half the rates"
    where = f"before update {end}" if end < STEPS else f"from update {begin} on"
    where = "throughout" if end - begin == STEPS else where
    return said + f"of all changes by a factor of two, {change} {where} would help most."


def best_change(rates: list[float]) -> tuple[float, int, int]:
    """A factor, 2 or 0.5, for the rates from one update to before another, the first or the last
    of all: of these changes, in steps of ten updates, that which lowers the mean loss most."""
    parts = [(0, STEPS)]
    parts += [part for at in range(10, STEPS, 10) for part in ((0, at), (at, STEPS))]
    changes = [(factor, *part) for part in parts for factor in (2.0, 0.5)]
    return min(changes, key=lambda change: sum(_shares(changed(rates, *change))))


def changed(rates: list[float], factor: float, begin: int, end: int) -> list[float]:
    """These rates, those of updates begin to end - 1 times a factor, and none above 1."""
    middle = [min(1.0, factor * rate) for rate in rates[begin:end]]
    return [*rates[:begin], *middle, *rates[end:]]


def _shares(rates: list[float]) -> tuple[float, float]:
    """What is left of the loss at the start, and what the noise of each update adds."""
    start, noise = 1.0, 0.0
    for rate in rates:
        start, noise = start * (1 - rate) ** 2, noise * (1 - rate) ** 2 + rate**2
    return start, noise


quiet_end = Challenge(_falls_below)
