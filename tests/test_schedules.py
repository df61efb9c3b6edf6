"""The schedules, against published values, torch's own, and the laws that they state."""

import ast
import copy
import csv
import math
import pickle
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from course_lib import facts
from course_lib.schedules import (
    GroupRates,
    as_torch,
    constant,
    cosine,
    fraction_to_steps,
    linear,
    one_cycle,
    record_rates,
    step_decay,
    warmup,
    wsd,
)

with (Path(__file__).parent / "facts" / "lr_values.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))

# What of the published schedules ours define, from the first update to the last.
OURS = {
    "StepLR(step_size=30,gamma=0.1)": step_decay(0.1, step_size=30),
    "CosineAnnealingLR(T_max=100,eta_min=0)": cosine(0.1, total_steps=100),
    "CosineAnnealingLR(T_max=100,eta_min=0.01)": cosine(0.1, total_steps=100, final_lr=0.01),
    "LinearLR(default 1/3->1,total_iters=5)": warmup(
        constant(0.1), warmup_steps=5, start_lr=0.1 / 3
    ),
    "LinearLR(start=0.01,total_iters=10)": warmup(constant(0.1), warmup_steps=10, start_lr=0.001),
    "ExponentialLR(0.9)": step_decay(0.1, step_size=1, gamma=0.9),
    "LambdaLR(0.95**t)": step_decay(0.1, step_size=1, gamma=0.95),
    "OneCycleLR(max_lr=1.0,total_steps=100)": one_cycle(1.0, total_steps=100),
    "SequentialLR([LinearLR(0.1,1,10),CosineAnnealingLR(90)],[10])": warmup(
        cosine(0.1, total_steps=90), warmup_steps=10, start_lr=0.01
    ),
    "get_linear_schedule_with_warmup(w=10,T=100)": warmup(
        linear(1.0, total_steps=90), warmup_steps=10, start_lr=0.0
    ),
    "get_cosine_schedule_with_warmup(w=10,T=100,cycles=.5)": warmup(
        cosine(1.0, total_steps=90), warmup_steps=10, start_lr=0.0
    ),
    "get_cosine_with_hard_restarts(w=10,T=100,cycles=1)": warmup(
        cosine(1.0, total_steps=90), warmup_steps=10, start_lr=0.0
    ),
    "WarmupLR(0->1,w=10,linear)": warmup(constant(1.0), warmup_steps=10, start_lr=0.0),
    "WarmupDecayLR(T=100,w=10,linear)": warmup(
        linear(1.0, total_steps=90), warmup_steps=10, start_lr=0.0
    ),
    "get_lr(6e-4,w=2000,T=600000,min=6e-5)": warmup(
        cosine(6e-4, total_steps=598_000, final_lr=6e-5), warmup_steps=2000, start_lr=6e-4 / 2001
    ),
}
# Where ours hold the last rate and the published one rises again, or raises.
RISES = {
    ("CosineAnnealingLR(T_max=100,eta_min=0)", step) for step in (200, 201, 210)
} | {
    ("OneCycleLR(max_lr=1.0,total_steps=100)", 101),
    ("SequentialLR([LinearLR(0.1,1,10),CosineAnnealingLR(90)],[10])", 101),
    ("get_cosine_schedule_with_warmup(w=10,T=100,cycles=.5)", 101),
}  # fmt: skip
DEFINED = [row for row in ROWS if row["schedule"] in OURS]


@pytest.mark.parametrize("row", DEFINED, ids=lambda r: f"{r['schedule'][:24]} {r['step']}")
def test_a_published_value_is_ours_unless_the_published_schedule_rises_again(row):
    schedule, step = OURS[row["schedule"]], int(row["step"])
    if (row["schedule"], step) in RISES:
        published = float("inf") if row["lr"].startswith("EXC") else float(row["lr"])
        assert schedule(step) == schedule(10 * step) < published
    else:
        assert abs(schedule(step) - float(row["lr"])) < 1e-12


def test_every_schedule_that_ours_define_has_rows():
    assert {row["schedule"] for row in DEFINED} == set(OURS) and len(DEFINED) > 70


def deepspeed_warmup(t, w, kind):
    """https://github.com/deepspeedai/DeepSpeed, runtime/lr_schedules.py, its WarmupLR."""
    return min(1.0, math.log(t + 1) / math.log(w) if kind == "log" else t / w)


def test_deepspeeds_logarithmic_warmup_is_ahead_of_a_straight_one():
    logs = {
        int(row["step"]): float(row["lr"])
        for row in ROWS
        if row["schedule"] == "WarmupDecayLR(T=100,w=10,log)" and int(row["step"]) < 10
    }
    straight = warmup(linear(1.0, total_steps=90), warmup_steps=10, start_lr=0.0)
    for step, rate in logs.items():
        assert abs(deepspeed_warmup(step, 10, "log") - rate) < 1e-12
        assert rate >= straight(step)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_deepspeeds_cosine_is_one_count_ahead_of_ours(kind):
    name = f"WarmupCosineLR(T=100,w=10,cos_min_ratio=1e-4,{kind})"
    rows = {int(r["step"]): float(r["lr"]) for r in ROWS if r["schedule"] == name}
    ours = warmup(cosine(1.0, total_steps=90, final_lr=1e-4), warmup_steps=10)
    assert len(rows) >= 7
    for step, rate in rows.items():
        ahead = deepspeed_warmup(step, 10, kind) if step < 10 else ours(step + 1)
        assert abs(rate - ahead) < 1e-12


def test_torchs_sequential_reaches_the_rate_one_update_later_than_ours():
    w = 6
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rise = lr_scheduler.LinearLR(optimizer, 1 / w, 1.0, total_iters=w)
    theirs = lr_scheduler.SequentialLR(
        optimizer, [rise, lr_scheduler.CosineAnnealingLR(optimizer, 20)], [w]
    )
    ours, seen = warmup(cosine(1.0, total_steps=20), warmup_steps=w), []
    for _ in range(w + 10):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert abs(ours(w - 1) - 1.0) < 1e-12 and ours(w) == 1.0
    assert seen[w - 1] < 0.99 and abs(seen[w] - 1.0) < 1e-12
    for k in range(w, w + 10):
        assert abs(ours(k) - seen[k]) < 1e-12


lengths = st.integers(1, 500)
rates = st.floats(1e-6, 10)


@st.composite
def decays(draw):
    total = draw(lengths)
    kind = draw(st.sampled_from([linear, cosine]))
    base = draw(rates)
    final = base * draw(st.floats(0, 1))
    return total, kind(base, total_steps=total, final_lr=final), base, final


@given(decays(), st.integers(0, 40))
def test_warmup_uses_each_update_of_the_inner_schedule_once(decay, w):
    total, inner, *_ = decay
    used = []

    def watched(k):
        used.append(k)
        return inner(k)

    whole = warmup(watched, warmup_steps=w)
    used.clear()
    found = [whole(k) for k in range(w + total + 1)]
    assert used == list(range(total + 1))
    assert found[w:] == [inner(k) for k in range(total + 1)]
    assert found[0] > 0
    assert all(a <= b for a, b in zip(found[:w], found[1 : w + 1], strict=True))
    if w:
        assert found[w - 1] == inner(0) == max(found)  # the full rate is held for two updates


@given(decays(), st.integers(0, 1000))
def test_after_its_end_a_schedule_holds_its_last_rate_and_it_never_rose(decay, later):
    total, schedule, base, final = decay
    found = [schedule(k) for k in range(total + 1)]
    assert all(a >= b - 1e-15 * base for a, b in zip(found, found[1:], strict=False))
    assert found[0] == base == max(found) and found[-1] == final == min(found)
    assert schedule(total + later) == final


@given(lengths, lengths, lengths)
def test_wsd_is_warmup_level_and_decay_with_nothing_missing(w, stable, decay):
    schedule = wsd(1.0, warmup_steps=w, stable_steps=stable, decay_steps=decay, final_lr=0.1)
    rates = [schedule(k) for k in range(w + stable + decay + 1)]
    assert rates[:w] == pytest.approx([(k + 1) / w for k in range(w)])
    assert rates[w : w + stable + 1] == [1.0] * (stable + 1)
    fall = [1.0 - 0.9 * k / decay for k in range(decay + 1)]
    assert rates[w + stable :] == pytest.approx(fall)
    assert schedule(10_000) == pytest.approx(0.1)


@given(st.integers(5, 300), st.floats(0.25, 0.9))
def test_one_cycle_is_torchs_until_its_last_update_and_then_stays(total, pct_start):
    if not 0 < pct_start * total - 1 < total - 1:
        return
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    theirs = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=total, pct_start=pct_start)
    ours = one_cycle(0.5, total_steps=total, pct_start=pct_start)
    for k in range(total):
        assert abs(ours(k) - optimizer.param_groups[0]["lr"]) < 1e-12
        optimizer.step()
        if k < total - 1:
            theirs.step()
    assert ours(total) == ours(total + 100) == ours(total - 1)


