"""Every live byte of a real training step, with or without the memory to run it.

Under fake tensors the same operations run on shapes alone: a model of any size can be measured
in little memory, and a small model measured both ways agrees to the byte. `live_bytes` says
how the bytes are followed, and what isn't seen.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from course_lib import checks
from course_lib.fake_tensors import Copies, ShapesAlone, ShapesCantTell
from course_lib.live_bytes import (
    CATEGORIES,
    Event,
    MemoryTimeline,
    PeakAt,
    Phase,
    Tracer,
    readers_line,
)
from course_lib.training import LossFn, check_autocast, train_step

__all__ = ["CATEGORIES", "ZERO_GRAD", "Event", "MemoryTimeline", "PeakAt", "Phase", "measure"]

ZERO_GRAD = ("after step", "before forward", "before backward")


def measure(
    build_model: Callable[[], nn.Module],
    build_batch: Callable[[], Any],
    loss_fn: LossFn,
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    fake: bool = True,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    zero_grad: str = "after step",
    set_to_none: bool = True,
) -> MemoryTimeline:
    """Run `steps` training steps and record every live byte of them.

    `build_model()` and `build_optimizer(model)` build new ones; `build_batch()` returns tensors,
    in lists, tuples or dicts if several, and is called `accumulate` times a step;
    `loss_fn(model, batch)` returns a scalar mean. All run with `dtype` as torch's default. With
    `fake` nothing is computed and no memory is needed; otherwise the step is run for real.
    `zero_grad` is "after step", "before forward" or "before backward".

    Raises TypeError or ValueError for input of the wrong kind, for a model that was built
    before, and, under fake tensors, for a model that reads values, is converted once it is built,
    or runs an operation that torch can't run on shapes alone or whose memory they don't tell
    (nn.LSTM). Fake tensors can't refuse what depends on values: NaN, an index out of range, a
    number in a tensor that is too large for fp16. `F.one_hot` has other temporaries under them,
    an eighth larger.
    """
    steps, accumulate = checks.whole("steps", steps), checks.whole("accumulate", accumulate)
    checks.one_of("zero_grad", zero_grad, ZERO_GRAD)
    _check(build_model, build_batch, loss_fn, build_optimizer, dtype)
    check_autocast(autocast)
    tracer, fake_mode = Tracer(fake), ShapesAlone() if fake else None
    default = torch.get_default_dtype()
    random_state = torch.get_rng_state()
    torch.set_default_dtype(dtype)
    try:
        with Copies() if fake else nullcontext(), fake_mode or nullcontext(), tracer:
            model = build_model()
            _check_new(model, tracer, fake)
            tracer.adopt(model)
            optimizer = _ZeroGrad(
                _checked_optimizer(build_optimizer(model)), zero_grad, set_to_none
            )
        for step in range(1, steps + 1):
            tracer.step = step
            batches = [tracer.take(_checked(build_batch()), fake_mode) for _ in range(accumulate)]
            with fake_mode or nullcontext(), tracer:
                train_step(
                    model,
                    batches,
                    loss_fn,
                    optimizer,
                    autocast=autocast,
                    phase=optimizer.moved(tracer.phase),
                )
            tracer.label_state(optimizer.state)
            del batches
    except RuntimeError as error:
        told = _told(error)
        if not told:
            raise
        raise ValueError(f"{told[0]}: {readers_line(error)}: {told[1]}") from error
    finally:
        torch.set_default_dtype(default)
        torch.set_rng_state(random_state)
    return tracer.timeline()


def _told(error: RuntimeError) -> tuple[str, str] | None:
    """What fake tensors can't do, and what to do; None for an error of another kind."""
    instead = "measure with fake=False, or leave it out"
    if isinstance(error, ShapesCantTell):
        return str(error), error.instead or instead
    if isinstance(error, UnsupportedOperatorException):
        return f"torch can't run {error.func} on shapes alone", instead
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        asked = "fake tensors hold no values, and this asks for one, as .item(), float() and if do"
        return asked, instead
    if "Couldn't swap" in str(error):
        converted = "a model that is built can't be converted on shapes alone, as .to() does"
        return converted, "build it as it shall be, as with measure(dtype=torch.bfloat16)"
    return None


class _ZeroGrad:
    """An optimizer whose zero_grad happens where `measure` was told, not where it's called."""

    def __init__(self, optimizer: torch.optim.Optimizer, where: str, set_to_none: bool):
        self._optimizer, self._where, self._set_to_none = optimizer, where, set_to_none
        self._due = False

    def __getattr__(self, name: str):
        return getattr(self._optimizer, name)

    def zero_grad(self) -> None:
        """train_step's own call, after the step."""
        if self._where == "after step":
            self._optimizer.zero_grad(set_to_none=self._set_to_none)
        self._due = True

    def moved(self, phase: Callable) -> Callable:
        """`phase`, with the pending zero_grad run before the phase it was moved to."""
        self._due = True

        def with_zero_grad(name: str):
            if self._due and self._where == f"before {name}":
                self._due = False
                with phase("zero_grad"):
                    self._optimizer.zero_grad(set_to_none=self._set_to_none)
            if name == "zero_grad" and self._where != "after step":
                return nullcontext()
            return phase(name)

        return with_zero_grad


def _check(build_model, build_batch, loss_fn, build_optimizer, dtype):
    for name, function in (
        ("build_model", build_model),
        ("build_batch", build_batch),
        ("loss_fn", loss_fn),
        ("build_optimizer", build_optimizer),
    ):
        if not callable(function) or isinstance(function, nn.Module):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}")
    if isinstance(build_optimizer, type) and issubclass(build_optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"build_optimizer is called with the model: write "
            f"lambda model: {build_optimizer.__name__}(model.parameters())"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")


def _check_new(model: nn.Module, tracer: Tracer, fake: bool) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"build_model must return a torch.nn.Module, got {type(model).__name__}")
    for tensor in (*model.parameters(), *model.buffers()):
        known = tensor.untyped_storage()._cdata in tracer.storages
        if not known or isinstance(tensor, FakeTensor) != fake:
            raise ValueError(
                "build_model must build a new model at each call; it returned one that existed"
            )


def _checked_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"build_optimizer must return a torch optimizer, got {type(optimizer).__name__}"
        )
    return optimizer


def _checked(batch: Any) -> Any:
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
        raise TypeError(
            "build_batch must return tensors, in lists, tuples or dicts, "
            f"got {type(batch).__name__}"
        )
    return batch
