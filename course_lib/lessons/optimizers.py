"""Chapter 03: predictions, exercises and quiz on optimizers."""

import math

import torch

from course_lib.check import Belief, Challenge, Exercise, Mistake, Option, Prediction, Question
from course_lib.optimizers import state_bytes

travel = Prediction(
    question="The gradient of one weight is 1, a hundred times. The rate is 0.1, so SGD travels "
    "10. How far does SGD with momentum 0.9 travel?",
    unit="in all",
    expected=91,
    tolerance=1,
    low=0,
    high=1000,
    too_low="Momentum adds gradients up, each weighing 0.9 of the one after it. Under a steady "
    "gradient the sum grows to 10 of them, and every step to 10 of SGD's.",
    too_high="The sum of the gradients grows to 1 / (1 − 0.9) = 10 of them and no further, so a "
    "step is at most 10 of SGD's.",
    beliefs=(
        Belief(
            10,
            "That is an average of the gradients. Torch's momentum is a sum: steps grow to 10 "
            "times SGD's.",
        ),
        Belief(100, "10 times SGD's, in the end; but the first steps are short: 0.1, 0.19, 0.27."),
        Belief(9, "A mean that begins at 0 would lag behind; torch's momentum is a sum."),
        Belief(19, "It is not only the last gradient that counts again, but all before it."),
    ),
)

decay_alone = Prediction(
    question="A weight of 1 has a gradient of exactly 0; the weight decay is 0.01. How many times "
    "the learning rate does Adam with L2 move it, in its first step?",
    unit="times the rate",
    expected=1,
    tolerance=0.005,
    low=0,
    high=100,
    too_low="The decay is Adam's whole gradient here, 0.01 · w, and Adam divides a gradient by its "
    "own size.",
    too_high="Adam divides a gradient by its own size: what is left is 1.",
    beliefs=(
        Belief(0.01, "That is AdamW, which shrinks the weight by lr · 0.01, beside Adam's step."),
        Belief(
            0,
            "The loss's gradient is 0, but L2 adds 0.01 · w to it, and Adam makes a full step of "
            "whatever is there.",
        ),
    ),
)

before_step_one = Question(
    "A model of 4 MB in float32 is built, and Adam for it. What does the optimizer keep, before "
    "its first step?",
    (
        Option("nothing", "The moments appear in the first step.", True),
        Option("4 MB", "It will keep two numbers for each weight, and keeps none yet."),
        Option("8 MB", "After the first step. It is made there, not when Adam is built."),
    ),
)

quiz = (
    Question(
        "You want a layer to stay as it is, and set its gradients to zero before every step. The "
        "optimizer is AdamW, in the middle of a run. Does the layer stay?",
        (
            Option("yes: no gradient, no step", "A gradient of 0 isn't none."),
            Option(
                "no: it goes on moving",
                "Old moments push it on, and weight decay shrinks it. With the gradient None it is "
                "left alone.",
                True,
            ),
            Option(
                "it moves once more and stops",
                "The moments fade over many steps, and the decay never ends.",
            ),
        ),
    ),
    Question(
        "A run is resumed from saved weights with a new Adam. What is its first step like?",
        (
            Option(
                "as long as the one that would have come",
                "That one would have been scaled by a long history of gradients.",
            ),
            Option("nearly nothing: the moments start at 0", "Bias correction makes up for that."),
            Option(
                "lr in every weight, up or down",
                "With one gradient seen, m̂ / √v̂ is its sign: every weight moves by lr.",
                True,
            ),
        ),
    ),
    Question(
        "What is the longest step that Adam with its usual betas can take in a weight?",
        (
            Option("lr", "For a steady gradient it is. After a silence, v is small."),
            Option(
                "a few times lr",
                "One spike after silence gets 3.16 lr; gradients that rise after it, up to 7.3.",
                True,
            ),
            Option(
                "there is no bound",
                "A gradient is divided by its own size too; the history can make up for only so "
                "much.",
            ),
        ),
    ),
)

