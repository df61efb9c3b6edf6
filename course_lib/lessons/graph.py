"""Chapter 02: predictions, exercises and quiz on graphs and backward."""

from numbers import Integral

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib import models, units
from course_lib.check import Belief, Challenge, Exercise, Mistake, Option, Prediction, Question
from course_lib.memory_trace import measure

frozen_above = Question(
    "Eight equal layers, a ReLU between each two, and the last seven are frozen: only the first "
    "still learns. What does forward keep for backward?",
    (
        Option(
            "an eighth of it",
            "The gradient has to come down through all seven to reach the first, and each ReLU on "
            "the way needs its output for that.",
        ),
        Option(
            "as much as without freezing",
            "The gradient must come down through the frozen layers, so what their ReLUs need is "
            "kept.",
            True,
        ),
        Option(
            "nothing: frozen layers keep nothing",
            "A frozen layer has no gradient of its own weight to compute, but it hands one down, "
            "and its ReLU needs its output for that.",
        ),
    ),
)

backward_flops = Prediction(
    question="A batch of data, six equal linear layers, a loss. Backward has how many times "
    "forward's FLOPs?",
    unit="times forward's",
    expected=1.83,
    tolerance=0.02,
    low=0,
    high=20,
    too_low="Each layer has one product in forward and two in backward, for its weight and for "
    "its input; only the first has one. That is 11, where forward has 6.",
    too_high="It runs once, with two products for each layer and one for the first: 11, where "
    "forward has 6. It doesn't grow with the number of weights.",
    beliefs=(
        Belief(
            2.0,
            "Two products for each layer, but nobody needs the gradient of the data: the first "
            "layer has one. 11 products, not 12.",
        ),
        Belief(1.0, "Each layer has two products in backward: for its weight and its input."),
        Belief(3.0, "That is forward and backward together, if the data needed a gradient."),
        Belief(2.83, "That is forward and backward together."),
    ),
)

quiz = (
    Question(
        "A loop carries a state h from step to step, and the second step fails: backward through "
        "the graph a second time. What is the cure?",
        (
            Option(
                "retain_graph=True",
                "Every step walks the whole past again, a few nodes more each time; and once an "
                "optimizer moves the weights in between, torch refuses all the same.",
            ),
            Option(
                "h = h.detach() between the steps",
                "The value goes on, its past doesn't.",
                True,
            ),
            Option(
                "no_grad() around the forward",
                "Then nothing is recorded, and there is nothing to go backward through at all.",
            ),
        ),
    ),
    Question(
        "y = tanh(x) is changed in place, y += 1, before backward; and the same with y = sin(x). "
        "What happens?",
        (
            Option(
                "both fail: in-place changes aren't allowed",
                "sin keeps its input, which you didn't touch.",
            ),
            Option(
                "tanh fails, sin works",
                "tanh' = 1 − y² needs the old y; sin' = cos x needs x.",
                True,
            ),
            Option(
                "both work, torch keeps copies",
                "It keeps references, no copies, and notices by a version number that y changed.",
            ),
        ),
    ),
    Question(
        "model.eval() has been called, and y = model(x). Does y need a gradient?",
        (
            Option(
                "yes, as in training",
                "eval() only tells dropout and BatchNorm how to behave. Autograd records and keeps "
                "as before.",
                True,
            ),
            Option(
                "no: eval() switches gradients off",
                "That is no_grad(). eval() tells dropout and BatchNorm how to behave, and autograd "
                "never hears of it.",
            ),
            Option(
                "yes, but nothing is kept for backward",
                "The layers keep what their backward needs, in training or not.",
            ),
        ),
    ),
)


def _both(for_a, for_b):
    return torch.stack([torch.as_tensor(for_a), torch.as_tensor(for_b)])


division = Exercise(
    lambda g, a, b: _both(g / b, -g * a / b**2),
    (
        (1.0, 6.0, 3.0),
        (0.5, -2.0, 4.0),
        (torch.tensor([2.0, -1.0]), torch.tensor([3.0, 0.5]), torch.tensor([4.0, 2.0])),
    ),
    (
        Mistake(
            lambda g, a, b: _both(1 / b + 0 * a, -a / b**2),
            "Those are the local derivatives. What is handed on is what arrived times them.",
        ),
        Mistake(
            lambda g, a, b: _both(g / b, g * a / b**2),
            "If b grows, a / b falls: the second one has a minus.",
        ),
        Mistake(
            lambda g, a, b: _both(-g * a / b**2, g / b),
            "Right, in the wrong order: the first is for a.",
        ),
        Mistake(
            lambda g, a, b: _both(g * b, g * a),
            "That is the rule of a × b.",
        ),
        Mistake(
            lambda g, a, b: _both(g / b, g / a),
            "In a / b the two don't play the same part. What is the slope of 1 / b?",
        ),
        Mistake(
            lambda g, a, b: _both(g / b, -a / b**2 + 0 * g),
            "For a it is right. For b, too, what arrived comes in: times g.",
        ),
        Mistake(
            lambda g, a, b: _both(g / b, g * a),
            "For a it is right. For b: what is the slope of 1 / b?",
        ),
        Mistake(
            lambda g, a, b: torch.as_tensor(g / b),
            "That is for a. Return two: for a, then for b.",
        ),
        Mistake(
            lambda g, a, b: _both(g / b, -g / b**2),
            "The second one misses a: a / b is a times 1 / b.",
        ),
    ),
    tolerance=1e-6,
)

