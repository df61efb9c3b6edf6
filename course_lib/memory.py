"""Model states by arithmetic: what each parameter costs, under a named convention.

Public figures run from 8 to 20 bytes a parameter, because they count different copies. A ledger
names each copy. It counts what is there after backward and before the update; activations, the
update's temporaries and what an allocator keeps are not in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_lib import units
from course_lib.live_bytes import CATEGORIES, MemoryTimeline
from course_lib.shapes import Activations, Kept, activations, num_params

__all__ = [
    "CONVENTIONS",
    "OPTIMIZERS",
    "Activations",
    "Comparison",
    "Convention",
    "Difference",
    "Kept",
    "Ledger",
    "Row",
    "activations",
    "compare",
    "ledger",
    "ledger_of",
    "num_params",
]

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# The first ZeRO stage that divides a row among the devices; what an optimizer keeps: 1.
ZERO_STAGES = {"gradients": 2, "weights": 3}

BLOCK_SCALE = Fraction(4, 256)  # 8-bit Adam: a float32 scale for each 256 numbers
OPTIMIZERS = {
    "adamw": ("first moment", "second moment"),
    "adam8bit": ("first moment", "second moment"),
    "momentum": ("momentum",),
    "sgd": (),
}


@dataclass(frozen=True)
class Convention:
    """Which copies of a parameter are counted, who counts so, and what is left out.

    `copies` are float32 gradients beside 16-bit ones, on the optimizer's side.
    """

    weights: str
    gradients: str
    moments: str
    masters: bool
    copies: bool
    source: str
    leaves_out: str


ZERO_PAPER = "https://arxiv.org/abs/1910.02054"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM, docs/user-guide/features/dist_optimizer.md"
CONVENTIONS = {
    "fp32": Convention(
        "fp32", "fp32", "fp32", False, False, "torch's default", "Adam's step counters"
    ),
    "autocast": Convention(
        "fp32", "fp32", "fp32", False, False,
        "torch.autocast: the weights stay float32",
        "16-bit copies of the weights, up to 2 bytes each, until backward has used them",
    ),
    "zero-fp16": Convention(
        "fp16", "fp16", "fp32", True, False, ZERO_PAPER,
        "float32 copies of the gradients, made for the update",
    ),
    "megatron-bf16": Convention(
        "bf16", "fp32", "fp32", True, False, MEGATRON,
        "bf16 gradients, added to the float32 ones as soon as they are there",
    ),
    "both-gradients": Convention(
        "bf16", "bf16", "fp32", True, True,
        "https://github.com/deepspeedai/DeepSpeed, runtime/zero/stage_1_and_2.py; and " + MEGATRON,
        "buckets for communication",
    ),
    "seed-1b": Convention(
        "fp16", "fp32", "fp32", True, False,
        "a budget of 18 GB for 1 B parameters, often seen", "16-bit gradients",
    ),
    "seed-7b": Convention(
        "fp16", "fp16", "fp32", False, False,
        "a budget of 84 GB for 7 B parameters, often seen",
        "the master weights, which float32 moments usually come with",
    ),
    "pure-bf16": Convention(
        "bf16", "bf16", "bf16", False, False,
        "https://github.com/pytorch/torchtune, full fine-tuning in bf16",
        "nothing, but small updates are lost",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One component: bytes a parameter and in all, on one device; `holder` says who has it."""

    name: str
    dtype: str
    bytes_per_param: float
    num_bytes: int
    holder: str


@dataclass(frozen=True, repr=False)
class Ledger:
    """Rows, for one device. It prints as a table with its total in GB and GiB."""

    title: str
    num_params: int
    rows: tuple[Row, ...]

    @property
    def total_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def bytes_per_param(self) -> float:
        return self.total_bytes / self.num_params

    def __repr__(self) -> str:
        lines = [f"{self.title}, {self.num_params:,} parameters"]
        for row in self.rows:
            size = units.decimal(row.num_bytes)
            each = f"{row.bytes_per_param:.4g} B"
            lines.append(f"{row.name:<21}{row.dtype:<5}{each:>8}{size:>11}  {row.holder}".rstrip())
        size = f"{units.decimal(self.total_bytes)} = {units.binary(self.total_bytes)}"
        lines.append(f"{'total':<26}{f'{self.bytes_per_param:.4g} B':>8} = {size}")
        return "\n".join(lines)


