"""Chapter 05: predictions, exercises and quiz on number formats and mixed precision."""

import torch
from torch import Tensor

from course_lib.check import (
    Belief,
    Challenge,
    Exercise,
    Mistake,
    Option,
    Prediction,
    Question,
)

lost_updates = Prediction(
    question="A bfloat16 weight of 1 is made smaller by 0.001, a hundred times. Where does it end?",
    unit="",
    expected=1,
    tolerance=0.001,
    low=0,
    high=2,
    too_low="Each update is less than half of the distance to the next number below 1, and is "
    "rounded away, every time.",
    too_high="Nothing makes it larger.",
    beliefs=(
        Belief(0.9, "The errors don't cancel: rounding always goes back to 1, so nothing adds up."),
        Belief(0.902, "That is fp16, whose numbers lie eight times as densely."),
    ),
)

skipped_steps = Prediction(
    question="A gradient is exactly 4, kept in fp16. The loss scale starts at 65,536 and halves "
    "after each overflow. How many steps are skipped?",
    unit="steps",
    expected=3,
    tolerance=0.5,
    low=0,
    high=100,
    too_low="4 times the scale must stay below fp16's largest number, 65,504: 65,536, 32,768 and "
    "16,384 are too much.",
    too_high="It stops as soon as it fits: 4 times 8,192 does.",
    beliefs=(
        Belief(0, "4 is small, but 4 times 65,536 isn't: fp16 ends at 65,504."),
        Belief(1, "4 times 32,768 is still more than 65,504."),
        Belief(16, "The scale needn't go down to 1: 8,192 fits."),
    ),
)

saved_bytes = Prediction(
    question="Eight equal layers, 8.4 MB of float32 weights. For 8 examples, forward keeps 0.13 MB "
    "for backward. How many MB under autocast to bfloat16?",
    unit="MB",
    expected=3.74,
    tolerance=0.2,
    low=0,
    high=100,
    too_low="Each weight is cast, and the 16-bit copies are kept for backward: 3.7 MB of them, for "
    "all layers but the first, which needs no gradient for its input.",
    too_high="The copies have half the bytes of the weights that they were made from.",
    beliefs=(
        Belief(0.07, "Activations are halved, but 16-bit copies of the weights are kept as well."),
        Belief(4.26, "The first layer's copy isn't kept: its input needs no gradient."),
        Belief(8.4, "The copies have 2 bytes a weight, not 4."),
    ),
)

quiz = (
    Question(
        "A model of float32 weights is trained under autocast to bfloat16. In what are its weights "
        "kept afterwards?",
        (
            Option("float32", "Autocast casts what goes into an operation, not the weights.", True),
            Option("bfloat16", "That would be model.to(torch.bfloat16)."),
            Option("some of each", "What is mixed are the operations, not the weights."),
        ),
    ),
    Question(
        "The gradient's true norm is 0.5, the loss scale 65,536. It is clipped to 1, and then "
        "unscaled. What norm does the optimizer get?",
        (
            Option("0.5", "The clip saw the scaled norm, 32,768, and cut it."),
            Option("1", "1 is what clipping left; it was divided by 65,536 after that."),
            Option("0.000015", "1 / 65,536: unscale first, then clip.", True),
        ),
    ),
    Question(
        "Training in bfloat16 with autocast: is a loss scaler needed?",
        (
            Option("yes, as in fp16", "It would repair nothing, and only skip steps."),
            Option(
                "no: its exponent reaches as far as float32's",
                "A gradient of 1e-8 stays one; in fp16 it would be 0.",
                True,
            ),
            Option(
                "yes, it has fewer digits",
                "Digits aren't what scaling saves: a scale moves the exponent.",
            ),
        ),
    ),
)


def _fp16(bits, *, bias=15, hidden=True, subnormal=True, sign=True):
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    if exponent == 0 and subnormal:
        value = mantissa / 1024 * 2.0 ** (1 - bias)
    else:
        value = (hidden + mantissa / 1024) * 2.0 ** (exponent - bias)
    return -value if sign and bits >> 15 else value


