"""One training step as a timeline: the phases above, the live bytes stacked below."""

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib import units
from course_lib.memory_trace import MemoryTimeline
from course_lib.views import style

# Bottom to top: what stays from step to step lies below what comes and goes.
STACK = ("weights", "optimizer state", "gradients", "activations", "inputs", "temporaries")
LABEL = {"step": "optimizer step"}  # a phase as the reader sees it, where its name won't do


def show_timeline(timeline: MemoryTimeline, step: int, title: str) -> None:
    """Show the timeline of one step, and one sentence with its key numbers."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    draw_timeline(timeline, step, figure.subplots())
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    style.show(figure, f"timeline of step {step}", timeline_sentence(timeline, step))


def draw_timeline(timeline: MemoryTimeline, step: int, ax: Axes) -> Axes:
    """Stack the live bytes of one step over its allocations and frees, phases marked above."""
    first, last = _bounds(timeline, step)
    live = {name: timeline.live[name][first:last] / units.GiB for name in STACK}
    x = np.arange(last - first)
    with matplotlib.rc_context({"hatch.linewidth": 0.5}):
        for name, low, high in _stacked(live):
            ax.fill_between(
                x, low, high, step="post", linewidth=0, label=name, hatch=style.HATCH[name],
                facecolor=style.COLOR[name], edgecolor="white",
            )  # fmt: skip
    _label_areas(ax, live)
    _mark_phases(ax, timeline, step, first)
    _mark_peak(ax, live)
    ax.set(xlim=(0, len(x)), ylim=(0, 1.12 * max(sum(live.values()))), ylabel="live bytes, GiB")
    ax.set_xlabel("allocations and frees, in order")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


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
    parts = {name: int(timeline.live[name][at]) for name in STACK}
    return timeline.events[at].phase, int(total.max()), parts


def _bounds(timeline: MemoryTimeline, step: int) -> tuple[int, int]:
    if not isinstance(timeline, MemoryTimeline):
        raise TypeError(f"timeline must be a MemoryTimeline, got {type(timeline).__name__}")
    inside = [i for i, event in enumerate(timeline.events) if event.step == step]
    if not inside or step < 1:
        measured = timeline.events[-1].step
        raise ValueError(f"step {step!r} isn't there: steps 1 to {measured} were measured")
    return inside[0], inside[-1] + 1


def _stacked(live: dict[str, np.ndarray]):
    low = np.zeros_like(live["weights"])
    for name, values in live.items():
        yield name, low, low + values
        low = low + values


def _label_areas(ax: Axes, live: dict[str, np.ndarray]) -> None:
    """Write each area's name where it is thickest, if it is thick enough to hold it."""
    top = max(sum(live.values()))
    for name, low, high in _stacked(live):
        thick = np.convolve(high - low, np.ones(len(low) // 8 + 1), "same") / (len(low) // 8 + 1)
        middle = slice(len(low) // 10, len(low) - len(low) // 10)
        at = middle.start + int(np.argmax(thick[middle]))
        if thick[at] > 0.06 * top:
            ax.text(
                at, (low[at] + high[at]) / 2, name, ha="center", va="center", fontsize=11,
                bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1.5},
            )  # fmt: skip


def _mark_peak(ax: Axes, live: dict[str, np.ndarray]) -> None:
    total = sum(live.values())
    at = int(np.argmax(total))
    ax.plot(at, total[at], marker="v", color="black", clip_on=False)
    ax.annotate(
        f"peak {total[at]:.2f} GiB", (at, total[at]), xytext=(-4, 6), ha="right", va="bottom",
        textcoords="offset points", fontsize=11,
        bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5},
    )  # fmt: skip


def _mark_phases(ax: Axes, timeline: MemoryTimeline, step: int, first: int) -> None:
    """A line where each phase begins and its name above, short phases raised a line."""
    starts: dict[str, list[int]] = {}
    for i, event in enumerate(timeline.events):
        if event.step == step and event.phase in [p.name for p in timeline.phases]:
            starts.setdefault(event.phase, []).append(i - first)
    width = max(at[-1] for at in starts.values())
    for name, at in starts.items():
        ax.axvline(at[0], color="black", linewidth=0.6, linestyle=(0, (4, 3)))
        height = 1.09 if (at[-1] - at[0]) < 0.08 * width else 1.02
        ax.text(
            (at[0] + at[-1]) / 2, height, LABEL.get(name, name), fontsize=11, ha="center",
            transform=ax.get_xaxis_transform(),
        )  # fmt: skip
