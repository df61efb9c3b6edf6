"""The race, read back from the SVG; the landscapes, against what is known of them."""

import itertools
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from course_lib.landscapes import KAPPA, LANDSCAPES, Landscape, descend
from course_lib.views import optimizers as race
from course_lib.views import style

ENDS = [
    (landscape, rate, update)
    for landscape in LANDSCAPES
    for rate in race.FACTORS
    for update in (0, 75, race.UPDATES)
]


def elements(svg, kind):
    return [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}" + kind)]


@pytest.mark.parametrize("name", LANDSCAPES)
def test_a_minimum_is_one_and_lies_inside(name):
    land = LANDSCAPES[name]
    point = torch.tensor(land.minimum, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(land.loss(*point), point, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(g, point, retain_graph=True)[0] for g in gradient])
    assert gradient.abs().max() < 1e-9
    assert torch.linalg.eigvalsh(hessian).min() > 0
    for (x, y), ((x0, x1), (y0, y1)) in zip(
        (land.start, land.minimum), [(land.xs, land.ys)] * 2, strict=True
    ):
        assert x0 < x < x1 and y0 < y < y1


def test_the_known_functions_have_their_known_values():
    """https://en.wikipedia.org/wiki/Test_functions_for_optimization"""
    assert abs(LANDSCAPES["Rosenbrock's valley"].loss(-1.2, 1.0) - 24.2) < 1e-12
    assert LANDSCAPES["Beale's plateau"].loss(1.0, 1.0) == 14.203125


STARTS = {  # what chapter 03 tells and draws begins here
    "ill-conditioned bowl": ((-4.0, 1.2), 26.0),
    "Rosenbrock's valley": ((-1.2, 1.0), 24.2),  # its published start
    "Beale's plateau": ((1.0, 1.5), 41.25),
    "saddle": ((-1.5, 0.01), 2.25 - 1e-4 + 1e-8 / 4),
    "noisy bowl": ((-4.0, 1.5), 13.625),
}


@pytest.mark.parametrize("name", LANDSCAPES)
def test_a_run_begins_at_its_start_with_the_loss_that_is_computed_by_hand(name):
    start, loss = STARTS[name]
    land = LANDSCAPES[name]
    assert tuple(descend(land, lambda p: torch.optim.SGD(p, lr=1.0), 0)[0]) == land.start == start
    assert abs(land.loss(*start) - loss) < 1e-12


def test_the_noise_has_its_size_and_no_direction():
    flat = Landscape(lambda x, y: 0 * x * y, (0, 0), (0, 0), (-1, 1), (-1, 1), noise=2.0)
    path = descend(flat, lambda p: torch.optim.SGD(p, lr=1.0), 2000)
    steps = np.diff(path, axis=0)
    assert abs(steps.std() - 2.0) < 0.1 and abs(steps.mean()) < 0.1


def test_the_saddle_is_begun_a_little_off_its_ridge():
    land = LANDSCAPES["saddle"]
    x, y = (torch.tensor(c, dtype=torch.float64, requires_grad=True) for c in land.start)
    land.loss(x, y).backward()
    assert 0 < abs(y.grad) < 0.1 < abs(x.grad)


def test_the_bowl_has_its_condition_number():
    x = torch.zeros(2, dtype=torch.float64)
    bowl = LANDSCAPES[race.BOWL]
    hessian = torch.autograd.functional.hessian(lambda p: bowl.loss(*p), x)
    values = torch.linalg.eigvalsh(hessian)
    assert values.max() / values.min() == KAPPA


def test_a_descent_is_the_optimizers_own():
    bowl = LANDSCAPES["noisy bowl"]
    paths = [descend(bowl, lambda p: torch.optim.SGD(p, lr=0.1), 5) for _ in range(2)]
    assert np.array_equal(*paths) and paths[0].shape == (6, 2)
    quiet = LANDSCAPES[race.BOWL]
    path = descend(quiet, lambda p: torch.optim.SGD(p, lr=0.01), 3)
    assert np.allclose(path[:, 1], 1.2 * (1 - 0.01 * KAPPA) ** np.arange(4))
    assert np.array_equal(path, descend(quiet, lambda p: torch.optim.SGD(p, lr=0.01), np.int64(3)))


@pytest.mark.parametrize(
    ("landscape", "steps", "error", "message"),
    [
        ("bowl", 1, TypeError, "a Landscape, got str"),
        (LANDSCAPES["saddle"], -1, ValueError, "steps must be at least 0"),
        (LANDSCAPES["saddle"], 1.5, TypeError, "steps must be a whole number"),
    ],
)
def test_what_cannot_be_descended_is_refused(landscape, steps, error, message):
    with pytest.raises(error, match=message):
        descend(landscape, lambda p: torch.optim.SGD(p, lr=0.1), steps)


