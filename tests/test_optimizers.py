"""Ours against torch.optim, against runs on known functions, and against theory."""

import ast
import copy
import csv
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import facts, models
from course_lib.memory_trace import measure
from course_lib.optimizers import SGD, Adam, AdamW, state_bytes

FACTS = Path(__file__).parent / "facts"
PAIRS = {
    "SGD": (SGD, torch.optim.SGD, {}),
    "SGD with decay": (SGD, torch.optim.SGD, dict(weight_decay=0.1)),
    "momentum": (SGD, torch.optim.SGD, dict(momentum=0.9)),
    "Nesterov": (SGD, torch.optim.SGD, dict(momentum=0.9, nesterov=True, weight_decay=0.1)),
    "Adam": (Adam, torch.optim.Adam, {}),
    "Adam, L2": (Adam, torch.optim.Adam, dict(weight_decay=0.1, betas=(0.8, 0.95))),
    "AMSGrad": (Adam, torch.optim.Adam, dict(amsgrad=True, eps=1e-3)),
    "AdamW": (AdamW, torch.optim.AdamW, {}),
    "AdamW, AMSGrad": (AdamW, torch.optim.AdamW, dict(amsgrad=True, weight_decay=0.1)),
}


def pair(kinds, shapes, lr=0.01):
    """The same parameters twice, in two groups of different rates, under ours and torch's."""
    ours, theirs, options = kinds
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    both = []
    for kind in (ours, theirs):
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in made]
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3 * lr}]
        both.append((parameters, kind([g for g in groups if g["params"]], lr=lr, **options)))
    return both


