"""Number formats bit by bit, rounding to them, and the two tools of mixed precision.

A `Format` is a sign bit, exponent bits and mantissa bits. `encode` and `decode` go from a number
to its bits and back, `round_to` rounds whole tensors. `LossScaler` keeps small gradients from
becoming 0 in fp16, `MasterWeights` keeps small updates from being lost.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor, nn

from course_lib.checks import one_of, whole

HIGHEST = ("infinity", "nan", "numbers")  # what the highest exponent can stand for


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    `highest` says what the highest exponent stands for. "infinity": for that, and for NaN, as in
    IEEE 754. "nan": all ones are NaN, the rest are numbers (fp8 e4m3fn). "numbers": for numbers
    alone (fp4 and fp6 of the OCP's MX formats, which have neither infinity nor NaN).
    `saturates` says what a cast does with larger numbers: the largest, or infinity.

    >>> FP16.bits, FP16.max, FP16.eps
    (16, 65504.0, 0.0009765625)
    >>> Format("fp4 e2m1", 2, 1, "numbers", saturates=True).max
    6.0
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    highest: str = "infinity"
    saturates: bool = False

    def __post_init__(self):
        exponent = whole("exponent_bits", self.exponent_bits, least=0)
        mantissa = whole("mantissa_bits", self.mantissa_bits, least=0)
        one_of("highest", self.highest, HIGHEST)
        most = 8 if self.highest == "infinity" else 7
        if not (2 <= exponent <= most and 1 <= mantissa <= 23):
            raise ValueError(
                f"a format has 2 to {most} exponent bits and 1 to 23 mantissa bits, as float32 at "
                f"most, got {exponent} and {mantissa}"
            )
        object.__setattr__(self, "exponent_bits", exponent)
        object.__setattr__(self, "mantissa_bits", mantissa)
        if self.highest == "numbers" and not self.saturates:
            raise ValueError("without infinity and NaN a format has to saturate: saturates=True")

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is added to an exponent before it is stored."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max(self) -> float:
        return decode(self._last, self)

    @property
    def _last(self) -> int:
        """The bits of the largest number."""
        ones = 2 ** (self.bits - 1) - 1
        return ones - {"infinity": 2**self.mantissa_bits, "nan": 1, "numbers": 0}[self.highest]

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """The smallest number above 0."""
        return self.min_normal * self.eps

    @property
    def eps(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits


NARROW = (torch.float32, torch.float16, torch.bfloat16)  # what an fp32 master holds exactly

FP32 = Format("fp32", 8, 23)
TF32 = Format("tf32", 8, 10)
FP16 = Format("fp16", 5, 10)
BF16 = Format("bf16", 8, 7)
FP8_E4M3 = Format("fp8 e4m3fn", 4, 3, "nan", saturates=True)
FP8_E5M2 = Format("fp8 e5m2", 5, 2)


def decode(bits: int, format: Format) -> float:
    """The number that a pattern of bits stands for.

    >>> decode(0b0_01111_1000000000, FP16)
    1.5
    """
    bits = whole("bits", bits, least=0)
    if bits >= 2**format.bits:
        raise ValueError(f"{format.name} has patterns 0 to {2**format.bits - 1}, got {bits}")
    sign = -1.0 if bits >> (format.bits - 1) else 1.0
    field = bits >> format.mantissa_bits & 2**format.exponent_bits - 1
    mantissa = bits & 2**format.mantissa_bits - 1
    if bits & 2 ** (format.bits - 1) - 1 > format._last:
        return sign * math.inf if format.highest == "infinity" and not mantissa else math.nan
    if field == 0:  # subnormal: no 1 before the point
        return sign * mantissa * format.min_subnormal
    return sign * (1 + mantissa * format.eps) * 2.0 ** (field - format.bias)


def encode(x: float, format: Format, *, overflow: str | None = None) -> int:
    """The bits of the number of this format that is nearest to x; `overflow` as in `round_to`.

    >>> f"{encode(1.5, FP16):016b}"
    '0011111000000000'
    """
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"encode takes a number, got {type(x).__name__}")
    value = round_to(torch.tensor(float(x), dtype=torch.float64), format, overflow=overflow).item()
    sign = int(math.copysign(1, value) < 0) << (format.bits - 1)
    if math.isnan(value):
        quiet = 2 ** (format.mantissa_bits - 1) if format.highest == "infinity" else 0
        return format._last + 1 + quiet
    if math.isinf(value):
        return sign | format._last + 1
    size = abs(value)
    if size < format.min_normal:
        return sign | int(size / format.min_subnormal)
    exponent = math.frexp(size)[1] - 1
    mantissa = int((size / 2.0**exponent - 1) / format.eps)
    return sign | exponent + format.bias << format.mantissa_bits | mantissa


def neighbours(x: float, format: Format) -> tuple[float, float]:
    """The numbers of this format just below and just above the one that x rounds to.

    Beyond the largest there is infinity, or NaN where the format has none.

    >>> neighbours(1.0, BF16)
    (0.99609375, 1.0078125)
    """
    bits = encode(x, format)
    value = decode(bits, format)
    if math.isnan(value):
        return math.nan, math.nan
    if math.isinf(value):
        return (format.max, value) if value > 0 else (value, -format.max)
    top = 1 << format.bits - 1
    # in this order the patterns of the numbers follow each other: below 0, the sizes fall
    place = -(bits - top) if bits & top else bits

    def at(place):
        if abs(place) == top:  # beyond the largest, where every pattern is a number
            return math.nan
        return decode(top - place if place < 0 else place, format)

    return at(place - 1), at(place + 1)


def round_to(x: Tensor, format: Format, *, overflow: str | None = None) -> Tensor:
    """Each number's nearest of this format, in the dtype of x, float32 or float64; ties to even.

    It rounds once, also from float64, where torch's own casts round to float32 first. Beyond the
    largest number, `overflow="ieee"` gives infinity (NaN where the format has none) and
    `"saturate"` the largest; the default is what torch 2.13's cast does. The gradient is a cast's:
    it goes through as if nothing had been rounded. Raises ValueError for NaN where there is none.
    """
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"round_to takes a float32 or float64 tensor, got {kind}")
    if overflow is None:
        overflow = "saturate" if format.saturates else "ieee"
    allowed = ("saturate",) if format.highest == "numbers" else ("ieee", "saturate")
    one_of("overflow", overflow, allowed)
    if format.highest == "numbers" and x.isnan().any():
        raise ValueError(f"{format.name} has no NaN: every pattern is a number")
    return _Rounded.apply(x, format, overflow)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, format: Format, overflow: str) -> Tensor:
        wide = x.double()
        _, exponent = torch.frexp(wide)  # |x| lies below 2**exponent, not below half of that
        smallest = 1 - format.bias
        step = _power_of_two((exponent - 1).clamp(min=smallest) - format.mantissa_bits)
        rounded = torch.round(wide / step) * step  # torch.round takes ties to even
        beyond = math.inf if format.highest == "infinity" else math.nan
        limit = torch.full_like(wide, format.max if overflow == "saturate" else beyond)
        rounded = torch.where(rounded.abs() > format.max, limit.copysign(wide), rounded)
        return torch.where(wide.isnan(), wide, rounded).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in float64, exactly: its bits are the exponent's, and no mantissa."""
    return (exponent.long() + 1023 << 52).view(torch.float64)