def test_no_warmup_is_the_schedule_itself():
    inner = cosine(0.3, total_steps=10)
    for start in (None, 0.0):
        none = warmup(inner, warmup_steps=0, start_lr=start)
        assert [none(k) for k in range(12)] == [inner(k) for k in range(12)]


# --- as a torch scheduler ---


def run(schedule, updates, resume_at=None, build_first=True):
    """The rates that updates use; with `resume_at`, everything is rebuilt and loaded there, the
    scheduler before or after the optimizer is loaded."""

    def build():
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.2}]
        return torch.optim.AdamW(groups, lr=0.1)

    optimizer = build()
    scheduler = as_torch(schedule, optimizer)
    seen = []
    for k in range(updates):
        if k == resume_at:
            saved = optimizer.state_dict(), scheduler.state_dict()
            optimizer = build()
            if build_first:
                scheduler = as_torch(schedule, optimizer)
            optimizer.load_state_dict(saved[0])
            if not build_first:
                scheduler = as_torch(schedule, optimizer)
            scheduler.load_state_dict(saved[1])
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


SCHEDULE = warmup(cosine(0.1, total_steps=20, final_lr=0.01), warmup_steps=5)


def test_torchs_optimizer_uses_the_schedule_and_groups_keep_their_ratio():
    for k, (first, second) in enumerate(run(SCHEDULE, 30)):
        assert abs(first - SCHEDULE(k)) < 1e-15 and abs(second - 2 * SCHEDULE(k)) < 1e-15


