"""The live bytes of a program: every storage, from its birth to its death, by category.

A dispatch mode sees each operation that torch runs, forward, backward and update alike. It
registers every new storage with a weak reference and hears when the storage dies, so the live
bytes are known after each operation.

Not seen: what a kernel allocates and frees inside itself, and what an allocator rounds up or
keeps back. Kernels differ: dropout keeps its mask as floats on a CPU and as bools on a GPU.
"""

import linecache
import os
import sys
import time
import traceback
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from course_lib import fake_tensors, units
from course_lib.compute import NoFormula, flops_of

CATEGORIES = ("weights", "gradients", "optimizer state", "activations", "inputs", "temporaries")

_NOT_THE_READERS = (str(Path(torch.__file__).parent) + os.sep, __file__, fake_tensors.__file__)


class Event(NamedTuple):
    """A storage appears (positive bytes) or dies (negative). Step 0 is the building."""

    step: int
    phase: str
    operation: str
    category: str
    num_bytes: int


@dataclass(frozen=True)
class Phase:
    """One phase of one step, from event `first` up to but not including event `end`.

    `seconds` includes the measuring; it is None under fake tensors, which take no real time.
    `flops` is None if an operation ran whose FLOPs can't be counted (`compute`).
    """

    step: int
    name: str
    bytes_before: int
    bytes_after: int
    peak_bytes: int
    seconds: float | None
    flops: int | None
    first: int
    end: int


@dataclass(frozen=True)
class PeakAt:
    """The moment of the peak: the operation, and the reader's line that asked for it.

    In backward it is the line of the forward operation whose gradient was being computed.
    """

    step: int
    phase: str
    operation: str
    function: str
    line: str

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}, {self.operation}, {self.function}: {self.line}"


@dataclass(frozen=True, repr=False)
class MemoryTimeline:
    """The measured run: events in order, phases in order, and the largest moment."""

    events: tuple[Event, ...]
    phases: tuple[Phase, ...]
    peak_bytes: int
    peak_by: dict[str, int]
    peak_at: PeakAt

    @cached_property
    def live(self) -> dict[str, np.ndarray]:
        """Live bytes of each category after each event: arrays as long as `events`."""
        position = {category: i for i, category in enumerate(CATEGORIES)}
        change = np.zeros((len(CATEGORIES), len(self.events)), dtype=np.int64)
        for i, event in enumerate(self.events):
            change[position[event.category], i] = event.num_bytes
        return dict(zip(CATEGORIES, change.cumsum(axis=1), strict=True))

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {units.binary(size)}" for name, size in self.peak_by.items())
        return (
            f"MemoryTimeline(peak {units.binary(self.peak_bytes)} in {self.peak_at.phase} of step "
            f"{self.peak_at.step}: {parts})"
        )


@dataclass(slots=True, eq=False)
class _Storage:
    """What is remembered of one storage. Its category may be learnt after its birth."""

    num_bytes: int
    category: str | None = None
    alive: bool = True
    ref: weakref.ref | None = field(default=None, repr=False)