LR, DECAY, BETAS, EPS = 0.1, 0.5, (0.9, 0.999), 1e-8


def _adamw(w, g, m, v, k, *, correct=(True, True), decay="beside", square=True, shift=0):
    if decay == "L2":
        g = g + DECAY * w
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * (g * g if square else abs(g))
    return _stepped(w, m, v, k + shift, correct=correct, decay=decay)


def _stepped(w, m, v, k, *, correct=(True, True), decay="beside", root=True):
    m = m / (1 - BETAS[0] ** k) if correct[0] else m
    v = v / (1 - BETAS[1] ** k) if correct[1] else v
    step = LR * m / ((math.sqrt(v) if root else v) + EPS)
    if decay == "after":
        return (1 - LR * DECAY) * (w - step)
    return {"beside": 1 - LR * DECAY, "unscaled": 1 - DECAY}.get(decay, 1) * w - step


def _moments(m, v, g, betas=BETAS):
    return betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g


def _epsilon_inside(w, g, m, v, k):
    m, v = _moments(m, v, g)
    v_hat = v / (1 - BETAS[1] ** k)
    return (1 - LR * DECAY) * w - LR * m / (1 - BETAS[0] ** k) / math.sqrt(v_hat + EPS)


adamw_step = Exercise(
    _adamw,
    (
        (1.0, 0.5, 0.0, 0.0, 1),
        (-2.0, 3.0, 0.2, 0.5, 10),
        (0.5, -0.01, -0.3, 0.04, 500),
        (1.0, 1e-8, 0.0, 0.0, 1),
    ),
    (
        Mistake(
            lambda *case: _adamw(*case, correct=(False, False)),
            "The moments begin at 0 and are too small at first: divide by 1 − βᵏ.",
        ),
        Mistake(
            lambda *case: _adamw(*case, correct=(True, False)),
            "Both moments are corrected, v too.",
        ),
        Mistake(
            lambda *case: _adamw(*case, decay="L2"),
            "That adds the decay to the gradient, where Adam divides it away: L2, not AdamW.",
        ),
        Mistake(
            lambda *case: _adamw(*case, decay="none"),
            "The weight decay is missing: θ is also multiplied by 1 − lr · λ.",
        ),
        Mistake(
            lambda *case: _adamw(*case, decay="unscaled"),
            "In torch the decay is multiplied by the learning rate too: 1 − lr · λ.",
        ),
        Mistake(
            lambda *case: _adamw(*case, decay="after"),
            "The decay shrinks the weight, not the step: first shrink, then step.",
        ),
        Mistake(
            lambda *case: _adamw(*case, square=False),
            "The second moment is the mean of the squared gradient.",
        ),
        Mistake(
            lambda w, g, m, v, k: _stepped(w, *_moments(m, v, g), k, root=False),
            "v is a mean of squares; its root comes into the step.",
        ),
        Mistake(_epsilon_inside, "ε stands outside of the root."),
        Mistake(
            lambda w, g, m, v, k: _stepped(w, *_moments(m, v, g, BETAS[::-1]), k),
            "β₁ belongs to the gradient's mean, β₂ to the square's.",
        ),
        Mistake(
            lambda *case: _adamw(*case, shift=1),
            "The first update has k = 1: it divides by 1 − β.",
        ),
        Mistake(
            lambda w, g, m, v, k: _stepped(w, m, v, k),
            "That steps by the old moments. Move them first, by this g.",
        ),
        Mistake(
            lambda w, *case: 2 * (1 - LR * DECAY) * w - _adamw(w, *case),
            "The step goes against the gradient: minus.",
        ),
    ),
    tolerance=1e-6,  # float32 answers are right too
)

NUMBERS = {"SGD": 0, "momentum": 1, "Adam": 2, "AMSGrad": 3}


