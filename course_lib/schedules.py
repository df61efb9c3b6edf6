"""Learning-rate schedules: from the number of an optimizer update to the rate that it uses.

A schedule is a function of k = 0, 1, …, counted in updates, not in batches or epochs. After its
end it holds its last rate and never rises again.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from course_lib.checks import number, whole


@dataclass(frozen=True, repr=False)
class Schedule:
    """A function from an update's number to its rate: printed, compared and pickled as its call."""

    rate: Callable[[int], float] = field(compare=False)
    made_by: Callable[..., "Schedule"]
    values: tuple
    options: tuple[tuple[str, Any], ...]

    def __call__(self, k: int) -> float:
        return self.rate(whole("an update's number", k, 0))

    def __repr__(self) -> str:
        said = [_said(value) for value in self.values]
        said += [f"{name}={_said(value)}" for name, value in self.options]
        return f"{self.made_by.__name__}({', '.join(said)})"

    def __reduce__(self):
        return functools.partial(self.made_by, *self.values, **dict(self.options)), ()


def _said(value: Any) -> str:
    return getattr(value, "__name__", repr(value))  # a function without its address


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's, which computes in float64 and prints without `np`."""
    return value.item() if isinstance(value, np.generic) else value


def _schedule(make: Callable[..., Callable[[int], float]]) -> Callable[..., Schedule]:
    """What `make` returns, as a Schedule."""

    @functools.wraps(make)
    def made(*values, **options) -> Schedule:
        values = tuple(map(_plain, values))
        options = {name: _plain(value) for name, value in options.items()}
        return Schedule(make(*values, **options), made, values, tuple(options.items()))

    return made


@_schedule
def constant(base_lr: float) -> Schedule:
    """The same rate throughout."""
    _check_rate("base_lr", base_lr)
    return lambda k: base_lr