class Tracer(TorchDispatchMode):
    """Registers each storage with a weak reference and counts it until it dies.

    With `fake` an optimizer's fused kernel isn't called: it only writes into what is there, and
    not each has a version for shapes alone.
    """

    def __init__(self, fake: bool):
        super().__init__()
        self.fake = fake
        self.step = 0
        self.phase_name = "build"
        self.operation = ""
        self.live_bytes = self.peak_bytes = self.phase_peak = 0
        self.flops: int | None = 0  # of this phase
        self.peak_index = 0
        self.peak_at = PeakAt(0, "build", "", "", "")
        self.phases: list[Phase] = []
        self.storages: dict[int, _Storage] = {}  # by address, while alive
        self._log: list[tuple[int, str, str, _Storage, int]] = []
        self._unsettled: list[_Storage] = []
        self._forward_frames: dict[int, tuple] = {}  # autograd sequence number -> code, line

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):  # a question or a mark, no operation
            return func(*args, **kwargs)
        recording = torch.is_grad_enabled()
        if self.phase_name == "backward" and not recording:
            self._settle()
        self.operation = str(func)
        if func is not torch.ops.aten.lift_fresh.default:  # its input is the constant itself
            for tensor in _tensors(args):
                self._register(tensor, "inputs")
        if self.fake and self.operation.startswith("aten._fused_") and not func._schema.returns:
            return None
        out = func(*args, **kwargs)
        self._count(func, args, kwargs, out)
        if recording and self.phase_name in ("forward", "loss"):
            self._forward_frames[torch._C._autograd._get_sequence_nr() - 1] = _readers_frame()
        for tensor in _tensors((out,)):
            self._register(tensor, None, recording)
        return out

    def _count(self, *operation) -> None:
        if self.flops is not None:
            try:
                self.flops += flops_of(*operation)
            except NoFormula:
                self.flops = None

    def adopt(self, model: nn.Module) -> None:
        """All that is alive once the model is built belongs to it; follow its gradients."""
        for storage in self.storages.values():
            storage.category = "weights"
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: self._label(parameter.grad, "gradients")
            )

    def take(self, batch: Any, fake_mode: FakeTensorMode | None) -> Any:
        """Register a real batch as inputs; under fake tensors, a fake copy of it."""
        self.operation = "build_batch"
        self.phase_name = "batch"
        if fake_mode is not None:
            batch = tree_map_only(Tensor, fake_mode.from_tensor, batch)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor):
                self._register(tensor, "inputs")
        return batch

    def label_state(self, state: dict) -> None:
        for tensor in tree_leaves([list(entry.values()) for entry in state.values()]):
            if isinstance(tensor, Tensor):
                self._label(tensor, "optimizer state")

    @contextmanager
    def phase(self, name: str):
        if name == "backward":
            self._settle()
        before, self.flops, start = self.live_bytes, 0, time.perf_counter()
        self.phase_name, self.phase_peak, first = name, self.live_bytes, len(self._log)
        yield
        seconds = None if self.fake else time.perf_counter() - start
        self.phases.append(
            Phase(
                self.step,
                name,
                before,
                self.live_bytes,
                self.phase_peak,
                seconds,
                self.flops,
                first,
                len(self._log),
            )
        )
        self.phase_name = "between phases"

    def timeline(self) -> MemoryTimeline:
        events = tuple(
            Event(step, phase, operation, storage.category or "temporaries", change)
            for step, phase, operation, storage, change in self._log
        )
        peak_by = dict.fromkeys(CATEGORIES, 0)
        for event in events[: self.peak_index]:
            peak_by[event.category] += event.num_bytes
        return MemoryTimeline(events, tuple(self.phases), self.peak_bytes, peak_by, self.peak_at)

    def _register(self, tensor: Tensor, category: str | None, recording: bool = False) -> None:
        if tensor.layout is not torch.strided:
            raise ValueError(f"only strided tensors can be measured, got {tensor.layout}")
        untyped = tensor.untyped_storage()
        key, num_bytes = untyped._cdata, untyped.nbytes()
        known = self.storages.get(key)
        if known is not None:
            if known.num_bytes != num_bytes:
                self._change(known, num_bytes - known.num_bytes)
                known.num_bytes = num_bytes
            return
        storage = _Storage(num_bytes, category)
        storage.ref = weakref.ref(untyped, lambda _: self._died(key))
        self.storages[key] = storage
        if recording and self.phase_name in ("forward", "loss", "backward"):
            self._unsettled.append(storage)
        self._change(storage, num_bytes)

    def _died(self, key: int) -> None:
        storage = self.storages.pop(key)
        storage.alive = False
        self._change(storage, -storage.num_bytes)

    def _change(self, storage: _Storage, change: int) -> None:
        if change == 0:
            return
        operation = "" if self.phase_name == "between phases" else self.operation
        self._log.append((self.step, self.phase_name, operation, storage, change))
        self.live_bytes += change
        self.phase_peak = max(self.phase_peak, self.live_bytes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_index = self.live_bytes, len(self._log)
            self.peak_at = self._here()

    def _label(self, tensor: Tensor, category: str) -> None:
        storage = self.storages.get(tensor.untyped_storage()._cdata)
        if storage is not None:
            storage.category = category

    def _settle(self) -> None:
        """What was made while autograd recorded and is alive when it stops is an activation."""
        for storage in self._unsettled:
            if storage.alive and storage.category is None:
                storage.category = "activations"
        self._unsettled.clear()

    def _here(self) -> PeakAt:
        node = torch._C._current_autograd_node()
        frame = None if node is None else self._forward_frames.get(node._sequence_nr())
        code, line_number = frame or _readers_frame()
        line = linecache.getline(code.co_filename, line_number).strip()
        return PeakAt(self.step, self.phase_name, self.operation, code.co_qualname, line)


def readers_line(error: BaseException) -> str:
    """Function and line of the innermost frame of an error that is the reader's own."""
    frames = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    code, number = [f for f in frames if not f[0].co_filename.startswith(_NOT_THE_READERS)][-1]
    return f"{code.co_qualname}: {linecache.getline(code.co_filename, number).strip()}"


def _tensors(values) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _readers_frame() -> tuple:
    """Code and line number of the innermost frame that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_READERS):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno
