"""The 7 B step traced: seconds and memory, against torch's own MemTracker in the same run.

    python benchmarks/memory_trace.py

Each tracer runs in a process of its own, on one thread, with the same model, batch and
optimizer under fake tensors: 32 layers, width 4,096, one sequence of 2,048 tokens, two AdamW
steps. Prints the peak, the seconds and the largest resident memory of each, and their ratios.
"""

import json
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from course_lib import facts, memory_trace, models, units
from course_lib.training import train_step

CONFIG = facts.model("llama-2-7b")


def build_batch():
    ids = torch.zeros(1, 2048, dtype=torch.int64)
    return ids, ids.clone()


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters())


def ours() -> int:
    return memory_trace.measure(
        lambda: models.Transformer(CONFIG), build_batch, loss_fn, build_optimizer
    ).peak_bytes


def mem_tracker() -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model = models.Transformer(CONFIG)
        optimizer = build_optimizer(model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                batch = build_batch()
                train_step(model, [batch], loss_fn, optimizer)
                del batch
                if step == 0:
                    tracker.reset_mod_stats()
        snapshot = tracker.get_tracker_snapshot("peak")
    return snapshot[torch.device("cpu")]["Total"]


def alone(tracer: str) -> dict:
    """Run one tracer in a new process and return its peak, seconds and resident bytes."""
    done = subprocess.run(
        [sys.executable, __file__, tracer], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if len(sys.argv) == 2:
        import resource  # not on Windows

        torch.set_num_threads(1)
        start = time.perf_counter()
        peak = {"ours": ours, "MemTracker": mem_tracker}[sys.argv[1]]()
        seconds = time.perf_counter() - start
        unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
        resident = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"peak": peak, "seconds": seconds, "resident": resident}))
        return
    results = {tracer: alone(tracer) for tracer in ("ours", "MemTracker")}
    for tracer, result in results.items():
        print(
            f"{tracer:<12} peak {units.binary(result['peak'])} ({result['peak']:,} bytes), "
            f"{result['seconds']:.1f} s, {units.decimal(result['resident'])} of RAM"
        )
    ratio = results["MemTracker"]["seconds"] / results["ours"]["seconds"]
    apart = results["ours"]["peak"] - results["MemTracker"]["peak"]
    print(f"{ratio:.1f} times as fast as MemTracker; peaks {apart:,} bytes apart")


if __name__ == "__main__":
    main()
