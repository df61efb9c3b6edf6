"""Chapter 05: predictions, exercises and quiz on number formats and mixed precision."""

import math

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
    question="A bfloat16 weight of 1 is made smaller by 0.002, a hundred times. Where does it end?",
    unit="",
    expected=0.609,
    tolerance=0.002,
    low=0,
    high=2,
    too_low="Below 1, bfloat16's numbers lie 0.0039 apart, and each update goes to one of them.",
    too_high="0.002 is a little more than half of the distance to the next number below 1, so each "
    "update is rounded to all of it.",
    beliefs=(
        Belief(0.8, "The errors don't cancel: 0.002 is rounded to 0.0039 every time, in the same "
               "direction."),
        Belief(0.805, "That is fp16, whose numbers lie eight times as densely."),
        Belief(1, "That would be 0.001: 0.002 is more than half of the distance to the next number "
               "below 1, and is rounded to all of it."),
    ),
)  # fmt: skip

skipped_steps = Prediction(
    question="A gradient is exactly 4, kept in fp16. The loss scale starts at 65,536 and halves "
    "after each overflow. How many steps are skipped?",
    unit="steps",
    expected=3,
    tolerance=0.5,
    low=0,
    high=100,
    too_low="4 times the scale must stay below 65,520, where infinity begins: 65,536, 32,768 and "
    "16,384 are too much.",
    too_high="It stops as soon as it fits: 4 times 8,192 does.",
    beliefs=(
        Belief(0, "4 is small, but 4 times 65,536 isn't: fp16 ends at 65,504."),
        Belief(1, "4 times 32,768 is still more than fp16 can hold."),
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
    too_high="The copies have half the bytes of the weights, and the first layer's isn't kept.",
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
            Option("yes, as in fp16", "In bfloat16 there is nothing for it to repair."),
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
    ((0x0000,), (0x3C00,), (0x3E00,), (0xC500,), (0x7BFF,), (0x0400,), (0x0001,), (0x8200,)),
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


def _largest_scale(largest, *, fits=lambda scaled: scaled < 65520.0):
    """By trying: fp16 rounds what is below 65,520 to a number, and the rest to infinity."""
    return max(2.0**k for k in range(-100, 140) if fits(largest * 2.0**k))


largest_scale = Exercise(
    _largest_scale,
    ((4.0,), (1.0,), (65504.0,), (3e-8,), (0.7,), (1.9995,), (65520 / 32768,), (1.9997,)),
    (
        Mistake(
            lambda g: _largest_scale(g, fits=lambda scaled: scaled <= 65504.0),
            "65,504 is fp16's largest number, but infinity begins later: what lies between it and "
            "65,520 is rounded down to it.",
        ),
        Mistake(
            lambda g: _largest_scale(g, fits=lambda scaled: scaled < 65504.0),
            "Up to just below 65,520 a number is rounded to 65,504, and not to infinity.",
        ),
        Mistake(
            lambda g: _largest_scale(g, fits=lambda scaled: scaled <= 65520.0),
            "65,520 itself is infinite: it lies in the middle, and its neighbour below is odd.",
        ),
        Mistake(
            lambda g: _largest_scale(g, fits=lambda scaled: scaled < 65536.0),
            "From 65,520 on it is infinite, not only from 65,536 on.",
        ),
        Mistake(lambda g: 65504 / g, "That is no power of two, and would cost digits."),
        Mistake(lambda g: 65520 / g, "That is no power of two, and would cost digits."),
        Mistake(lambda g: 2 * _largest_scale(g), "With that one it overflows: halve it."),
        Mistake(lambda g: _largest_scale(g) / 2, "Twice that still fits."),
        Mistake(lambda g: math.log2(_largest_scale(g)), "That is the power, not the scale."),
    ),
)

RATE, UPDATES, CLOSE, NOISE = 0.005, 600, 0.02, 0.15  # of the exercise on gains that never move


def gains() -> tuple[Tensor, Tensor]:
    """512 gains of 1 in bfloat16, and where the loss is lowest, 0.8 to 1.2, in float32."""
    return torch.ones(512, dtype=torch.bfloat16), torch.linspace(0.8, 1.2, 512)


class _GradientOf:
    """Of half the squared distance to the best gains, with a batch's noise, in bf16."""

    def __init__(self, best: Tensor):
        self.best = best
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, gain: Tensor) -> Tensor:
        if not isinstance(gain, Tensor) or gain.dtype != torch.bfloat16:
            kind = gain.dtype if isinstance(gain, Tensor) else type(gain).__name__
            raise TypeError(f"forward reads bfloat16 gains, this is {kind}")
        noise = 2 * torch.rand(self.best.shape, generator=self.generator) - 1
        return (gain - self.best + NOISE * noise).bfloat16()


def _gains_learnt(learn) -> str | None:
    if not callable(learn):
        return f"A function is needed; this is {type(learn).__name__}."
    start, best = gains()
    gradient_of = _GradientOf(best)
    end = learn(start.clone(), gradient_of, RATE, UPDATES)
    if not isinstance(end, Tensor) or end.shape != start.shape or end.dtype != torch.bfloat16:
        return "It must return the 512 gains, in bfloat16, the format that forward reads."
    moved = (end != start).sum().item()
    if not moved:
        return (
            "0 of 512 gains moved. Unless you return what you didn't update: each update is less "
            "than half of the distance to the next bfloat16 number. Where could the part that is "
            "rounded away be kept?"
        )
    off = (end.float() - best).abs().mean().item()
    if not off <= CLOSE:
        return (
            f"{moved} of 512 gains moved, but on average they end {off:.3f} from the best. What "
            "still stalls, or jumps too far?"
        )
    return None


learnt_gains = Challenge(_gains_learnt)
