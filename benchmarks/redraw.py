"""Redraw of every view with controls, against interactive_output with inline matplotlib.

    python benchmarks/redraw.py

Both run in one new kernel, as in a notebook: a value is changed, and the time until the new
picture is ready in the kernel is taken. The peer draws the same bars and areas with pyplot.
Prints the median of each and their ratio.
"""

from jupyter_client.manager import start_new_kernel

IN_THE_KERNEL = """
%matplotlib inline
import itertools, statistics, time
import ipywidgets, matplotlib.pyplot as plt, numpy as np, torch
import torch.nn.functional as F
from course_lib import models
from course_lib.memory_trace import measure
from course_lib.views import training as view

def trace(images):
    return measure(
        lambda: models.mlp(64, 128, 128, 10),
        lambda: (torch.zeros(images, 64), torch.zeros(images, dtype=torch.int64)),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        lambda m: torch.optim.AdamW(m.parameters()),
    )

traces = {("AdamW", images): trace(images) for images in (128, 256, 384, 512)}

def median_ms(holder, values):
    taken = []
    for value in itertools.islice(itertools.cycle(values), 40):
        start = time.perf_counter()
        holder.value = value
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[8:])

def peer(images, phase):
    figure, (ax, bars) = plt.subplots(1, 2, figsize=(9.6, 4), width_ratios=(3, 1))
    chosen = traces["AdamW", images]
    ax.stackplot(range(len(chosen.events)), *chosen.live.values(), labels=chosen.live)
    ax.legend()
    parts = view.after(chosen, 2, phase)
    bars.barh(list(parts), list(parts.values()))
    plt.show()

box = view.walk(traces, "images")
slider = ipywidgets.IntSlider(value=256, min=128, max=512, step=128)
phase = ipywidgets.Dropdown(options=view.STOPS)
_ = ipywidgets.interactive_output(peer, {"images": slider, "phase": phase})
print("RESULT", median_ms(box.values["phase"], view.STOPS), median_ms(phase, view.STOPS))
print("RESULT", median_ms(box.values["batch"], (128, 256, 384, 512)),
      median_ms(slider, (128, 256, 384, 512)))
"""


def main() -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    printed = []

    def keep(message):
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed.append(content["text"])
        elif message["msg_type"] == "error":
            raise RuntimeError("\n".join(content["traceback"]))

    try:
        client.execute_interactive(IN_THE_KERNEL, output_hook=keep, timeout=300)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    rows = [line for line in "".join(printed).splitlines() if line.startswith("RESULT")]
    for control, row in zip(("phase", "batch"), rows, strict=True):
        ours, peer = map(float, row.split()[1:])
        print(
            f"walk, {control}: {ours:.1f} ms; interactive_output {peer:.0f} ms; "
            f"{peer / ours:.0f} times as fast"
        )


if __name__ == "__main__":
    main()
