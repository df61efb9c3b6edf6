"""Model states as they are: of a live model, and beside a traced peak.

The ledger's arithmetic is in `ledgers`, and what is kept for backward in `shapes`; both are
offered from here, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_lib import units
from course_lib.ledgers import CONVENTIONS, OPTIMIZERS, Convention, Ledger, Role, Row, ledger
from course_lib.live_bytes import CATEGORIES, MemoryTimeline
from course_lib.shapes import DTYPES, Activations, Kept, activations, num_params

__all__ = [
    "CONVENTIONS",
    "OPTIMIZERS",
    "Activations",
    "Comparison",
    "Convention",
    "Difference",
    "Kept",
    "Ledger",
    "Role",
    "Row",
    "activations",
    "compare",
    "ledger",
    "ledger_of",
    "num_params",
]


def ledger_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Ledger:
    """What a live model and its optimizer hold now: each storage once, by kind and dtype.

    Tied weights and shared modules count once; frozen weights and buffers have rows of their own,
    and so have trainable weights that the optimizer doesn't update. What the optimizer updates
    and the model hasn't are master weights, and their gradients float32 copies, where it is
    float32 of the shape of a 16-bit weight that the optimizer doesn't update itself; anything
    else is said to be not in the model. A row is missing while there is nothing in it. Raises
    ValueError for a tensor on the meta device, which holds nothing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ledger_of needs a module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"ledger_of needs a torch optimizer, got {type(optimizer).__name__}")
    num_params = sum(p.numel() for p in model.parameters())
    if not num_params:
        raise ValueError("the model has no parameters")
    sizes: dict[tuple[Role, str, str], int] = {}
    counted = set()
    for role, name, tensor in _held(model, optimizer):
        if tensor.is_meta:
            raise ValueError(
                f"ledger_of counts what is held, and {name} are on the meta device, which holds "
                f"nothing: build the model on a real one, or ask ledger({num_params}, convention)"
            )
        key = role, name, _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        for storage in _storages(tensor):
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                sizes[key] = sizes.get(key, 0) + storage.nbytes()
    rows = (Row(*key, size / num_params, size, "") for key, size in sizes.items())
    return Ledger(f"{type(model).__name__}, live", num_params, tuple(rows))


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Role, str, Tensor]]:
    """Each tensor with what it is and what that is called."""
    own = list(model.parameters())
    updated = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    masters, mastered = _masters(own, updated)
    known = {id(p) for p in own} | masters.keys()
    strangers = [p for key, p in updated.items() if key not in known]
    shared = {storage._cdata for p in updated.values() for storage in _storages(p)}

    def role_of(parameter: nn.Parameter) -> Role:
        if not parameter.requires_grad:
            return Role.FROZEN
        same = any(storage._cdata in shared for storage in _storages(parameter))
        return Role.WEIGHTS if same or id(parameter) in mastered else Role.NOT_UPDATED

    gradient = (Role.GRADIENTS, Role.UNUSED_GRADIENTS)
    found = [
        *((role_of(p), p) for p in own),
        *((Role.BUFFERS, buffer) for buffer in model.buffers()),
        *((gradient[role_of(p) is Role.NOT_UPDATED], p.grad) for p in own),
        *((Role.GRADIENT_COPIES, p.grad) for p in masters.values()),
        *((Role.MASTERS, p) for p in masters.values()),
        *((Role.NOT_THE_MODELS, p) for p in strangers),
        *((Role.THEIR_GRADIENTS, p.grad) for p in strangers),
    ]
    yield from ((role, role.value, tensor) for role, tensor in found if tensor is not None)
    for state in optimizer.state.values():
        for key, value in state.items():
            role = Role.STEP_COUNTERS if key == "step" else Role.STATE
            name = role.value if key == "step" else f"{role.value} {key}"
            yield from ((role, name, t) for t in tree_leaves(value) if isinstance(t, Tensor))


def _masters(own: list, updated: dict) -> tuple[dict, set[int]]:
    """Masters by id, and the ids of the model's parameters that have one."""
    known = {id(p) for p in own}
    waiting: dict[torch.Size, list] = {}
    for p in own:
        if p.requires_grad and id(p) not in updated and p.dtype in (torch.float16, torch.bfloat16):
            waiting.setdefault(p.shape, []).append(id(p))
    masters, mastered = {}, set()
    for key, p in updated.items():
        if key not in known and p.dtype == torch.float32 and waiting.get(p.shape):
            masters[key] = p
            mastered.add(waiting[p.shape].pop(0))
    return masters, mastered


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """One; of a sparse tensor its values' and its indices'; of a wrapper what it wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        return [storage for name in inner for storage in _storages(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values().untyped_storage(), tensor._indices().untyped_storage()]
    if tensor.layout is not torch.strided:
        raise TypeError(f"ledger_of can't count a tensor of layout {tensor.layout}")
    return [tensor.untyped_storage()]


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
        counted[row.role.part] += row.num_bytes
    return Comparison(
        tuple(
            Difference(
                name, counted[name], peak, _reason(name, counted[name], peak, ledger, timeline)
            )
            for name, peak in timeline.peak_by.items()
            if counted[name] or peak
        )
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
    adam = any(row.role is Role.SECOND_MOMENT for row in ledger.rows)
    counters = _counters(timeline) if adam else 0
    if peak == 0 and counted <= most <= counted + counters:
        return "made by the first update"
    return "step counters" if counted < peak <= counted + counters else "another optimizer"


def _counters(timeline: MemoryTimeline) -> int:
    """Bytes of optimizer state that came in pieces as small as a step counter."""
    made = [e.num_bytes for e in timeline.events if e.category == "optimizer state"]
    return made.count(COUNTER) * COUNTER
