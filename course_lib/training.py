"""One training step, and the loop around it."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from course_lib.checks import number, whole
from course_lib.schedules import GroupRates

PHASES = ("forward", "loss", "backward", "sync", "step", "zero_grad")

SCALER_METHODS = ("scale", "unscale_", "step", "update", "get_scale")

LossFn = Callable[[nn.Module, Any], Tensor]
Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Step:
    """What one step did.

    `loss` is the weighted mean over the micro-batches (nan under fake tensors, which have no
    values), `grad_norm` the norm before clipping or None without clipping, `stepped` False when
    the scaler skipped the update.
    """

    loss: float
    grad_norm: float | None
    stepped: bool


def train_step(
    model: nn.Module,
    micro_batches: Sequence,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    weights: Sequence[float] | None = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    clip_norm: float | None = None,
    phase: Phase = nullcontext,
) -> Step:
    """Forward, loss and backward for each micro-batch, then one update and zero_grad.

    `loss_fn(model, batch)` returns a scalar mean. `weights` has one number a micro-batch (the
    number of its tokens, say; equal if None): the losses are weighted by it, so that together
    they equal the one large batch. `autocast` is the dtype of forward and loss. `scaler` has
    GradScaler's methods scale, unscale_, step, update and get_scale. `clip_norm` bounds the norm
    of the gradients that the optimizer holds, all as one. `phase("forward")` … is entered around
    each of PHASES: forward ends when the model's own `forward` returns, the rest of `loss_fn` is
    loss; sync is empty on one device.

    Raises TypeError for a model, loss or batch of the wrong kind, one batch in place of a list
    among them; ValueError for no micro-batch, for weights that don't match them, for a loss that
    isn't a scalar with a graph, and where no gradient reached a parameter of the optimizer.
    """
    _check_model(model)
    _check_optimizer(optimizer)
    check_autocast(autocast)
    if scaler is not None and not all(hasattr(scaler, name) for name in SCALER_METHODS):
        raise TypeError(f"scaler needs {', '.join(SCALER_METHODS)}: got {type(scaler).__name__}")
    _check_micro_batches(micro_batches)
    shares = _shares(micro_batches, weights)
    _check_clip_norm(clip_norm)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    before = _versions(model, held)
    device_type = next(model.parameters()).device.type
    total, arrived = 0.0, 0
    for batch, share in zip(micro_batches, shares, strict=True):
        with _forward_then_loss(model, phase), _autocast(device_type, autocast):
            loss = _check_loss(loss_fn(model, batch)) * share
        total = total + loss.detach()
        with phase("backward"), _arrivals(held) as gradients:
            (loss if scaler is None else scaler.scale(loss)).backward()
        arrived += len(gradients)
        del loss
    with phase("sync"):
        pass  # one device: there is nobody to exchange gradients with
    with phase("step"):
        if not (scaler is None and clip_norm is None or _any_gradient(held)):
            raise ValueError(_why_nothing_is_learnt(model, held))
        grad_norm, stepped = _update(optimizer, held, scaler, clip_norm)
    # an optimizer on masters takes the model's gradients in its step: they never reach `held`
    if not arrived and not _any_gradient(held) and _versions(model, held) == before:
        raise ValueError(_why_nothing_is_learnt(model, held))
    with phase("zero_grad"):
        optimizer.zero_grad()
    return Step(_number(total), None if grad_norm is None else _number(grad_norm), stepped)


def train(
    model: nn.Module,
    batches: Iterable[Sequence],
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    schedule: Callable[[int], float] | None = None,
    scaler: Any = None,
) -> list[Step]:
    """`steps` calls of `train_step`; `batches` yields the list of micro-batches for each.

    `schedule(k)` is the learning rate of update k = 0, 1, …: the first parameter group's, others
    keep their ratio to it (`GroupRates`). k counts updates that happened, so a step that the
    scaler skipped uses its rate again. Raises ValueError when `batches` ends early, and what
    `train_step` raises.
    """
    steps = whole("steps", steps)
    _check_optimizer(optimizer)
    rates = None if schedule is None else GroupRates(schedule, optimizer)
    done, updates, source = [], 0, iter(batches)
    for i in range(steps):
        micro_batches = next(source, None)
        if micro_batches is None:
            raise ValueError(f"batches ended after {i} of {steps} steps")
        _check_micro_batches(micro_batches, loaded=isinstance(batches, DataLoader))
        if rates is not None:
            rates.use(updates)
        step = train_step(model, micro_batches, loss_fn, optimizer, scaler=scaler)
        updates += step.stepped
        done.append(step)
    return done


@contextmanager
def _forward_then_loss(model: nn.Module, phase: Phase):
    """Phase "forward" until the model's own forward returns, then phase "loss"."""
    with ExitStack() as current:

        def forward_returned(*_):
            current.close()
            current.enter_context(phase("loss"))

        hook = model.register_forward_hook(forward_returned)
        current.enter_context(phase("forward"))
        try:
            yield
        finally:
            hook.remove()