def play(pairs, steps, seed=1, missing=0.2):
    """The same gradients to both, some of them missing."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for i, tensor in enumerate(pairs[0][0]):
            absent = torch.rand((), generator=generator) < missing
            g = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            for parameters, _ in pairs:
                parameters[i].grad = None if absent else g.clone()
        for _, optimizer in pairs:
            optimizer.step()


def apart(pairs):
    (ours, _), (theirs, _) = pairs
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kinds", PAIRS.values(), ids=PAIRS)
@settings(max_examples=20)
@given(
    shapes=st.lists(st.sampled_from([(), (1,), (3,), (2, 5), (2, 3, 4)]), min_size=1, max_size=4)
)
def test_a_hundred_steps_are_torchs(kinds, shapes):
    pairs = pair(kinds, shapes)
    play(pairs, 100)
    assert apart(pairs) < 1e-12


OTHER = {
    SGD: dict(momentum=0.5, weight_decay=0.3, nesterov=False),
    Adam: dict(betas=(0.5, 0.9), eps=0.1, weight_decay=0.3, amsgrad=True),
    AdamW: dict(betas=(0.5, 0.9), eps=0.1, weight_decay=0.3, amsgrad=True),
}


@pytest.mark.parametrize("kinds", PAIRS.values(), ids=PAIRS)
def test_a_group_has_its_own_options(kinds):
    ours, theirs, options = kinds
    pairs = []
    for kind in (ours, theirs):
        weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
        groups = [{"params": weights[:1]}, {"params": weights[1:], **OTHER[ours]}]
        pairs.append((weights, kind(groups, **options)))
    play(pairs, 30)
    assert apart(pairs) < 1e-12


@pytest.mark.parametrize("kinds", PAIRS.values(), ids=PAIRS)
def test_what_isn_t_said_is_as_in_torch(kinds):
    own = inspect.signature(kinds[0]).parameters
    torchs = inspect.signature(kinds[1]).parameters
    assert all(torchs[name].default == own[name].default for name in own if name != "params")


@pytest.mark.parametrize("kinds", PAIRS.values(), ids=PAIRS)
def test_a_run_goes_on_from_a_state_dict(kinds):
    whole, halves = pair(kinds, [(3,), (2, 2)]), pair(kinds, [(3,), (2, 2)])
    play(whole, 20)
    play(whole, 20, seed=2)
    play(halves, 20)
    parameters, optimizer = halves[0]
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = kinds[0]([{"params": fresh[::2]}, {"params": fresh[1::2]}], lr=1.0, **kinds[2])
    resumed.load_state_dict(saved)
    halves[0] = fresh, resumed
    play(halves, 20, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(fresh, whole[0][0], strict=True))


@pytest.mark.parametrize("kinds", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_has_as_many_bytes_as_torchs(kinds, dtype):
    ours, theirs, options = kinds
    sizes = []
    for kind in (ours, theirs):
        model = torch.nn.Sequential(torch.nn.Linear(20, 13), torch.nn.Linear(13, 4)).to(dtype)
        optimizer = kind(model.parameters(), **options)
        assert state_bytes(optimizer) == 0
        model(torch.ones(1, 20, dtype=dtype)).sum().backward()
        optimizer.step()
        sizes.append(state_bytes(optimizer))
    assert sizes[0] == sizes[1]
    n, tensors, each = 329, 4, 4 if dtype is torch.float32 else 2
    numbers = 1 if options.get("momentum") else 0
    if ours is not SGD:
        numbers = 3 if options.get("amsgrad") else 2
    counters = 0 if ours is SGD else 4 * tensors
    assert sizes[0] == each * numbers * n + counters


@pytest.mark.parametrize("kinds", PAIRS.values(), ids=PAIRS)
def test_a_parameter_without_a_gradient_is_left_alone(kinds):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = kinds[0]([parameter], **kinds[2])
    parameter.grad = torch.ones(3)
    optimizer.step()
    after, kept = parameter.detach().clone(), state_bytes(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(parameter, after) and state_bytes(optimizer) == kept


def test_a_closure_is_called_with_gradients_on():
    w = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = SGD([w], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = w**2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert abs(w.item() - 0.8) < 1e-6


@pytest.mark.parametrize("kinds", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_dict_keeps_the_counter_and_every_byte_in_any_dtype(kinds, dtype):
    """More than 256 steps: in bfloat16 a counter would stop there."""

    def steps(weight, optimizer, n):
        for k in range(n):
            weight.grad = torch.full_like(weight, (-1) ** k * 0.5)
            optimizer.step()

    whole, half = (torch.nn.Parameter(torch.ones(10, dtype=dtype)) for _ in range(2))
    first, second = (kinds[0]([w], lr=0.01, **kinds[2]) for w in (whole, half))
    steps(whole, first, 600)
    steps(half, second, 300)
    resumed = kinds[0]([half], lr=0.01, **kinds[2])
    resumed.load_state_dict(copy.deepcopy(second.state_dict()))
    assert state_bytes(resumed) == state_bytes(second)
    steps(half, resumed, 300)
    assert torch.equal(whole, half)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_they_run_on_shapes_without_numbers_too(kind):
    def traced(fake):
        return measure(
            lambda: models.mlp(8, 16, 4), lambda: torch.zeros(2, 8),
            lambda model, x: model(x).sum(), lambda model: kind(model.parameters()), fake=fake,
        )  # fmt: skip

    assert traced(True).peak_bytes == traced(False).peak_bytes


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_the_gradient_is_not_changed(kind):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], **({"momentum": 0.9} if kind is SGD else {}))
    for _ in range(3):
        weight.grad = torch.full_like(weight, 2.0)
        kept = weight.grad
        optimizer.step()
        optimizer.step()
        assert torch.equal(kept, torch.full_like(weight, 2.0))


FUNCTIONS = {
    "rosenbrock": lambda x, y: (1 - x) ** 2 + 100 * (y - x**2) ** 2,
    "beale": lambda x, y: (
        (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2
    ),
    "booth": lambda x, y: (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2,
    "matyas": lambda x, y: 0.26 * (x**2 + y**2) - 0.48 * x * y,
    "himmelblau": lambda x, y: (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2,
    "quad_k100": lambda x, y: 0.5 * (x**2 + 100 * y**2),
}
KINDS = {
    "SGD(1e-3)": lambda p: SGD(p, lr=1e-3),
    "SGD(1e-3,m=.9)": lambda p: SGD(p, lr=1e-3, momentum=0.9),
    "SGD(1e-3,m=.9,nesterov)": lambda p: SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "Adam(1e-2)": lambda p: Adam(p, lr=1e-2),
    "Adam(1e-2,wd=.01 L2)": lambda p: Adam(p, lr=1e-2, weight_decay=0.01),
    "AdamW(1e-2,wd=.01)": lambda p: AdamW(p, lr=1e-2, weight_decay=0.01),
}


def runs():
    """The recorded points of each run: {(function, start, optimizer): {step: row}}."""
    found = {}
    with (FACTS / "optimizer_runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["function"], row["x0"], row["optimizer"]
            found.setdefault(key, {})[int(row["step"])] = row
    return found


@pytest.mark.parametrize("key", runs(), ids=lambda key: f"{key[0]} {key[2]}")
def test_a_run_on_a_known_function_passes_through_the_recorded_points(key):
    function, start, kind = key
    point = torch.tensor(ast.literal_eval(start), dtype=torch.float64, requires_grad=True)
    optimizer, recorded = KINDS[kind]([point]), runs()[key]
    for step in range(1, max(recorded) + 1):
        optimizer.zero_grad()
        FUNCTIONS[function](*point).backward()
        optimizer.step()
        if step in recorded:
            for found, name in zip(point.tolist(), "xy", strict=True):
                assert math.isclose(found, float(recorded[step][name]), rel_tol=1e-9, abs_tol=1e-12)


# --- where Adam fails ---


def gradient(t, row):
    if row["period"] == "3":
        return float(row["C"]) if t % 3 == 1 else -1.0
    return 1010.0 if t % 101 == 1 else -10.0


def published_recursion(row):
    """As in the paper: no bias correction, no ε, x kept in [−1, 1], rate α/√t."""
    alpha, beta1, beta2 = (float(row[name]) for name in ("alpha", "beta1", "beta2"))
    x = m = v = largest = 0.0
    for t in range(1, int(row["T"]) + 1):
        g = gradient(t, row)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        largest = max(largest, v) if row["amsgrad"] == "True" else v
        x = min(1.0, max(-1.0, x - alpha / math.sqrt(t) * m / math.sqrt(largest)))
    return x


with (FACTS / "amsgrad.csv").open(encoding="utf-8") as file:
    AMSGRAD = list(csv.DictReader(file))


@pytest.mark.parametrize("row", AMSGRAD, ids=lambda r: f"C {r['C']} {r['amsgrad']} {r['T']}")
def test_the_counterexample_ends_as_recorded(row):
    assert math.isclose(published_recursion(row), float(row["final_x"]), rel_tol=1e-9)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_our_adam_reaches_the_same_ends(amsgrad):
    row = next(r for r in AMSGRAD if r["C"] == "3" and r["amsgrad"] == str(amsgrad))
    x = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    adam = Adam([x], betas=(0.0, 0.1), amsgrad=amsgrad)
    for t in range(1, 1001):
        x.grad = torch.tensor(gradient(t, row), dtype=torch.float64)
        adam.param_groups[0]["lr"] = 0.5 / math.sqrt(t)
        adam.step()
        x.data.clamp_(-1, 1)
    assert abs(x.item() - float(row["final_x"])) < 1e-6


# --- on quadratics ---


def distances(kind, curvatures, steps):
    """|x| before the first and after each step on ½ Σ λ x², from (1, 1, …)."""
    x = torch.nn.Parameter(torch.ones(len(curvatures), dtype=torch.float64))
    optimizer, curvatures = kind([x]), torch.tensor(curvatures, dtype=torch.float64)
    found = [x.norm().item()]
    for _ in range(steps):
        x.grad = curvatures * x.detach()
        optimizer.step()
        found.append(x.norm().item())
    return found


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_the_largest_stable_step(mu):
    for factor, grows in ((0.999, False), (1.001, True)):
        lr = factor * 2 * (1 + mu) / 10
        path = distances(lambda p, lr=lr: SGD(p, lr=lr, momentum=mu), [1.0, 10.0], 20_000)
        assert (path[-1] > 1e3) == grows and (path[-1] < 1e-3) != grows


@pytest.mark.parametrize("kappa", [10, 100, 1000])
def test_momentums_best_rate_is_theorys(kappa):
    """At the double root E_t ~ t rᵗ: the rate is taken from E_t / t between T/2 and T."""
    root = math.sqrt(kappa)
    alpha, beta = (2 / (1 + root)) ** 2, ((root - 1) / (root + 1)) ** 2
    found = distances(lambda p: SGD(p, lr=alpha, momentum=beta), [1.0, float(kappa)], 300)
    # the published recursion has its rate inside: b ← β b + g, x ← x − α b, and torch's is it
    rate = ((found[300] / 300) / (found[150] / 150)) ** (1 / 150)
    assert abs(rate / ((root - 1) / (root + 1)) - 1) < 1e-3


@pytest.mark.parametrize("kappa", [10, 100])
def test_plain_descents_best_rate_is_theorys(kappa):
    found = distances(lambda p: SGD(p, lr=2 / (1 + kappa)), [1.0, float(kappa)], 200)
    assert abs(found[200] / found[199] / ((kappa - 1) / (kappa + 1)) - 1) < 1e-9


def travelled(move, rates):
    """The way of a weight whose gradient is always 1, in the updates of the last rate."""
    places = [0.0]
    for lr in rates:
        places.append(move(lr))
    return places[rates.index(rates[-1])] - places[-1]


def keras_momentum():
    """Keras's SGD: v ← μ v − γ g, θ ← θ + v, so that the buffer holds rates."""
    theta = v = 0.0

    def move(lr):
        nonlocal theta, v
        v = 0.9 * v - lr
        theta += v
        return theta

    return move


