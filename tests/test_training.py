import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib import datasets, models
from course_lib.training import PHASES, Step, train, train_step

SPLIT = datasets.digits(dtype=torch.float64)
X, Y = SPLIT.train_x[:60], SPLIT.train_y[:60]


def mlp():
    torch.manual_seed(0)
    return models.mlp(64, 16, 10, dtype=torch.float64)


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def parts(*sizes):
    assert sum(sizes) == len(X)
    return list(zip(X.split(sizes), Y.split(sizes), strict=True))


def after_one_step(micro_batches, **options):
    model = mlp()
    step = train_step(model, micro_batches, loss_fn, sgd(model), **options)
    return step, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_step_is_the_five_lines_written_by_hand():
    model = mlp()
    optimizer = sgd(model)
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    optimizer.step()
    step, weights = after_one_step([(X, Y)])
    assert step == Step(loss.item(), None, True)
    assert torch.equal(weights, torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("sizes", [(30, 30), (15, 15, 15, 15), (20, 20, 20)])
def test_equal_micro_batches_are_the_one_batch(sizes):
    one, one_weights = after_one_step([(X, Y)])
    many, many_weights = after_one_step(parts(*sizes))
    assert abs(one.loss - many.loss) < 1e-12
    assert torch.allclose(one_weights, many_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 59), (25, 25, 10), (7, 13, 40)])
def test_weights_make_unequal_micro_batches_the_one_batch(sizes):
    one, one_weights = after_one_step([(X, Y)])
    many, many_weights = after_one_step(parts(*sizes), weights=sizes)
    assert abs(one.loss - many.loss) < 1e-12
    assert torch.allclose(one_weights, many_weights, rtol=0, atol=1e-12)
    mean_of_means, other_weights = after_one_step(parts(*sizes))
    assert not torch.allclose(one_weights, other_weights, rtol=0, atol=1e-6)


def test_clipping_bounds_the_norm_and_reports_the_one_before():
    model = mlp()
    loss_fn(model, (X, Y)).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    step, clipped = after_one_step([(X, Y)], clip_norm=norm / 4)
    start = torch.cat([p.detach().flatten() for p in mlp().parameters()])
    assert abs(step.grad_norm - norm) < 1e-12
    assert abs((clipped - start).norm().item() - 0.1 * norm / 4) < 1e-6  # torch's 1e-6 in clipping


def test_phases_come_in_order_and_the_loss_begins_where_forward_returns():
    seen = []

    @contextmanager
    def phase(name):
        seen.append(name)
        yield
        seen.append(f"end {name}")

    def noisy_loss(model, batch):
        logits = model(batch[0])
        seen.append("rest of loss_fn")
        return F.cross_entropy(logits, batch[1])

    model = mlp()
    train_step(model, parts(30, 30), noisy_loss, sgd(model), phase=phase)
    micro = ["forward", "end forward", "loss", "rest of loss_fn", "end loss"]
    micro += ["backward", "end backward"]
    rest = [mark for name in PHASES[3:] for mark in (name, f"end {name}")]
    assert seen == micro * 2 + rest
    assert not model._forward_hooks  # nothing is left on the reader's model


def test_a_fake_step_has_no_loss_value():
    with FakeTensorMode():
        model = models.mlp(64, 10)
        batch = (torch.zeros(5, 64), torch.zeros(5).long())
        step = train_step(model, [batch], loss_fn, sgd(model), clip_norm=1.0)
    assert math.isnan(step.loss) and math.isnan(step.grad_norm) and step.stepped


def test_a_failing_loss_leaves_no_hook_and_no_change():
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        train_step(model, [0], lambda model, batch: 1 / batch, sgd(model))
    assert not model._forward_hooks
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_autocast_covers_forward_and_loss_only():
    model, seen = models.mlp(64, 16, 10), {}
    model.register_forward_hook(lambda *_: seen.update(forward=torch.is_autocast_enabled("cpu")))
    first = next(model.parameters())
    first.register_hook(lambda _: seen.update(backward=torch.is_autocast_enabled("cpu")))
    step = train_step(model, [(X.float(), Y)], loss_fn, sgd(model), autocast=torch.bfloat16)
    assert seen == {"forward": True, "backward": False} and step.stepped
    assert all(p.dtype == torch.float32 for p in model.parameters())