FROM_ZERO_TO_ZERO = warmup(cosine(0.1, total_steps=20), warmup_steps=5, start_lr=0.0)


@pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 24, 25, 29])
@pytest.mark.parametrize("build_first", [True, False])
@pytest.mark.parametrize("schedule", [SCHEDULE, FROM_ZERO_TO_ZERO], ids=repr)
def test_a_resumed_run_goes_on_along_the_same_curve(schedule, at, build_first):
    resumed = run(schedule, 30, resume_at=at, build_first=build_first)
    assert resumed == run(schedule, 30)


def test_the_position_is_all_that_a_state_dict_holds():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = as_torch(SCHEDULE, optimizer)
    scheduler.load_state_dict({"last_epoch": 7})
    assert scheduler.state_dict() == {"last_epoch": 7}
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == SCHEDULE(7)
    for bad, error in (({"last_epoch": -3}, ValueError), ({"last_epoch": "7"}, TypeError)):
        with pytest.raises(error, match="last_epoch"):
            scheduler.load_state_dict(bad)
        assert scheduler.last_epoch == 7 and optimizer.param_groups[0]["lr"] == SCHEDULE(7)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=rate)
    scheduler = as_torch(SCHEDULE, optimizer)
    scheduler.load_state_dict({"last_epoch": 7})
    assert optimizer.param_groups[0]["lr"] is rate and abs(rate.item() - SCHEDULE(7)) < 1e-8


@pytest.mark.parametrize(
    ("rate", "error"),
    [(math.nan, ValueError), (-1.0, ValueError), (math.inf, ValueError), ("0.1", TypeError)],
)
def test_a_rate_that_is_none_is_refused_by_as_torch(rate, error):
    with pytest.raises(error, match=r"schedule\(0\) must be (finite|at least 0|a number)"):
        as_torch(lambda k: rate, torch.optim.SGD([torch.zeros(1)], lr=0.1))


def two_groups(first=0.1, second=0.2):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    return torch.optim.SGD(
        [{"params": weights[:1], "lr": first}, {"params": weights[1:], "lr": second}]
    )


