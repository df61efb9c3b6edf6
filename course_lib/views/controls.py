"""Controls around a picture: the one helper that every widget of the course uses.

A view is a pure function of its controls' values that returns a `style.Picture`. `explore`
shows it with its controls. In the same output lies the static picture, which is what a reader
with no kernel sees, and below it the sentence for the values at the start. Every control has
a name and a route by keyboard: a slider is paired with a number box, a walk has buttons.
"""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import ipywidgets as widgets
from IPython.display import display

from course_lib.views.style import Picture, say

WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Slider:
    """A whole number between `low` and `high` in steps of `step`."""

    label: str
    low: int
    high: int
    step: int
    value: int

    def ends(self) -> tuple[int, int]:
        return self.low, self.high

    def build(self) -> tuple[widgets.Widget, widgets.ValueWidget]:
        """The widget to show, and the one that holds the value: slider and box, linked."""
        limits = {"min": self.low, "max": self.high, "step": self.step, "value": self.value}
        box = widgets.BoundedIntText(
            **limits,
            description=self.label,
            style={"description_width": "initial"},
            layout={"width": "210px"},
        )
        slider = widgets.IntSlider(
            **limits, readout=False, tooltip=self.label, layout={"width": "200px"}
        )
        widgets.link((slider, "value"), (box, "value"))
        box.observe(lambda change: self._snap(box), "value")
        return widgets.HBox([box, slider]), box

    def _snap(self, box: widgets.BoundedIntText) -> None:
        """A typed number goes to the nearest that the slider can reach."""
        steps = round((box.value - self.low) / self.step)
        box.value = min(self.low + steps * self.step, self.high)


@dataclass(frozen=True)
class Choice:
    """One of several named options."""

    label: str
    options: tuple[str, ...]
    value: str

    def ends(self) -> tuple[str, ...]:
        return self.options

    def build(self) -> tuple[widgets.Widget, widgets.ValueWidget]:
        chooser = widgets.Dropdown(
            options=self.options,
            value=self.value,
            description=self.label,
            style={"description_width": "initial"},
        )
        return chooser, chooser


@dataclass(frozen=True)
class Walk:
    """A walk through named stops, with buttons to the previous and the next."""

    label: str
    stops: tuple[str, ...]
    value: str

    def ends(self) -> tuple[str, str]:
        return self.stops[0], self.stops[-1]

    def build(self) -> tuple[widgets.Widget, widgets.ValueWidget]:
        here = widgets.SelectionSlider(
            options=self.stops, value=self.value
        )  # holds the value, not shown
        where = widgets.HTML()
        back, ahead = (
            widgets.Button(description=f"{w} {self.label}") for w in ("Previous", "Next")
        )
        back.on_click(lambda _: self._go(here, -1))
        ahead.on_click(lambda _: self._go(here, +1))

        def mark(_=None):
            back.disabled, ahead.disabled = (here.value == end for end in self.ends())
            number = self.stops.index(here.value) + 1
            where.value = f"{escape(here.value)} ({number} of {len(self.stops)})"

        here.observe(mark, "value")
        mark()
        return widgets.HBox([back, ahead, where]), here

    def _go(self, here: widgets.SelectionSlider, by: int) -> None:
        there = self.stops.index(here.value) + by
        here.value = self.stops[max(0, min(there, len(self.stops) - 1))]


@dataclass(frozen=True)
class Number:
    """Any number, typed; the view gets what was typed, as text."""

    label: str
    value: float

    def build(self) -> tuple[widgets.Widget, widgets.ValueWidget]:
        box = widgets.Text(
            value=repr(self.value),
            description=self.label,
            continuous_update=False,
            style={"description_width": "initial"},
            layout={"width": "300px"},
        )
        return box, box


Control = Slider | Choice | Walk | Number


def explore(view: Callable[..., Picture], **controls: Control) -> widgets.VBox:
    """Show `view(**values)` with its controls; draw it again whenever a value changes.

    An error in the view is shown as text in place of the sentence, and the last good picture
    stays. Returns the box, whose `values` hold the value widgets by name, for tests.
    """
    for name, control in controls.items():
        if not isinstance(control, Control):
            raise TypeError(f"{name} must be a Slider, Choice, Walk or Number, got {control!r}")
    built = {name: control.build() for name, control in controls.items()}
    start = view(**{name: holder.value for name, (_, holder) in built.items()})
    image = widgets.HTML(start.html)
    sentence = widgets.HTML(html(start.sentence))

    def redraw(_=None):
        try:
            now = view(**{name: holder.value for name, (_, holder) in built.items()})
        except Exception as error:
            sentence.value = html(f"This can't be drawn. {type(error).__name__}: {error}")
        else:
            image.value, sentence.value = now.html, html(now.sentence)

    for _, holder in built.values():
        holder.observe(redraw, "value")
    shown = [shown for shown, _ in built.values()]
    if len(shown) > 4:  # many: beside each other
        for widget in shown:
            widget.layout.width = "max-content"
        shown = [widgets.HBox(shown, layout={"flex_flow": "row wrap", "max_width": "580px"})]
    box = widgets.VBox([*shown, image, sentence])
    box.values = {name: holder for name, (_, holder) in built.items()}
    box.image, box.sentence = image, sentence
    _display(box, start)
    return box


def _display(box: widgets.VBox, start: Picture) -> None:
    bundle = {
        WIDGET: {"version_major": 2, "version_minor": 0, "model_id": box.model_id},
        "text/html": start.html,
        "text/plain": f"[picture with controls: {start.name}]",
    }
    display(bundle, raw=True)
    say(f"At the start: {start.sentence}")


def html(said: str, status: bool = True) -> str:
    """A paragraph; as a status, a screen reader announces it when it changes."""
    role = ' role="status"' if status else ""
    return f'<p{role} style="line-height: 1.4">{escape(said)}</p>'
