"""Estimates of a training step's peak against the traced truth.

    python -m pip install torchinfo
    python benchmarks/memory_estimates.py

Ten steps of published models and small ones, chosen before looking, then twenty drawn by chance
from the published models, cut to a few layers; the truth is a trace of two steps on shapes
without numbers. Estimators: ours (`moments`); accelerate's rule, four times the
weights as they are loaded; DeepSpeed's estimator for ZeRO-2 on one device, 20 bytes a parameter;
torchinfo, weights plus its estimate of a forward and backward pass. Accelerate and DeepSpeed
count model states only, and say so; torchinfo counts no optimizer. Their users take them for the
whole. Prints each error in per cent, and each estimator's median and largest.
"""

import dataclasses
import random
import statistics

import torch
import torch.nn.functional as F
import torchinfo

from course_lib import facts, memory_trace, models, units
from course_lib.facts import ModelConfig
from course_lib.moments import ONE_BY_ONE, moments
from course_lib.shapes import num_params

LLAMA = facts.model("llama-2-7b")
LLAMA_4 = dataclasses.replace(LLAMA, num_layers=4)
SMALL = ModelConfig(
    vocab_size=27, dim=128, num_layers=4, num_heads=4, ffn_dim=344, max_seq_len=256, name="names"
)

STEPS = [  # model, convention, batch, sequence, optimizer, step, the rest
    (LLAMA, "fp32", 1, 2048, "adamw", ONE_BY_ONE, {}),
    (LLAMA, "pure-bf16", 8, 2048, "adamw", ONE_BY_ONE, {"checkpointing": True}),
    (LLAMA_4, "autocast", 8, 2048, "adamw", "foreach", {}),
    (LLAMA_4, "fp32", 4, 1024, "sgd", ONE_BY_ONE, {"attention": "explicit"}),
    (facts.model("qwen2.5-0.5b"), "autocast", 4, 1024, "adamw", "foreach", {}),
    (facts.model("qwen2.5-1.5b"), "fp32", 1, 512, "momentum", ONE_BY_ONE, {}),
    (facts.model("llama-3.2-1b"), "pure-bf16", 2, 4096, "adamw", "fused", {"checkpointing": True}),
    (facts.model("mistral-7b-v0.1"), "autocast", 1, 1024, "adamw", "fused", {}),
    (SMALL, "fp32", 32, 128, "adamw", ONE_BY_ONE, {}),
    (SMALL, "fp32", 64, 256, "momentum", "foreach", {"checkpointing": True}),
]


def drawn(count: int) -> list[tuple]:
    """Model, convention, batch, sequence, optimizer, step, the rest: each by chance."""
    draw = random.Random(2026)
    rows = []
    for _ in range(count):
        published = draw.choice([model for model in facts.models() if model.family == "llama"])
        layers = draw.choice([2, 4, 6])
        how = {"attention": "explicit"} if draw.random() < 0.25 else {}
        how |= {"checkpointing": True} if draw.random() < 0.4 else {}
        rows.append(
            (
                dataclasses.replace(published, num_layers=layers),
                draw.choice(["fp32", "autocast", "pure-bf16"]),
                draw.choice([1, 2, 4, 8]),
                draw.choice([128, 512, 1024, 2048]),
                draw.choice(["adamw", "adamw", "momentum", "sgd"]),
                draw.choice([ONE_BY_ONE, "foreach", "fused"]),
                how,
            )
        )
    return rows


def traced(config, convention, batch, seq, optimizer, step, how) -> int:
    many = {"fused": True} if step == "fused" else {"foreach": step == "foreach"}
    build = {
        "adamw": lambda m: torch.optim.AdamW(m.parameters(), **many),
        "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, **many),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **many),
    }[optimizer]
    return memory_trace.measure(
        lambda: models.Transformer(config, **how),
        lambda: torch.zeros((batch, seq), dtype=torch.int64),
        lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()),
        build,
        dtype=torch.bfloat16 if convention == "pure-bf16" else torch.float32,
        autocast=torch.bfloat16 if convention == "autocast" else None,
    ).peak_bytes


def by_torchinfo(config, batch, seq, how) -> int:
    with torch.device("meta"):
        model = models.Transformer(config, **how)
        tokens = torch.zeros((batch, seq), dtype=torch.int64)
    summary = torchinfo.summary(model, input_data=tokens, device="meta", verbose=0)
    return summary.total_param_bytes + summary.total_output_bytes + summary.total_input


def estimates(config, convention, batch, seq, optimizer, step, how) -> dict[str, int]:
    ours = moments(config, convention, batch=batch, seq=seq, optimizer=optimizer, step=step, **how)
    weight = 2 if convention == "pure-bf16" else 4
    return {
        "ours": ours.peak.total_bytes,
        "accelerate": 4 * weight * num_params(config),
        "DeepSpeed": 20 * num_params(config),
        "torchinfo": by_torchinfo(config, batch, seq, how),
    }


def main() -> None:
    torch.set_num_threads(1)
    errors: dict[str, list[float]] = {}
    for row in (*STEPS, *drawn(20)):
        config, convention, batch, seq, optimizer, step, how = row
        truth, said = traced(*row), []
        for name, estimate in estimates(*row).items():
            error = 100 * (estimate / truth - 1)
            errors.setdefault(name, []).append(abs(error))
            said.append(f"{name} {error:+.1f} %")
        label = f"{config.name}, {config.num_layers} layers, {convention}, {batch} × {seq}"
        extra = ", ".join([optimizer, step, *map(str, how)])
        print(f"{label}, {extra}: {units.binary(truth)}; {', '.join(said)}", flush=True)
    for name, all_errors in errors.items():
        median, most = statistics.median(all_errors), max(all_errors)
        print(f"{name}: median error {median:.1f} %, largest {most:.1f} %")


if __name__ == "__main__":
    main()