def test_a_group_that_is_added_later_joins_in_by_its_own_rate():
    """pytorch#79888: a group added after the scheduler ended in a bare error of zip()."""
    both, grown = two_groups(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedulers = as_torch(SCHEDULE, both), as_torch(SCHEDULE, grown)
    for k in range(20):
        if k == 7:
            grown.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2})
        for optimizer, scheduler in zip((both, grown), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        if k >= 7:
            assert [g["lr"] for g in grown.param_groups] == [g["lr"] for g in both.param_groups]
            assert schedulers[1].get_last_lr() == schedulers[0].get_last_lr()


def test_a_grown_run_goes_on_from_its_states():
    def grown():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = as_torch(SCHEDULE, optimizer)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.3})
        return optimizer, scheduler

    whole, resumed = grown(), grown()
    for k in range(20):
        for optimizer, scheduler in (whole, resumed):
            optimizer.step()
            scheduler.step()
        if k == 11:
            saved = [copy.deepcopy(each.state_dict()) for each in resumed]
            resumed = grown()
            for each, state in zip(resumed, saved, strict=True):
                each.load_state_dict(state)
    rates = [[group["lr"] for group in each[0].param_groups] for each in (whole, resumed)]
    assert rates[0] == rates[1] and rates[0][1] == pytest.approx(3 * rates[0][0])


def test_a_run_resumed_with_a_new_peak_follows_the_new_schedule():
    """pytorch/examples#816: the saved settings win, with torch's scheduler: 2.5e-4 at update 50."""

    def resumed(scheduler_of):
        old, new = (torch.optim.AdamW([torch.ones(1)], lr=lr) for lr in (5e-4, 1e-4))
        saved = scheduler_of(old, 5e-4)
        for _ in range(50):
            old.step()
            saved.step()
        scheduler = scheduler_of(new, 1e-4)
        new.load_state_dict(old.state_dict())
        scheduler.load_state_dict(saved.state_dict())
        new.step()
        scheduler.step()
        return new.param_groups[0]["lr"], scheduler

    ours, scheduler = resumed(lambda o, peak: as_torch(cosine(peak, total_steps=100), o))
    torchs, _ = resumed(lambda o, peak: lr_scheduler.CosineAnnealingLR(o, 100))
    assert ours == cosine(1e-4, total_steps=100)(51) and torchs == pytest.approx(5 * ours)
    scheduler.load_state_dict({"last_epoch": 50})
    assert scheduler.get_last_lr() == [pytest.approx(5e-5, rel=1e-12)]


def test_groups_are_set_as_numbers_or_in_their_tensors():
    optimizer = two_groups(torch.tensor(0.1), 0.3)
    rate = optimizer.param_groups[0]["lr"]
    GroupRates(constant(0.5), optimizer).use(0)
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.5
    assert optimizer.param_groups[1]["lr"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    "schedule",
    [
        constant(0.1),
        cosine(0.1, total_steps=20, final_lr=0.01),
        warmup(wsd(0.1, warmup_steps=1, stable_steps=2, decay_steps=3), warmup_steps=5),
    ],
    ids=repr,
)
def test_a_schedule_prints_as_the_call_that_makes_it(schedule):
    again = eval(repr(schedule))
    assert [again(k) for k in range(30)] == [schedule(k) for k in range(30)]


def halves(k):
    return 0.5**k


def test_a_function_of_the_reader_s_prints_by_its_name():
    assert repr(warmup(halves, warmup_steps=2)) == "warmup(halves, warmup_steps=2)"
    given_by_name = warmup(schedule=halves, warmup_steps=2)
    assert repr(given_by_name) == "warmup(schedule=halves, warmup_steps=2)"


EACH = [
    constant(0.1),
    step_decay(0.1, step_size=3, gamma=0.5),
    linear(0.1, total_steps=20),
    cosine(0.1, total_steps=20, final_lr=0.01),
    wsd(0.1, warmup_steps=1, stable_steps=2, decay_steps=3),
    one_cycle(0.1, total_steps=20),
    warmup(cosine(0.1, total_steps=20), warmup_steps=5, start_lr=0.01),
    warmup(schedule=halves, warmup_steps=5),
]


