"""Learning-rate schedules: from the number of an optimizer update to the rate that it uses.

A schedule is a function of k = 0, 1, …, counted in updates, not in batches or epochs. After its
end it holds its last rate and never rises again.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch.optim.lr_scheduler import LRScheduler

Schedule = Callable[[int], float]


def constant(base_lr: float) -> Schedule:
    """The same rate throughout."""
    _check_rate(base_lr=base_lr)
    return _schedule(lambda k: base_lr)


def step_decay(base_lr: float, *, step_size: int, gamma: float = 0.1) -> Schedule:
    """The rate times `gamma` after every `step_size` updates.

    >>> rate = step_decay(0.1, step_size=30)
    >>> [f"{rate(k):.3f}" for k in (0, 29, 30, 60)]
    ['0.100', '0.100', '0.010', '0.001']
    """
    _check_rate(base_lr=base_lr)
    _check_steps(1, step_size=step_size)
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma must be above 0 and at most 1, got {gamma!r}")
    return _schedule(lambda k: base_lr * gamma ** (k // step_size))


def linear(base_lr: float, *, total_steps: int, final_lr: float = 0.0) -> Schedule:
    """Straight from `base_lr` at update 0 to `final_lr`, reached at update `total_steps`."""
    _check_decay(base_lr, final_lr, total_steps=total_steps)

    def rate(k: int) -> float:
        return base_lr + (final_lr - base_lr) * min(k, total_steps) / total_steps

    return _schedule(rate)


def cosine(base_lr: float, *, total_steps: int, final_lr: float = 0.0) -> Schedule:
    """Half a cosine from `base_lr` at update 0 to `final_lr` at update `total_steps`.

    Unlike torch's CosineAnnealingLR it doesn't rise again. Source: https://arxiv.org/abs/1608.03983
    """
    _check_decay(base_lr, final_lr, total_steps=total_steps)

    def rate(k: int) -> float:
        turn = math.pi * min(k, total_steps) / total_steps
        return final_lr + (base_lr - final_lr) * (1 + math.cos(turn)) / 2

    return _schedule(rate)


def wsd(
    base_lr: float,
    *,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    final_lr: float = 0.0,
) -> Schedule:
    """Warmup, a stable stretch, and a straight decay. Source: https://arxiv.org/abs/2404.06395"""
    _check_steps(0, warmup_steps=warmup_steps, stable_steps=stable_steps)
    decay = linear(base_lr, total_steps=decay_steps, final_lr=final_lr)
    level = _schedule(lambda k: base_lr if k < stable_steps else decay(k - stable_steps))
    return warmup(level, warmup_steps=warmup_steps)


