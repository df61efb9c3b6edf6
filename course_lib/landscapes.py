"""Losses of two numbers, small enough to see, and the way that an optimizer takes on one."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from course_lib.checks import whole


@dataclass(frozen=True)
class Landscape:
    """`loss(x, y)` is a number; `start` and `minimum` are points, `xs` and `ys` the part to show.

    With `noise`, each gradient is off by a normal random number of this standard deviation in
    each coordinate, as a mini-batch's is.
    """

    loss: Callable
    start: tuple[float, float]
    minimum: tuple[float, float]
    xs: tuple[float, float]
    ys: tuple[float, float]
    noise: float = 0.0


def _rosenbrock(x, y):
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def _beale(x, y):
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


KAPPA = 25  # the condition number of the ill-conditioned bowl: its largest curvature over its least

LANDSCAPES = {
    "ill-conditioned bowl": Landscape(
        lambda x, y: (x**2 + KAPPA * y**2) / 2, (-4.0, 1.2), (0.0, 0.0), (-5, 2), (-2, 2)
    ),
    "Rosenbrock's valley": Landscape(_rosenbrock, (-1.2, 1.0), (1.0, 1.0), (-2, 2), (-1, 3)),
    "Beale's plateau": Landscape(_beale, (1.0, 1.5), (3.0, 0.5), (-0.5, 4), (-1, 2)),
    "saddle": Landscape(
        lambda x, y: x**2 - y**2 + y**4 / 4, (-1.5, 0.01), (0.0, 2**0.5), (-2, 2), (-2, 2)
    ),
    "noisy bowl": Landscape(
        lambda x, y: (x**2 + 5 * y**2) / 2, (-4.0, 1.5), (0.0, 0.0), (-5, 2), (-2, 2), noise=1.0
    ),
}


def descend(
    landscape: Landscape,
    build_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
) -> np.ndarray:
    """The points of a run, (steps + 1, 2), its start first. The noise is the same every time.

    >>> bowl = LANDSCAPES["ill-conditioned bowl"]
    >>> descend(bowl, lambda p: torch.optim.SGD(p, lr=0.5), 2)[:, 0].tolist()
    [-4.0, -2.0, -1.0]
    """
    if not isinstance(landscape, Landscape):
        raise TypeError(f"descend needs a Landscape, got {type(landscape).__name__}")
    point = torch.nn.Parameter(torch.tensor(landscape.start, dtype=torch.float64))
    optimizer, generator = build_optimizer([point]), torch.Generator().manual_seed(0)
    path = [point.tolist()]
    for _ in range(whole("steps", steps, least=0)):
        (point.grad,) = torch.autograd.grad(landscape.loss(*point), point)
        noise = torch.randn(2, dtype=torch.float64, generator=generator)
        point.grad += landscape.noise * noise
        optimizer.step()
        path.append(point.tolist())
    return np.array(path)
