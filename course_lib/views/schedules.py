"""Curves of rates: recorded ones side by side, and the composer, where a schedule is put together
and drawn with its code and the nearest published one."""

import textwrap
from collections.abc import Mapping, Sequence

from course_lib import facts, schedules
from course_lib.schedules import Schedule
from course_lib.views import controls, style

PLANNED = 1000  # updates that the run will make
WARMUPS = ("0 %", "0.3 %", "1 %", "3 %", "5 %", "10 %")
FINALS = ("0", "0.1")
SHAPES = ("constant", "step decay", "linear", "cosine", "warmup-stable-decay", "one-cycle")
LEFT, TOP, WIDE, TALL = 46, 40, 500, 190  # pixels of the plot
SHOWN = 250  # points of the curve


def composer():
    """Compose a schedule for a run of PLANNED updates."""
    return controls.explore(
        composer_view,
        shape=controls.Choice("shape", SHAPES, "cosine"),
        warmup=controls.Choice("warmup", WARMUPS, "3 %"),
        final=controls.Choice("ends at, of the peak", FINALS, "0"),
        length=controls.Slider("length of the schedule", 250, 2000, 250, PLANNED),
    )


def compose(shape: str, warmup: str, final: str, length: int) -> Schedule:
    """A schedule of `length` updates with a peak of 1; `warmup` is a share such as "3 %".

    The step decay drops at a third and at two thirds; the last fifth of warmup-stable-decay
    decays. Constant, step decay and one-cycle have ends of their own, whatever `final`, and
    one-cycle its own warmup.
    """
    rising = schedules.fraction_to_steps(_share(warmup), length)
    rest, last = length - rising, dict(final_lr=float(final)) if float(final) else {}
    if shape == "one-cycle":
        return schedules.one_cycle(1.0, total_steps=length)
    if shape == "warmup-stable-decay":
        decay = length // 5
        steps = dict(warmup_steps=rising, stable_steps=rest - decay, decay_steps=decay)
        return schedules.wsd(1.0, **steps, **last)
    pieces = {
        "constant": lambda: schedules.constant(1.0),
        "step decay": lambda: schedules.step_decay(1.0, step_size=-(-rest // 3)),
        "linear": lambda: schedules.linear(1.0, total_steps=rest, **last),
        "cosine": lambda: schedules.cosine(1.0, total_steps=rest, **last),
    }
    if shape not in pieces:
        raise ValueError(f"shape must be one of {SHAPES}, got {shape!r}")
    inner = pieces[shape]()
    return schedules.warmup(inner, warmup_steps=rising) if rising else inner


def _share(percent: str) -> float:
    return float(percent.split()[0]) / 100


def nearest(shape: str, warmup: str, final: str) -> facts.Recipe | None:
    """The published recipe of the same decay that is nearest in warmup and end; None if none is."""
    share = _share(warmup)
    same = [recipe for recipe in facts.recipes() if recipe.decay == shape]

    def distance(recipe: facts.Recipe) -> float:
        return abs(recipe.warmup_fraction - share) + abs(recipe.final_fraction - float(final))

    return min(same, key=distance, default=None)


def composer_view(shape: str, warmup: str, final: str, length: int) -> style.Picture:
    """The curve over the planned updates and what is left of the schedule beyond them."""
    rate = compose(shape, warmup, final, length)
    published = nearest(shape, warmup, final)
    until = max(length, PLANNED)
    title = shape if shape == "one-cycle" else f"{shape}, warmup {warmup}"
    drawing = style.svg(
        580,
        TOP + TALL + 118,
        style.text(12, 22, title, anchor="start", size=15, bold=True),
        *_axes(until),
        _curve(rate, 0, PLANNED - 1, until, ""),
        *([_curve(rate, PLANNED - 1, length - 1, until, "4 4")] if length > PLANNED else []),
        *_planned_end(until),
        *_code(repr(rate)),
    )
    parts = (_ends(rate), OWN.get(shape), _warning(shape, rate, length), _published(published))
    sentence = " ".join(part for part in (f"{rate!r}.", *parts) if part)
    return style.Picture(drawing, "a schedule", sentence)


def show_rates(curves: Mapping[str, Sequence[float]], title: str, unit: str = "update") -> None:
    """Show curves of rates, at most 1, in panels of their own, by name, and say their ends."""
    style.show(rates_picture(curves, title, unit))


def rates_picture(
    curves: Mapping[str, Sequence[float]], title: str, unit: str = "update"
) -> style.Picture:
    """Two panels in a row; the rates, from 0 to 1, over the points of the curve."""
    if not curves or any(len(rates) < 2 for rates in curves.values()):
        raise ValueError("curves of two rates or more are needed")
    if not all(0 <= rate <= 1 for rates in curves.values() for rate in rates):
        raise ValueError("rates are drawn as parts of the peak: between 0 and 1")
    parts = [style.text(12, 22, title, anchor="start", size=15, bold=True)]
    for i, (name, rates) in enumerate(curves.items()):
        parts += _panel(name, rates, unit, 34 + i % 2 * 286, 52 + i // 2 * 138)
    height = 52 + -(-len(curves) // 2) * 138
    sentence = " ".join(f"{name}: {_quarters(rates, unit)}" for name, rates in curves.items())
    return style.Picture(style.svg(580, height, *parts), title, sentence)


def _quarters(rates: Sequence[float], unit: str) -> str:
    """Where a curve is at its start, its quarters and its end."""
    last = len(rates) - 1
    at = [round(last * i / 4) for i in range(5)]
    where = ", ".join(f"{k:,}" for k in at)
    said = f"{unit} {where}: {', '.join(f'{rates[k]:.2f}' for k in at)}."
    jumps = [
        k
        for k in range(last)
        if rates[k + 1] > rates[k] + 0.1 and rates[k] < max(rates[: k + 1])  # it had fallen
    ]
    return " ".join([said, *(f"After {k:,} it jumps up to {rates[k + 1]:.2f}." for k in jumps)])


def _panel(name: str, rates: Sequence[float], unit: str, left: float, top: float) -> list[str]:
    wide, tall, last = 230, 80, len(rates) - 1
    points = " ".join(
        f"{left + wide * k / last:.1f},{top + tall * (1 - rate):.1f}"
        for k, rate in enumerate(rates)
    )
    return [
        style.text(left + wide / 2, top - 7, name, bold=True),
        style.line(left, top, left, top + tall),
        style.line(left, top + tall, left + wide, top + tall),
        style.text(left - 6, top + 5, "1", anchor="end"),
        style.text(left - 6, top + tall + 4, "0", anchor="end"),
        style.text(left, top + tall + 17, "0"),
        style.text(left + wide / 2, top + tall + 17, unit, size=12),
        style.text(left + wide, top + tall + 17, f"{last:,}"),
        f'<polyline points="{points}" fill="none" stroke="{style.COLOR["weights"]}" '
        'stroke-width="2" data-name="rate"/>',
    ]


OWN = {  # where a control changes nothing
    "constant": "It has no end to choose.",
    "step decay": "Its end is its own.",
    "one-cycle": "Its warmup and its end are its own.",
}


def _ends(rate: Schedule) -> str:
    peak = max(range(PLANNED), key=rate)
    first, last = rate(0), rate(PLANNED - 1)
    return (
        f"Of the peak, update 0 uses {first:.3f} and update {PLANNED - 1}, the last, {last:.3f}; "
        f"the highest is {rate(peak):.3f}, first at update {peak}."
    )


def _warning(shape: str, rate: Schedule, length: int) -> str | None:
    if length == PLANNED or shape == "constant":
        return None
    if shape == "step decay":
        pairs = ((rate(k), rate(k + 1)) for k in range(PLANNED - 1))
        part = f"the run sees {sum(after < before for before, after in pairs)} drops and not 2"
    else:
        part = "it never finishes" if length > PLANNED else "it is over early"
    return f"Careful: it is {length} updates long and {PLANNED} are planned, so {part}."


def _published(recipe: facts.Recipe | None) -> str:
    if recipe is None:
        return "None of the recipes in data/recipes.csv has this shape."
    peak, warmup = f"{recipe.peak_lr:.6f}".rstrip("0"), 100 * recipe.warmup_fraction
    return (
        f"Nearest published: {recipe.name}, {recipe.decay} to {recipe.final_fraction:g} of its "
        f"peak of {peak}, warmup {warmup:.1f} %."
    )


def _x(k: float, until: int) -> float:
    return LEFT + k / (until - 1) * WIDE


def _y(rate: float) -> float:
    return TOP + TALL * (1 - rate / 1.05)


def _curve(rate: Schedule, first: int, last: int, until: int, dash: str) -> str:
    updates = sorted({first + (last - first) * i // SHOWN for i in range(SHOWN + 1)})
    points = " ".join(f"{_x(k, until):.1f},{_y(rate(k)):.1f}" for k in updates)
    return (
        f'<polyline points="{points}" fill="none" stroke="{style.COLOR["weights"]}" '
        f'stroke-width="2.4" stroke-dasharray="{dash}" data-name="rate"/>'
    )


def _axes(until: int) -> list[str]:
    bottom = TOP + TALL
    drawn = [style.line(LEFT, TOP, LEFT, bottom), style.line(LEFT, bottom, LEFT + WIDE, bottom)]
    for share in (0, 0.5, 1):
        drawn.append(style.line(LEFT - 4, _y(share), LEFT, _y(share)))
        drawn.append(style.text(LEFT - 8, _y(share) + 4, f"{share:g}", anchor="end"))
    for k in range(0, until + 1, 500):
        at = _x(min(k, until - 1), until)
        drawn.append(style.line(at, bottom, at, bottom + 4))
        drawn.append(style.text(at, bottom + 18, f"{k:,}"))
    drawn.append(style.text(LEFT + WIDE / 2, bottom + 36, "optimizer updates"))
    drawn.append(style.text(LEFT + 6, TOP - 4, "rate / peak", anchor="start", size=12))
    return drawn


def _planned_end(until: int) -> list[str]:
    if until == PLANNED:
        return []
    at = _x(PLANNED - 1, until)
    return [
        style.line(at, TOP, at, TOP + TALL, color=style.COLOR["moment"], width=2, dash="2 3"),
        style.text(at, TOP - 4, "the run ends", size=12),
    ]


def _code(code: str) -> list[str]:
    lines = textwrap.wrap(code, 66, break_long_words=False)
    top = TOP + TALL + 62
    return [
        style.text(LEFT, top + 18 * i, line, anchor="start", size=13)
        for i, line in enumerate(lines)
    ]
