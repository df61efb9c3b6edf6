import base64

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from course_lib import models, units
from course_lib.memory_trace import CATEGORIES, measure
from course_lib.views import style
from course_lib.views import training as view


@pytest.fixture(scope="module")
def trace():
    return measure(
        lambda: models.mlp(64, 512, 512, 10),
        lambda: (torch.zeros(256, 64), torch.zeros(256).long()),
        lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
        lambda m: torch.optim.AdamW(m.parameters()),
    )


def events_of(trace, step):
    inside = [i for i, event in enumerate(trace.events) if event.step == step]
    return slice(inside[0], inside[-1] + 1)


@pytest.mark.parametrize("step", [1, 2])
def test_the_drawn_areas_are_the_live_bytes(trace, step):
    ax = view.draw_timeline(trace, step, Figure().subplots())
    below = 0.0
    for area, name in zip(ax.collections, view.STACK, strict=True):
        expected = trace.live[name][events_of(trace, step)] / units.GiB
        top = area.get_paths()[0].vertices[:, 1].max()
        assert area.get_label() == name
        assert np.isclose(top, (below + expected).max())
        below = below + expected


def test_the_peak_and_the_phases_are_written_on_the_picture(trace):
    ax = view.draw_timeline(trace, 2, Figure().subplots())
    written = [text.get_text() for text in ax.texts]
    _, peak, _ = view.step_peak(trace, 2)
    assert f"peak {peak / units.GiB:.2f} GiB" in written
    assert {"forward", "loss", "backward", "optimizer step", "zero_grad"} <= set(written)
    drawn = max(line.get_ydata()[0] for line in ax.lines if line.get_marker() == "v")
    assert np.isclose(drawn, peak / units.GiB)


def test_the_sentence_holds_the_peak_and_the_shares(trace):
    phase, peak, parts = view.step_peak(trace, 2)
    sentence = view.timeline_sentence(trace, 2)
    assert view.LABEL.get(phase, phase) in sentence and units.binary(peak) in sentence
    assert sum(parts.values()) == peak
    assert f"weights {100 * parts['weights'] / peak:.1f} %" in sentence


def test_a_number_is_not_torn_from_its_unit(trace, monkeypatch, capsys):
    monkeypatch.setattr(style, "display", lambda data, raw: None)
    style.show(Figure(), "", "word " * 10 + "12.5 % and " + "word " * 8 + "101.39 GiB, 7 B.")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 56
    assert not any(line.startswith(("%", "GiB")) for line in lines)


def test_every_category_has_a_colour_a_hatch_and_a_place():
    assert set(style.COLOR) == set(style.HATCH) == set(CATEGORIES) == set(view.STACK)
    for cues in (style.COLOR, style.HATCH):
        assert len(set(cues.values())) == len(CATEGORIES)


def test_a_picture_is_shown_with_its_sentence_and_no_address(trace, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(style, "display", lambda data, raw: shown.append(data))
    view.show_timeline(trace, 2, "a title")
    assert shown[0]["text/plain"] == "[picture: timeline of step 2]"
    assert shown[0]["image/png"].startswith(base64.b64decode("iVBORw0KGgo="))
    assert " ".join(capsys.readouterr().out.split()) == view.timeline_sentence(trace, 2)


@pytest.mark.parametrize("step", [0, 3, -1])
def test_a_step_that_was_not_measured_is_refused(trace, step):
    with pytest.raises(ValueError, match="steps 1 to 2 were measured"):
        view.timeline_sentence(trace, step)


def test_what_is_no_timeline_is_refused():
    with pytest.raises(TypeError, match="MemoryTimeline"):
        view.show_timeline([1, 2], 1, "")