class Unit(nn.Module):
    """One weight whose gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (self.weight * x).half().float()


def test_a_unit_gradient_overflows_fp16_once_at_65536():
    """The largest float16 is 65504, so the first step is skipped and the scale halved."""
    model, scaler = Unit(), torch.amp.GradScaler("cpu")
    batches = [[torch.ones(())]] * 4
    steps = train(
        model, batches, lambda m, x: m(x), sgd(model), steps=4, scaler=scaler,
        schedule=lambda k: [0.5, 0.25, 0.125][k],
    )  # fmt: skip
    assert [step.stepped for step in steps] == [False, True, True, True]
    assert scaler.get_scale() == 32768
    assert model.weight.item() == -(0.5 + 0.25 + 0.125)  # the skipped step's rate is used again


def test_clipping_under_a_scaler_sees_the_unscaled_gradient():
    model, scaler = Unit(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = train_step(
        model, [torch.ones(())], lambda m, x: m(x), sgd(model), scaler=scaler, clip_norm=0.5
    )
    assert abs(step.grad_norm - 1) < 1e-6
    assert abs(model.weight.item() + 0.05) < 1e-6


def test_the_schedule_gives_the_rate_of_each_update():
    model, rates = mlp(), []
    optimizer = sgd(model)
    train(
        model, [[(X, Y)]] * 3, loss_fn, optimizer, steps=3, schedule=lambda k: 0.1 / (k + 1),
        on_step=lambda i, step: rates.append((i, optimizer.param_groups[0]["lr"])),
    )  # fmt: skip
    assert rates == [(0, 0.1), (1, 0.05), (2, 0.1 / 3)]


def test_weights_of_a_run_are_counted_for_each_list_of_micro_batches():
    model, other = mlp(), mlp()
    unequal, whole = [parts(20, 40), parts(50, 10)], [[(X, Y)], [(X, Y)]]
    sizes = lambda micro_batches: [len(y) for _, y in micro_batches]  # noqa: E731
    a = train(model, unequal, loss_fn, sgd(model), steps=2, weights=sizes)
    b = train(other, whole, loss_fn, sgd(other), steps=2)
    assert all(abs(x.loss - y.loss) < 1e-12 for x, y in zip(a, b, strict=True))


def test_digits_are_learnt():
    model = models.mlp(64, 32, 10, dtype=torch.float64)
    batch = [(SPLIT.train_x, SPLIT.train_y)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = train(model, [batch] * 60, loss_fn, optimizer, steps=60)
    assert steps[-1].loss < 0.2 < steps[0].loss
    assert (model(SPLIT.test_x).argmax(1) == SPLIT.test_y).double().mean() > 0.9


def step_with(model=None, micro_batches=None, loss=loss_fn, optimizer=None, **options):
    model = model or mlp()
    micro_batches = [(X, Y)] if micro_batches is None else micro_batches
    return train_step(model, micro_batches, loss, optimizer or sgd(mlp()), **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: step_with(model=loss_fn), TypeError, "torch.nn.Module"),
        (lambda: step_with(model=nn.ReLU()), ValueError, "no parameters"),
        (lambda: step_with(optimizer=mlp()), TypeError, "torch optimizer"),
        (lambda: step_with(micro_batches=X), TypeError, r"write \[batch\]"),
        (lambda: step_with(micro_batches=[]), ValueError, "empty"),
        (lambda: step_with(weights=[1, 2]), ValueError, "2 weights for 1"),
        (lambda: step_with(weights=[0]), ValueError, "not all 0"),
        (lambda: step_with(weights=[-1]), ValueError, "at least 0"),
        (lambda: step_with(clip_norm=0), ValueError, "clip_norm must be positive"),
        (lambda: step_with(clip_norm=float("nan")), ValueError, "clip_norm"),
        (lambda: step_with(loss=lambda m, b: 1.0), TypeError, "return a tensor"),
        (lambda: step_with(loss=lambda m, b: m(b[0])), ValueError, "scalar mean"),
        (lambda: step_with(loss=lambda m, b: m(b[0]).mean().detach()), ValueError, "no graph"),
        (lambda: step_with(autocast="bfloat16"), TypeError, "torch.dtype or None"),
        (lambda: step_with(autocast=torch.float64), ValueError, "bfloat16 or torch.float16"),
        (lambda: step_with(scaler=3), TypeError, "scaler needs scale"),
        (
            lambda: step_with(optimizer=torch.optim.LBFGS(mlp().parameters())),
            TypeError,
            "isn't supported",
        ),
        (lambda: train(mlp(), [], loss_fn, None, steps=1), TypeError, "torch optimizer"),
        (lambda: run(steps=2, schedule=lambda k: float("inf")), ValueError, "finite"),
        (lambda: run(steps=2, schedule=lambda k: "0.1"), TypeError, "must be a number"),
        (lambda: run(steps=0), ValueError, "at least 1"),
        (lambda: run(steps=1.0), TypeError, "whole number"),
        (lambda: run(steps=3), ValueError, "ended after 2 of 3"),
        (lambda: run(steps=2, schedule=lambda k: -1.0), ValueError, r"schedule\(0\)"),
        (lambda: run(steps=2, schedule=lambda k: float("nan")), ValueError, "at least 0"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def run(steps, **options):
    model = mlp()
    return train(model, [[(X, Y)]] * 2, loss_fn, sgd(model), steps=steps, **options)