def ledger(
    num_params: int,
    convention: str,
    *,
    optimizer: str = "adamw",
    zero_stage: int = 0,
    data_parallel: int = 1,
) -> Ledger:
    """What one device holds for `num_params` parameters: a row for each copy.

    `convention` is one of CONVENTIONS, `optimizer` of OPTIMIZERS. ZeRO divides among
    `data_parallel` devices: stage 1 what the optimizer keeps, master weights and float32 copies
    of gradients; stage 2 also gradients, stage 3 also weights. Raises ValueError for anything
    else.

    >>> ledger(1_000_000_000, "zero-fp16").bytes_per_param
    16.0
    >>> ledger(7_500_000_000, "zero-fp16", zero_stage=2, data_parallel=64).total_bytes
    16640625000
    """
    _positive("num_params", num_params)
    _positive("data_parallel", data_parallel)
    _one_of("convention", convention, CONVENTIONS)
    _one_of("optimizer", optimizer, OPTIMIZERS)
    _one_of("zero_stage", zero_stage, range(4))
    rows = []
    for name, dtype, each in _copies(CONVENTIONS[convention], optimizer):
        divided = zero_stage >= ZERO_STAGES.get(name, 1)
        share = Fraction(each, data_parallel if divided else 1)
        num_bytes = -int(-share * num_params // 1)  # up to a whole byte
        holder = f"1/{data_parallel} each" if divided else "each device"
        rows.append(Row(name, dtype, float(share), num_bytes, holder))
    return Ledger(f"{convention}, {optimizer}", num_params, tuple(rows))


def _copies(convention: Convention, optimizer: str) -> Iterable[tuple[str, str, Fraction]]:
    """Name, dtype and bytes of each copy of a parameter."""
    yield "weights", convention.weights, Fraction(BYTES[convention.weights])
    yield "gradients", convention.gradients, Fraction(BYTES[convention.gradients])
    if convention.copies:
        yield "fp32 gradient copies", "fp32", Fraction(4)
    if convention.masters:
        yield "master weights", "fp32", Fraction(4)
    for state in OPTIMIZERS[optimizer]:
        if optimizer == "adam8bit":
            yield state, "int8", 1 + BLOCK_SCALE
        else:
            yield state, convention.moments, Fraction(BYTES[convention.moments])


def ledger_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Ledger:
    """What a live model and its optimizer hold now: each storage once, by kind and dtype.

    Tied weights and shared modules count once; frozen weights and buffers have rows of their own.
    Parameters that the optimizer has and the model hasn't are master weights, their gradients
    float32 copies. A row is missing while there is nothing in it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ledger_of needs a module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"ledger_of needs a torch optimizer, got {type(optimizer).__name__}")
    own = list(model.parameters())
    known = {id(p) for p in own}
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    masters = [p for p in updated if id(p) not in known]
    kept = [
        ("step counters" if key == "step" else f"state {key}", tensor)
        for state in optimizer.state.values()
        for key, value in state.items()
        for tensor in tree_leaves(value)
        if isinstance(tensor, Tensor)
    ]
    found = [
        *(("weights" if p.requires_grad else "frozen weights", p) for p in own),
        *(("buffers", buffer) for buffer in model.buffers()),
        *(("gradients", p.grad) for p in own if p.grad is not None),
        *(("fp32 gradient copies", p.grad) for p in masters if p.grad is not None),
        *(("master weights", p) for p in masters),
        *kept,
    ]
    num_params = sum(p.numel() for p in own)
    if not num_params:
        raise ValueError("the model has no parameters")
    sizes: dict[tuple[str, str], int] = {}
    counted = set()
    for name, tensor in found:
        key = name, DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        for storage in _storages(tensor):
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                sizes[key] = sizes.get(key, 0) + storage.nbytes()
    rows = (Row(*key, size / num_params, size, "") for key, size in sizes.items())
    return Ledger(f"{type(model).__name__}, live", num_params, tuple(rows))


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """One; of a sparse tensor its values' and its indices'; of a wrapper what it wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        return [storage for name in inner for storage in _storages(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values().untyped_storage(), tensor._indices().untyped_storage()]
    if tensor.layout is not torch.strided:
        raise TypeError(f"ledger_of can't count a tensor of layout {tensor.layout}")
    return [] if tensor.is_meta else [tensor.untyped_storage()]


@dataclass(frozen=True)
class Difference:
    """A category's bytes in a ledger and at a traced peak, and why they differ."""

    category: str
    ledger_bytes: int
    peak_bytes: int
    reason: str


@dataclass(frozen=True, repr=False)
class Comparison:
    """Differences that add up to the whole difference. It prints as a table."""

    lines: tuple[Difference, ...]

    def __repr__(self) -> str:
        sums = (sum(d.ledger_bytes for d in self.lines), sum(d.peak_bytes for d in self.lines))
        rows = [f"{'':<15}{'ledger':>12}{'at the peak':>13}"]
        for line in (*self.lines, Difference("total", *sums, "")):
            sizes = f"{units.binary(line.ledger_bytes):>12}{units.binary(line.peak_bytes):>13}"
            rows.append(f"{line.category:<15}{sizes}  {line.reason}".rstrip())
        return "\n".join(rows)


def compare(ledger: Ledger, timeline: MemoryTimeline) -> Comparison:
    """A ledger beside a traced peak, category by category, with a reason where they differ."""
    if not isinstance(ledger, Ledger):
        raise TypeError(f"compare needs a Ledger, got {type(ledger).__name__}")
    if not isinstance(timeline, MemoryTimeline):
        raise TypeError(f"compare needs a MemoryTimeline, got {type(timeline).__name__}")
    counted = dict.fromkeys(CATEGORIES, 0)
    for row in ledger.rows:
        counted[_CATEGORY.get(row.name, "optimizer state")] += row.num_bytes
    return Comparison(
        tuple(
            Difference(
                name, counted[name], peak, _reason(name, counted[name], peak, ledger, timeline)
            )
            for name, peak in timeline.peak_by.items()
            if counted[name] or peak
        )
    )


_CATEGORY = {"gradients": "gradients", "fp32 gradient copies": "gradients"} | dict.fromkeys(
    ("weights", "frozen weights", "buffers"), "weights"
)
COUNTER = 4  # bytes: AdamW's step counter, one for each tensor


def _reason(
    category: str, counted: int, peak: int, ledger: Ledger, timeline: MemoryTimeline
) -> str:
    if counted == peak:
        return ""
    if category in ("activations", "inputs", "temporaries"):
        return "not in a ledger"
    if category == "weights":
        return "another model, or buffers"
    most = int(max(timeline.live[category], default=0))
    if category == "gradients":
        late = peak < counted == most
        return (
            f"not all there in {timeline.peak_at.phase}" if late else "another model or convention"
        )
    adam = any(row.name == "second moment" for row in ledger.rows)
    counters = _counters(timeline) if adam else 0
    if peak == 0 and counted <= most <= counted + counters:
        return "made by the first update"
    return "step counters" if counted < peak <= counted + counters else "another optimizer"


def _counters(timeline: MemoryTimeline) -> int:
    """Bytes of optimizer state that came in pieces as small as a step counter."""
    made = [e.num_bytes for e in timeline.events if e.category == "optimizer state"]
    return made.count(COUNTER) * COUNTER


def _positive(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _one_of(name: str, value, allowed) -> None:
    if type(value) not in (str, int) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
