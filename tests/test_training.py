import math
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib import datasets, models
from course_lib.precision import LossScaler, MasterWeights
from course_lib.schedules import as_torch, cosine, record_rates
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


def test_a_micro_batch_of_weight_0_is_left_out():
    one, one_weights = after_one_step([(X[:20], Y[:20])])
    padded, weights = after_one_step(parts(20, 40), weights=[3, 0])
    assert one.loss == padded.loss and torch.equal(one_weights, weights)


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
    model = mlp()
    optimizer = sgd(model)
    rates = record_rates(optimizer)
    train(model, [[(X, Y)]] * 3, loss_fn, optimizer, steps=3, schedule=lambda k: 0.1 / (k + 1))
    assert rates == [0.1, 0.05, 0.1 / 3]


def test_digits_are_learnt():
    model = models.mlp(64, 32, 10, dtype=torch.float64)
    batch = [(SPLIT.train_x, SPLIT.train_y)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = train(model, [batch] * 60, loss_fn, optimizer, steps=60)
    assert steps[-1].loss < 0.2 < steps[0].loss
    assert (model(SPLIT.test_x).argmax(1) == SPLIT.test_y).double().mean() > 0.9


# --- whose parameters: the model's, the optimizer's, those with a gradient ---


def two_layers(held):
    """Two 1 × 1 layers, all weights 1, the optimizer for `held`; the loss's gradient is 1 each."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    return model, torch.optim.SGD(held(model).parameters(), lr=0.0)


def mean_output(model, x):
    return model(x).mean()


def test_a_clip_sees_what_the_optimizer_holds_and_nothing_that_was_left_over():
    """rslearn#217: gradients that nobody zeroes spoiled the norm, to 2.132 at update 10."""
    model, optimizer = two_layers(lambda model: model[1])
    norms = [
        train_step(model, [torch.ones(1, 1)], mean_output, optimizer, clip_norm=10.0).grad_norm
        for _ in range(10)
    ]
    assert norms == [1.0] * 10
    assert model[0].weight.grad == 10  # nobody's: still there, and harmless


def test_a_clip_bounds_all_groups_as_one():
    model, _ = two_layers(lambda model: model)
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    step = train_step(model, [torch.ones(1, 1)], mean_output, optimizer, clip_norm=0.5)
    moved = torch.stack([1 - p.detach().squeeze() for p in model.parameters()])
    assert abs(step.grad_norm - 2**0.5) < 1e-6 and abs(moved.norm() - 0.5) < 1e-5


REBUILT = {  # ReLeaSE#39: a loss rebuilt from its number trains nothing, silently
    "item": lambda loss: torch.tensor(loss.item(), requires_grad=True),
    "detach": lambda loss: loss.detach().requires_grad_(),
    "list": lambda loss: torch.tensor([loss.item()] * 2, requires_grad=True).mean(),
    "numpy": lambda loss: torch.from_numpy(loss.detach().numpy().copy()).requires_grad_() * 1,
}


@pytest.mark.parametrize("rebuild", REBUILT.values(), ids=REBUILT)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 1.0}, {"scaler": LossScaler(2.0)}],
    ids=["plain", "clipped", "scaled"],  # no address: two processes collect the same names
)
def test_a_loss_that_was_rebuilt_from_its_number_is_refused(rebuild, options):
    model = mlp()
    with pytest.raises(ValueError, match="no parameter of the optimizer .* rebuilt from numbers"):
        train_step(model, [(X, Y)], lambda m, b: rebuild(loss_fn(m, b)), sgd(model), **options)


def replaced():
    """A model whose only layer was replaced after the optimizer was built."""
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0] = nn.Linear(1, 1)
    return model, optimizer


def unused():
    """The optimizer holds a layer that the loss doesn't reach."""
    model, _ = two_layers(lambda model: model)
    model.append(nn.Identity())
    model[2].spare = nn.Linear(1, 1)
    return model, torch.optim.SGD(model[2].parameters(), lr=0.1)


