"""Chapter 04: predictions, exercises and quiz on learning-rate schedules."""

import math

import torch

from course_lib.check import Belief, Challenge, Exercise, Mistake, Option, Prediction, Question

beyond_the_end = Prediction(
    question="torch's CosineAnnealingLR with T_max=10 goes from 1 to 0 in ten updates. It is "
    "stepped on. What is the rate at update 15?",
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
        Belief(0.75, "That would be a straight line from the top; it comes up from below."),
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
                "the first rate; every change comes one update early",
                "The schedule has moved on before its first rate was used.",
                True,
            ),
            Option("the last rate only", "The last comes early too, and the first is never used."),
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


def _warm_cosine(k, peak, warmup, total, *, first=1, inner=None, hold=True):
    if k < warmup:
        return peak * (k + first) / warmup
    done = (k - warmup) / (total - warmup) if inner is None else inner(k, warmup, total)
    return peak * (1 + math.cos(math.pi * (min(done, 1.0) if hold else done))) / 2


warm_cosine = Exercise(
    _warm_cosine,
    tuple((k, 0.1, 5, 25) for k in (0, 3, 4, 5, 6, 15, 24, 25, 40)),
    (
        Mistake(
            lambda *case: _warm_cosine(*case, first=0),
            "That begins at 0: the first update learns nothing. Update k uses (k + 1) / warmup.",
        ),
        Mistake(
            lambda *case: _warm_cosine(*case, hold=False),
            "After the end it rises again. Hold the last rate.",
        ),
        Mistake(
            lambda *case: _warm_cosine(*case, inner=lambda k, w, t: k / t),
            "The cosine begins where the warmup ends: there it has done nothing yet.",
        ),
        Mistake(
            lambda *case: _warm_cosine(*case, inner=lambda k, w, t: (k - w) / t),
            "It doesn't arrive: the cosine has only total − warmup updates.",
        ),
        Mistake(
            lambda *case: 2 * _warm_cosine(*case) if case[0] >= case[2] else _warm_cosine(*case),
            "1 + cos goes from 2 to 0: halve it.",
        ),
        Mistake(
            lambda k, peak, w, t: _warm_cosine(k, peak, w, t) if k < w else (
                peak * max(0.0, 1 - (k - w) / (t - w))
            ),
            "That falls in a straight line.",
        ),
    ),
    tolerance=1e-6,
)  # fmt: skip


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
        Mistake(lambda n, e, b, d, a: e, "Those are epochs."),
    ),
)

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
    rates = [rate(k) for k in range(STEPS)]
    if not all(isinstance(r, (int, float)) and 0 <= r <= 1 for r in rates):
        return "Every rate must be a number between 0 and 1."
    loss = noisy_loss(rate)
    if loss < GOOD:
        return None
    if max(rates) == min(rates):
        return (
            f"The loss is {loss:.4f}, not below {GOOD}. A constant rate has to choose: far enough, "
            "or quiet enough at the end."
        )
    return (
        f"The loss is {loss:.4f}, not below {GOOD}. The rates fall from {max(rates):.3g} to "
        f"{rates[-1]:.3g}: is it the way there that is missing, or the quiet at the end?"
    )


quiet_end = Challenge(_falls_below)
