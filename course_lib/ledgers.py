"""Model states by arithmetic: what each parameter costs, under a named convention.

Public figures run from 8 to 20 bytes a parameter, because they count different copies. A ledger
names each copy. It counts what is there after backward and before the update; activations, the
update's temporaries and what an allocator keeps are not in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from course_lib import units
from course_lib.checks import one_of, whole
from course_lib.shapes import DTYPES


class Role(Enum):
    """What a row is, and what it is called."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    GRADIENT_COPIES = "fp32 gradient copies"
    MASTERS = "master weights"
    FIRST_MOMENT = "first moment"
    SECOND_MOMENT = "second moment"
    MOMENTUM = "momentum"
    # Of a live model:
    FROZEN = "frozen weights"
    NOT_UPDATED = "not in the optimizer"
    UNUSED_GRADIENTS = "gradients not used"
    BUFFERS = "buffers"
    NOT_THE_MODELS = "not in the model"
    THEIR_GRADIENTS = "their gradients"
    STEP_COUNTERS = "step counters"
    STATE = "state"

    @property
    def part(self) -> str:
        """The category of `live_bytes` that it belongs to."""
        return _PARTS.get(self, "optimizer state")


_PARTS = dict.fromkeys(
    (Role.WEIGHTS, Role.FROZEN, Role.NOT_UPDATED, Role.BUFFERS), "weights"
) | dict.fromkeys((Role.GRADIENTS, Role.GRADIENT_COPIES, Role.UNUSED_GRADIENTS), "gradients")

# The first ZeRO stage that divides a row among the devices; what an optimizer keeps: 1.
ZERO_STAGES = {Role.GRADIENTS: 2, Role.WEIGHTS: 3}

BLOCK_SCALE = Fraction(4, 256)  # 8-bit Adam: a float32 scale for each 256 numbers
OPTIMIZERS = {
    "adamw": (Role.FIRST_MOMENT, Role.SECOND_MOMENT),
    "adam8bit": (Role.FIRST_MOMENT, Role.SECOND_MOMENT),
    "momentum": (Role.MOMENTUM,),
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

    role: Role
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
    of gradients; stage 2 also gradients, stage 3 also weights. Raises TypeError or ValueError for
    anything else.

    >>> ledger(1_000_000_000, "zero-fp16").bytes_per_param
    16.0
    >>> ledger(7_500_000_000, "zero-fp16", zero_stage=2, data_parallel=64).total_bytes
    16640625000
    """
    num_params = whole("num_params", num_params)
    data_parallel = whole("data_parallel", data_parallel)
    one_of("convention", convention, CONVENTIONS)
    one_of("optimizer", optimizer, OPTIMIZERS)
    zero_stage = whole("zero_stage", zero_stage, least=0)
    one_of("zero_stage", zero_stage, range(4))
    rows = []
    for role, dtype, each in _copies(CONVENTIONS[convention], optimizer):
        divided = zero_stage >= ZERO_STAGES.get(role, 1)
        share = Fraction(each, data_parallel if divided else 1)
        num_bytes = -int(-share * num_params // 1)  # up to a whole byte
        holder = f"1/{data_parallel} each" if divided else "each device"
        rows.append(Row(role, role.value, dtype, float(share), num_bytes, holder))
    return Ledger(f"{convention}, {optimizer}", num_params, tuple(rows))


def _copies(convention: Convention, optimizer: str) -> Iterable[tuple[Role, str, Fraction]]:
    """What it is, its dtype, and the bytes of each copy of a parameter."""
    copies = [(Role.WEIGHTS, convention.weights), (Role.GRADIENTS, convention.gradients)]
    copies += [(Role.GRADIENT_COPIES, "fp32")] * convention.copies
    copies += [(Role.MASTERS, "fp32")] * convention.masters
    for state in OPTIMIZERS[optimizer]:
        copies.append((state, "int8" if optimizer == "adam8bit" else convention.moments))
    for role, dtype in copies:
        each = 1 + BLOCK_SCALE if dtype == "int8" else Fraction(DTYPES[dtype].itemsize)
        yield role, dtype, each