def frozen():
    model, optimizer = two_layers(lambda model: model[1])
    model[1].requires_grad_(False)
    return model, optimizer


ANOTHERS = {
    "another model": (lambda: (mlp(), sgd(mlp())), "none is this model's"),
    "an older model": (replaced, "replaced since"),
    "an unused part": (unused, "other parameters of the model only"),
    "frozen": (frozen, "all are frozen"),
}


@pytest.mark.parametrize(("make", "message"), ANOTHERS.values(), ids=ANOTHERS)
@pytest.mark.parametrize("fake", [False, True])
def test_an_optimizer_none_of_whose_parameters_gets_a_gradient_is_refused(make, message, fake):
    """FairMOT#125: the optimizer held an older model's tensors, silently."""
    with FakeTensorMode() if fake else nullcontext():
        model, optimizer = make()
        first = next(model.parameters())
        batch = torch.ones(2, first.shape[1], dtype=first.dtype)
        with pytest.raises(ValueError, match=message):
            train_step(model, [batch], mean_output, optimizer)


@pytest.mark.parametrize("scaler", [LossScaler, lambda: torch.amp.GradScaler("cpu")])
def test_under_a_scaler_too_the_step_says_which_mistake_it_is(scaler):
    """nerfstudio PR#1919: torch says "No inf checks were recorded for this optimizer"."""
    with pytest.raises(ValueError, match="none is this model's"):
        train_step(mlp(), [(X, Y)], loss_fn, sgd(mlp()), scaler=scaler())


def test_all_frozen_says_so_before_backward():
    model = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="the loss has no graph.* are frozen"):
        train_step(model, [(X, Y)], loss_fn, sgd(model))


class Masters(torch.optim.SGD):
    """Takes its gradients in its step, and perhaps forgets them there."""

    def __init__(self, model, forget):
        self.kept, self.forget = MasterWeights(model.parameters()), forget
        super().__init__(self.kept.masters, lr=0.1)

    def step(self):
        self.kept.take_gradients()
        super().step()
        self.kept.give_weights()
        if self.forget:
            self.zero_grad()


class InBackward(torch.optim.SGD):
    """Moves each weight as soon as its gradient is there, and keeps no gradient for the step."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.move)

    @torch.no_grad()
    def move(self, p):
        p -= self.param_groups[0]["lr"] * p.grad
        p.grad = None


class ThroughData(InBackward):
    """Writes to `p.data`, as many do: the weight's own version number doesn't tell."""

    def move(self, p):
        p.data -= self.param_groups[0]["lr"] * p.grad
        p.grad = None


@pytest.mark.parametrize(
    "build", [lambda m: Masters(m, False), lambda m: Masters(m, True), InBackward, ThroughData]
)
def test_an_optimizer_may_take_its_gradients_elsewhere(build):
    model = models.mlp(64, 16, 10)
    optimizer = build(model)
    steps = train(model, [[(X.float(), Y)]] * 5, loss_fn, optimizer, steps=5)
    assert steps[-1].loss < steps[0].loss


@pytest.mark.parametrize("build", [lambda m: Masters(m, False), InBackward])
def test_a_clip_that_would_see_no_gradient_is_refused(build):
    model = models.mlp(64, 16, 10)
    with pytest.raises(ValueError, match="no parameter of the optimizer has a gradient"):
        train_step(model, [(X.float(), Y)], loss_fn, build(model), clip_norm=1.0)


def test_a_weight_of_the_loss_may_be_all_that_is_trained():
    model, temperature = mlp(), nn.Parameter(torch.ones((), dtype=torch.float64))
    scaled = lambda m, b: F.cross_entropy(m(b[0]) / temperature, b[1])  # noqa: E731
    assert train_step(model, [(X, Y)], scaled, torch.optim.SGD([temperature], lr=0.1)).stepped
    assert temperature != 1


# --- one rate a group ---


def test_a_schedule_keeps_the_ratio_of_the_groups_as_as_torch_does():
    """flair PR#2641: all groups got one rate."""

    def rates(drive):
        model, _ = two_layers(lambda model: model)
        lrs = zip(model, (1e-4, 1e-2), strict=True)
        optimizer = torch.optim.SGD([{"params": m.parameters(), "lr": lr} for m, lr in lrs])
        used = record_rates(optimizer)
        drive(model, optimizer, cosine(3e-4, total_steps=20))
        return used

    def by_train(model, optimizer, schedule):
        batches = [[torch.ones(1, 1)]] * 10
        for _ in range(2):  # the second run finds the first rates again
            train(model, batches, mean_output, optimizer, steps=10, schedule=schedule)

    def by_torch(model, optimizer, schedule):
        for _ in range(2):
            scheduler = as_torch(schedule, optimizer)
            for _ in range(10):
                optimizer.step()
                scheduler.step()

    found = rates(by_train)
    assert found == rates(by_torch) and len(found) == 20
    for k, (first, second) in enumerate(found):
        assert first == cosine(3e-4, total_steps=20)(k % 10)
        assert abs(second / first - 100) < 1e-12