def _kept(shapes, optimizer, bytes_per_number):
    weights = sum(math.prod(shape) for shape in shapes)
    counters = 4 * len(shapes) if NUMBERS[optimizer] > 1 else 0
    return bytes_per_number * NUMBERS[optimizer] * weights + counters


kept = Exercise(
    _kept,
    (
        ([(4, 3), (4,)], "SGD", 4),
        ([(4, 3), (4,)], "momentum", 4),
        ([(4, 3), (4,)], "Adam", 4),
        ([(4, 3), (4,)], "Adam", 2),
        ([(10,)], "AMSGrad", 4),
    ),
    (
        Mistake(
            lambda s, o, b: b * NUMBERS[o] * sum(math.prod(shape) for shape in s),
            "Nearly: Adam and AMSGrad also count their steps, in 4 bytes for each tensor.",
        ),
        Mistake(
            lambda s, o, b: (
                b * (NUMBERS[o] * sum(math.prod(x) for x in s) + (NUMBERS[o] > 1) * len(s))
            ),
            "The counter is a float32, whatever the weights are.",
        ),
        Mistake(
            lambda s, o, b: _kept(s, o, b) - (4 * (len(s) - 1) if NUMBERS[o] > 1 else 0),
            "There is a counter for each tensor, not one in all.",
        ),
        Mistake(
            lambda s, o, b: _kept(s, o, 4),
            "State has the dtype of the weights: two bytes a number in bfloat16.",
        ),
        Mistake(
            lambda s, o, b: _kept([(sum(shape),) for shape in s], o, b),
            "A tensor has as many numbers as the product of its shape, not the sum.",
        ),
        Mistake(
            lambda s, o, b: _kept(s, o, b) + (4 * len(s) if NUMBERS[o] > 1 else 0),
            "Nearly: a counter is a float32, 4 bytes.",
        ),
        Mistake(
            lambda s, o, b: _kept(s, o, b) + (4 * len(s) if o == "momentum" else 0),
            "Nearly: momentum counts no steps, since nothing is corrected.",
        ),
        Mistake(
            lambda s, o, b: _kept(s, "Adam" if o == "AMSGrad" else o, b),
            "AMSGrad also keeps the largest v so far.",
        ),
        Mistake(
            lambda s, o, b: _kept(s, o, b) + b * sum(math.prod(shape) for shape in s),
            "That counts the weights, or the gradients, too; the question is what the optimizer "
            "keeps.",
        ),
    ),
)

STEEP, WITHIN, NEAR = 1000.0, 200, 0.01
TURN = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64) / math.sqrt(2)
VALLEY = TURN.T @ torch.diag(torch.tensor([1.0, STEEP], dtype=torch.float64)) @ TURN
MINIMUM = torch.tensor([3.0, -2.0], dtype=torch.float64)


def _through_the_valley(build) -> str | None:
    """`build` makes an optimizer from a list of parameters."""
    if not callable(build):
        return f"A function from a list of parameters to an optimizer is needed, not {build!r}."
    point = torch.nn.Parameter(MINIMUM + TURN.T @ torch.ones(2, dtype=torch.float64))
    start = (point.detach() - MINIMUM).norm().item()
    optimizer = build([point])
    for _ in range(WITHIN):
        point.grad = VALLEY @ (point.detach() - MINIMUM)
        optimizer.step()
    far, state = (point.detach() - MINIMUM).norm().item(), state_bytes(optimizer)
    if state > 8 * 2 + 4:
        return f"It keeps {state} bytes for two weights of 8: that is more than one number each."
    if not far <= start:
        return (
            f"It ends farther away than it began, at {far:.2g}. The largest curvature is "
            f"{STEEP:g}: which rate and momentum does that bear?"
        )
    if far > NEAR:
        return (
            f"After {WITHIN} updates it is {far:.2g} away, not within {NEAR}. The curvature along "
            f"the valley is 1, across it {STEEP:g}, and neither axis is a weight's own. What goes "
            "on along the valley while it is calm across?"
        )
    return None


valley = Challenge(_through_the_valley)
