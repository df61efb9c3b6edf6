"""The course's colours, by meaning, and the one way a picture is drawn and shown.

Colours after Okabe and Ito, https://jfly.uni-koeln.de/color/. Each has a hatch as a second cue.
Pictures that we draw ourselves are SVG text with rounded coordinates and no measured fonts: the
same letters on every machine, so nbval compares them. They are shown as an HTML image, which
JupyterLab also shows in a notebook that it doesn't trust yet, and which has an alternative text.
"""

import re
import textwrap
from dataclasses import dataclass, field
from html import escape
from urllib.parse import quote

from IPython.display import display

COLOR = {
    "weights": "#0072B2",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "activations": "#CC79A7",
    "inputs": "#777777",
    "temporaries": "#BBBBBB",
    "moment": "#D55E00",
}
HATCH = {  # white lines in a tile of 10 × 10
    "weights": "",
    "gradients": "M0 10L10 0",
    "optimizer state": "M3 5h1.6M8 0h1.6M8 10h1.6",
    "activations": "M0 0L10 10",
    "inputs": "M0 0L10 10M0 10L10 0",
    "temporaries": "M0 5H10M5 0V10",
}


STROKE = {  # colour and dashes of a line that is one optimizer's
    "SGD": ("#0072B2", ""),
    "momentum": ("#D55E00", "7 3"),
    "Nesterov": ("#009E73", "2 3"),
    "Adam": ("#CC79A7", "9 3 2 3"),
}


@dataclass(frozen=True)
class Picture:
    """An SVG, the name that stands where no picture can, and its text twin: one sentence."""

    svg: str = field(repr=False)
    name: str
    sentence: str

    @property
    def html(self) -> str:
        """The picture as an HTML image, the sentence its alternative text."""
        source = quote(self.svg, safe=" =:/,;-_.()'")
        alt = escape(self.sentence, quote=True)
        return f'<img alt="{alt}" style="max-width: 100%" src="data:image/svg+xml,{source}">'


def show(picture: Picture) -> None:
    """Display the picture and print its sentence."""
    display({"text/html": picture.html, "text/plain": f"[picture: {picture.name}]"}, raw=True)
    say(picture.sentence)


def say(sentence: str) -> None:
    """Print a sentence in lines that fit a narrow window."""
    print(wrap(sentence))


def wrap(sentence: str) -> str:
    """In lines that fit a narrow window, a number beside its unit."""
    together = re.sub(r"(?<=\d) (?=%|[KMGTk]?i?B\b)", "\N{NO-BREAK SPACE}", sentence)
    return textwrap.fill(together, 56)


def svg(width: int, height: int, *parts: str) -> str:
    """An SVG of this size in pixels, with the patterns of every category at hand."""
    patterns = "".join(
        f'<pattern id="{_id(name)}" width="10" height="10" patternUnits="userSpaceOnUse">'
        f'<rect width="10" height="10" fill="{COLOR[name]}"/>'
        f'<path d="{hatch}" stroke="white" stroke-width="1.2"/></pattern>'
        for name, hatch in HATCH.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
        f'<defs>{patterns}</defs><rect width="{width}" height="{height}" fill="white"/>'
        f"{''.join(parts)}</svg>"
    )


def area(d: str, name: str) -> str:
    """A closed path filled with a category's colour and hatch."""
    return f'<path d="{d}" fill="url(#{_id(name)})" data-name="{name}"/>'


def bar(x: float, y: float, width: float, height: float, name: str) -> str:
    """A rectangle filled with a category's colour and hatch."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="url(#{_id(name)})" data-name="{name}"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, *, color="black", width=1, dash="") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" '
        f'stroke-width="{width}"{dashed}/>'
    )


def text(x: float, y: float, said: str, *, anchor="middle", size=13, bold=False, box=False) -> str:
    """Text with its middle, start or end at x and its baseline at y; `box` puts white under it."""
    under = ""
    if box:
        wide = 0.56 * size * len(said) + 4  # an ample guess: fonts aren't measured
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        under = (
            f'<rect x="{left:.1f}" y="{y - size:.1f}" width="{wide:.1f}" '
            f'height="{1.35 * size:.1f}" fill="white" opacity="0.85"/>'
        )
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'{under}<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'font-size="{size}"{weight}>{escape(said)}</text>'
    )


def _id(name: str) -> str:
    return name.replace(" ", "-")
