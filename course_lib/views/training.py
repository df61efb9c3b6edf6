"""One training step as a timeline, and a walk through its phases.

The timeline has the phases above and the live bytes stacked below; the walk adds what is in
memory after the chosen phase.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from course_lib import units
from course_lib.memory_trace import MemoryTimeline, Phase
from course_lib.training import PHASES
from course_lib.views import controls, style

# Bottom to top: what stays from step to step lies below what comes and goes.
STACK = ("weights", "optimizer state", "gradients", "activations", "inputs", "temporaries")
LABEL = {"step": "optimizer step"}  # a phase as the reader sees it, where its name won't do
BEFORE = "before the step"
STOPS = (BEFORE, *(LABEL.get(phase, phase) for phase in PHASES))
MOST_POINTS = 400  # of a long timeline, each the fullest moment of its stretch


def show_timeline(timeline: MemoryTimeline, step: int, title: str) -> None:
    """Show the timeline of one step, and one sentence with its key numbers."""
    style.show(timeline_picture(timeline, step, title))


def timeline_picture(timeline: MemoryTimeline, step: int, title: str) -> style.Picture:
    """The timeline of one step with a title that says what to see in it."""
    heading = style.text(12, 24, title, anchor="start", size=17, bold=True)
    drawing = style.svg(680, 400, heading, draw_timeline(timeline, step, Frame(56, 86, 600, 270)))
    sentence = timeline_sentence(timeline, step)
    return style.Picture(drawing, f"timeline of step {step}", sentence)


def timeline_sentence(timeline: MemoryTimeline, step: int) -> str:
    """The peak of one step, its phase, and each category's share of it."""
    phase, peak, parts = step_peak(timeline, step)
    shares = ", ".join(
        f"{name} {100 * size / peak:.1f} %" for name, size in parts.items() if size / peak > 5e-4
    )
    label = LABEL.get(phase, phase)
    return f"Training step {step} peaks at {units.binary(peak)}, in its {label}: {shares}."


def step_peak(timeline: MemoryTimeline, step: int) -> tuple[str, int, dict[str, int]]:
    """Phase, bytes, and bytes by category of the largest moment of one step."""
    first, last = _bounds(timeline, step)
    total = sum(timeline.live[name][first:last] for name in STACK)
    at = first + int(np.argmax(total))
    return timeline.events[at].phase, int(total.max()), _parts(timeline, at)


def after(timeline: MemoryTimeline, step: int, stop: str) -> dict[str, int]:
    """Bytes by category when a step reaches one of STOPS: before it, or after a phase."""
    return _parts(timeline, _index_after(timeline, step, stop))


@dataclass(frozen=True)
class Frame:
    """Where a drawing lies in its SVG, in pixels."""

    left: float
    top: float
    width: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height


def draw_timeline(
    timeline: MemoryTimeline, step: int, frame: Frame, stop: str | None = None
) -> str:
    """Live bytes of one step, stacked over its allocations and frees, phases marked above.

    With `stop`, the moment at which that stop is reached is marked.
    """
    first, last = _bounds(timeline, step)
    live = np.stack([timeline.live[name][first:last] for name in STACK])
    heights = live.cumsum(axis=0)  # the upper edge of each category
    top = 1.1 * heights[-1].max()
    wide = frame.width / (last - first)

    def x(index: float) -> float:
        return frame.left + index * wide

    def y(num_bytes: float) -> float:
        return frame.bottom - num_bytes / top * frame.height

    kept = _kept(heights[-1])
    parts = [
        style.area(_steps([x(i) for i in kept], [y(h) for h in edge[kept]], frame), name)
        for name, edge in zip(STACK[::-1], heights[::-1], strict=True)
    ]
    parts += _axis(top, y, frame)
    parts += _phase_marks(timeline, step, first, x, frame)
    if stop is not None:
        at = x(_index_after(timeline, step, stop) - first + 1)
        parts.append(
            style.line(at, frame.top, at, frame.bottom, color=style.COLOR["moment"], width=3)
        )
    parts += _area_labels(heights, x, y, top, frame)
    parts.append(_peak_mark(heights[-1], x, y))
    label = "allocations and frees, in order"
    parts.append(style.text(frame.left + frame.width / 2, frame.bottom + 24, label))
    return "".join(parts)


