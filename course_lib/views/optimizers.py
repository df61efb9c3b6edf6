"""The race: optimizers on landscapes of two numbers, every run computed beforehand."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from matplotlib.figure import Figure

from course_lib.landscapes import KAPPA, LANDSCAPES, Landscape, descend
from course_lib.optimizers import SGD, Adam
from course_lib.views import controls, style

ROOT = math.sqrt(KAPPA)
BOWL = "ill-conditioned bowl"
# For each landscape: SGD's rate; momentum's and Nesterov's rate and momentum; Adam's rate. On the
# bowl the first two are theory's best, https://distill.pub/2017/momentum; Nesterov's is safe for
# any bowl of this condition number. On the noisy bowl lr / (1 − μ) is the same for all three.
SETTINGS = {
    BOWL: (
        2 / (1 + KAPPA),
        ((2 / (1 + ROOT)) ** 2, ((ROOT - 1) / (ROOT + 1)) ** 2),
        (1 / KAPPA, (ROOT - 1) / (ROOT + 1)),
        0.1,
    ),
    "Rosenbrock's valley": (1.5e-3, (1e-3, 0.9), (5e-4, 0.9), 0.1),
    "Beale's plateau": (0.02, (5e-3, 0.9), (5e-3, 0.9), 0.1),
    "saddle": (0.1, (0.05, 0.8), (0.05, 0.8), 0.1),
    "noisy bowl": (0.05, (0.01, 0.8), (0.01, 0.8), 0.1),
}
FACTORS = ("0.25", "0.5", "1", "2")
LEFT, TOP, WIDE, TALL = 16, 40, 340, 270  # pixels of the map
UPDATES = 150
LOST = 1e3  # a loss above this many times the start's counts as lost


def builders(landscape: str, factor: float) -> dict[str, Callable]:
    """For each racer a function that builds its optimizer, all rates times `factor`."""
    plain, (heavy, mu), (nesterov, nu), adam = SETTINGS[landscape]
    return {
        "SGD": lambda p: SGD(p, lr=factor * plain),
        "momentum": lambda p: SGD(p, lr=factor * heavy, momentum=mu),
        "Nesterov": lambda p: SGD(p, lr=factor * nesterov, momentum=nu, nesterov=True),
        "Adam": lambda p: Adam(p, lr=factor * adam),
    }


def race():
    """Race on each landscape, at several multiples of the rates that suit it."""
    return controls.explore(
        race_view(),
        landscape=controls.Choice("landscape", tuple(LANDSCAPES), BOWL),
        rate=controls.Choice("rate, times", FACTORS, "1"),
        update=controls.Slider("update", 0, UPDATES, 5, 30),
    )


@cache
def race_view() -> Callable[..., style.Picture]:
    """The race's view; all runs are computed at the first call, in some seconds."""
    maps = {name: _map(landscape) for name, landscape in LANDSCAPES.items()}

    def view(landscape: str, rate: str, update: int) -> style.Picture:
        paths = {racer: path[: update + 1] for racer, path in runs()[landscape, rate].items()}
        land = LANDSCAPES[landscape]
        losses = {n: written(loss) for n, loss in losses_after(landscape, rate, update).items()}
        theory = landscape == BOWL and rate == "1"
        drawing = style.svg(
            560,
            TOP + TALL + 14,
            style.text(LEFT, 24, f"{landscape}, rates × {rate}", anchor="start", bold=True),
            _framed(maps[landscape], *(_path(land, racer, p) for racer, p in paths.items())),
            *_legend(landscape, float(rate), losses, theory),
        )
        listed = ", ".join(f"{racer} {loss}" for racer, loss in losses.items())
        said = f"{landscape}, rates × {rate}, loss above the minimum's after {update} updates: "
        said += f"{listed}."
        said += " SGD's and momentum's rates are theory's best." if theory else ""
        said += " It is one draw of the noise." if land.noise else ""
        return style.Picture(drawing, "a race of optimizers", said)

    return view


@cache
def runs() -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """For each landscape and factor the racers' paths, of UPDATES + 1 points each."""
    return {
        (name, factor): {
            racer: descend(landscape, build, UPDATES)
            for racer, build in builders(name, float(factor)).items()
        }
        for name, landscape in LANDSCAPES.items()
        for factor in FACTORS
    }


def losses_after(landscape: str, rate: str, update: int) -> dict[str, float]:
    """Each racer's loss after this update, above the minimum's; infinity where it is lost."""
    paths = runs()[landscape, rate].items()
    return {racer: loss_after(LANDSCAPES[landscape], path[: update + 1]) for racer, path in paths}


