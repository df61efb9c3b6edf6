"""Controls around a picture: the one helper that every widget of the course uses.

A view is a pure function of its controls' values that returns a `style.Picture`. `explore`
shows it with its controls. In the same output lies what a reader with no kernel sees: the
picture and its sentence for the values at the start, and what the controls will offer. Every
control has a name and a route by keyboard: a slider is paired with a number box, a walk has
buttons. In JupyterLab, `jupyter/labextension` keeps the notebook's shortcuts off them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import ipywidgets as widgets
from IPython.display import display

from course_lib.views.style import Picture, wrap

WIDGET = "application/vnd.jupyter.widget-view+json"
MOST_NAMED = 8  # options of a choice that a reader with no kernel is told


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

    def offer(self) -> str:
        return f"{self.label}: {self.low} to {self.high}"

    def build(self) -> tuple[widgets.Widget, widgets.ValueWidget]:
        """The widget to show, and the one that holds the value: slider and box, linked.

        The box takes any number (one for whole numbers drops the e of 1e9, and reads 19).
        """
        limits = {"min": self.low, "max": self.high, "step": self.step, "value": self.value}
        box = widgets.BoundedFloatText(
            **limits,
            description=self.label,
            style={"description_width": "initial"},
            layout={"width": "210px"},
        )
        slider = widgets.IntSlider(
            **limits, readout=False, tooltip=self.label, layout={"width": "200px"}
        )

        def settle(change):
            slider.value = box.value = self._nearest(change.new)

        slider.observe(settle, "value")
        box.observe(settle, "value")
        return widgets.HBox([box, slider]), slider

    def _nearest(self, typed: float) -> int:
        """The value that the slider can reach and that lies nearest to a typed number."""
        steps = round((typed - self.low) / self.step)
        return min(self.low + steps * self.step, self.high)


@dataclass(frozen=True)
class Choice:
    """One of several named options."""

    label: str
    options: tuple[str, ...]
    value: str

    def ends(self) -> tuple[str, ...]:
        return self.options

    def offer(self) -> str:
        named, more = self.options[:MOST_NAMED], len(self.options) - MOST_NAMED
        return f"{self.label}: {', '.join(named)}" + (f" and {more} more" if more > 0 else "")

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
    """A walk through named stops, with buttons to the previous and the next.

    At an end a button does nothing. It isn't disabled, or it would lose the keyboard's focus.
    """

    label: str
    stops: tuple[str, ...]
    value: str

    def ends(self) -> tuple[str, str]:
        return self.stops[0], self.stops[-1]

    def offer(self) -> str:
        return f"{self.label}: {len(self.stops)} from {self.stops[0]} to {self.stops[-1]}"

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
            number, last = self.stops.index(here.value) + 1, len(self.stops)
            end = {1: ", the first", last: ", the last"}.get(number, "")
            where.value = f"{escape(here.value)} ({number} of {last}{end})"

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

    def offer(self) -> str:
        return f"{self.label}: any number"

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
    box.add_class("course-controls")
    box.values = {name: holder for name, (_, holder) in built.items()}
    box.image, box.sentence = image, sentence
    _display(box, start, "; ".join(control.offer() for control in controls.values()))
    return box


def _display(box: widgets.VBox, start: Picture, offered: str) -> None:
    """The widget, or where none can be: the picture, its sentence and what would be offered."""
    offer = f"<small>With a kernel, run this cell to choose {escape(offered)}.</small>"
    bundle = {
        WIDGET: {"version_major": 2, "version_minor": 0, "model_id": box.model_id},
        "text/html": f"{start.html}<p>{escape(start.sentence)}</p>{offer}",
        "text/plain": f"[picture with controls: {start.name}]\n{wrap(start.sentence)}",
    }
    display(bundle, raw=True)


def html(said: str, status: bool = True) -> str:
    """A paragraph; as a status, a screen reader announces it when it changes."""
    role = ' role="status"' if status else ""
    return f'<p{role} style="line-height: 1.4; word-break: normal">{escape(said)}</p>'
