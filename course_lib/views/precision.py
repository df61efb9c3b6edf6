"""The bit explorer, a number in every format side by side, the loss-scale dial, and what is
learnt of gradients that are made smaller and smaller."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

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
LINES = (  # colour, width and dashes: the first lies under the others
    (style.COLOR["temporaries"], 7, ""),
    (style.COLOR["weights"], 2, "9 9"),
    (style.COLOR["optimizer state"], 2, "2 4"),
    (style.COLOR["activations"], 2, "9 3 2 3"),
    (style.COLOR["moment"], 2, ""),
)


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


def show_sweep(
    shares: Mapping[str, Mapping[int, float]], title: str, marks: Mapping[str, float]
) -> None:
    """Show how far the runs of each kind get whose loss is multiplied by powers of two."""
    style.show(sweep_view(shares, title, marks))


def sweep_view(
    shares: Mapping[str, Mapping[int, float]], title: str, marks: Mapping[str, float]
) -> style.Picture:
    """A line for each kind of run: by power, its share of the way down, from the highest power on.

    `marks` are powers that have a name. Shares are drawn and said in tenths, as 16-bit runs are
    the same on any machine; one below 0 is a run that gets nowhere, and counts as 0.
    """
    if not 1 <= len(shares) <= len(LINES):
        raise ValueError(f"1 to {len(LINES)} kinds can be told apart, got {len(shares)}")
    powers = sorted({power for kind in shares.values() for power in kind}, reverse=True)
    if len(powers) < 2 or not all(shares.values()):
        raise ValueError("each kind needs a share, and there must be two powers or more")
    if not all(math.isfinite(share) for kind in shares.values() for share in kind.values()):
        raise ValueError("a share is infinite or NaN: that run has no loss at its end")
    tenths = {
        name: {power: max(0, round(10 * kind[power])) / 10 for power in powers if power in kind}
        for name, kind in shares.items()
    }
    said = " ".join(
        f"{name}, times 2 to the {', '.join(map(str, kind))}: "
        f"{', '.join(f'{share:.1f}' for share in kind.values())}."
        for name, kind in tenths.items()
    )
    marked = " ".join(f"At {power:.0f}: {name}." for name, power in marks.items())
    return style.Picture(_sweep(tenths, powers, title, marks), title, f"{said} {marked}".rstrip())


def _sweep(
    shares: Mapping[str, Mapping[int, float]],
    powers: list[int],
    title: str,
    marks: Mapping[str, float],
) -> str:
    left, top, wide, tall = 40, 66, 380, 150
    most = max(1.0, *(share for kind in shares.values() for share in kind.values()))

    def x(power: float) -> float:
        return left + wide * (powers[0] - power) / (powers[0] - powers[-1])

    def y(share: float) -> float:
        return top + tall * (1 - share / most)

    drawn = [
        style.text(12, 22, title, anchor="start", size=15, bold=True),
        style.text(left - 28, top - 12, "share of float32's way", anchor="start", size=12),
        style.line(left, y(0), left + wide, y(0)),
        *(style.text(left - 6, y(share) + 4, f"{share}", anchor="end") for share in (0, 1)),
        *(style.text(x(power), y(0) + 17, f"{power}") for power in powers),
        style.text(left + wide / 2, y(0) + 36, "the loss, times 2 to the"),
    ]
    for name, power in marks.items():
        drawn.append(style.line(x(power), top - 6, x(power), y(0), dash="3 3"))
        drawn.append(style.text(x(power) - 6, y(most / 2), name, anchor="end", size=12))
    for kind, (color, width, dash) in zip(shares.values(), LINES, strict=False):
        points = [(x(power), y(share)) for power, share in kind.items()]
        for start, end in pairwise(points):
            drawn.append(style.line(*start, *end, color=color, width=width, dash=dash))
        for a, b in points if width == 2 else ():
            drawn.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>')
    ends = sorted((y(list(kind.values())[-1]), name) for name, kind in shares.items())
    lowest = -math.inf  # of the names written so far, each where its line ends
    for height, name in ends:
        lowest = max(height + 4, lowest + 16)
        drawn.append(style.text(left + wide + 12, lowest, name, anchor="start", size=12))
    return style.svg(580, top + tall + 46, *drawn)


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