def loss_after(landscape: Landscape, path: np.ndarray) -> float:
    """The loss at a path's end, above the minimum's; infinity where it has left for good."""
    lowest = landscape.loss(*landscape.minimum)
    with np.errstate(over="ignore", invalid="ignore"):  # of a path that is lost
        first, last = (landscape.loss(*point) - lowest for point in (path[0], path[-1]))
    return float(last) if last < LOST * max(first, 1) else math.inf


def written(loss: float) -> str:
    """A loss with one digit, or "lost".

    >>> written(0.0234), written(1e-12), written(math.inf)
    ('0.02', 'below 1e-9', 'lost')
    """
    if loss == math.inf:
        return "lost"
    return f"{float(f'{loss:.1g}'):g}" if loss >= 1e-9 else "below 1e-9"


def _xy(landscape: Landscape, points: np.ndarray) -> list[tuple[float, float]]:
    """The points in pixels of the map."""
    (x0, x1), (y0, y1) = landscape.xs, landscape.ys
    x = (points[:, 0] - x0) / (x1 - x0) * WIDE
    y = (y1 - points[:, 1]) / (y1 - y0) * TALL
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _line(points, color: str, width: float, dash: str = "", name: str = "") -> str:
    written = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{written}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-dasharray="{dash}" data-name="{name}"/>'
    )


def _map(landscape: Landscape) -> str:
    """Contour lines, each with a tenth of the area between it and the next; start and minimum."""
    x, y = (np.linspace(*limits, 81) for limits in (landscape.xs, landscape.ys))
    z = landscape.loss(torch.tensor(x)[None, :], torch.tensor(y)[:, None]).numpy()
    levels = np.unique(np.quantile(z, np.linspace(0.02, 0.92, 10)))
    drawn = Figure().add_subplot().contour(x, y, z, levels=levels)
    lines = [
        _line(_xy(landscape, segment), "#BBBBBB", 0.8)
        for level in drawn.allsegs
        for segment in level
    ]
    ((sx, sy), (mx, my)) = _xy(landscape, np.array([landscape.start, landscape.minimum]))
    start = f'<circle cx="{sx:.1f}" cy="{sy:.1f}" r="5" fill="black"/>'
    cross = f"M{mx - 6:.1f} {my:.1f}h12M{mx:.1f} {my - 6:.1f}v12"
    return "".join(lines) + start + f'<path d="{cross}" stroke="black" stroke-width="2"/>'


def _path(landscape: Landscape, racer: str, path: np.ndarray) -> str:
    far_out = ~(np.abs(path) < 1e3).all(axis=1)  # or no number any more
    path = path[: int(np.argmax(far_out)) or 1] if far_out.any() else path
    points = _xy(landscape, path)
    color, dash = style.STROKE[racer]
    x, y = points[-1]
    end = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'
    return _line(points, color, 2, dash, racer) + end


def _framed(*parts: str) -> str:
    """The map: what leaves it is cut off at its border."""
    border = f'<rect width="{WIDE}" height="{TALL}" fill="none" stroke="black"/>'
    return (
        f'<svg x="{LEFT}" y="{TOP}" width="{WIDE}" height="{TALL}">{"".join(parts)}{border}</svg>'
    )


def _legend(landscape: str, factor: float, losses: dict[str, str], theory: bool) -> list[str]:
    plain, heavy, nesterov, adam = SETTINGS[landscape]
    rates = {"SGD": (plain, 0), "momentum": heavy, "Nesterov": nesterov, "Adam": (adam, 0)}
    left, drawn = LEFT + WIDE + 16, []
    for row, (racer, loss) in enumerate(losses.items()):
        y = TOP + 12 + 56 * row
        color, dash = style.STROKE[racer]
        (rate, mu) = rates[racer]
        options = f"lr {factor * rate:.3g}" + (f", μ {mu:.2f}" if mu else "")
        options += " *" if theory and racer in ("SGD", "momentum") else ""
        drawn.append(_line([(left, y - 4), (left + 34, y - 4)], color, 3, dash))
        drawn.append(style.text(left + 42, y, racer, anchor="start", bold=True))
        drawn.append(style.text(left + 42, y + 16, options, anchor="start", size=12))
        drawn.append(style.text(left + 42, y + 32, f"loss {loss}", anchor="start", size=12))
    notes = ["loss: above the minimum's", *(["* theory's best"] if theory else [])]
    notes += ["one draw of the noise"] if LANDSCAPES[landscape].noise else []
    for row, note in enumerate(notes):
        drawn.append(style.text(left, TOP + 246 + 18 * row, note, anchor="start", size=12))
    return drawn
