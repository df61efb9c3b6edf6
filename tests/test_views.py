"""What was drawn, read back from the SVG and compared with the values."""

import re
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from course_lib import models, units
from course_lib.memory_trace import CATEGORIES, measure
from course_lib.views import learning, style
from course_lib.views import training as view


def trace_of(optimizer, batch=256):
    return measure(
        lambda: models.mlp(64, 128, 128, 10),
        lambda: (torch.zeros(batch, 64), torch.zeros(batch).long()),
        lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
        lambda m: optimizer(m.parameters()),
    )


@pytest.fixture(scope="module")
def trace():
    return trace_of(torch.optim.AdamW)


@pytest.fixture(scope="module")
def traces():
    kinds = {
        "SGD": torch.optim.SGD,
        "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        "AdamW": torch.optim.AdamW,
    }
    return {(n, size): trace_of(o, size) for n, o in kinds.items() for size in (128, 256, 384)}


def elements(svg, kind):
    return [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}" + kind)]


def texts(svg):
    return [element.text for element in elements(svg, "text")]


def areas(svg):
    """Name and highest edge of each drawn area, from the last drawn (the lowest) up."""
    drawn = [e for e in elements(svg, "path") if e.get("data-name") in CATEGORIES]
    return {
        e.get("data-name"): min(float(y) for y in re.findall(r"V([\d.]+)", e.get("d")))
        for e in reversed(drawn)
    }


def events_of(trace, step):
    inside = [i for i, event in enumerate(trace.events) if event.step == step]
    return slice(inside[0], inside[-1] + 1)


FRAME = view.Frame(left=56, top=86, width=600, height=270)


@pytest.mark.parametrize("step", [1, 2])
def test_the_drawn_areas_are_the_live_bytes(trace, step):
    picture = view.timeline_picture(trace, step, "a title")
    drawn, edge = areas(picture.svg), 0
    _, peak, _ = view.step_peak(trace, step)
    assert tuple(drawn) == view.STACK
    for name in view.STACK:
        edge = edge + trace.live[name][slice(*view._bounds(trace, step))]
        expected = FRAME.bottom - FRAME.height * edge.max() / (1.1 * peak)
        assert abs(drawn[name] - expected) <= 0.06  # the last written decimal


def test_a_long_timeline_keeps_its_peak_and_few_points():
    total = np.random.default_rng(0).integers(0, 1000, 50_000)
    total[31_234] = 5000
    kept = view._kept(total)
    assert len(kept) == view.MOST_POINTS and 31_234 in kept and kept == sorted(kept)


def test_the_peak_the_title_and_the_phases_are_written_on_the_picture(trace):
    written = texts(view.timeline_picture(trace, 2, "a title").svg)
    _, peak, _ = view.step_peak(trace, 2)
    phases = {"forward", "loss", "backward", "optimizer step", "zero_grad"}
    assert phases | {"a title", f"peak {units.binary(peak)}"} <= set(written)


def test_the_sentence_holds_the_peak_and_the_shares(trace):
    phase, peak, parts = view.step_peak(trace, 2)
    sentence = view.timeline_sentence(trace, 2)
    assert view.LABEL.get(phase, phase) in sentence and units.binary(peak) in sentence
    assert sum(parts.values()) == peak
    assert f"weights {100 * parts['weights'] / peak:.1f} %" in sentence


@pytest.mark.parametrize("step", [1, 2])
def test_the_parts_after_each_phase_are_the_bytes_that_the_trace_recorded(trace, step):
    recorded = {view.LABEL.get(p.name, p.name): p for p in trace.phases if p.step == step}
    for stop in view.STOPS[1:]:
        assert sum(view.after(trace, step, stop).values()) == recorded[stop].bytes_after
    before = sum(view.after(trace, step, view.BEFORE).values())
    assert before == recorded["forward"].bytes_before