def one_cycle(
    max_lr: float,
    *,
    total_steps: int,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Up from max_lr / div_factor and down to that / final_div_factor, each by half a cosine.

    The last update, total_steps − 1, has the lowest rate; torch's OneCycleLR, which this is up to
    there, bounces up after it. Source: https://arxiv.org/abs/1708.07120
    """
    _check_rate(max_lr=max_lr)
    _check_steps(2, total_steps=total_steps)
    top = pct_start * total_steps - 1
    if not 0 < top < total_steps - 1:
        raise ValueError(f"the top, update {top:g}, must lie inside of {total_steps} updates")
    if not (div_factor >= 1 and final_div_factor >= 1):
        raise ValueError("div_factor and final_div_factor must be at least 1")
    first = max_lr / div_factor
    last = first / final_div_factor

    def rate(k: int) -> float:
        if k <= top:
            return _between(first, max_lr, k / top)
        return _between(max_lr, last, min(1.0, (k - top) / (total_steps - 1 - top)))

    return _schedule(rate)


def warmup(schedule: Schedule, *, warmup_steps: int, start_lr: float | None = None) -> Schedule:
    """A schedule with a straight rise in front; update `warmup_steps` is its update 0.

    Update k < warmup_steps uses (k + 1) / warmup_steps of its first rate, so the first rate isn't
    0 and the full rate is held for two updates. With `start_lr` it is
    start_lr + (first − start_lr) · k / warmup_steps.

    >>> rate = warmup(constant(1.0), warmup_steps=4)
    >>> [rate(k) for k in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    _check_schedule(schedule)
    _check_steps(0, warmup_steps=warmup_steps)
    first = schedule(0)
    if start_lr is not None and not 0 <= start_lr <= first:
        raise ValueError(f"start_lr must lie between 0 and the first rate, {first}: {start_lr!r}")

    def rate(k: int) -> float:
        if k >= warmup_steps:
            return schedule(k - warmup_steps)
        if start_lr is None:
            return first * (k + 1) / warmup_steps
        return start_lr + (first - start_lr) * k / warmup_steps

    return _schedule(rate)


def fraction_to_steps(fraction: float, total_steps: int) -> int:
    """A share of the updates as a whole number, rounded up: 1 % of 150 updates are 2.

    >>> fraction_to_steps(0.01, 150), fraction_to_steps(0.1, 30), fraction_to_steps(0, 30)
    (2, 3, 0)
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction!r}")
    _check_steps(0, total_steps=total_steps)
    return math.ceil(Fraction(str(fraction)) * total_steps)  # the decimal that was written


class _FromSchedule(LRScheduler):
    def __init__(self, schedule: Schedule, optimizer: torch.optim.Optimizer):
        self.schedule = schedule
        first = optimizer.param_groups[0]["lr"]
        self.shares = [group["lr"] / first for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [share * self.schedule(self.last_epoch) for share in self.shares]

    def state_dict(self) -> dict:
        return {"last_epoch": self.last_epoch, "shares": list(self.shares)}

    def load_state_dict(self, state_dict: dict) -> None:
        self.last_epoch, self.shares = state_dict["last_epoch"], list(state_dict["shares"])
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def as_torch(schedule: Schedule, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A torch scheduler that sets these rates; call its `step()` once after each update.

    The first parameter group gets the schedule's rate, others keep their ratio to it. Its
    `state_dict` holds the position only: rebuild it with the same schedule, then load.
    """
    _check_schedule(schedule)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"as_torch needs a torch Optimizer, got {type(optimizer).__name__}")
    if not optimizer.param_groups[0]["lr"] > 0:
        raise ValueError("the first group's rate must be above 0: others are measured by it")
    return _FromSchedule(schedule, optimizer)


def record_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """A list that gets the rate of the first group at each `step()` from now on, as it is used."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"a torch Optimizer is needed, got {type(optimizer).__name__}")
    rates: list[float] = []
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(float(optimizer.param_groups[0]["lr"]))
    )
    return rates


def _schedule(rate: Schedule) -> Schedule:
    """A schedule that refuses what is no update's number."""

    def checked(k: int) -> float:
        if isinstance(k, bool) or not isinstance(k, int) or k < 0:
            raise ValueError(f"an update's number is a whole number from 0, got {k!r}")
        return rate(k)

    return checked


def _between(start: float, end: float, share: float) -> float:
    """Half a cosine from start to end."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _check_schedule(schedule) -> None:
    if not callable(schedule):
        raise TypeError(f"a schedule is a function of the update's number, got {schedule!r}")


def _check_rate(**rates: float) -> None:
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise TypeError(f"{name} must be a number, got {rate!r}")
        if not 0 < rate < math.inf:
            raise ValueError(f"{name} must be above 0, got {rate!r}")


def _check_steps(least: int, **steps: int) -> None:
    for name, count in steps.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} must be a whole number of updates, got {count!r}")
        if count < least:
            raise ValueError(f"{name} must be at least {least}, got {count}")


def _check_decay(base_lr: float, final_lr: float, **steps: int) -> None:
    _check_rate(base_lr=base_lr)
    _check_steps(1, **steps)
    if not 0 <= final_lr <= base_lr:
        raise ValueError(f"final_lr must lie between 0 and base_lr, {base_lr}: {final_lr!r}")
