"""What LossScaler and MasterWeights say to an optimizer that holds no gradients."""

import numpy as np
import pytest
import torch
from torch import nn

from course_lib.precision import LossScaler, MasterWeights


def two_optimizers():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    return weights, [torch.optim.SGD([weight], lr=0.5) for weight in weights]


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_an_optimizer_that_the_loss_doesn_t_reach_is_refused_by_all_its_likely_causes(call):
    """nerfstudio PR#1919: torch says "No inf checks were recorded for this optimizer"."""
    (first, _), (reached, other) = two_optimizers()
    scaler = LossScaler(2.0)
    scaler.scale(first.sum()).backward()
    scaler.step(reached)
    with pytest.raises(RuntimeError, match="no gradients") as refused:
        getattr(scaler, call)(other)
    for cause in ("backward() didn't run", "another optimizer's", "zero_grad()", "take_gradients"):
        assert cause in str(refused.value)


@pytest.mark.parametrize("make", [LossScaler, lambda scale: torch.amp.GradScaler("cpu", scale)])
def test_an_update_goes_on_without_the_optimizer_that_has_no_gradients(make):
    weights, (reached, other) = two_optimizers()
    scaler = make(2.0)
    for loss in (weights[0].sum(), sum(weights).sum()):
        scaler.scale(loss).backward()
        for optimizer in (reached, other):
            if any(p.grad is not None for p in optimizer.param_groups[0]["params"]):
                scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert [weight.item() for weight in weights] == [0.0, 0.5]


def test_masters_whose_gradients_were_not_taken_are_refused():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    pair, scaler = MasterWeights([weight]), LossScaler(2.0)
    optimizer = torch.optim.SGD(pair.masters, lr=0.5)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match="take_gradients"):
        scaler.step(optimizer)
    pair.take_gradients()
    scaler.step(optimizer)
    assert pair.masters[0].item() == 0.5


def test_an_interval_may_be_numpy_s_whole_number():
    scaler = LossScaler(2.0, growth_interval=np.int64(1))
    weight = nn.Parameter(torch.ones(1))
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.5))
    scaler.update()
    assert scaler.get_scale() == 4.0
    for wrong in (1.5, True, "1"):
        with pytest.raises(TypeError, match="growth_interval must be a whole number"):
            LossScaler(growth_interval=wrong)
