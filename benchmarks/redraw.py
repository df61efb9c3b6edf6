"""Redraw of every view with controls, the walk against interactive_output with matplotlib.

    python benchmarks/redraw.py

Both run in one new kernel, as in a notebook: a value is changed, and the time until the new
picture is ready in the kernel is taken. The peer draws the same bars and areas with pyplot.
Prints the median of each and their ratio; then the redraw of the stepper, the race, the
composer, the explorer, the dial and the calculator, and the drawing of the graph of a
Transformer, about 250 nodes, from trace to picture.
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

from course_lib import autograd
from course_lib.facts import ModelConfig
from course_lib.graph import trace
from course_lib.views import graph, memory, optimizers, precision, schedules, stepper

w, b = autograd.Tensor(0.5, requires_grad=True), autograd.Tensor(-0.4, requires_grad=True)
box = stepper.step_through(((w * 2.0 + b).tanh() - 1.0) ** 2, w=w, b=b)
step = box.values["step"]
sizes = dict(vocab_size=100, dim=32, num_layers=3, num_heads=4, ffn_dim=64, max_seq_len=16)
model = models.Transformer(ModelConfig(**sizes, name="small"))
loss, taken = model(torch.zeros(1, 16).long()).sum(), []
for _ in range(15):
    start = time.perf_counter()
    traced = trace(loss, model)
    graph.graph_picture(traced, "")
    taken.append(1000 * (time.perf_counter() - start))
race = optimizers.race().values["update"]
shape = schedules.composer().values["shape"]
number = precision.explorer().values["value"]
scale = precision.dial(torch.randn(20_000) * 1e-6).values["exponent"]
convention = memory.calculator().values["convention"]
print("GRAPHS", median_ms(step, step.options), len(traced.nodes), statistics.median(taken),
      median_ms(race, range(0, 150, 5)), median_ms(shape, schedules.SHAPES),
      median_ms(number, ("0.1", "257", "1e-8")), median_ms(scale, range(0, 33, 4)),
      median_ms(convention, memory.CONVENTIONS))
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
    row = next(line for line in "".join(printed).splitlines() if line.startswith("GRAPHS"))
    step, nodes, picture, race, composer, explorer, dial, calculator = row.split()[1:]
    print(f"stepper: {float(step):.1f} ms; race: {float(race):.1f} ms", end="; ")
    print(f"composer: {float(composer):.1f} ms", end="; ")
    print(f"explorer: {float(explorer):.1f} ms; dial: {float(dial):.1f} ms", end="; ")
    print(f"calculator: {float(calculator):.1f} ms", end="; ")
    print(f"{nodes} nodes traced and drawn: {float(picture):.0f} ms")


if __name__ == "__main__":
    main()
