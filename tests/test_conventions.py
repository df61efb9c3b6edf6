"""Each convention's moments against a traced step that holds exactly the copies it names."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib import facts, memory_trace, models
from course_lib.ledgers import CONVENTIONS
from course_lib.moments import ONE_BY_ONE, moments
from course_lib.precision import MasterWeights
from course_lib.shapes import DTYPES

LLAMA = dataclasses.replace(facts.model("llama-2-7b"), num_layers=2)
SMALL = facts.ModelConfig(
    vocab_size=2000, dim=64, num_layers=6, num_heads=4, ffn_dim=160, max_seq_len=64, name="small"
)


class OneByOne(torch.optim.Optimizer):
    """Adam in float32, tensor by tensor, with the copies that a convention names."""

    def __init__(self, parameters, convention):
        super().__init__(parameters, dict(lr=1e-4))
        self.kind = CONVENTIONS[convention]
        if self.kind.gradients != self.kind.weights or self.kind.copies:
            for p in self.param_groups[0]["params"]:
                p.register_post_accumulate_grad_hook(self.widen)

    def widen(self, p):
        self.state[p]["gradient"] = p.grad.float()
        if not self.kind.copies:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for moment in () if "m" in state else ("m", "v"):
                state[moment] = torch.zeros_like(p, dtype=DTYPES[self.kind.moments])
            if self.kind.masters and "master" not in state:
                state["master"] = p.float()
            g = state.pop("gradient", p.grad).to(DTYPES[self.kind.moments])
            state["m"].lerp_(g, 0.1)
            state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
            step = (state["m"] / state["v"].sqrt().add_(1e-8)).mul_(1e-4)
            p.copy_(state.get("master", p).sub_(step))


class AllAtOnce(torch.optim.Optimizer):
    """torch's own AdamW on masters, whose gradients `MasterWeights` widens all at once."""

    def __init__(self, parameters, convention, **how):
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.kept, self.kind = MasterWeights(parameters), CONVENTIONS[convention]
        self.inner = torch.optim.AdamW(self.kept.masters, **how)
        if self.kind.gradients == "fp32" or self.kind.copies:
            for p, master in zip(parameters, self.kept.masters, strict=True):
                p.register_post_accumulate_grad_hook(lambda p, m=master: self.widen(p, m))

    def widen(self, p, master):
        master.grad = p.grad.float()
        if not self.kind.copies:
            p.grad = None

    def step(self):
        if self.kind.gradients != "fp32" and not self.kind.copies:
            self.kept.take_gradients()
        self.inner.step()
        self.kept.give_weights()
        self.inner.zero_grad()


def traced(config, convention, batch, seq, build):
    """The peaks of the second step's phases."""
    timeline = memory_trace.measure(
        lambda: models.Transformer(config),
        lambda: torch.zeros((batch, seq), dtype=torch.int64),
        lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()),
        build,
        dtype=DTYPES[CONVENTIONS[convention].weights],
        autocast=torch.bfloat16 if convention == "autocast" else None,
    )
    return {phase.name: phase.peak_bytes for phase in timeline.phases if phase.step == 2}


@pytest.mark.parametrize("config", [LLAMA, SMALL], ids=lambda config: config.name)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_one_tensor_at_a_time_each_phase_is_the_traced_one(convention, config):
    seq = min(1024, config.max_seq_len)
    peaks = traced(config, convention, 2, seq, lambda m: OneByOne(m.parameters(), convention))
    found = moments(config, convention, batch=2, seq=seq, step=ONE_BY_ONE)
    for moment in found.phases:
        assert moment.total_bytes == pytest.approx(peaks[moment.phase], rel=0.01), moment.name


MASTERS = [name for name, kind in CONVENTIONS.items() if kind.masters]


@pytest.mark.parametrize("step", ["foreach", "fused"])
@pytest.mark.parametrize("convention", MASTERS)
def test_all_at_once_each_phase_is_the_traced_one(convention, step):
    peaks = traced(
        LLAMA, convention, 2, 1024, lambda m: AllAtOnce(m.parameters(), convention, **{step: True})
    )
    found = moments(LLAMA, convention, batch=2, seq=1024, step=step)
    for moment in found.phases:
        assert moment.total_bytes == pytest.approx(peaks[moment.phase], rel=0.01), moment.name


# --- ZeRO, as one of W devices would run it: no bucket, nothing fetched ahead ---

W = 4


class OneDevice(torch.optim.Optimizer):
    """AdamW on the first 1/W of each tensor; at stage 2 a layer's gradients are cut, too."""

    def __init__(self, model, convention, stage):
        super().__init__(list(model.parameters()), {})
        self.parameters, self.stage = self.param_groups[0]["params"], stage
        shares = [share(p).detach() for p in self.parameters]
        self.masters = CONVENTIONS[convention].masters
        self.shares = [nn.Parameter(s.float() if self.masters else s) for s in shares]
        self.inner = torch.optim.AdamW(self.shares, foreach=True)
        for layer in (model.embedding, *model.layers, model.norm, model.head):
            if stage == 2:
                self.cut_gradients(list(layer.parameters()))

    def cut_gradients(self, own):
        """Of one layer, once all of them are there."""
        arrived = []

        def count(p):
            arrived.append(p)
            if len(arrived) == len(own):
                arrived.clear()
                for p in own:
                    p.cut, p.grad = share(p.grad).clone(), None

        for p in own:
            p.register_post_accumulate_grad_hook(count)

    @torch.no_grad()
    def step(self):
        for p, own in zip(self.parameters, self.shares, strict=True):
            gradient = share(p.grad) if self.stage == 1 else p.__dict__.pop("cut")
            own.grad = gradient.float()  # itself, if it is float32
            del gradient
        self.inner.step()
        self.inner.zero_grad()
        if self.masters:
            for p, own in zip(self.parameters, self.shares, strict=True):
                share(p).copy_(own)


def share(tensor):
    return tensor.view(-1)[: tensor.numel() // W]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("convention", ["fp32", "zero-fp16"])
def test_what_zero_leaves_on_a_device_is_the_traced_one(convention, stage):
    """In backward, stage 2 counts a layer's gradients whole at each of its lines."""
    peaks = traced(LLAMA, convention, 2, 1024, lambda m: OneDevice(m, convention, stage))
    found = moments(LLAMA, convention, batch=2, seq=1024, zero_stage=stage, data_parallel=W)
    for moment in found.phases:
        near = 0.05 if (stage, moment.phase) == (2, "backward") else 0.01
        assert moment.total_bytes == pytest.approx(peaks[moment.phase], rel=near), moment.name
