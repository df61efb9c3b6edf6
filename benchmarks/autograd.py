"""One training step of micrograd's own demo, by three engines in one run.

    pip install micrograd && python benchmarks/autograd.py

A 2-16-16-1 network with ReLU on 100 moons: zero the gradients, forward, hinge loss with an L2
term, backward, SGD update, in float64. micrograd makes an object for each number, and its
closures refer back to them, so that Python's collector walks them over and over: its time is
taken with the collector on, as it is by default, and off.
"""

import gc
import statistics
import time

import numpy as np
import torch

from course_lib.autograd import Tensor

ANGLE = np.linspace(0, np.pi, 50)
UPPER = np.stack([np.cos(ANGLE), np.sin(ANGLE)], axis=1)  # one moon; the other is turned round
X = np.concatenate([UPPER, [1.0, 0.5] - UPPER])
Y = np.repeat([-1.0, 1.0], 50)[:, None]
SIZES = (2, 16, 16, 1)
RATE, DECAY = 0.1, 1e-4


def weights() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    pairs = zip(SIZES, SIZES[1:], strict=False)
    return [a for i, o in pairs for a in (rng.uniform(-1, 1, (i, o)), np.zeros(o))]


def by_arrays(make, to_data):
    """One step on arrays, written once for our engine and for torch."""
    parameters = [make(w) for w in weights()]

    def step() -> float:
        for p in parameters:
            p.grad = None
        h = make.constant(X)
        for i in range(0, 6, 2):
            h = h @ parameters[i] + parameters[i + 1]
            h = h.relu() if i < 4 else h
        loss = (1.0 - h * make.constant(Y)).relu().mean()
        for p in parameters:
            loss = loss + (p * p).sum() * DECAY
        loss.backward()
        for p in parameters:
            data = to_data(p)
            data -= RATE * p.grad
        return float(loss.data)

    return step


def ours():
    def make(w):
        return Tensor(w, requires_grad=True)

    make.constant = Tensor
    return by_arrays(make, lambda p: p.data)


def torchs():
    def make(w):
        return torch.tensor(w, requires_grad=True)

    make.constant = torch.from_numpy
    return by_arrays(make, lambda p: p.data)


def micrograds():
    from micrograd.engine import Value
    from micrograd.nn import MLP

    model = MLP(2, [16, 16, 1])
    arrays = weights()
    for layer, (w, b) in zip(
        model.layers, zip(arrays[::2], arrays[1::2], strict=True), strict=True
    ):
        for k, neuron in enumerate(layer.neurons):
            neuron.b.data = float(b[k])
            for value, number in zip(neuron.w, w[:, k], strict=True):
                value.data = float(number)

    def step() -> float:
        model.zero_grad()
        scores = [model([Value(float(a)) for a in x]) for x in X]
        losses = [(1 + -float(y) * score).relu() for y, score in zip(Y[:, 0], scores, strict=True)]
        loss = sum(losses) * (1.0 / len(losses))
        loss = loss + DECAY * sum(p * p for p in model.parameters())
        loss.backward()
        for p in model.parameters():
            p.data -= RATE * p.grad
        return loss.data

    return step


def milliseconds(step, times: int) -> float:
    step()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        step()
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken)


def main() -> None:
    torch.set_num_threads(1)
    first = [engine()() for engine in (ours, torchs, micrograds)]
    assert max(first) - min(first) < 1e-9, first  # the same step
    our_ms, torch_ms = milliseconds(ours(), 500), milliseconds(torchs(), 500)
    with_collector = milliseconds(micrograds(), 5)
    gc.disable()
    without = milliseconds(micrograds(), 5)
    gc.enable()
    print(f"ours {our_ms:.3f} ms; torch {torch_ms:.3f} ms ({our_ms / torch_ms:.2f} times torch's)")
    print(f"micrograd {with_collector:.0f} ms: {with_collector / our_ms:,.0f} times ours")
    print(f"micrograd, collector off {without:.0f} ms: {without / our_ms:,.0f} times ours")


if __name__ == "__main__":
    main()
