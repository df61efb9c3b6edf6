"""The bit explorer, the loss-scale dial and the sweep, read back from what was drawn and said."""

import itertools
from xml.etree import ElementTree

import pytest
import torch

from course_lib.precision import FP16, decode, encode, round_to
from course_lib.views import precision as view

NUMBERS = ("0.1", "1", "-257", "1e-8", "65519", "65520", "300000", "0", "-0.0", "inf", "nan")


def texts(svg):
    return [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("chosen", view.FORMATS)
def test_each_row_shows_the_bits_and_says_the_number(number, chosen):
    picture = view.explorer_view(number, chosen)
    drawn = texts(picture.svg)
    for i, (name, format) in enumerate(view.FORMATS.items()):
        top = view.TOP + i * view.ROW
        row = [e for e in drawn if float(e.get("y")) == top + 13]
        row.sort(key=lambda e: float(e.get("x")))
        bits = "".join(e.text for e in row)
        assert bits == f"{encode(float(number), format):0{format.bits}b}"
        value = decode(int(bits, 2), format)
        assert f"{name}: {value:.8g}, " in picture.sentence
    for text in drawn:
        x, wide = float(text.get("x")), 0.56 * float(text.get("font-size")) * len(text.text)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[text.get("text-anchor")]
        assert left >= 0 and left + wide <= 580, text.text


@pytest.mark.parametrize(
    ("number", "name", "said"),
    [
        ("257", "bf16", "256, off by 0.39 %"),
        ("257", "fp16", "257, exactly"),
        ("1e-8", "fp16", "0, too small for it"),
        ("65519", "fp16", "65504, off by 0.023 %"),
        ("65520", "fp16", "inf, out of range"),
        ("460", "fp8 e4m3fn", "448, off by 2.6 %"),
        ("300000", "fp8 e4m3fn", "448, out of range"),
        ("1", "tf32", "1, exactly"),
    ],
)
def test_what_a_format_keeps_is_said(number, name, said):
    assert f"{name}: {said}." in view.explorer_view(number, "fp16").sentence


def test_beside_infinity_lies_the_largest_number():
    assert "Beside it, in fp16, lie 65504 and inf." in view.explorer_view("65520", "fp16").sentence


def test_the_bits_of_nan_can_be_flipped(monkeypatch):
    monkeypatch.setattr("course_lib.views.controls.display", lambda *a, **k: None)
    box = view.explorer()
    box.values["value"].value = "inf"
    buttons = box.bits.children
    for button in (buttons[-1], buttons[-2], buttons[-1]):
        button.click()
    assert "".join(button.description for button in buttons) == "0111110000000010"
    buttons[-2].click()
    assert box.values["value"].value == "inf"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_dial_refuses_a_gradient_that_no_scale_repairs(bad):
    with pytest.raises(ValueError, match="no scale repairs"):
        view.dial_view(torch.tensor([1.0, bad], dtype=torch.float64), 0)


def test_no_number_is_said_so():
    with pytest.raises(ValueError, match="a number is needed"):
        view.explorer_view("0,1", "fp16")


def test_flipping_a_bit_flips_it_and_every_bit_has_a_name(monkeypatch):
    monkeypatch.setattr("course_lib.views.controls.display", lambda *a, **k: None)
    box = view.explorer()
    assert [len(box.bits.children), box.bits.children[0].tooltip] == [16, "sign, bit 15"]
    value = box.values["value"]
    value.value = "1.0"
    sign = box.bits.children[0]
    sign.click()
    assert box.bits.children[0] is sign  # the keyboard's place is kept
    assert value.value == "-1.0" and box.bits.children[0].description == "1"
    box.bits.children[1].click()
    assert value.value == "-inf"
    box.values["format"].value = "fp8 e5m2"
    assert len(box.bits.children) == 8
    assert {b.tooltip.partition(",")[0] for b in box.bits.children} == set(view.PARTS)


def test_a_typing_error_leaves_the_bits_and_says_what_is_needed(monkeypatch):
    monkeypatch.setattr("course_lib.views.controls.display", lambda *a, **k: None)
    box = view.explorer()
    before = [button.description for button in box.bits.children]
    box.values["value"].value = "zero"
    assert "a number is needed" in box.sentence.value
    assert [button.description for button in box.bits.children] == before


def gradient():
    generator = torch.Generator().manual_seed(0)
    return 1e-7 * torch.randn(20_000, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("exponent", [0, 5, 10, 24, 32])
def test_the_dial_says_the_shares_that_fp16_loses(exponent):
    sizes = gradient()
    picture = view.dial_view(sizes, exponent)
    cast = (sizes * 2.0**exponent).float().half()
    zero, infinite = (100 * lost.double().mean().item() for lost in (cast == 0, cast.isinf()))
    assert f"makes {zero:.1f} % zero and {infinite:.1f} % infinite" in picture.sentence
    assert f"Scale {2**exponent:,}:" in picture.sentence


def test_the_bars_hold_every_entry_and_the_lost_ones_are_grey():
    sizes = gradient()
    svg = view.dial_view(sizes, 0).svg
    bars = [e for e in ElementTree.fromstring(svg).iter() if e.get("data-name")]
    heights = {name: 0.0 for name in ("gradients", "temporaries")}
    for bar in bars:
        heights[bar.get("data-name")] += float(bar.get("height"))
    lost = (round_to(sizes, FP16) == 0).double().mean().item()
    assert heights["temporaries"] / sum(heights.values()) == pytest.approx(lost, abs=0.01)


def test_zeros_are_left_out_and_a_gradient_of_zeros_is_refused():
    mixed = torch.cat([gradient(), torch.zeros(1000).double()])
    assert view.dial_view(mixed, 3).sentence == view.dial_view(gradient(), 3).sentence
    with pytest.raises(ValueError, match="0 everywhere"):
        view.dial_view(torch.zeros(3), 0)


def test_the_dial_turns(monkeypatch):
    monkeypatch.setattr("course_lib.views.controls.display", lambda *a, **k: None)
    box = view.dial(gradient().reshape(200, 100).float())
    assert "Scale 1:" in box.sentence.value
    box.values["exponent"].value = 10
    assert "Scale 1,024:" in box.sentence.value


SWEEP = {"a": {0: 1.0, -4: 0.76, -8: -0.3}, "b": {0: 0.98, -8: 1.01}}


def circles(svg):
    found = (e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}circle"))
    return [(float(e.get("cx")), float(e.get("cy"))) for e in found]


def test_a_sweep_is_drawn_and_said_in_tenths_and_not_below_0():
    picture = view.sweep_view(SWEEP, "a title", {"here": -4.2})
    said = "a, times 2 to the 0, -4, -8: 1.0, 0.8, 0.0. b, times 2 to the 0, -8: 1.0, 1.0."
    assert picture.sentence == f"{said} At -4: here."
    drawn = view.sweep_view({"b": SWEEP["b"], "a": SWEEP["a"]}, "a title", {}).svg
    (_, full), (middle, part), (right, none) = circles(drawn)
    ends = [float(e.get("x")) for e in texts(drawn) if e.text in ("0", "-8")]
    assert middle == pytest.approx((max(ends) + circles(drawn)[0][0]) / 2) and right == max(ends)
    assert (none - part) / (none - full) == pytest.approx(0.8, abs=0.01)


def test_the_names_of_lines_that_end_together_stand_apart():
    kinds = {name: {0: 1.0, -24: 1.0 - (i == 4)} for i, name in enumerate("abcde")}
    heights = sorted(float(e.get("y")) for e in texts(view.sweep_view(kinds, "t", {}).svg)
                     if e.text in kinds)  # fmt: skip
    assert len(heights) == 5 and min(b - a for a, b in itertools.pairwise(heights)) >= 16


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({}, "told apart"),
        ({name: {0: 1, -1: 1} for name in "abcdef"}, "told apart"),
        ({"a": {0: 1}}, "two powers"),
        ({"a": {0: 1, -1: 1}, "b": {}}, "needs a share"),
        ({"a": {0: 1, -1: float("nan")}}, "no loss at its end"),
    ],
)
def test_a_sweep_that_cannot_be_drawn_is_refused(shares, said):
    with pytest.raises(ValueError, match=said):
        view.sweep_view(shares, "t", {})


def test_a_sweep_that_is_shown_has_its_sentence(capsys):
    view.show_sweep(SWEEP, "a title", {})
    assert "a, times 2 to the 0, -4, -8: 1.0, 0.8, 0.0." in " ".join(
        capsys.readouterr().out.split()
    )
