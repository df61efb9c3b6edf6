"""Chapter 06: predictions, exercises and quiz on where a training step's memory goes."""

import math

from course_lib import facts, units
from course_lib.check import Belief, Challenge, Exercise, Mistake, Option, Prediction, Question
from course_lib.checks import whole
from course_lib.memory import CONVENTIONS
from course_lib.moments import moments

states_gb = Prediction(
    question="Llama-2-7B has 6.74 billion parameters. Weights, gradients and AdamW's state in "
    "float32, without activations: how many GB?",
    unit="GB",
    expected=107.8,
    tolerance=3,
    low=0,
    high=1000,
    too_low="Each parameter is there four times: weight, gradient and two moments, 4 bytes each.",
    too_high="Activations aren't asked for: 16 bytes a parameter.",
    beliefs=(
        Belief(13.5, "That is the weights in 16 bits: enough to answer, not to train."),
        Belief(27, "That is the weights alone, 4 bytes each."),
        Belief(53.9, "That is weights and gradients; AdamW's two moments are as much again."),
        Belief(80.9, "12 bytes? Weight, gradient and two moments are four times 4 bytes."),
        Belief(100.4, "That is GiB: in GB it is 107.8."),
        Belief(121.3, "18 bytes are another count, with 16-bit weights and masters beside them."),
    ),
)

with_autocast = Prediction(
    question="Chapter 00 traced Llama-2-7B in float32 with AdamW, one tensor at a time: 256 GiB "
    "with 8 sequences of 2,048 tokens, 101.4 with one. With one sequence and autocast to "
    "bfloat16: how many GiB at the peak?",
    unit="GiB",
    expected=102.8,
    tolerance=0.6,
    low=0,
    high=1000,
    too_low="Weights, gradients and AdamW's state stay float32, and beside what autocast saves of "
    "the activations it keeps a 16-bit copy of each weight until backward has used it.",
    too_high="The copies are 2 bytes a weight, 12.3 GiB, and activations shrink by more than half "
    "of that.",
    beliefs=(
        Belief(50.7, "Half of it all? Weights, gradients and AdamW's state stay float32."),
        Belief(101.4, "The update stays as it was; but before it, activations and 16-bit copies of "
               "the weights now take more than the gradients."),
        Belief(113.7, "12.3 GiB of copies come, but the last of them are gone before the update."),
    ),
)  # fmt: skip

in_place = Prediction(
    question="Linear, ReLU, Linear keep 2.10 MB for backward. How many MB with an in-place ReLU?",
    unit="MB",
    expected=2.1,
    tolerance=0.1,
    low=0,
    high=10,
    too_low="ReLU's output is the next layer's input, which is kept anyway; its input never was.",
    too_high="In place nothing is added.",
    beliefs=(Belief(1.05, "What ReLU is given was never kept: only what comes out."),),
)

quiz = (
    Question(
        "Somebody says 18 bytes a parameter. What is in them?",
        (
            Option("16, and 2 for activations", "Activations don't go by the parameter."),
            Option(
                "2 weights, 4 gradients, 4 masters, 8 moments",
                "The gradients are kept in float32; with 16-bit ones it is 16.",
                True,
            ),
            Option("16, miscounted", "Another convention, not a mistake: float32 gradients."),
        ),
    ),
    Question(
        "A process holds 11.14 GiB of a card; 10.14 GiB are tensors, 0.75 GiB lie free in torch's "
        "cache. How much can empty_cache() give back?",
        (
            Option("at most 0.75 GiB", "What is cached, of segments that are wholly free.", True),
            Option("1.00 GiB", "A quarter of that is the device's context and libraries."),
            Option("11.14 GiB", "Live tensors stay where they are."),
        ),
    ),
    Question(
        "A card sold as 80 GB reports 85.1e9 bytes. Does a step of 80 GiB fit?",
        (
            Option("yes, exactly", "80 GiB are 85.9e9 bytes."),
            Option("no, by less than 1 GiB", "85.1e9 bytes are 79.3 GiB.", True),
            Option("yes, with 5 GB to spare", "That takes the GiB for GB."),
        ),
    ),
)


def _zero(num_params, stage, devices, *, state=12, gradients=4, order=(1, 2, 3)):
    shares = ((state, order[0]), (gradients, order[1]), (2, order[2]))
    return sum(num_params * b / (devices if stage >= first else 1) for b, first in shares)