kept_by_forward = Exercise(
    lambda batch, sizes: 4 * batch * sum(sizes[:-1]),
    ((256, [64, 128, 128, 10]), (32, [8, 16, 4]), (7, [5, 3])),
    (
        Mistake(
            lambda batch, sizes: 4 * batch * (sizes[0] + 2 * sum(sizes[1:-1])),
            "A ReLU's output is the next layer's input: one tensor, kept once. What the ReLU got "
            "isn't kept; the output tells where it was positive.",
        ),
        Mistake(
            lambda batch, sizes: 4 * batch * sum(sizes[1:-1]),
            "The first layer keeps its input too: the gradient of its weight is made from it.",
        ),
        Mistake(
            lambda batch, sizes: 4 * batch * sum(sizes),
            "Nothing in the model needs the last layer's result; a loss may.",
        ),
        Mistake(
            lambda batch, sizes: 4 * batch * sum(sizes[1:]),
            "A layer keeps what goes in, not what comes out.",
        ),
        Mistake(
            lambda batch, sizes: batch * sum(sizes[:-1]),
            "That many numbers; each has four bytes.",
        ),
        Mistake(
            lambda batch, sizes: 8 * batch * sum(sizes[:-1]),
            "A float32 number has four bytes, not eight.",
        ),
        Mistake(
            lambda batch, sizes: 32 * batch * sum(sizes[:-1]),
            "Those are bits; a byte has eight.",
        ),
        Mistake(
            lambda batch, sizes: batch * sum(sizes[:-1]) / 256,
            "That is in KiB; the question asks for bytes.",
        ),
        Mistake(
            lambda batch, sizes: 4 * batch * (sum(sizes) + sum(sizes[1:-1])),
            "A ReLU's output is the next layer's input: one tensor, kept once. What the ReLU got "
            "isn't kept, nor is the last layer's result.",
        ),
        Mistake(
            lambda batch, sizes: 4 * sum(sizes[:-1]),
            "For one example; the batch has more.",
        ),
        Mistake(
            lambda batch, sizes: (
                4 * batch * sum(sizes[:-1])
                + 4 * sum(i * o for i, o in zip(sizes, sizes[1:], strict=False))
            ),
            "The weights are there anyway: the question is what forward adds.",
        ),
    ),
)

BLOCKS, PEAK, FLOPS = 16, 1.7 * units.MiB, 2.7


def _within_both_budgets(plan) -> str | None:
    """`plan` is the lengths of the checkpointed segments, which add up to BLOCKS."""
    if not isinstance(plan, (list, tuple)) or not all(map(_counts_blocks, plan)):
        return f"A plan is a list of whole numbers, each at least 1, not {plan!r}."
    plan = [int(length) for length in plan]
    if sum(plan) != BLOCKS:
        return f"The segments hold {sum(plan)} blocks together; there are {BLOCKS}."
    peak, ratio = checkpointed(plan)
    said = f"The peak is {units.binary(peak)} and backward has {ratio:.2f} times forward's FLOPs"
    if peak > PEAK:
        return f"{said}. Over {units.binary(PEAK)}: {_worst_moment(plan)}"
    if ratio > FLOPS:
        return f"{said}. Over {FLOPS}: of n blocks, 2n − 1 of 2n products are computed again."
    return None


def _counts_blocks(length) -> bool:
    return isinstance(length, Integral) and not isinstance(length, bool) and length > 0


def _worst_moment(plan) -> str:
    """Of each segment: its own blocks, computed again, keep their inputs and the four times
    larger results of their ReLUs; the segments before it still keep their inputs."""
    at = max(range(len(plan)), key=lambda i: i + 5 * plan[i])
    blocks = f"the {plan[at]} blocks of segment {at + 1} are" if plan[at] > 1 else "one block is"
    waiting = f", and the inputs of the {at} segments before it are still kept" if at else ""
    return f"at the worst moment {blocks} back, computed again{waiting}."


def checkpointed(plan: list[int]) -> tuple[int, float]:
    """Peak bytes of a training step of BLOCKS blocks in checkpointed segments of these lengths,
    and backward's FLOPs over forward's. A block is models.mlp(16, 64, 16); 1,024 examples."""
    trace = measure(
        lambda: nn.Sequential(*(models.mlp(16, 64, 16) for _ in range(BLOCKS))),
        lambda: torch.zeros(1024, 16),
        lambda model, x: _through(model, x, plan).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    flops = dict.fromkeys(("forward", "backward"), 0)
    for phase in trace.phases:
        if phase.name in flops:
            flops[phase.name] += phase.flops
    return trace.peak_bytes, flops["backward"] / flops["forward"]


def _through(model: nn.Sequential, x: torch.Tensor, plan) -> torch.Tensor:
    first = 0
    for length in plan:
        x = checkpoint(model[first : first + length], x, use_reentrant=False)
        first += length
    return x


segments = Challenge(_within_both_budgets)