def draw_parts(parts: dict[str, int], most: int, frame: Frame) -> str:
    """A bar for each category, its bytes beside it; `most` bytes fill the frame's width."""
    tall = frame.height / len(STACK)
    drawn = []
    for row, name in enumerate(STACK[::-1]):
        y = frame.top + row * tall
        wide = parts[name] / most * frame.width
        size = units.binary(parts[name], 0)
        drawn.append(style.text(frame.left - 8, y + tall / 2 + 5, name, anchor="end"))
        drawn.append(style.bar(frame.left, y + 4, wide, tall - 8, name))
        drawn.append(style.text(frame.left + wide + 6, y + tall / 2 + 5, size, anchor="start"))
    drawn.append(style.line(frame.left, frame.top, frame.left, frame.bottom))
    return "".join(drawn)


def walk(traces: dict[tuple[str, int], MemoryTimeline], what: str):
    """Walk through the phases of a measured step, for each optimizer and batch size.

    `traces` has a timeline of two steps for each (optimizer, batch size), the batch sizes evenly
    spaced; `what` names the examples of a batch, such as "images".
    """
    optimizers = tuple(dict.fromkeys(optimizer for optimizer, _ in traces))
    sizes = sorted({size for _, size in traces})
    gaps = {int(gap) for gap in np.diff(sizes)}
    if set(traces) != {(o, s) for o in optimizers for s in sizes} or len(gaps) != 1:
        raise ValueError("traces must hold every optimizer with the same, evenly spaced batches")
    middle = sizes[(len(sizes) - 1) // 2]
    return controls.explore(
        walk_view(traces, what),
        phase=controls.Walk("phase", STOPS, "forward"),
        batch=controls.Slider(f"batch, {what}", sizes[0], sizes[-1], gaps.pop(), middle),
        optimizer=controls.Choice("optimizer", optimizers, optimizers[0]),
        step=controls.Choice("step", ("first", "second"), "second"),
    )


def walk_view(
    traces: dict[tuple[str, int], MemoryTimeline], what: str
) -> Callable[..., style.Picture]:
    """The walk's view: the timeline with the moment marked, and the parts alive at it."""
    most = max(int(trace.live[name].max()) for trace in traces.values() for name in STACK)

    def view(phase: str, batch: int, optimizer: str, step: str) -> style.Picture:
        trace, number = traces[optimizer, batch], ("first", "second").index(step) + 1
        parts = after(trace, number, phase)
        moment = phase if phase == BEFORE else f"after {phase}"
        drawing = style.svg(
            680,
            520,
            draw_timeline(trace, number, Frame(56, 50, 600, 230), stop=phase),
            style.text(136, 336, f"in memory {moment}", anchor="start", bold=True),
            draw_parts(parts, most, Frame(136, 344, 420, 168)),
        )
        sentence = f"{optimizer}, {batch} {what}, {step} step, {moment}: {_listed(parts)}."
        return style.Picture(drawing, "the phases of a step", sentence)

    return view


def _phases(timeline: MemoryTimeline, step: int) -> list[Phase]:
    """The phases of one step, in the order in which they were run."""
    if not isinstance(timeline, MemoryTimeline):
        raise TypeError(f"timeline must be a MemoryTimeline, got {type(timeline).__name__}")
    phases = [phase for phase in timeline.phases if phase.step == step]
    if not phases:
        measured = timeline.phases[-1].step
        raise ValueError(f"step {step!r} isn't there: steps 1 to {measured} were measured")
    return phases


def _bounds(timeline: MemoryTimeline, step: int) -> tuple[int, int]:
    """The first event of a step's first phase, and the one after the last phase's last."""
    phases = _phases(timeline, step)
    return phases[0].first, phases[-1].end


def _index_after(timeline: MemoryTimeline, step: int, stop: str) -> int:
    """The last event before a stop; of a repeated phase, the last time it ended."""
    phases = _phases(timeline, step)
    if stop == BEFORE:
        return phases[0].first - 1
    ends = [phase.end for phase in phases if LABEL.get(phase.name, phase.name) == stop]
    ends += [phase.end for phase in phases if phase.name == stop and not ends]
    if not ends:
        raise ValueError(f"stop must be one of {list(STOPS)}, as far as it was run, got {stop!r}")
    return max(ends) - 1


def _parts(timeline: MemoryTimeline, at: int) -> dict[str, int]:
    return {name: int(timeline.live[name][at]) for name in STACK}


def _listed(parts: dict[str, int]) -> str:
    named = [f"{name} {units.binary(size, 1)}" for name, size in parts.items() if size]
    return f"{', '.join(named)}; in all {units.binary(sum(parts.values()), 1)}"


def _kept(total: np.ndarray) -> list[int]:
    """The indices to draw: all, or of a long timeline the fullest moment of each stretch."""
    stretches = np.array_split(np.arange(len(total)), min(len(total), MOST_POINTS))
    return [int(stretch[np.argmax(total[stretch])]) for stretch in stretches]


def _steps(x: list[float], y: list[float], frame: Frame) -> str:
    """A path that holds each y until the next x, closed along the frame's bottom."""
    d, last = f"M{x[0]:.1f} {frame.bottom:.1f}V{y[0]:.1f}", f"{y[0]:.1f}"
    for at, to in zip(x[1:], y[1:], strict=True):
        if f"{to:.1f}" != last:
            d, last = f"{d}H{at:.1f}V{to:.1f}", f"{to:.1f}"
    return f"{d}H{frame.left + frame.width:.1f}V{frame.bottom:.1f}Z"


def _axis(top: float, y: Callable, frame: Frame) -> list[str]:
    """Ticks at round numbers of the largest unit that fits."""
    sizes = ((units.GiB, "GiB"), (units.MiB, "MiB"), (units.KiB, "KiB"), (1, "B"))
    divisor, unit = next(size for size in sizes if top >= size[0])
    rough = top / divisor / 5
    power = 10.0 ** np.floor(np.log10(rough))
    between = min((m * power for m in (1, 2, 5, 10)), key=lambda gap: abs(gap - rough))
    drawn = [style.line(frame.left, frame.top, frame.left, frame.bottom)]
    drawn.append(style.line(frame.left, frame.bottom, frame.left + frame.width, frame.bottom))
    for tick in range(int(top / divisor / between) + 1):
        at = y(tick * between * divisor)
        drawn.append(style.line(frame.left - 4, at, frame.left, at))
        drawn.append(style.text(frame.left - 8, at + 4, f"{tick * between:g}", anchor="end"))
    drawn.append(style.text(frame.left - 8, frame.top - 4, unit, anchor="end"))
    return drawn


def _phase_marks(timeline, step: int, first: int, x: Callable, frame: Frame) -> list[str]:
    """A line where each phase begins and its name above, raised where there is no room."""
    drawn, end = [], frame.left - 20
    for phase in _phases(timeline, step):
        start, stop = phase.first - first, phase.end - first
        label = LABEL.get(phase.name, phase.name)
        half, right = 4 * len(label), frame.left + frame.width + 20
        middle = (x(start) + x(stop)) / 2
        middle = min(max(middle, frame.left + half - 20), right - half)
        raised = middle - half < end
        end = end if raised else middle + half
        drawn.append(
            style.line(x(start), frame.top - 2, x(start), frame.bottom, width=0.7, dash="4 3")
        )
        drawn.append(style.text(middle, frame.top - (26 if raised else 8), label))
    return drawn


def _area_labels(heights, x: Callable, y: Callable, top: float, frame: Frame) -> list[str]:
    """Each category's name where it is thickest, if it is thick enough and the place is free."""
    drawn, taken = [], []
    count = heights.shape[1]
    lows = np.vstack([np.zeros(count), heights[:-1]])
    for name, low, high in zip(STACK, lows, heights, strict=True):
        half = 4 * len(name) + 4  # pixels, an ample guess
        window = max(1, int(2 * half / frame.width * count))
        thick = np.convolve(high - low, np.ones(window), "same") / window
        for at in np.argsort(-thick, kind="stable"):
            px, py = x(at), y((low[at] + high[at]) / 2) + 5
            inside = frame.left + half <= px <= frame.left + frame.width - half
            free = all(abs(px - tx) > half + th or abs(py - ty) > 18 for tx, ty, th in taken)
            if thick[at] > 0.06 * top and inside and free:
                drawn.append(style.text(px, py, name, box=True))
                taken.append((px, py, half))
                break
    return drawn


def _peak_mark(total: np.ndarray, x: Callable, y: Callable) -> str:
    at = int(np.argmax(total))
    left = at > len(total) / 2  # the side with more room
    px, py = x(at + 0.5), y(total[at])
    mark = f'<path d="M{px - 5:.1f} {py - 9:.1f}h10l-5 8Z" data-name="peak"/>'
    said = f"peak {units.binary(int(total[at]))}"
    anchor = "end" if left else "start"
    return mark + style.text(px + (-9 if left else 9), py - 3, said, anchor=anchor, box=True)
