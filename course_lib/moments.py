"""The largest moments of a training step by arithmetic: a sum of parts is no forecast.

Activations die in backward while gradients grow, and the update's temporaries come last. So the
peak is one of a few moments, and which one depends on the setting. Counted for
`models.Transformer` in eager torch on a CPU, and within 5 % of the trace. Not counted: an
allocator's rounding, a device's context, the buckets of data parallel training.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from course_lib.facts import ModelConfig
from course_lib.memory import BYTES, CONVENTIONS, DTYPES, Convention, Ledger, ledger
from course_lib.shapes import Activations, Kept, activations, layer_params, matrices, num_params

PHASES = ("forward", "loss", "backward", "step")
STEPS = ("one tensor at a time", "foreach", "fused")  # how the optimizer goes over the weights
# What a norm's backward holds in float32: its output's gradient, and four to its input's.
NORM = 5
WEIGHTS = {name: dtype for dtype, name in DTYPES.items()}


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
    "foreach". With `accumulate` above 1 `batch` is one of so many micro-batches, and the gradients
    stay alive between them. What ZeRO divides is there in full for the layer at hand, or the head;
    autocast's copies of the weights are never divided here.
    """
    if step not in STEPS:
        raise ValueError(f"step must be one of {', '.join(STEPS)}, got {step!r}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"accumulate must be a whole number, got {accumulate!r}")
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")
    if type(convention) is not str or convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")
    sizes = _sizes(config, convention, batch, seq, attention, checkpointing, accumulate > 1)
    states = ledger(
        num_params(config),
        convention,
        optimizer=optimizer,
        zero_stage=zero_stage,
        data_parallel=data_parallel,
    )
    kind = CONVENTIONS[convention]
    held = {row.name: row.num_bytes for row in states.rows}
    weights, gradients = held.pop("weights"), held.pop("gradients")
    gradients += held.pop("fp32 gradient copies", 0)
    base = {"weights": weights, "optimizer state": sum(held.values())}
    sharded = zero_stage if data_parallel > 1 else 0
    found = []
    for point in (*_forward(sizes), *_backward(sizes)):
        grown = states.num_params if accumulate > 1 else point.grown
        new = max(point.new, point.used) if sharded >= 2 and point.grown else point.new
        said = [point.passing] * (point.temporaries > 0) + ["new gradients"] * (new > 0)
        parts = base | {
            "gradients": gradients * grown // states.num_params,
            "activations": point.activations,
            "temporaries": point.temporaries + BYTES[kind.weights] * new,
        }
        if sharded == 3:
            parts["gathered"] = BYTES[kind.weights] * point.used
        found.append(Moment(point.phase, point.at, parts, " and ".join(said) or "none"))
    updated = -(-states.num_params // data_parallel) if sharded else states.num_params
    temporaries, passing = _update(config, kind, updated, optimizer, step)
    alive = {"gradients": gradients, "temporaries": temporaries}
    found.append(Moment("step", "", base | alive, passing))
    return Moments(tuple(found), states, sizes.kept)


@dataclass(frozen=True)
class _Sizes:
    """Bytes that several moments share."""

    config: ModelConfig
    kept: Activations
    layer: tuple[Kept, ...]  # what a layer keeps, or keeps again when it is computed again
    checkpointing: bool
    autocast: bool
    accumulating: bool
    stream: int  # of the residual path
    wide: int  # the same in float32
    heads: int  # of a query, of all heads
    inside: int  # of the feed-forward's width
    scores: int  # T × T of all heads, if written out
    logits: int
    loss_logits: int  # as the loss takes them
    casts: int  # autocast's copies of a layer's matrices

    @property
    def softmax(self) -> int:
        """What is there beside it in forward; autocast's q and k are rotated in float32."""
        wider = 4 * self.heads + self.stream if self.autocast else 0
        return 2 * self.scores + wider if self.scores else 0

    def before(self, line: str) -> int:
        """What a layer keeps before this line."""
        places = [kept.where for kept in self.layer]
        return sum(kept.num_bytes for kept in self.layer[: places.index(line)])


def _sizes(
    config: ModelConfig,
    convention: str,
    batch: int,
    seq: int,
    attention: str,
    checkpointing: bool,
    accumulating: bool,
) -> _Sizes:
    kind, autocast = CONVENTIONS[convention], convention == "autocast"
    how = dict(
        batch=batch,
        seq=seq,
        attention=attention,
        dtype=WEIGHTS[kind.weights],
        autocast=torch.bfloat16 if autocast else None,
    )
    kept = activations(config, checkpointing=checkpointing, **how)  # refuses what doesn't run
    weight, tokens = BYTES[kind.weights], batch * seq
    operand = 2 if autocast else weight
    return _Sizes(
        config,
        kept=kept,
        layer=activations(config, **how).layer,
        checkpointing=checkpointing,
        autocast=autocast,
        accumulating=accumulating,
        stream=tokens * config.dim * weight,
        wide=tokens * config.dim * 4,
        heads=tokens * config.num_heads * config.head_dim * operand,
        inside=tokens * config.ffn_dim * operand,
        scores=tokens * seq * config.num_heads * operand if attention == "explicit" else 0,
        logits=tokens * config.vocab_size * operand,
        loss_logits=tokens * config.vocab_size * weight,
        casts=2 * matrices(config) if autocast else 0,
    )


@dataclass(frozen=True)
class _Point:
    """A moment of forward or backward: bytes alive, then numbers of parameters.

    `used` are in the line at hand, `grown` have their gradients, of `new` there is another
    gradient, not added yet.
    """

    phase: str
    at: str
    activations: int
    temporaries: int
    passing: str
    used: int
    grown: int = 0
    new: int = 0


def _forward(s: _Sizes) -> Iterator[_Point]:
    """The last layer, the logits, the loss. Autocast keeps its copies until its block ends."""
    c, layers = s.config, s.config.num_layers * s.kept.layer_bytes
    layer, head = layer_params(c), c.vocab_size * c.dim
    casts = c.num_layers * s.casts if s.checkpointing else 0
    copied = " and the weights cast" if casts else ""
    last = dict(phase="forward", used=layer)
    if s.checkpointing:
        # SwiGLU's two factors and their product, or attention's: scores, masked scores, softmax,
        # q, k and v; or q, k, v, the output and the residual path of heads joined.
        attention = 3 * s.scores + 3 * s.heads if s.scores else 5 * s.heads
        attention += 4 * s.heads if s.autocast else 0  # rotated q and k are float32, and cast
        inside = max(3 * s.inside, attention) + 2 * s.stream  # the layer's input, normed and not
        passing = "what the layer doesn't keep" + copied
        yield _Point(
            at="the last layer",
            activations=layers,
            temporaries=casts + inside,
            passing=passing,
            **last,
        )
    else:
        yield _Point(at="the last layer", activations=layers, temporaries=0, passing="", **last)
    if s.scores and not s.checkpointing:
        kept, passing = layers - s.kept.layer_bytes + s.before("wo"), "two more T × T tensors"
        yield _Point(
            at="attention of the last layer",
            activations=kept,
            temporaries=s.softmax,
            passing=passing,
            **last,
        )
    kept, logits = s.kept.total_bytes, "the logits" + copied
    yield _Point("forward", "the logits", kept - s.loss_logits, casts + s.logits, logits, head)
    if s.autocast:
        logits = "the logits, also in float32" + copied.replace(" and", ", and")
    wide = s.loss_logits if s.autocast else 0
    yield _Point("loss", "", kept, casts + s.logits + wide, logits, head)


def _backward(s: _Sizes) -> Iterator[_Point]:
    """The loss, the head, the norm before it, the last layer and the first, the embedding."""
    c, kept = s.config, s.kept.total_bytes
    layer, head, every = layer_params(c), c.vocab_size * c.dim, num_params(c)
    new = head if s.accumulating else 0
    # The gradients of the log-probabilities and of the logits.
    yield _Point(
        "backward", "its beginning", kept, 2 * s.loss_logits, "two of the logits' size", head
    )
    kept, inside = kept - s.loss_logits, s.logits + s.stream
    if s.autocast:  # the 16-bit gradient is cast; the 16-bit weights are gone
        kept, inside = kept - 2 * head, 2 * head + s.stream
    yield _Point("backward", "the head", kept, inside, "gradients", head, head, new)
    after = ("head", "loss")
    kept = s.kept.total_bytes - sum(k.num_bytes for k in s.kept.rest if k.where in after) - s.wide
    yield _Point("backward", "the last norm", kept, NORM * s.wide, "gradients", 0, head, new)
    tied, waiting = (head, new) if c.tied_head else (0, 0)  # the head's, for the embedding's
    first = every - layer - head + tied
    yield from _layer_backward(s, "the last layer", c.num_layers, head, waiting)
    yield from _layer_backward(s, "the first layer", 1, first, waiting)
    # A tied head's gradient, the embedding's, and their sum.
    yield _Point("backward", "the embedding", 0, 0, "", head, every, new + 2 * tied)


def _layer_backward(s: _Sizes, name: str, place: int, done: int, waiting: int) -> Iterator[_Point]:
    """One of four: w2, the product it was given, the norm before it, attention.

    The layers after `place` have their gradients, `done` parameters, and what the layer kept
    after the line at hand is gone.
    """
    w2, used = s.config.dim * s.config.ffn_dim, layer_params(s.config)
    narrow = s.stream if s.stream < s.wide else 0
    others = (place if s.checkpointing else place - 1) * s.kept.layer_bytes
    if s.checkpointing and not narrow:  # the checkpoint's input is the first norm's
        others -= s.stream
    in_layer = dict(phase="backward", used=used)
    kept = others + s.before("w2") + s.casts
    yield _Point(
        at=f"w2 of {name}",
        activations=kept + s.inside,
        temporaries=s.inside + s.stream,  # the gradients of its input and of its output
        passing="two gradients",
        grown=done + w2,
        new=waiting + (w2 if s.accumulating else 0),
        **in_layer,
    )
    yield _Point(
        at=f"SwiGLU of {name}",
        activations=kept,
        temporaries=3 * s.inside + s.stream,  # of the product, both factors, and the residual path
        passing="three gradients, tokens × ffn",
        grown=done + w2,
        new=waiting,
        **in_layer,
    )
    yield _Point(
        at=f"norm of {name}",
        activations=others + s.before("w1 w3") - s.wide,
        temporaries=NORM * s.wide + narrow,
        passing="gradients in float32",
        grown=done + 3 * w2,
        new=waiting,
        **in_layer,
    )
    # Of the output, q, k and v; or of the softmax and the scores.
    attention = max(4 * s.heads, s.softmax if s.checkpointing else 2 * s.scores)
    yield _Point(
        at=f"attention of {name}",
        activations=others + s.before("wo"),
        temporaries=attention + s.stream,
        passing="two gradients, T × T" if s.scores else "gradients of q, k, v, output",
        grown=done + 3 * w2,
        new=waiting,
        **in_layer,
    )


def _update(
    config: ModelConfig, kind: Convention, params: int, optimizer: str, step: str
) -> tuple[int, str]:
    """The temporaries of an update of `params` parameters, and what they are.

    16-bit gradients get float32 copies first, where there are masters. 8-bit Adam is one kernel.
    """
    copies, said = 0, []
    if kind.masters and kind.gradients != "fp32" and not kind.copies:
        copies, said = 4 * params, ["float32 copies of the gradients"]
    if step == "fused" or optimizer != "adamw":
        return copies, *(said or ["none"])
    each = BYTES[kind.moments]
    if step == "foreach":
        return copies + each * params, " and ".join([*said, "one number for each weight"])
    # Two for the tensor at hand, beside the one of the tensor before it: in a layer, as large.
    inside = 3 * config.dim * max(config.ffn_dim, config.num_heads * config.head_dim)
    most = min(2 * params, max(2 * config.vocab_size * config.dim, inside))
    return copies + each * most, " and ".join([*said, "two for the largest tensor"])
