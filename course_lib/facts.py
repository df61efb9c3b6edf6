"""Published figures as frozen records, read from `data/` with their sources."""

import csv
import difflib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from course_lib.checks import one_of, whole

DATA = Path(__file__).resolve().parent.parent / "data"


@dataclass(frozen=True)
class Accelerator:
    """One accelerator, with dense rates and the link's speed in one direction.

    `memory_bytes` is what is sold; `reported_bytes` is the smallest capacity that torch reports
    of it, in public messages, else None. `verified` says how the row was checked: primary,
    secondary or from memory.
    """

    name: str
    memory_bytes: int
    reported_bytes: int | None
    memory_bytes_per_s: int
    fp32_flops_per_s: int | None
    tf32_flops_per_s: int | None
    fp16_flops_per_s: int | None
    bf16_flops_per_s: int | None
    fp8_flops_per_s: int | None
    link_bytes_per_s: int | None
    note: str
    source: str
    verified: str

    @property
    def capacity_bytes(self) -> int:
        """What a plan may use: what torch reports where that is known, else what is sold."""
        return self.reported_bytes or self.memory_bytes


SIZES = (
    "vocab_size", "dim", "num_layers", "num_heads", "ffn_dim", "max_seq_len",
    "num_kv_heads", "head_dim", "num_experts",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions of a dense transformer.

    `num_kv_heads` defaults to `num_heads` and `head_dim` to dim / num_heads. `qk_norm` is an
    RMSNorm over each head of queries and keys, as in Qwen3. `published_params` is the count in
    the public checkpoint where it is known, else None.

    It can't say experts (`num_experts` above 1 is refused), further norms, other biases than
    `qkv_bias`, one matrix for the feed-forward's way up: each changes the number of parameters,
    so compare `num_params` with the published one. Nor dropout, a cap on logits, rotation of a
    part of a head, which change bytes kept and no parameter; a sliding window changes neither.

    >>> ModelConfig(vocab_size=27, dim=32, num_layers=2, num_heads=4, ffn_dim=64,
    ...             max_seq_len=16).head_dim
    8
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    max_seq_len: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 1
    family: str = "llama"
    name: str = ""
    published_params: int | None = None
    note: str = ""
    source: str = ""
    verified: str = ""

    def __post_init__(self):
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        for size in ("dim", "num_heads"):
            whole(size, getattr(self, size))
        if self.head_dim is None:
            if self.dim % self.num_heads:
                raise ValueError(
                    f"dim {self.dim} isn't a multiple of num_heads {self.num_heads}: give head_dim"
                )
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        for size in SIZES:
            object.__setattr__(self, size, whole(size, getattr(self, size)))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        for flag in ("tied_head", "qkv_bias", "qk_norm"):
            one_of(flag, getattr(self, flag), (True, False))
        if self.num_experts > 1:
            raise ValueError(
                f"num_experts is {self.num_experts}: a mixture of experts isn't counted here, "
                "neither its parameters nor what it keeps for backward. Its states follow from the "
                "published number of all its parameters: memory.ledger(number, convention)"
            )


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps between steps, for float32 weights.

    `bytes_per_weight` is None where it depends on the weights' shapes. `verified` as above.
    """

    name: str
    keeps: str
    bytes_per_weight: float | None
    source: str
    verified: str


@dataclass(frozen=True)
class Recipe:
    """A published learning-rate schedule: `warmup` and `total` are counted in `unit`.

    `final_fraction` is the last rate over the peak. `verified` as above.
    """

    name: str
    peak_lr: float
    warmup: int
    total: int
    unit: str
    decay: str
    final_fraction: float
    source: str
    verified: str

    @property
    def warmup_fraction(self) -> float:
        return self.warmup / self.total


@dataclass(frozen=True)
class Matmul:
    """The fastest matrix product that was found on an accelerator, `shape` m × n × k.

    Beside it the published dense rate. `verified` as above.
    """

    name: str
    format: str
    reached_flops_per_s: int
    published_flops_per_s: int
    shape: str
    source: str
    verified: str


def accelerator(name: str) -> Accelerator:
    """The accelerator of this name, in any case. An unknown name raises ValueError.

    >>> accelerator("a100-sxm4-80gb").memory_bytes
    80000000000
    """
    return _named(accelerators(), name, "accelerator")


def model(name: str) -> ModelConfig:
    """The published model of this name, in any case. An unknown name raises ValueError.

    >>> model("Llama-2-7B").published_params
    6738415616
    """
    return _named(models(), name, "model")


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Every row of `data/accelerators.csv`."""
    return tuple(_read("accelerators.csv", Accelerator))


@cache
def models() -> tuple[ModelConfig, ...]:
    """Every row of `data/models.csv`."""
    return tuple(_read("models.csv", ModelConfig))


@cache
def optimizer_states() -> tuple[OptimizerState, ...]:
    """Every row of `data/optimizers.csv`."""
    return tuple(_read("optimizers.csv", OptimizerState))


@cache
def recipes() -> tuple[Recipe, ...]:
    """Every row of `data/recipes.csv`."""
    return tuple(_read("recipes.csv", Recipe))


@cache
def matmuls() -> tuple[Matmul, ...]:
    """Every row of `data/matmuls.csv`."""
    return tuple(_read("matmuls.csv", Matmul))


def _named(records: tuple, name: str, kind: str):
    if not isinstance(name, str):
        raise TypeError(f"{kind} name must be text, got {type(name).__name__}")
    by_name = {record.name.lower(): record for record in records}
    if name.lower() in by_name:
        return by_name[name.lower()]
    close = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.0)
    raise ValueError(f"unknown {kind} {name!r}: did you mean {by_name[close[0]].name!r}?")


def _read(file_name: str, record: type) -> list:
    types = {field.name: str(field.type) for field in fields(record)}
    with open(DATA / file_name, newline="", encoding="utf-8") as file:
        return [
            record(**{column: _typed(text, types[column]) for column, text in row.items()})
            for row in csv.DictReader(file)
        ]


def _typed(text: str, type_name: str):
    """A cell as its column's type; an empty cell of an optional column is None."""
    if "bool" in type_name:
        return {"true": True, "false": False}[text]
    for kind in (int, float):
        if kind.__name__ in type_name:
            return kind(text) if text else None
    return text
