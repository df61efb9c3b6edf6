"""What is learnt, and how it goes: images of digits, and losses over the updates."""

import base64
import io
import math
from collections.abc import Mapping, Sequence

import torch
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.views import style

NEAR = 0.1  # of loss: two runs that differ by less all the way are said to be one
LINES = (  # width, dashes, colour: the first lies under the others
    (7, "-", style.COLOR["temporaries"]),
    (2, "-", style.COLOR["weights"]),
    (2, (0, (5, 3)), style.COLOR["moment"]),
    (2, (0, (1, 2)), style.COLOR["optimizer state"]),
    (2, "-.", style.COLOR["activations"]),
    (2, (0, (8, 2, 1, 2, 1, 2)), style.COLOR["gradients"]),
)


def show_digits(images: torch.Tensor, labels: torch.Tensor) -> None:
    """Show 8 × 8 images (n, 64) of pixels between 0 and 1 in a row, labels (n,) above them."""
    if images.dim() != 2 or images.shape[1] != 64 or len(images) != len(labels):
        raise ValueError(
            f"images must be (n, 64) and labels (n,), got {tuple(images.shape)} and "
            f"{tuple(labels.shape)}"
        )
    pixel, gap = 9, 12
    parts = []
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        left = gap / 2 + i * (8 * pixel + gap)
        parts.append(style.text(left + 4 * pixel, 18, str(label.item()), size=15))
        for j, ink in enumerate(image.tolist()):
            grey = round(255 * (1 - ink))
            parts.append(
                f'<rect x="{left + j % 8 * pixel:.0f}" y="{26 + j // 8 * pixel}" '
                f'width="{pixel}" height="{pixel}" fill="#{grey:02x}{grey:02x}{grey:02x}"/>'
            )
    drawing = style.svg(len(images) * (8 * pixel + gap), 26 + 8 * pixel + 6, *parts)
    sentence = f"The first labels: {' '.join(str(label.item()) for label in labels)}."
    style.show(style.Picture(drawing, f"{len(images)} digits", sentence))


def show_losses(losses: list[float], title: str) -> None:
    """Show the loss of each update as a line, and say where it began, ended, fell and rose."""
    finite = next((i for i, x in enumerate(losses) if not math.isfinite(x)), len(losses))
    lost = f" From update {finite + 1} on it is not finite." if finite < len(losses) else ""
    losses = losses[:finite]
    if len(losses) < 2:
        raise ValueError(f"a curve needs two finite losses or more, got {len(losses)}")
    left, top, width, height = 50, 46, 600, 160
    most = 1.05 * max(losses) or 1.0

    def y(loss: float) -> float:
        return top + height * (1 - loss / most)

    points = " ".join(
        f"{left + i * width / (len(losses) - 1):.1f},{y(loss):.1f}" for i, loss in enumerate(losses)
    )
    between = 10 ** math.floor(math.log10(most))  # of the ticks on the loss axis
    ticks = [i * between for i in range(int(most / between) + 1)]
    every = max(1, round(len(losses) / 5, -1)) if len(losses) > 20 else 1
    parts = [
        style.text(12, 22, title, anchor="start", size=15, bold=True),
        style.line(left, top, left, top + height),
        style.line(left, top + height, left + width, top + height),
        *(style.text(left - 6, y(tick) + 4, f"{tick:g}", anchor="end") for tick in ticks),
        *(style.line(left - 4, y(tick), left, y(tick)) for tick in ticks),
        *(
            style.text(left + (k - 1) * width / (len(losses) - 1), top + height + 18, f"{k:g}")
            for k in [1, *range(int(every), len(losses) + 1, int(every))]
        ),
        style.text(left, top - 8, "loss"),
        style.text(left + width / 2, top + height + 38, "update"),
        f'<polyline points="{points}" fill="none" stroke="{style.COLOR["weights"]}" '
        'stroke-width="1.8"/>',
    ]
    pairs = list(zip(losses, losses[1:], strict=False))
    falls, rises = sum(b < a for a, b in pairs), sum(b > a for a, b in pairs)
    sentence = (
        f"The loss goes from {losses[0]:.2f} to {losses[-1]:.2f}. It fell in {falls} updates and "
        f"rose in {rises}.{lost}"
    )
    style.show(style.Picture(style.svg(680, 252, *parts), "loss over updates", sentence))


def show_runs(runs: Mapping[str, Sequence[float]], title: str) -> None:
    """Show the losses of 2 to 6 runs; say which follow the first, and how far the others get.

    It is an image of pixels: 16-bit runs differ a little between machines, what is said doesn't.
    """
    if not 2 <= len(runs) <= len(LINES):
        raise ValueError(f"2 to {len(LINES)} runs can be told apart, got {len(runs)}")
    first, *others = runs
    if len({len(losses) for losses in runs.values()}) > 1:
        raise ValueError("the runs must be equally long")
    if _finite(runs[first]) < max(1, len(runs[first])) or not all(map(_finite, runs.values())):
        raise ValueError("the first run must be finite, and so must every run's first loss")
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    draw_runs(figure.add_subplot(), runs).set_title(title, fontsize=11, fontweight="bold")
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=160, metadata={"Software": None})
    image = base64.b64encode(pixels.getvalue()).decode()
    size = {"image/png": {"width": 580}}
    display({"image/png": image, "text/plain": f"[picture: {title}]"}, metadata=size, raw=True)
    said = [_followed(first, runs[first], name, runs[name]) for name in others]
    style.say(" ".join(said))


def draw_runs(ax: Axes, runs: Mapping[str, Sequence[float]]) -> Axes:
    """A line for each run, and a cross where a loss is the last that is a number.

    A point is the mean over a fiftieth of the longest run.
    """
    each = max(1, max(map(len, runs.values())) // 50)
    for (name, losses), (width, dashes, color) in zip(runs.items(), LINES, strict=False):
        until = _finite(losses)
        starts = range(0, until, each)
        means = [_mean(losses[k : min(k + each, until)]) for k in starts]
        ax.plot(starts, means, lw=width, ls=dashes, color=color, label=name)
        if until < len(losses):
            ax.plot(until - 1, losses[until - 1], "x", ms=11, mew=2.5, color=color)
    ax.set(xlabel="update", ylabel=f"loss, mean of {each}" if each > 1 else "loss", ylim=(0, None))
    ax.legend(loc="lower left", frameon=False, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _finite(losses: Sequence[float]) -> int:
    """How many losses come before the first that is infinite or NaN."""
    return next((k for k, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))


def _followed(first: str, expected: Sequence[float], name: str, losses: Sequence[float]) -> str:
    until = _finite(losses)
    if until < len(losses):
        return f"{name}: no number after {until} update{'s' * (until != 1)}."
    if max(abs(a - b) for a, b in zip(expected, losses, strict=True)) < NEAR:
        return f"{name}: follows {first}."
    tenth = max(1, len(losses) // 10)
    way, other = (_mean(run[:tenth]) - _mean(run[-tenth:]) for run in (expected, losses))
    if other < way / 10:
        return f"{name}: goes less than a tenth of {first}'s way."
    return f"{name}: departs from {first}."


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