class LossScaler:
    """Multiplies the loss, divides the gradients by the same, and skips steps that overflowed.

    Step by step the same as `torch.amp.GradScaler`, whose names and defaults it has; `skipped`
    counts the steps that were left out. In a training step, in this order: `scale(loss)` and
    backward, `unscale_` if gradients are clipped, `step`, `update`.
    Source: https://arxiv.org/abs/1710.03740
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ):
        self._scale = torch.tensor(init_scale, dtype=torch.float32)
        usable = 0 < self._scale < math.inf
        if not (usable and growth_factor > 1 and 0 < backoff_factor < 1):
            raise ValueError(
                "a scale above 0, a growth factor above 1 and a backoff factor between 0 and 1 "
                f"are needed, got {init_scale}, {growth_factor}, {backoff_factor}"
            )
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = whole("growth_interval", growth_interval)
        self.skipped = 0
        self._in_a_row = 0  # steps without overflow since the scale last changed
        self._overflowed: dict[int, bool] = {}  # by optimizer, once it is unscaled
        self._stepped: set[int] = set()

    def get_scale(self) -> float:
        return self._scale.item()

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale.to(loss.device)

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and note whether any is infinite or NaN."""
        if id(optimizer) in self._stepped:
            raise RuntimeError("unscale_() comes before step()")
        if id(optimizer) in self._overflowed:
            raise RuntimeError("these gradients are unscaled already: update() comes first")
        inverse = self._scale.double().reciprocal().float()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        gradients = [gradient for gradient in gradients if gradient is not None]
        if not gradients:
            raise RuntimeError(
                "there are no gradients to unscale: none of this optimizer's parameters has one. "
                "backward() didn't run yet; or its loss reaches another optimizer's parameters "
                "only: then leave this one out of this update; or zero_grad() cleared them; or "
                "MasterWeights.take_gradients() wasn't called"
            )
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise ValueError("sparse gradients aren't supported")
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("fp16 gradients would underflow again: keep fp32 masters")
        self._overflowed[id(optimizer)] = not all(g.isfinite().all() for g in gradients)
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, unless a gradient overflowed."""
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() was called already since the last update()")
        if id(optimizer) not in self._overflowed:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        if self._overflowed[id(optimizer)]:
            self.skipped += 1
        else:
            optimizer.step()

    def update(self) -> None:
        """A smaller scale after an overflow, a larger one after `growth_interval` good steps."""
        if not self._overflowed:
            raise RuntimeError("update() comes after step(): no gradients were looked at")
        if any(self._overflowed.values()):
            self._scale = (self._scale.double() * self.backoff_factor).float()
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            if self._in_a_row == self.growth_interval:
                grown = (self._scale.double() * self.growth_factor).float()
                self._scale = grown if grown.isfinite() else self._scale
                self._in_a_row = 0
        self._overflowed.clear()
        self._stepped.clear()


class MasterWeights:
    """fp32 copies of 16-bit parameters, for the optimizer to update.

    Build the optimizer on `masters`, whose gradients it zeroes. After each backward
    `take_gradients()` adds the gradients to theirs, after the optimizer's step `give_weights()`
    rounds the masters into the parameters. Each parameter is given once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        if not self.parameters or not all(isinstance(p, nn.Parameter) for p in self.parameters):
            raise TypeError("MasterWeights takes a model's parameters")
        if len({id(p) for p in self.parameters}) < len(self.parameters):
            raise ValueError("a parameter was given twice: its masters would overwrite each other")
        wide = [p.dtype for p in self.parameters if p.dtype not in NARROW]
        if wide:
            raise TypeError(f"masters are fp32: they can't hold all of {wide[0]}")
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.parameters]

    def take_gradients(self) -> None:
        """Each gradient, in fp32, is added to its master's; the parameters have none left."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