def _update(optimizer, held, scaler, clip_norm) -> tuple[Tensor | None, bool]:
    """Unscale, clip, step, update the scale: in this order. Returns the norm and "it stepped"."""
    if scaler is not None and clip_norm is not None:
        scaler.unscale_(optimizer)
    norm = None
    if clip_norm is not None:
        norm = nn.utils.clip_grad_norm_(held, clip_norm)
    if scaler is None:
        optimizer.step()
        return norm, True
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return norm, scaler.get_scale() >= before > 0  # at 0 every gradient is NaN


def _autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager:
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def _number(value: Tensor) -> float:
    return float("nan") if isinstance(value, FakeTensor) else value.item()


def _shares(micro_batches: Sequence, weights: Sequence[float] | None) -> list[float]:
    """Each micro-batch's share of the loss; they add up to 1."""
    if weights is None:
        return [1 / len(micro_batches)] * len(micro_batches)
    weights = [float(weight) for weight in weights]
    if len(weights) != len(micro_batches):
        raise ValueError(f"{len(weights)} weights for {len(micro_batches)} micro-batches")
    if min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ValueError(f"weights must be at least 0 and not all 0, got {weights}")
    return [weight / sum(weights) for weight in weights]


@contextmanager
def _arrivals(parameters: list[Tensor]):
    """The parameters to which backward gives a gradient, also where a hook takes it at once."""
    arrived = []
    hooks = [
        p.register_post_accumulate_grad_hook(arrived.append)
        for p in parameters
        if p.requires_grad and p.is_leaf
    ]
    try:
        yield arrived
    finally:
        for hook in hooks:
            hook.remove()


def _any_gradient(parameters: list[Tensor]) -> bool:
    return any(p.grad is not None for p in parameters)


def _versions(model: nn.Module, held: list[Tensor]) -> list[int]:
    """How often each parameter was written in place so far: what a step moves, it changes."""
    return [p._version for p in (*model.parameters(), *held)]


def _why_nothing_is_learnt(model: nn.Module, held: list[Tensor]) -> str:
    """The likely mistake, by what is there after a backward that reached none of `held`."""
    if not any(p.requires_grad for p in held):
        why = "all are frozen: set requires_grad_(True) for those to train"
    elif {id(p) for p in model.parameters()}.isdisjoint(map(id, held)):
        why = (
            "none is this model's. The optimizer was built for another model, or for parts that "
            "were replaced since: build it again, from model.parameters()"
        )
    elif _any_gradient(list(model.parameters())):
        why = "the loss reaches other parameters of the model only: give the optimizer those"
    else:
        why = (
            "the loss doesn't come from the model's parameters. It was rebuilt from numbers, by "
            "item(), detach() or torch.tensor(…), say: return the tensor that was computed"
        )
    return f"no parameter of the optimizer has a gradient: {why}"


def _check_micro_batches(micro_batches: Any, loaded: bool = False) -> None:
    """Raise for what is no list of batches; `loaded`: a DataLoader's, which are one batch each."""
    if not isinstance(micro_batches, (list, tuple)):
        raise TypeError(
            f"micro_batches must be a list of batches, got {type(micro_batches).__name__}: "
            "write [batch] for one"
        )
    if not micro_batches:
        raise ValueError("micro_batches is empty: a step needs at least one")
    tensors = any(isinstance(each, Tensor) for each in micro_batches)
    kinds = {
        (each.dtype, each.dim()) if isinstance(each, Tensor) else type(each)
        for each in micro_batches
    }
    if tensors and (loaded or isinstance(micro_batches, tuple) or len(kinds) > 1):
        raise TypeError(
            f"micro_batches must be a list of batches, and this {type(micro_batches).__name__} of "
            f"{len(micro_batches)} tensors is one batch: write [(x, y)], for a DataLoader "
            "([batch] for batch in loader), and list(parts) if they are micro-batches"
        )


def _check_clip_norm(clip_norm: float | None) -> None:
    if clip_norm is None or clip_norm == math.inf:  # inf measures the norm only
        return
    if not number("clip_norm", clip_norm) > 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm}")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters to train")


def check_autocast(dtype: torch.dtype | None) -> None:
    """Raise TypeError for what is no dtype, ValueError for one that autocast doesn't know."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"autocast must be a torch.dtype or None, got {dtype!r}")
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast must be torch.bfloat16 or torch.float16, got {dtype}")


def _check_optimizer(optimizer: Any) -> None:
    if not all(hasattr(optimizer, name) for name in ("step", "zero_grad", "param_groups")):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss itself, many times a step: it isn't supported")


def _check_loss(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a tensor, got {type(loss).__name__}")
    if loss.dim() != 0:
        raise ValueError(f"loss_fn must return a scalar mean, got shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph: it doesn't depend on a parameter that needs a gradient. All "
            "are frozen, or it was computed under no_grad, or rebuilt from its number by item(), "
            "detach() or torch.tensor(…)"
        )
    return loss
