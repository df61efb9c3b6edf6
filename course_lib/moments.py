"""The largest moments of a training step by arithmetic: a sum of parts is no forecast.

Activations die in backward while gradients grow, and the update's temporaries come last. So the
peak is one of a few moments, and which one depends on the setting. Counted for
`models.Transformer` in eager torch on a CPU, and within 5 % of the trace. Not counted: an
allocator's rounding, a device's context, the buckets of data parallel training. What ZeRO leaves
on a device is therefore a floor: nothing is fetched ahead, and no bucket waits to be sent. Its
stages 1 and 2 are compared with a traced step, stage 3 is arithmetic alone.
"""

from dataclasses import dataclass

from course_lib.checks import one_of, whole
from course_lib.facts import ModelConfig
from course_lib.ledgers import CONVENTIONS, Convention, Ledger, Role, ledger
from course_lib.passes import backward, forward, sizes_of
from course_lib.shapes import DTYPES, WIDE, Activations, num_params

PHASES = ("forward", "loss", "backward", "step")
ONE_BY_ONE = "one tensor at a time"
STEPS = (ONE_BY_ONE, "foreach", "fused")  # how the optimizer goes over the weights


@dataclass(frozen=True)
class Moment:
    """What is alive `at` some point of a phase, on one device: bytes by part.

    `passing` says what the temporaries are.
    """

    phase: str
    at: str
    parts: dict[str, int]
    passing: str

    @property
    def name(self) -> str:
        return f"{self.phase}, {self.at}" if self.at else self.phase

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Moments:
    """The moments of a step, in order, with the ledger and the activations they are made of."""

    moments: tuple[Moment, ...]
    ledger: Ledger
    activations: Activations

    @property
    def phases(self) -> tuple[Moment, ...]:
        """The largest moment of each phase."""
        return tuple(
            max((m for m in self.moments if m.phase == phase), key=lambda m: m.total_bytes)
            for phase in PHASES
        )

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def sum_bytes(self) -> int:
        """All that lasts added up, as if it stood together. Temporaries come on top."""
        return self.ledger.total_bytes + self.activations.total_bytes


def moments(
    config: ModelConfig,
    convention: str,
    *,
    batch: int,
    seq: int,
    optimizer: str = "adamw",
    step: str = "foreach",
    attention: str = "sdpa",
    checkpointing: bool = False,
    accumulate: int = 1,
    zero_stage: int = 0,
    data_parallel: int = 1,
) -> Moments:
    """The moments of a training step of `batch` sequences of `seq` tokens on one device.

    `convention`, `optimizer`, `zero_stage` and `data_parallel` as in `memory.ledger`, `attention`
    and `checkpointing` as in `shapes.activations`, `step` one of STEPS: a GPU's default is
    "foreach". 16-bit gradients that masters are updated from become float32, as `MasterWeights`
    does it, which gives the 16-bit ones up, all before the update; with "one tensor at a time" each
    is widened beside it for its own tensor alone. With `accumulate` above 1 `batch` is one of so
    many micro-batches, and the gradients stay alive between them. What ZeRO divides is there in
    full for the layer at hand, or the head; autocast's copies of the weights are never divided.
    """
    one_of("step", step, STEPS)
    one_of("convention", convention, CONVENTIONS)
    kind, data_parallel = CONVENTIONS[convention], whole("data_parallel", data_parallel)
    accumulating = whole("accumulate", accumulate) > 1
    # A gradient that is widened as soon as it is there stands beside its sum, like a further one.
    beside = accumulating or kind.gradients != kind.weights
    sizes = sizes_of(config, convention, batch, seq, attention, checkpointing, beside)
    states = ledger(
        num_params(config),
        convention,
        optimizer=optimizer,
        zero_stage=zero_stage,
        data_parallel=data_parallel,
    )
    held = {row.role: row.num_bytes for row in states.rows}
    weights, gradients = held.pop(Role.WEIGHTS), held.pop(Role.GRADIENTS)
    gradients += held.pop(Role.GRADIENT_COPIES, 0)
    weight = DTYPES[kind.weights].itemsize
    base = {"weights": weights, "optimizer state": sum(held.values())}
    sharded = zero_stage if data_parallel > 1 else 0
    found = []
    for point in (*forward(sizes), *backward(sizes)):
        grown = states.num_params if accumulating else point.grown
        new = max(point.new, point.used) if sharded >= 2 and point.grown else point.new
        said = [point.passing] * (point.temporaries > 0) + ["new gradients"] * (new > 0)
        parts = base | {
            "gradients": gradients * grown // states.num_params,
            "activations": point.activations,
            "temporaries": point.temporaries + weight * new,
        }
        if sharded == 3:
            parts["gathered"] = weight * point.used
        found.append(Moment(point.phase, point.at, parts, " and ".join(said) or "none"))
    updated = -(-states.num_params // data_parallel) if sharded else states.num_params
    temporaries, given_up, passing = _update(config, kind, updated, optimizer, step)
    if sharded != 1:  # there a device widens its share of whole gradients, which stay
        gradients = max(0, gradients - given_up)
    alive = {"gradients": gradients, "temporaries": temporaries}
    found.append(Moment("step", "", base | alive, passing))
    return Moments(tuple(found), states, sizes.kept)


def _update(
    config: ModelConfig, kind: Convention, params: int, optimizer: str, step: str
) -> tuple[int, int, str]:
    """Of an update of `params` parameters: its temporaries, gradients given up for it, in bytes.

    And what the temporaries are. 8-bit Adam is one kernel.
    """
    if step == ONE_BY_ONE:
        temporaries, said = _one_by_one(config, kind, params, optimizer)
        return temporaries, 0, said
    numbers = params if step == "foreach" and optimizer == "adamw" else 0
    temporaries = DTYPES[kind.moments].itemsize * numbers
    said = ["one number for each weight"] * (numbers > 0)
    if not (kind.masters and _narrow(kind)):
        return temporaries, 0, said[0] if said else "none"
    gradient = DTYPES[kind.gradients].itemsize
    # The head's is the last that is widened: once more, its 16-bit gradient is there.
    last = 0 if config.tied_head else min(params, config.vocab_size * config.dim)
    temporaries = WIDE * params + max(temporaries, gradient * last)
    return temporaries, gradient * params, " and ".join(["float32 copies of the gradients", *said])


def _one_by_one(
    config: ModelConfig, kind: Convention, params: int, optimizer: str
) -> tuple[int, str]:
    """Of the tensor at hand: two numbers of Adam's each, and a 16-bit gradient in float32.

    One number is there of the tensor before it: in a layer, as large.
    """
    own = 2 * (optimizer == "adamw")
    widened = _narrow(kind) and (kind.masters or own > 0)
    if not own and not widened:
        return 0, "none"
    embedding = config.vocab_size * config.dim
    inside = config.dim * max(config.ffn_dim, config.num_heads * config.head_dim)
    numbers = own + widened
    most = min(numbers * params, max(numbers * embedding, (numbers + 1) * inside))
    said = ["a gradient in float32"] * widened + ["two for the largest tensor"] * (own > 0)
    return DTYPES[kind.moments].itemsize * most, " and ".join(said)


def _narrow(kind: Convention) -> bool:
    """Whether 16-bit gradients are all there is for float32 moments."""
    return kind.gradients != kind.moments and not kind.copies