@_schedule
def step_decay(base_lr: float, *, step_size: int, gamma: float = 0.1) -> Schedule:
    """The rate times `gamma` after every `step_size` updates.

    >>> rate = step_decay(0.1, step_size=30)
    >>> [f"{rate(k):.3f}" for k in (0, 29, 30, 60)]
    ['0.100', '0.100', '0.010', '0.001']
    """
    _check_rate("base_lr", base_lr)
    whole("step_size", step_size)
    if not 0 < number("gamma", gamma) <= 1:
        raise ValueError(f"gamma must be above 0 and at most 1, got {gamma!r}")
    return lambda k: base_lr * gamma ** (k // step_size)


@_schedule
def linear(base_lr: float, *, total_steps: int, final_lr: float = 0.0) -> Schedule:
    """Straight from `base_lr` at update 0 to `final_lr`, reached at update `total_steps`."""
    whole("total_steps", total_steps)
    _check_decay(base_lr, final_lr)
    return lambda k: _between(base_lr, final_lr, min(k, total_steps) / total_steps)


@_schedule
def cosine(base_lr: float, *, total_steps: int, final_lr: float = 0.0) -> Schedule:
    """Half a cosine from `base_lr` at update 0 to `final_lr` at update `total_steps`.

    Unlike torch's CosineAnnealingLR it doesn't rise again. Source: https://arxiv.org/abs/1608.03983
    """
    whole("total_steps", total_steps)
    _check_decay(base_lr, final_lr)
    return lambda k: _between(base_lr, final_lr, _half_cosine(min(k, total_steps) / total_steps))


@_schedule
def wsd(
    base_lr: float,
    *,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    final_lr: float = 0.0,
) -> Schedule:
    """Warmup, a stable stretch, and a straight decay. Source: https://arxiv.org/abs/2404.06395"""
    whole("stable_steps", stable_steps, 0)
    whole("decay_steps", decay_steps)
    decay = linear(base_lr, total_steps=decay_steps, final_lr=final_lr)

    def level(k: int) -> float:
        return base_lr if k < stable_steps else decay(k - stable_steps)

    return warmup(level, warmup_steps=warmup_steps)


@_schedule
def one_cycle(
    max_lr: float,
    *,
    total_steps: int,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Up from max_lr / div_factor and down to that / final_div_factor, each by half a cosine.

    The last update, total_steps − 1, has the lowest rate; torch's OneCycleLR, whose rates these are
    up to there, bounces up after it. Torch also moves the momentum, unless `cycle_momentum=False`.
    Source: https://arxiv.org/abs/1708.07120
    """
    _check_rate("max_lr", max_lr)
    whole("total_steps", total_steps, 2)
    top = number("pct_start", pct_start) * total_steps - 1
    if not 0 < top < total_steps - 1:
        raise ValueError(f"the top, update {top:g}, must lie inside of {total_steps} updates")
    for name, factor in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
        if number(name, factor) < 1:
            raise ValueError(f"{name} must be at least 1, got {factor}")
    first = max_lr / div_factor
    last = first / final_div_factor

    def rate(k: int) -> float:
        if k <= top:
            return _between(first, max_lr, _half_cosine(k / top))
        done = min(1.0, (k - top) / (total_steps - 1 - top))
        return _between(max_lr, last, _half_cosine(done))

    return rate


@_schedule
def warmup(
    schedule: Callable[[int], float], *, warmup_steps: int, start_lr: float | None = None
) -> Schedule:
    """A schedule with a straight rise in front; update `warmup_steps` is its update 0.

    Update k < warmup_steps uses (k + 1) / warmup_steps of its first rate, so the first rate isn't
    0 and the full rate is held for two updates. With `start_lr` it is
    start_lr + (first − start_lr) · k / warmup_steps.

    >>> rate = warmup(constant(1.0), warmup_steps=4)
    >>> [rate(k) for k in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    _check_schedule(schedule)
    whole("warmup_steps", warmup_steps, 0)
    first = schedule(0)
    if warmup_steps:
        _check_rate("first_rate", first)
    if start_lr is not None and not 0 <= number("start_lr", start_lr) <= first:
        raise ValueError(f"start_lr must lie between 0 and the first rate, {first}: {start_lr!r}")

    def rate(k: int) -> float:
        if k >= warmup_steps:
            return schedule(k - warmup_steps)
        if start_lr is None:
            return _between(0.0, first, (k + 1) / warmup_steps)
        return _between(start_lr, first, k / warmup_steps)

    return rate


def fraction_to_steps(fraction: float, total_steps: int) -> int:
    """A share of the updates as a whole number, rounded up: 1 % of 150 updates are 2.

    A product within 1e-12 of a whole number, relative to it, is that number: 0.07 · 100 is 7.

    >>> fraction_to_steps(0.01, 150), fraction_to_steps(0.1, 30), fraction_to_steps(0, 30)
    (2, 3, 0)
    """
    if not 0 <= number("fraction", fraction) <= 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction!r}")
    steps = fraction * whole("total_steps", total_steps, 0)
    return round(steps) if abs(steps - round(steps)) <= 1e-12 * steps else math.ceil(steps)


class GroupRates:
    """What a schedule says for each parameter group of an optimizer.

    The first group gets the schedule's rate, others keep the ratio of their first rates to its; a
    first rate is a group's `initial_lr`, as torch's schedulers note it, or else its `lr`. A group
    that is added later joins in with its own first rate.
    """

    def __init__(self, schedule: Callable[[int], float], optimizer: torch.optim.Optimizer):
        _check_schedule(schedule)
        self.schedule, self.optimizer = schedule, optimizer
        self.first_rates: list[float] = []
        self._note_new_groups()

    def at(self, k: int) -> list[float]:
        """The rates of update k, one a group."""
        name = f"schedule({k})"
        rate = number(name, self.schedule(k))
        if rate < 0:
            raise ValueError(f"{name} must be at least 0, got {rate}")
        self._note_new_groups()
        first, *others = self.first_rates
        return [rate, *(rate * (other / first) for other in others)]

    def use(self, k: int) -> None:
        """Give the optimizer the rates of update k."""
        for group, rate in zip(self.optimizer.param_groups, self.at(k), strict=True):
            if isinstance(group["lr"], torch.Tensor):  # which a compiled step may hold
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _note_new_groups(self) -> None:
        for group in self.optimizer.param_groups[len(self.first_rates) :]:
            self.first_rates.append(float(group.setdefault("initial_lr", float(group["lr"]))))
        if len(self.first_rates) > 1 and not self.first_rates[0] > 0:
            raise ValueError("the first group's rate must be above 0: others are measured by it")


class _FromSchedule(LRScheduler):
    def __init__(self, schedule: Callable[[int], float], optimizer: torch.optim.Optimizer):
        self.rates = GroupRates(schedule, optimizer)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return self.rates.at(self.last_epoch)

    def state_dict(self) -> dict:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict) -> None:
        self.last_epoch = whole("last_epoch", state_dict["last_epoch"], 0)
        self._last_lr = self.get_lr()
        self.rates.use(self.last_epoch)


def as_torch(schedule: Callable[[int], float], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A torch scheduler that sets these rates; call its `step()` once after each update.

    Each parameter group gets what `GroupRates` says; one that is added later, from the next
    `step()` on. The `state_dict` holds the position only: rebuild it with the same schedule, then
    load.
    """
    _check_optimizer(optimizer)
    return _FromSchedule(schedule, optimizer)


def record_rates(optimizer: torch.optim.Optimizer) -> list[float | tuple[float, ...]]:
    """A list that gets the rate of each `step()` from now on, as it is used.

    With several parameter groups it gets a tuple, one rate a group.
    """
    _check_optimizer(optimizer)
    rates: list[float | tuple[float, ...]] = []

    def record(optimizer, *_):
        used = tuple(float(group["lr"]) for group in optimizer.param_groups)
        rates.append(used if len(used) > 1 else used[0])

    optimizer.register_step_pre_hook(record)
    return rates


def _between(start: float, end: float, share: float) -> float:
    """From start, exactly, at share 0 to end, exactly, at share 1, and never beyond either."""
    mixed = start * (1 - share) + end * share
    return min(max(mixed, min(start, end)), max(start, end))


def _half_cosine(share: float) -> float:
    """From 0 to 1, flat at both ends."""
    return (1 - math.cos(math.pi * share)) / 2


def _check_schedule(schedule) -> None:
    if not callable(schedule):
        raise TypeError(f"a schedule is a function of the update's number, got {schedule!r}")


def _check_optimizer(optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"a torch Optimizer is needed, got {type(optimizer).__name__}")


def _check_rate(name: str, rate: float) -> None:
    if not number(name, rate) > 0:
        raise ValueError(f"{name} must be above 0, got {rate!r}")


def _check_decay(base_lr: float, final_lr: float) -> None:
    _check_rate("base_lr", base_lr)
    if not 0 <= number("final_lr", final_lr) <= base_lr:
        raise ValueError(f"final_lr must lie between 0 and base_lr, {base_lr}: {final_lr!r}")