def test_train_s_schedule_needs_no_first_rate_of_one_group():
    model = mlp()
    optimizer = sgd(model, lr=0.0)
    train(model, [[(X, Y)]], loss_fn, optimizer, steps=1, schedule=lambda k: 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- one batch isn't a list of them ---


def regression(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


ONE_BATCH = {
    "a pair": (X, Y),
    "a pair of the same kind": (X, X[:, :10]),
    "a loader's list": [X, Y],
    "a target of fewer dimensions": [X, X[:, 0]],
    "of a tensor and a dict": [X, {"y": Y}],
    "cut": Y.split(20),
}


@pytest.mark.parametrize("batch", ONE_BATCH.values(), ids=ONE_BATCH)
def test_one_batch_is_not_taken_for_a_list_of_them(batch):
    with pytest.raises(TypeError, match=r"is one batch: write \[\(x, y\)\]"):
        step_with(micro_batches=batch)


def test_a_data_loader_yields_batches_not_lists_of_them():
    data = torch.utils.data.TensorDataset(X, X[:, :10])  # both float64 and of two dimensions
    loader = torch.utils.data.DataLoader(data, batch_size=30)
    model = mlp()
    with pytest.raises(TypeError, match=r"\(\[batch\] for batch in loader\)"):
        train(model, loader, regression, sgd(model), steps=2)
    batches = ([batch] for batch in loader)
    assert len(train(model, batches, regression, sgd(model), steps=2)) == 2


def test_tensors_in_a_list_are_micro_batches():
    model, cut = mlp(), list(X.split([40, 20]))
    step = train_step(model, cut, mean_output, sgd(model), weights=[40, 20])
    assert abs(step.loss - mlp()(X).mean().item()) < 1e-12


# --- what is refused ---


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
        (lambda: step_with(clip_norm=-1), ValueError, "clip_norm must be positive"),
        (lambda: step_with(clip_norm=float("nan")), ValueError, "clip_norm"),
        (lambda: step_with(clip_norm="1"), TypeError, "clip_norm must be a number"),
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
        (lambda: run(steps=2, schedule=lambda k: float("nan")), ValueError, "finite"),
        (lambda: run(steps=2, schedule=0.1), TypeError, "a schedule is a function"),
        (lambda: run(steps=True), TypeError, "whole number"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def run(steps, **options):
    model = mlp()
    return train(model, [[(X, Y)]] * 2, loss_fn, sgd(model), steps=steps, **options)


def test_numpy_s_whole_numbers_are_steps():
    assert len(run(steps=np.int64(2))) == 2


def test_an_infinite_clip_measures_only():
    step, weights = after_one_step([(X, Y)], clip_norm=math.inf)
    _, unclipped = after_one_step([(X, Y)])
    assert step.grad_norm > 0 and torch.equal(weights, unclipped)