def momentum(kind):
    theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = kind([theta], lr=1.0, momentum=0.9)

    def move(lr):
        theta.grad, optimizer.param_groups[0]["lr"] = torch.ones_like(theta), lr
        optimizer.step()
        return theta.item()

    return move


def test_after_a_drop_of_the_rate_momentum_moves_by_the_new_one_as_torchs():
    """Keras's buffer remembers the old rate: 3 + 8.1 (1 − 0.9³⁰) = 10.8, where ours travels 3."""
    rates = [0.1] * 300 + [0.01] * 30
    ours, torchs = (travelled(momentum(kind), rates) for kind in (SGD, torch.optim.SGD))
    assert abs(ours - torchs) < 1e-12 and abs(ours - 3.0) < 1e-9
    assert abs(travelled(keras_momentum(), rates) - (3 + 8.1 * (1 - 0.9**30))) < 1e-9


# --- form ---


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_step_can_be_read_at_a_glance(kind):
    assert len(inspect.getsource(kind.step).splitlines()) <= 25


W = torch.nn.Parameter(torch.ones(2))


def added(kind, **options):
    kind([W], **options.pop("defaults", {})).add_param_group(
        {"params": [torch.zeros(1)], **options}
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD([W], lr=-0.1), "lr must be"),
        (lambda: SGD([W], lr=float("nan")), "lr must be"),
        (lambda: SGD([W], momentum=-1), "momentum must be"),
        (lambda: SGD([W], weight_decay=-1), "weight_decay must be"),
        (lambda: SGD([W], nesterov=True), "needs a momentum"),
        (lambda: Adam([W], betas=(0.9, 1.0)), "betas must be"),
        (lambda: Adam([W], betas=(0.9,)), "betas must be"),
        (lambda: AdamW([W], eps=-1e-8), "eps must be"),
        (lambda: Adam([W], lr=-1.0), "lr must be"),
        (lambda: Adam([W], weight_decay=-1.0), "weight_decay must be"),
        (lambda: Adam([W], betas=(-0.1, 0.9)), "betas must be"),
        (lambda: SGD([W], lr=float("inf")), "lr must be"),
        (lambda: SGD([{"params": [W], "lr": -0.1}]), "lr must be"),
        (lambda: added(SGD, momentum=-0.1), "momentum must be"),
        (lambda: added(SGD, nesterov=True), "needs a momentum"),
        (lambda: added(Adam, betas=(0.9, 1.0)), "betas must be"),
        (lambda: added(AdamW, eps=-1e-8), "eps must be"),
    ],
)
def test_what_makes_no_optimizer_is_refused_in_any_group(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD([W], lr="0.1"), "lr must be a number"),
        (lambda: SGD([W], lr=True), "lr must be a number"),
        (lambda: Adam([W], betas=("0.9", 0.9)), "a beta must be a number"),
        (lambda: SGD([W]).add_param_group([W]), "a parameter group is a dict"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("number", [np.float32(0.5), np.int64(1)])
def test_numpy_s_numbers_are_rates(number):
    weights = []
    for lr in (number, float(number)):
        weights.append(torch.nn.Parameter(torch.ones(1)))
        weights[-1].grad = torch.ones(1)
        Adam(weights[-1:], lr=lr).step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_sparse_and_complex_ones_are_refused_before_any_is_moved(kind):
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    wave = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    for refused in (embedding.weight, wave):
        first = torch.nn.Parameter(torch.ones(2))
        first.grad = torch.ones(2)
        with pytest.raises(ValueError, match="only real, dense gradients"):
            kind([first, refused]).step()
        assert torch.equal(first, torch.ones(2))


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (SGD, lambda p: torch.optim.SGD(p, momentum=0.9)),
        (Adam, torch.optim.Adam),
        (AdamW, torch.optim.AdamW),
        (SGD, Adam),
        (Adam, lambda p: SGD(p, momentum=0.9)),
    ],
)
def test_the_state_of_another_optimizer_is_refused(kind, other):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    before = other([weight])
    before.step()
    ours = kind([weight])
    ours.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match="the state is another optimizer's"):
        ours.step()


def test_state_bytes_looks_into_lists_and_counts_shared_memory_once():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight])
    shared = torch.zeros(10)
    optimizer.state[weight] = {"history": [shared, shared[:5], {"more": torch.zeros(1)}], "n": 3}
    assert state_bytes(optimizer) == 44


def test_state_bytes_needs_an_optimizer():
    with pytest.raises(TypeError, match="got Linear"):
        state_bytes(torch.nn.Linear(1, 1))


def test_what_is_said_of_torchs_own_optimizers_is_what_they_keep():
    said = {row.name: row for row in facts.optimizer_states()}
    weight = torch.nn.Parameter(torch.ones(100, 50))
    muon = torch.optim.Muon([weight])
    weight.grad = torch.ones_like(weight)
    muon.step()
    assert said["Muon"].bytes_per_weight == state_bytes(muon) / weight.numel()
    assert said["8-bit Adam"].bytes_per_weight == 2 * (1 + 4 / 256)
    assert {row.verified for row in said.values()} <= {"primary", "secondary"}