@pytest.mark.parametrize("schedule", EACH, ids=repr)
@pytest.mark.parametrize("again", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_a_schedule_comes_back_whole_from_a_pickle(schedule, again):
    other = again(schedule)
    assert other == schedule and repr(other) == repr(schedule)
    assert [other(k) for k in range(30)] == [schedule(k) for k in range(30)]


def test_two_schedules_are_equal_where_their_calls_are():
    assert cosine(0.1, total_steps=20) == cosine(0.1, total_steps=20) != cosine(0.1, total_steps=21)
    assert cosine(0.1, total_steps=20) != linear(0.1, total_steps=20)
    assert len({cosine(0.1, total_steps=20), cosine(0.1, total_steps=20)}) == 1


def test_numpy_numbers_are_numbers():
    three, half = np.int64(3), np.float32(0.5)
    for rate, same in (
        (cosine(half, total_steps=three), cosine(0.5, total_steps=3)),
        (linear(half, total_steps=three), linear(0.5, total_steps=3)),
        (step_decay(half, step_size=three), step_decay(0.5, step_size=3)),
        (one_cycle(half, total_steps=np.int64(9)), one_cycle(0.5, total_steps=9)),
        (warmup(constant(half), warmup_steps=three), warmup(constant(0.5), warmup_steps=3)),
        (
            wsd(half, warmup_steps=three, stable_steps=three, decay_steps=three),
            wsd(0.5, warmup_steps=3, stable_steps=3, decay_steps=3),
        ),
    ):
        assert [rate(k) for k in np.arange(12)] == [same(k) for k in range(12)]
        assert repr(rate) == repr(same)
    assert fraction_to_steps(0.5, three) == 2 and type(fraction_to_steps(0.5, three)) is int


# --- fractions, and what is refused ---


@given(st.integers(1, 1000), st.data(), st.integers(0, 10**6))
def test_a_fraction_is_rounded_up_and_not_by_chance(whole, data, total):
    part = data.draw(st.integers(0, whole))
    assert fraction_to_steps(part / whole, total) == -(-part * total // whole)


def test_a_product_that_missed_a_whole_number_is_that_number():
    assert fraction_to_steps(3 * 0.1, 10) == 3 and fraction_to_steps(1e-10, 10) == 1
    for recipe in facts.recipes():
        assert fraction_to_steps(recipe.warmup_fraction, recipe.total) == recipe.warmup


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: constant(0.0), ValueError, "base_lr must be above 0"),
        (lambda: constant("0.1"), TypeError, "must be a number"),
        (lambda: constant(float("nan")), ValueError, "base_lr must be finite"),
        (lambda: step_decay(0.1, step_size=0), ValueError, "step_size must be at least 1"),
        (lambda: step_decay(0.1, step_size=5, gamma=1.1), ValueError, "gamma"),
        (lambda: linear(0.1, total_steps=0), ValueError, "total_steps must be at least 1"),
        (lambda: cosine(0.1, total_steps=10.0), TypeError, "total_steps must be a whole"),
        (lambda: cosine(0.1, total_steps=10, final_lr=0.2), ValueError, "final_lr"),
        (lambda: linear(0.1, total_steps=10, final_lr=-0.1), ValueError, "final_lr"),
        (lambda: warmup(constant(0.1), warmup_steps=-1), ValueError, "at least 0"),
        (lambda: warmup(constant(0.1), warmup_steps=3, start_lr=0.2), ValueError, "start_lr"),
        (lambda: warmup(0.1, warmup_steps=3), TypeError, "a function of the update's number"),
        (lambda: wsd(0.1, warmup_steps=1, stable_steps=1, decay_steps=0), ValueError, "at least 1"),
        (lambda: one_cycle(0.1, total_steps=3), ValueError, "must lie inside"),
        (lambda: one_cycle(0.1, total_steps=10, div_factor=0.5), ValueError, "div_factor"),
        (lambda: constant(0.1)(-1), ValueError, "at least 0"),
        (lambda: constant(0.1)(1.5), TypeError, "whole number"),
        (lambda: constant(0.1)(True), TypeError, "whole number"),
        (lambda: constant(True), TypeError, "must be a number"),
        (lambda: step_decay(0.1, step_size=True), TypeError, "step_size must be a whole"),
        (lambda: step_decay(0.1, step_size=5, gamma=0.0), ValueError, "gamma"),
        (lambda: step_decay(0.1, step_size=5, gamma="0.1"), TypeError, "gamma must be a number"),
        (lambda: linear(0.1, total_steps=5, final_lr="0"), TypeError, "final_lr must be a number"),
        (lambda: cosine(0.1, total_steps=5, final_lr=None), TypeError, "final_lr must be a number"),
        (lambda: wsd(1.0, warmup_steps=1, stable_steps=1, decay_steps=0), ValueError, "decay_st"),
        (lambda: warmup(constant(1.0), warmup_steps=1, start_lr="0"), TypeError, "start_lr must"),
        (lambda: warmup(lambda k: 0.0, warmup_steps=4), ValueError, "first_rate must be above 0"),
        (lambda: warmup(lambda k: math.nan, warmup_steps=4), ValueError, "first_rate"),
        (lambda: one_cycle(0.1, total_steps=1), ValueError, "at least 2"),
        (lambda: one_cycle(0.1, total_steps=9, pct_start="0.3"), TypeError, "pct_start must be"),
        (
            lambda: one_cycle(0.1, total_steps=9, div_factor=math.inf),
            ValueError,
            "div_factor must be f",
        ),
        (lambda: fraction_to_steps("0.1", 10), TypeError, "fraction must be a number"),
        (lambda: fraction_to_steps(True, 10), TypeError, "fraction must be a number"),
        (lambda: fraction_to_steps(1.5, 10), ValueError, "between 0 and 1"),
        (lambda: as_torch(constant(0.1), "sgd"), TypeError, "torch Optimizer"),
        (lambda: as_torch(constant(0.1), two_groups(0.0, 0.1)), ValueError, "above 0"),
        (lambda: as_torch(0.1, two_groups()), TypeError, "a function of the update's number"),
        (lambda: one_cycle(0.1, total_steps=9, final_div_factor=0), ValueError, "final_div_factor"),
        (lambda: wsd(1.0, warmup_steps=1.0, stable_steps=1, decay_steps=1), TypeError, "warmup_st"),
        (lambda: wsd(1.0, warmup_steps=1, stable_steps=-1, decay_steps=1), ValueError, "stable_st"),
    ],
)
def test_what_makes_no_schedule_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_schedule_is_what_train_takes():
    from course_lib import models
    from course_lib.training import train

    model = models.mlp(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = ([torch.ones(1, 2)] for _ in range(8))
    train(model, batches, lambda m, x: m(x).mean(), optimizer, steps=8, schedule=SCHEDULE)
    assert optimizer.param_groups[0]["lr"] == SCHEDULE(7)


def test_recorded_rates_are_those_that_the_updates_used():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    optimizer.step()
    rates = record_rates(optimizer)
    for rate in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.3
    assert rates == [0.1, 0.2]
    with pytest.raises(TypeError, match="torch Optimizer"):
        record_rates("sgd")


def test_of_several_groups_every_rate_is_recorded():
    optimizer = two_groups()
    rates = record_rates(optimizer)
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.3
    optimizer.step()
    assert rates == [(0.1, 0.2), (0.1, 0.3)]


FORMULAS = {
    "get_cosine_schedule_with_warmup(w=10,T=100,cycles=.5)": "transformers_rate",
    "WarmupCosineLR(T=100,w=10,cos_min_ratio=1e-4,log)": "deepspeed_rate",
}


@pytest.mark.parametrize("schedule", FORMULAS)
def test_the_formulas_that_chapter_04_writes_out_are_the_published_ones(schedule):
    chapter = Path(__file__).parents[1] / "chapters" / "04_schedules.ipynb"
    cells = nbformat.read(chapter, 4).cells
    (source,) = (cell.source for cell in cells if f"def {FORMULAS[schedule]}" in cell.source)
    names = {"math": math, "w": 10, "K": 90}
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    exec(compile(ast.Module(functions, []), "chapter 04", "exec"), names)
    rows = [row for row in ROWS if row["schedule"] == schedule]
    assert len(rows) >= 7
    later = FORMULAS[schedule] == "deepspeed_rate"  # its count begins after the first update
    for row in rows:
        rate = names[FORMULAS[schedule]](int(row["step"]) + later)
        assert abs(rate - float(row["lr"])) < 1e-12
