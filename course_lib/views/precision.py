"""The bit explorer, a number in every format side by side, and the loss-scale dial."""

import math
from collections.abc import Callable

import ipywidgets as widgets
import torch
from torch import Tensor

from course_lib.precision import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    TF32,
    Format,
    decode,
    encode,
    neighbours,
    round_to,
)
from course_lib.views import controls, style

FORMATS = {f.name: f for f in (FP32, TF32, FP16, BF16, FP8_E4M3, FP8_E5M2)}
LEFT, TOP, BOX, ROW = 84, 58, 10, 42  # pixels: where the bits begin, a bit, a format's row
PARTS = {"sign": "temporaries", "exponent": "activations", "mantissa": "weights"}
EXPONENTS = range(-40, 26)  # of two: what the dial shows


def explorer():
    """Type a value or flip bits of one format, and see the number in all formats."""
    box = controls.explore(
        explorer_view,
        value=controls.Number("value", 0.1),
        format=controls.Choice("flip bits of", tuple(FORMATS), "fp16"),
    )
    buttons = widgets.HBox(layout={"flex_flow": "row wrap", "max_width": "580px"})
    value, chosen = box.values["value"], box.values["format"]

    def shown() -> int:
        return int("".join(button.description for button in buttons.children), 2)

    def show(pattern: int, format: Format) -> None:
        bits = f"{pattern:0{format.bits}b}"
        for button, bit in zip(buttons.children, bits, strict=True):
            button.description = bit

    def flip(position: int) -> None:
        format = FORMATS[chosen.value]
        pattern = shown() ^ 1 << position
        show(pattern, format)
        value.value = repr(decode(pattern, format))

    def show_bits(_=None) -> None:
        format = FORMATS[chosen.value]
        try:
            x = _number(value.value)
        except ValueError:
            return  # the sentence says what is wrong
        if repr(decode(shown(), format)) != repr(x):  # NaN has many patterns: keep this one
            show(encode(x, format), format)

    def new_buttons(_=None) -> None:
        format = FORMATS[chosen.value]
        positions = reversed(range(format.bits))
        buttons.children = [_button(format, position, flip) for position in positions]
        show(0, format)
        show_bits()

    value.observe(show_bits, "value")
    chosen.observe(new_buttons, "value")
    new_buttons()
    box.children = (*box.children[:2], buttons, *box.children[2:])
    box.bits = buttons
    return box


def explorer_view(value: str, format: str) -> style.Picture:
    """A row for each format: its bits, the number that they stand for, and its neighbours."""
    x = _number(value)
    parts = [
        style.text(12, 22, f"{x:.10g} in six formats", anchor="start", size=15, bold=True),
        *_legend(),
    ]
    said = [f"{x:.10g}."]
    for i, kind in enumerate(FORMATS.values()):
        parts += _row(x, kind, TOP + i * ROW, kind.name == format)
        said.append(f"{kind.name}: {_kept(x, kind)}.")
    below, above = neighbours(x, FORMATS[format])
    said.append(f"Beside it, in {format}, lie {below:.8g} and {above:.8g}.")
    drawing = style.svg(580, TOP + len(FORMATS) * ROW, *parts)
    return style.Picture(drawing, "a number in six formats", " ".join(said))


def dial(gradient: Tensor):
    """Turn the loss scale over a gradient, and see what fp16 loses at either end."""
    sizes = gradient.detach().double().flatten()
    return controls.explore(
        lambda exponent: dial_view(sizes, exponent),
        exponent=controls.Slider("loss scale: 2 to the", 0, 32, 1, 0),
    )


def dial_view(sizes: Tensor, exponent: int) -> style.Picture:
    """The gradient's sizes by powers of two, scaled; what fp16 makes 0, or infinite, apart."""
    if not sizes.isfinite().all():
        raise ValueError("the gradient is infinite or NaN in places: no scale repairs that")
    scaled = sizes[sizes != 0] * 2.0**exponent
    if not len(scaled):
        raise ValueError("the gradient is 0 everywhere: there is nothing to scale")
    kept = round_to(scaled, FP16)
    zero, infinite = (kept == 0).double().mean().item(), kept.isinf().double().mean().item()
    sentence = (
        f"Scale {2**exponent:,}: of the gradient's entries that aren't 0, fp16 makes "
        f"{100 * zero:.1f} % zero and {100 * infinite:.1f} % infinite."
    )
    drawing = style.svg(580, 250, *_histogram(scaled, exponent))
    return style.Picture(drawing, "a gradient against fp16's range", sentence)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"a number is needed, such as 0.1 or 1e-8, not {value!r}") from None


def _button(format: Format, position: int, flip: Callable[[int], None]) -> widgets.Button:
    button = widgets.Button(
        tooltip=f"{_part(format, position)}, bit {position}",
        layout={"width": "24px", "padding": "0"},
    )
    button.on_click(lambda _: flip(position))
    return button


def _part(format: Format, position: int) -> str:
    if position == format.bits - 1:
        return "sign"
    return "exponent" if position >= format.mantissa_bits else "mantissa"


def _kept(x: float, format: Format) -> str:
    """What the format makes of x, and how far off that is."""
    value = decode(encode(x, format), format)
    if value == x or math.isnan(x):
        return f"{value:.8g}, exactly"
    if not math.isfinite(decode(encode(x, format, overflow="ieee"), format)):
        return f"{value:.8g}, out of range"
    if value == 0:
        return "0, too small for it"
    return f"{value:.8g}, off by {100 * abs(value / x - 1):.2g} %"


def _row(x: float, format: Format, top: float, chosen: bool) -> list[str]:
    bits = f"{encode(x, format):0{format.bits}b}"
    drawn = [style.text(12, top + 14, format.name, anchor="start", size=12, bold=chosen)]
    for i, bit in enumerate(bits):
        at = LEFT + i * BOX
        drawn.append(style.bar(at, top, BOX, 18, PARTS[_part(format, format.bits - 1 - i)]))
        drawn.append(style.text(at + BOX / 2, top + 13, bit, size=11, box=True))
    said = _kept(x, format)
    drawn.append(style.text(LEFT, top + 31, said, anchor="start", size=12))
    return drawn


def _legend() -> list[str]:
    drawn, at = [], LEFT
    for part, color in PARTS.items():
        drawn += [
            style.bar(at, 34, 12, 12, color),
            style.text(at + 17, 44, part, anchor="start", size=12),
        ]
        at += 90
    return drawn


def _histogram(scaled: Tensor, exponent: int) -> list[str]:
    left, top, wide, tall = 40, 46, 520, 150
    step = wide / len(EXPONENTS)
    powers = torch.frexp(scaled.abs())[1] - 1
    powers = powers.clamp(EXPONENTS[0], EXPONENTS[-1])
    counts = torch.bincount(powers - EXPONENTS[0], minlength=len(EXPONENTS)).tolist()
    most = max(counts)

    def x(power: float) -> float:
        return left + (power - EXPONENTS[0]) * step

    drawn = [
        style.text(
            12, 22, f"The gradient, times 2 to the {exponent}", anchor="start", size=15, bold=True
        ),
        style.line(left, top + tall, left + wide, top + tall),
    ]
    for power, count in zip(EXPONENTS, counts, strict=True):
        inside = -25 <= power < 16
        color = "gradients" if inside else "temporaries"
        height = tall * count / most
        if count:
            drawn.append(style.bar(x(power), top + tall - height, step, height, color))
    for power, said in ((-25, "0 below"), (16, "infinite above")):
        drawn.append(style.line(x(power), top, x(power), top + tall, dash="3 3"))
        drawn.append(style.text(x(power), top - 5, said, size=12))
    for power in range(EXPONENTS[0], EXPONENTS[-1] + 1, 10):
        said = f"≤ {power}" if power == EXPONENTS[0] else f"{power}"
        drawn.append(style.text(x(power), top + tall + 17, said))
    drawn.append(style.text(left + wide / 2, top + tall + 36, "size: 2 to the"))
    return drawn