fp16_number = Exercise(
    _fp16,
    ((0x3C00,), (0x3E00,), (0xC500,), (0x7BFF,), (0x0400,), (0x0001,), (0x8200,)),
    (
        Mistake(lambda b: _fp16(b, subnormal=False), "With an exponent field of 0 there is no 1 "
                "before the point, and the exponent is that of field 1."),
        Mistake(lambda b: _fp16(b, hidden=False), "A normal number has a 1 before the point, which "
                "isn't stored."),
        Mistake(lambda b: _fp16(b, bias=16), "The bias is 15: field 15 is an exponent of 0."),
        Mistake(lambda b: _fp16(b, bias=0), "The exponent's field is shifted by the bias, 15."),
        Mistake(lambda b: _fp16(b, sign=False), "The highest bit is the sign."),
        Mistake(lambda b: float(b), "Those are the bits as a whole number."),
    ),
)  # fmt: skip


def _next_scale(scale, in_a_row, overflowed, *, interval=2000, reset=True, grow_late=False):
    if overflowed:
        return scale / 2, 0 if reset else in_a_row
    in_a_row += 1
    if in_a_row == interval + grow_late:
        return 2 * scale, 0
    return scale, in_a_row


next_scale = Exercise(
    _next_scale,
    (
        (65536.0, 0, True),
        (1024.0, 700, True),
        (1024.0, 0, False),
        (1024.0, 1998, False),
        (1024.0, 1999, False),
    ),
    (
        Mistake(
            lambda *case: _next_scale(*case, reset=False),
            "After an overflow the count of good steps begins anew.",
        ),
        Mistake(
            lambda *case: _next_scale(*case, grow_late=True),
            "The 2,000th good step is the one that doubles the scale.",
        ),
        Mistake(
            lambda scale, n, overflowed: (scale / 2, 0) if overflowed else (2 * scale, 0),
            "It doesn't double after every good step: only after 2,000 in a row.",
        ),
        Mistake(
            lambda scale, n, overflowed: (2 * scale, 0) if overflowed else (scale, n + 1),
            "An overflow means that the scale was too large: halve it.",
        ),
    ),
)

RATE, UPDATES, CLOSE = 0.005, 600, 0.02  # of the exercise on gains that never move


def gains() -> tuple[Tensor, Tensor]:
    """512 gains of 1 in bfloat16, and where the loss is lowest, 0.8 to 1.2, in float32."""
    return torch.ones(512, dtype=torch.bfloat16), torch.linspace(0.8, 1.2, 512)


def _gradient_of(best: Tensor):
    def gradient_of(gain: Tensor) -> Tensor:
        """The gradient of half the squared distance to the best gains, as bfloat16 holds it."""
        if not isinstance(gain, Tensor) or gain.dtype != torch.bfloat16:
            kind = gain.dtype if isinstance(gain, Tensor) else type(gain).__name__
            raise TypeError(f"forward reads bfloat16 gains, this is {kind}")
        return (gain - best).bfloat16()

    return gradient_of


def _gains_learnt(learn) -> str | None:
    if not callable(learn):
        return f"A function is needed; this is {type(learn).__name__}."
    start, best = gains()
    end = learn(start.clone(), _gradient_of(best), RATE, UPDATES)
    if end is None or end is ...:
        raise NotImplementedError
    if not isinstance(end, Tensor) or end.shape != start.shape or end.dtype != torch.bfloat16:
        return "It must return the 512 gains in bfloat16, the format that forward reads."
    moved = (end != start).sum().item()
    if not moved:
        return (
            "0 of 512 gains moved: each update is less than half of the distance to the next "
            "bfloat16 number. Where could the part that is rounded away be kept?"
        )
    off = (end.float() - best).abs().mean().item()
    if not off <= CLOSE:
        return f"{moved} of 512 gains moved, but on average they end {off:.3f} from the best."
    return None


learnt_gains = Challenge(_gains_learnt)
