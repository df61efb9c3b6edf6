"""The course's colours, by meaning, and the one way a picture is shown.

Colours after Okabe and Ito, https://jfly.uni-koeln.de/color/. Each has a hatch as a second cue.
"""

import io
import re
import textwrap

from IPython.display import display
from matplotlib.figure import Figure

COLOR = {
    "weights": "#0072B2",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "activations": "#CC79A7",
    "inputs": "#777777",
    "temporaries": "#BBBBBB",
}
HATCH = {
    "weights": "",
    "gradients": "//",
    "optimizer state": "..",
    "activations": "\\\\",
    "inputs": "xx",
    "temporaries": "++",
}


def show(figure: Figure, name: str, sentence: str) -> None:
    """Display the figure as a PNG and print its text twin. `name` stands where no picture can."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100, metadata={"Software": None})
    display({"image/png": png.getvalue(), "text/plain": f"[picture: {name}]"}, raw=True)
    together = re.sub(r"(?<=\d) (?=%|[KMGTk]?i?B\b)", "\N{NO-BREAK SPACE}", sentence)
    print(textwrap.fill(together, 56))