@pytest.mark.parametrize(("landscape", "rate", "update"), ENDS)
def test_the_race_draws_the_paths_up_to_the_update(landscape, rate, update):
    picture, land = race.race_view()(landscape, rate, update), LANDSCAPES[landscape]
    drawn = {e.get("data-name"): e for e in elements(picture.svg, "polyline")}
    for racer, path in race.runs()[landscape, rate].items():
        points = drawn[racer].get("points").split()
        gone = ~(np.abs(path[: update + 1]) < 1e3).all(axis=1)
        assert len(points) == (np.argmax(gone) if gone.any() else update + 1)
        x, y = map(float, points[-1].split(","))
        at = path[len(points) - 1]
        if (
            land.xs[0] < at[0] < land.xs[1] and land.ys[0] < at[1] < land.ys[1]
        ):  # else it is drawn outside of the frame
            assert abs(x - (at[0] - land.xs[0]) / np.ptp(land.xs) * race.WIDE) < 0.06
            assert abs(y - (land.ys[1] - at[1]) / np.ptp(land.ys) * race.TALL) < 0.06
        loss = race.loss_after(land, path[: update + 1])
        assert race.losses_after(landscape, rate, update)[racer] == loss
        assert f"{racer} {race.written(loss)}" in picture.sentence
    assert not re.search("nan|inf", picture.svg)
    assert ("s best</text>" in picture.svg) == (landscape == race.BOWL and rate == "1")
    assert f"{landscape}, rates × {rate}, loss above the minimum's" in picture.sentence
    assert ("one draw of the noise" in picture.sentence) == (landscape == "noisy bowl")
    assert ("one draw of the noise</text>" in picture.svg) == (landscape == "noisy bowl")


@pytest.mark.parametrize("factor", race.FACTORS)
def test_the_legend_says_the_rates_that_were_used(factor):
    svg = race.race_view()(race.BOWL, factor, 10).svg
    written = [text.text for text in elements(svg, "text")]
    for racer, build in race.builders(race.BOWL, float(factor)).items():
        rate = build([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
        assert written[written.index(racer) + 1].startswith(f"lr {rate:.3g}")


def test_a_loss_is_counted_from_the_minimum_s():
    saddle = LANDSCAPES["saddle"]
    assert race.loss_after(saddle, np.array([saddle.start, saddle.minimum])) == 0


def test_every_stop_of_the_slider_is_drawn_without_a_warning(recwarn):
    for landscape, rate in itertools.product(LANDSCAPES, race.FACTORS):
        for update in range(0, race.UPDATES + 1, 5):
            race.race_view()(landscape, rate, update)
    assert not recwarn.list


@pytest.mark.parametrize(("end", "loss"), [(10.0, 100), (31.0, 961), (32.0, math.inf), (0, 0)])
def test_a_loss_is_lost_beyond_a_thousand_times_the_start_s(end, loss):
    slope = Landscape(lambda x, y: x * x, (1, 0), (0, 0), (-1, 1), (-1, 1))
    assert race.loss_after(slope, np.array([(1.0, 0.0), (end, 0.0)])) == loss
    assert race.loss_after(slope, np.array([(1.0, 0.0), (math.nan, 0.0)])) == math.inf


def test_a_loss_is_written_with_one_digit():
    assert [race.written(x) for x in (961.0, 1e-9, 9e-10, 0.0)] == [
        "1000",
        "1e-09",
        "below 1e-9",
        "below 1e-9",
    ]


def test_on_the_noisy_bowl_all_kinds_of_sgd_go_as_far_in_the_long_run():
    for builder in race.builders("noisy bowl", 1.0).values():
        (group,) = builder([torch.nn.Parameter(torch.ones(1))]).param_groups
        if "momentum" in group:
            assert group["lr"] / (1 - group["momentum"]) == pytest.approx(0.05)


def test_every_word_lies_inside_the_picture():
    for landscape, rate, update in ENDS:
        svg = race.race_view()(landscape, rate, update).svg
        for text in elements(svg, "text"):
            x, y = float(text.get("x")), float(text.get("y"))
            assert x > 0 and x + 6.8 * len(text.text) <= 566 and 10 < y < 324, text.text


def test_the_bowls_settings_are_theorys_and_twice_as_much_is_lost():
    for racer in ("SGD", "momentum", "Nesterov"):
        assert race.losses_after(race.BOWL, "2", race.UPDATES)[racer] == math.inf
        ends = {f: np.linalg.norm(race.runs()[race.BOWL, f][racer][60]) for f in race.FACTORS}
        assert min(ends, key=ends.get) == "1"


def test_the_racers_have_lines_that_differ_in_colour_and_dashes():
    assert set(style.STROKE) == set(race.builders(race.BOWL, 1.0))
    assert len(set(style.STROKE.values())) == len({c for c, _ in style.STROKE.values()}) == 4
    assert len({dash for _, dash in style.STROKE.values()}) == 4


def test_the_walk_opens_with_its_start(monkeypatch):
    shown = []
    monkeypatch.setattr("course_lib.views.controls.display", lambda data, raw: shown.append(data))
    box = race.race()
    assert box.values["update"].max == race.UPDATES
    box.values["rate"].value = "2"
    assert "SGD lost" in box.sentence.value or "lost" in box.sentence.value
    box.values["landscape"].value = "saddle"
    assert "saddle, rates × 2" in box.sentence.value
    assert shown[0]["text/plain"].startswith("[picture with controls: a race of optimizers]")