BATCH = (torch.zeros(64, 64), torch.zeros(64).long())


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("zero_grad", ["after step", "before forward", "before backward"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_run_order_is_drawn_as_it_was_recorded(fake, zero_grad, accumulate):
    """A batch made before, micro-batches, and zero_grad in other places."""
    trace = measure(
        lambda: models.mlp(64, 32, 10),
        lambda: BATCH,
        lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        fake=fake,
        zero_grad=zero_grad,
        accumulate=accumulate,
    )
    phases = [phase for phase in trace.phases if phase.step == 2]
    for name in {phase.name for phase in phases}:
        last = [phase for phase in phases if phase.name == name][-1]
        assert sum(view.after(trace, 2, name).values()) == last.bytes_after
    assert sum(view.after(trace, 2, view.BEFORE).values()) == phases[0].bytes_before
    svg = view.timeline_picture(trace, 2, "").svg
    labels = [e for e in elements(svg, "text") if e.text == "backward"]
    assert len({e.get("x") for e in labels}) == len(labels) == accumulate


WALK_ENDS = [
    (phase, batch, optimizer, step)
    for phase in view.STOPS
    for batch in (128, 384)
    for optimizer in ("SGD", "momentum", "AdamW")
    for step in ("first", "second")
]


@pytest.mark.parametrize(("phase", "batch", "optimizer", "step"), WALK_ENDS)
def test_the_walk_draws_the_parts_alive_at_every_control_s_ends(
    traces, phase, batch, optimizer, step
):
    picture = view.walk_view(traces, "images")(phase, batch, optimizer, step)
    parts = view.after(traces[optimizer, batch], ("first", "second").index(step) + 1, phase)
    most = max(int(t.live[name].max()) for t in traces.values() for name in view.STACK)
    bars = {e.get("data-name"): float(e.get("width")) for e in elements(picture.svg, "rect")
            if e.get("data-name")}  # fmt: skip
    for name, num_bytes in parts.items():
        assert abs(bars[name] - 420 * num_bytes / most) <= 0.06
        assert units.binary(num_bytes, 0) in texts(picture.svg)
        assert (f"{name} {units.binary(num_bytes, 1)}" in picture.sentence) == (num_bytes > 0)
    assert optimizer in picture.sentence and str(batch) in picture.sentence
    assert all(0 <= width <= 420 for width in bars.values())


def test_nothing_is_written_outside_the_picture(traces):
    """Half of a letter's height for the width of a letter: fonts aren't measured."""
    for phase, batch, optimizer, step in WALK_ENDS:
        svg = view.walk_view(traces, "images")(phase, batch, optimizer, step).svg
        for element in elements(svg, "text"):
            x, wide = float(element.get("x")), 6.5 * len(element.text)
            left = x - {"start": 0, "middle": wide / 2, "end": wide}[element.get("text-anchor")]
            assert left >= 0 and left + wide <= 680, element.text
            assert 10 <= float(element.get("y")) <= 516


def test_no_areas_name_is_written_over_another(traces):
    for phase, batch, optimizer, step in WALK_ENDS:
        svg = view.walk_view(traces, "images")(phase, batch, optimizer, step).svg
        named = [e for e in elements(svg, "text") if e.text in view.STACK][: -len(view.STACK)]
        for i, a in enumerate(named):
            for b in named[i + 1 :]:
                wide = 3.5 * (len(a.text) + len(b.text))
                apart = abs(float(a.get("x")) - float(b.get("x"))) > wide
                assert apart or abs(float(a.get("y")) - float(b.get("y"))) > 16, (a.text, b.text)


def test_a_phase_is_known_by_its_name_in_the_code_too(trace):
    assert view.after(trace, 1, "step") == view.after(trace, 1, "optimizer step")


def test_the_walk_needs_every_combination(traces):
    missing = {key: trace for key, trace in traces.items() if key != ("SGD", 256)}
    with pytest.raises(ValueError, match="every optimizer"):
        view.walk(missing, "images")


def test_every_category_has_a_colour_a_hatch_and_a_place():
    assert set(style.HATCH) == set(CATEGORIES) == set(view.STACK)
    assert set(style.COLOR) == {*CATEGORIES, "moment"}
    for cues in (style.COLOR, style.HATCH):
        assert len(set(cues.values())) == len(cues)


def test_a_picture_is_the_same_letters_every_time(trace):
    pictures = [view.timeline_picture(trace, 2, "a title") for _ in range(2)]
    assert pictures[0] == pictures[1]


def test_a_picture_is_shown_with_its_sentence_as_text_and_alternative(trace, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(style, "display", lambda data, raw: shown.append(data))
    view.show_timeline(trace, 2, 'a "title" & <more>')
    assert shown[0]["text/plain"] == "[picture: timeline of step 2]"
    image = ElementTree.fromstring(shown[0]["text/html"].replace(">", "/>"))
    sentence = view.timeline_sentence(trace, 2)
    assert image.get("alt") == sentence
    svg = unquote(image.get("src").removeprefix("data:image/svg+xml,"))
    assert 'a "title" & <more>' in texts(svg)
    assert " ".join(capsys.readouterr().out.split()) == sentence


def test_a_number_is_not_torn_from_its_unit(capsys):
    style.say("word " * 10 + "12.5 % and " + "word " * 8 + "101.39 GiB, 7 B.")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 56
    assert not any(line.startswith(("%", "GiB")) for line in lines)


@pytest.mark.parametrize("step", [0, 3, -1])
def test_a_step_that_was_not_measured_is_refused(trace, step):
    with pytest.raises(ValueError, match="steps 1 to 2 were measured"):
        view.timeline_sentence(trace, step)


def test_what_is_no_timeline_and_no_stop_is_refused(trace):
    with pytest.raises(TypeError, match="MemoryTimeline"):
        view.show_timeline([1, 2], 1, "")
    with pytest.raises(ValueError, match="before the step"):
        view.after(trace, 1, "nowhere")


def test_each_pixel_of_a_digit_is_drawn_as_dark_as_it_is(monkeypatch):
    shown = []
    monkeypatch.setattr(style, "display", lambda data, raw: shown.append(data))
    images = torch.arange(128).reshape(2, 64) / 127
    learning.show_digits(images, torch.tensor([3, 4]))
    svg = unquote(shown[0]["text/html"].split('src="data:image/svg+xml,')[1].rstrip('">'))
    pixels = [e.get("fill") for e in elements(svg, "rect") if e.get("width") == "9"]
    ink = [1 - int(fill[1:3], 16) / 255 for fill in pixels]
    assert np.allclose(ink, images.flatten(), atol=0.5 / 255)
    assert texts(svg) == ["3", "4"]


def test_the_loss_curve_goes_through_every_loss(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(style, "display", lambda data, raw: shown.append(data))
    losses = [2.0, 1.0, 1.5, 0.5]
    learning.show_losses(losses, "falls")
    svg = unquote(shown[0]["text/html"].split('src="data:image/svg+xml,')[1].rstrip('">'))
    points = [
        tuple(map(float, p.split(","))) for p in elements(svg, "polyline")[0].get("points").split()
    ]
    drawn = [2.1 * (1 - (y - 46) / 160) for _, y in points]
    assert np.allclose(drawn, losses, atol=2.1 / 160 * 0.06)
    assert "from 2.00 to 0.50. It fell in 2 updates and rose in 1." in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("end", [float("nan"), float("inf")])
def test_a_loss_that_is_lost_ends_the_curve_and_is_said(monkeypatch, capsys, end):
    monkeypatch.setattr(style, "display", lambda data, raw: None)
    learning.show_losses([0.0, 0.0, end, 1.0], "lost")
    said = " ".join(capsys.readouterr().out.split())
    assert "rose in 0" in said and "From update 3 on it is not finite." in said


@pytest.mark.parametrize(
    "call",
    [
        lambda: learning.show_digits(torch.zeros(2, 8, 8), torch.zeros(2)),
        lambda: learning.show_digits(torch.zeros(2, 64), torch.zeros(3)),
        lambda: learning.show_losses([1.0], "one"),
        lambda: learning.show_losses([1.0, float("nan"), 2.0], "diverged at once"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call):
    with pytest.raises(ValueError, match="must be|needs"):
        call()
