"""The composer at every setting: its curve, its code, its warning, and the nearest recipe."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from course_lib import facts, schedules
from course_lib.views import schedules as view

SETTINGS = list(
    itertools.product(view.SHAPES, view.WARMUPS, view.FINALS, (250, 750, view.PLANNED, 2000))
)
ids = [" ".join(map(str, setting)) for setting in SETTINGS]


def elements(svg, kind):
    return [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}" + kind)]


@pytest.mark.parametrize("setting", SETTINGS, ids=ids)
def test_the_curve_is_the_schedule_and_the_code_makes_it(setting):
    length = setting[-1]
    made = view.compose(*setting)
    picture = view.composer_view(*setting)
    svg, code = picture.svg, picture.sentence.partition(". Of the peak")[0]
    from_code = eval(code, vars(schedules))
    until = max(length, view.PLANNED)
    assert all(made(k) == from_code(k) for k in range(0, until, 7))
    written = " ".join(text.text for text in elements(svg, "text") if float(text.get("y")) > 280)
    assert written == code
    for line in elements(svg, "polyline"):
        for point in line.get("points").split():
            x, y = map(float, point.split(","))
            k = round((x - view.LEFT) / view.WIDE * (until - 1))
            near = [made(max(0, k + d)) for d in (-1, 0, 1)]
            drawn = 1.05 * (1 - (y - view.TOP) / view.TALL)
            assert min(near) - 6e-4 < drawn < max(near) + 6e-4
    ends = [p.get("points").split()[-1].split(",")[0] for p in elements(svg, "polyline")]
    assert float(ends[-1]) == pytest.approx(view.LEFT + view.WIDE, abs=0.06)


@pytest.mark.parametrize("setting", SETTINGS, ids=ids)
def test_the_sentence_says_the_ends_and_warns_where_lengths_part(setting):
    length, made = setting[-1], view.compose(*setting)
    picture = view.composer_view(*setting)
    assert f"update 0 uses {made(0):.3f}" in picture.sentence
    assert f"the last, {made(view.PLANNED - 1):.3f}" in picture.sentence
    shape = setting[0]
    careful = length != view.PLANNED and shape != "constant"
    assert ("Careful" in picture.sentence) == careful
    assert ("over early" in picture.sentence) == (careful and length < 1000 and shape[:2] != "st")
    for name, said in view.OWN.items():
        assert (said in picture.sentence) == (shape == name)
    assert ("warmup" in elements(picture.svg, "text")[0].text) == (shape != "one-cycle")
    assert ("the run ends" in picture.svg) == (length > view.PLANNED)
    assert made(0) > 0
    for text in elements(picture.svg, "text"):
        x, y = float(text.get("x")), float(text.get("y"))
        wide = 6.6 * len(text.text)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[text.get("text-anchor")]
        assert left >= 0 and left + wide <= 580 and 10 < y < 345, text.text


@pytest.mark.parametrize("recipe", facts.recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_is_nearest_to_itself(recipe):
    share, final = f"{100 * recipe.warmup_fraction} %", str(recipe.final_fraction)
    assert view.nearest(recipe.decay, share, final) == recipe


def test_every_recipe_can_be_reached_from_the_controls():
    settings = itertools.product(view.SHAPES, view.WARMUPS, view.FINALS)
    assert {view.nearest(*setting) for setting in settings} == {None, *facts.recipes()}


@pytest.mark.parametrize(("length", "drops"), [(250, 11), (750, 3), (2000, 1)])
def test_a_step_decay_of_another_length_says_how_often_it_drops(length, drops):
    sentence = view.composer_view("step decay", "0 %", "0", length).sentence
    rate = schedules.step_decay(1.0, step_size=-(-length // 3))
    assert sum(rate(k + 1) < rate(k) for k in range(999)) == drops
    assert f"the run sees {drops} drops" in sentence


def test_a_shape_that_no_recipe_has_is_said():
    assert view.nearest("linear", "3 %", "0") is None
    assert "None of the recipes" in view.composer_view("linear", "3 %", "0", 1000).sentence


def test_recipes_are_shares_of_their_whole():
    for recipe in facts.recipes():
        assert 0 < recipe.warmup_fraction < 0.1 and 0 <= recipe.final_fraction < 1
        assert recipe.decay in view.SHAPES and recipe.verified.startswith("primary")


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="shape must be one of"):
        view.compose("zigzag", "3 %", "0", 1000)


def test_the_composer_follows_its_controls(monkeypatch):
    monkeypatch.setattr("course_lib.views.controls.display", lambda *a, **k: None)
    box = view.composer()
    before = box.image.value
    box.values["length"].value = 2000
    assert box.image.value != before
    assert "never finishes" in re.sub("<.*?>", "", box.sentence.value)
    box.values["shape"].value = "one-cycle"
    assert "first at update" in box.sentence.value


def curves():
    return {"falls": [1 - k / 40 for k in range(41)], "breaks": [1.0, 0.2, 0.1, 0.9, 0.5]}


def test_the_panels_show_each_curve_and_the_sentence_its_quarters_and_jumps():
    picture = view.rates_picture(curves(), "Two curves")
    lines = elements(picture.svg, "polyline")
    for i, (line, rates) in enumerate(zip(lines, curves().values(), strict=True)):
        points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
        left, top = 34 + 286 * i, 52
        for (x, y), (k, rate) in zip(points, enumerate(rates), strict=True):
            assert x == pytest.approx(left + 230 * k / (len(rates) - 1), abs=0.06)
            assert y == pytest.approx(top + 80 * (1 - rate), abs=0.06)
    assert "falls: update 0, 10, 20, 30, 40: 1.00, 0.75, 0.50, 0.25, 0.00." in picture.sentence
    assert picture.sentence.endswith("0.90, 0.50. After 2 it jumps up to 0.90.")
    assert picture.sentence.count("jumps") == 1


def test_a_jump_after_a_level_stretch_is_one():
    sentence = view.rates_picture({"b": [1.0, 0.5, 0.0, 0.0, 1.0, 0.5]}, "b").sentence
    assert "After 3 it jumps up to 1.00." in sentence


def test_a_warmup_is_no_jump():
    assert "jumps" not in view.rates_picture({"w": [0.1, 0.5, 1.0, 0.4, 0.0]}, "w").sentence


@pytest.mark.parametrize("bad", [{}, {"a": [1.0]}, {"a": [0.5, 1.5]}, {"a": [0.0, -0.1]}])
def test_what_cannot_be_drawn_is_refused(bad):
    with pytest.raises(ValueError, match="rates"):
        view.rates_picture(bad, "bad")