zero_bytes = Exercise(
    _zero,
    ((1000, 0, 8), (1000, 1, 8), (1000, 2, 8), (1000, 3, 8), (7_500_000_000, 2, 64)),
    (
        Mistake(
            lambda n, stage, devices: sum(
                n * b / (devices if stage == first else 1) for first, b in ((1, 12), (2, 4), (3, 2))
            ),
            "Each stage also divides what the stages below it divide.",
        ),
        Mistake(
            lambda n, stage, devices: 4 * n + _zero(n, stage, devices, state=8),
            "The masters are the optimizer's, too, and divided with its moments.",
        ),
        Mistake(
            lambda n, stage, devices: 18 * n / devices,
            "Stage 0 divides nothing; stage 1 the optimizer's part alone.",
        ),
        Mistake(
            lambda n, stage, devices: 18 * n / (devices if stage else 1),
            "Stage 1 divides the optimizer's part alone, stage 2 also gradients, stage 3 all.",
        ),
        Mistake(lambda n, stage, devices: 18 * n, "From stage 1 on, something is divided."),
        Mistake(
            lambda n, stage, devices: _zero(n, stage, devices, state=8),
            "The optimizer's part has 12 bytes: the float32 masters, and two moments.",
        ),
        Mistake(
            lambda n, stage, devices: _zero(n, stage, devices, gradients=2),
            "The gradients are float32 here: 4 bytes.",
        ),
        Mistake(
            lambda n, stage, devices: _zero(n, stage, devices, order=(3, 2, 1)),
            "The largest part is divided first: the optimizer's.",
        ),
        Mistake(
            lambda n, stage, devices: _zero(n, stage, devices, order=(1, 3, 2)),
            "Gradients are divided before weights.",
        ),
    ),
)


def _lora(dim, layers, rank, *, base=4, trained=16, matrices=2):
    return layers * (base * dim**2 + trained * matrices * dim * rank)


lora_bytes = Exercise(
    _lora,
    ((512, 8, 8), (4096, 32, 16), (10, 1, 1)),
    (
        Mistake(
            lambda d, n, r: _lora(d, n, r, base=16),
            "A frozen weight has no gradient and no moments, only its own 4 bytes.",
        ),
        Mistake(
            lambda d, n, r: _lora(d, 1, r),
            "There are several such layers.",
        ),
        Mistake(
            lambda d, n, r: _lora(d, n, r, base=2),
            "The frozen weights are float32 here: 4 bytes.",
        ),
        Mistake(
            lambda d, n, r: _lora(d, n, r, base=8),
            "A frozen weight gets no gradient: 4 bytes are all it has.",
        ),
        Mistake(
            lambda d, n, r: _lora(d, n, r, base=0),
            "Frozen is not absent: the base weights are used in every forward.",
        ),
        Mistake(
            lambda d, n, r: _lora(d, n, r, matrices=1),
            "An adapter has two matrices, dim × rank and rank × dim, and each of their weights "
            "four numbers of 4 bytes: itself, a gradient, two moments.",
        ),
        Mistake(
            lambda d, n, r: _lora(d, n, r, trained=4),
            "The adapters are trained: each of their weights has a gradient and two moments.",
        ),
        Mistake(
            lambda d, n, r: _lora(d, n, r, trained=12),
            "Weight, gradient, two moments: four times 4 bytes.",
        ),
    ),
)

CARD = facts.accelerator("A100-SXM4-80GB")
SEQUENCES = 8
SETTINGS = ("convention", "batch", "optimizer", "accumulate", "checkpointing", "step")
EXACT = [name for name, kind in CONVENTIONS.items() if kind.weights == "fp32" or kind.masters]


def _fits(plan) -> str | None:
    if not isinstance(plan, dict):
        return f"A plan is a dict of settings for moments(); this is {type(plan).__name__}."
    if "batch" not in plan:
        return "The batch is missing: how many sequences at a time?"
    unknown = [name for name in plan if name not in SETTINGS]
    if unknown:
        return f"A plan has these settings: {', '.join(SETTINGS)}. Not {unknown[0]!r}."
    counts = {name: plan.get(name, 1) for name in ("batch", "accumulate")}
    try:
        counts = {name: whole(name, count) for name, count in counts.items()}
    except (TypeError, ValueError) as error:
        return f"{error}."
    if str(plan.get("convention")) not in CONVENTIONS:
        return f"convention is one of {', '.join(CONVENTIONS)}."
    if plan["convention"] not in EXACT:
        return f"Weights that lose no update need one of these conventions: {', '.join(EXACT)}."
    given = math.prod(counts.values())
    if given != SEQUENCES:
        return f"An update must see {SEQUENCES} sequences, batch × accumulate; this sees {given}."
    peak = moments(facts.model("llama-2-7b"), seq=2048, **(plan | counts)).peak
    if peak.total_bytes <= CARD.capacity_bytes:
        return None
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    said = ", ".join(f"{name} {units.binary(size)}" for name, size in parts if size)
    return (
        f"It peaks at {units.binary(peak.total_bytes)}, in {peak.name}, and the card has "
        f"{units.binary(CARD.capacity_bytes)}. There then: {said}. Which setting shrinks "
        "one of them?"
    )


one_card = Challenge(_fits)
