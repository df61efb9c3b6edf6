"""What is alive at each point of forward and backward, by arithmetic.

Counted for `models.Transformer` in eager torch on a CPU: what its lines keep for backward, from
`shapes`, and what passes while a line is at hand. `moments` adds what lasts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from course_lib.checks import whole
from course_lib.facts import ModelConfig
from course_lib.ledgers import CONVENTIONS
from course_lib.shapes import (
    DTYPES,
    Activations,
    Kept,
    Line,
    activations,
    layer_params,
    matrices,
    num_params,
)

# What a norm's backward holds in float32: its output's gradient, and four to its input's.
NORM = 5


@dataclass(frozen=True)
class Sizes:
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

    @property
    def wide_heads(self) -> int:
        """Of a query, of all heads, in float32."""
        return self.wide // self.config.dim * self.config.num_heads * self.config.head_dim

    @property
    def narrow_heads(self) -> int:
        """The same in 16 bits, where it is there beside it."""
        return self.heads if self.heads < self.wide_heads else 0

    def before(self, line: Line) -> int:
        """What a layer keeps before this line."""
        places = [kept.line for kept in self.layer]
        return sum(kept.num_bytes for kept in self.layer[: places.index(line)])


def sizes_of(
    config: ModelConfig,
    convention: str,
    batch: int,
    seq: int,
    attention: str,
    checkpointing: bool,
    accumulating: bool,
) -> Sizes:
    kind, autocast = CONVENTIONS[convention], convention == "autocast"
    how = dict(
        batch=batch,
        seq=seq,
        attention=attention,
        dtype=DTYPES[kind.weights],
        autocast=torch.bfloat16 if autocast else None,
    )
    kept = activations(config, checkpointing=checkpointing, **how)  # refuses what doesn't run
    batch, seq = whole("batch", batch), whole("seq", seq)
    weight, tokens = DTYPES[kind.weights].itemsize, batch * seq
    operand = 2 if autocast else weight
    return Sizes(
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
class Point:
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


def forward(s: Sizes) -> Iterator[Point]:
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
        normed = 3 * s.wide_heads + s.narrow_heads if c.qk_norm else 0  # of the queries
        inside = (
            max(3 * s.inside, attention, normed) + 2 * s.stream
        )  # the layer's input, normed and not
        passing = "what the layer doesn't keep" + copied
        yield Point(
            at="the last layer",
            activations=layers,
            temporaries=casts + inside,
            passing=passing,
            **last,
        )
    else:
        yield Point(at="the last layer", activations=layers, temporaries=0, passing="", **last)
    if s.scores and not s.checkpointing:
        kept, passing = layers - s.kept.layer_bytes + s.before(Line.WO), "two more T × T tensors"
        yield Point(
            at="attention of the last layer",
            activations=kept,
            temporaries=s.softmax,
            passing=passing,
            **last,
        )
    kept, logits = s.kept.total_bytes, "the logits" + copied
    yield Point("forward", "the logits", kept - s.loss_logits, casts + s.logits, logits, head)
    if s.autocast:
        logits = "the logits, also in float32" + copied.replace(" and", ", and")
    wide = s.loss_logits if s.autocast else 0
    yield Point("loss", "", kept, casts + s.logits + wide, logits, head)


def backward(s: Sizes) -> Iterator[Point]:
    """The loss, the head, the norm before it, the last layer and the first, the embedding."""
    c, kept = s.config, s.kept.total_bytes
    layer, head, every = layer_params(c), c.vocab_size * c.dim, num_params(c)
    new = head if s.accumulating else 0
    # The gradients of the log-probabilities and of the logits.
    yield Point(
        "backward", "its beginning", kept, 2 * s.loss_logits, "two of the logits' size", head
    )
    kept, inside = kept - s.loss_logits, s.logits + s.stream
    if s.autocast:  # the 16-bit gradient is cast; the 16-bit weights are gone
        kept, inside = kept - 2 * head, 2 * head + s.stream
    yield Point("backward", "the head", kept, inside, "gradients", head, head, new)
    after = (Line.HEAD, Line.LOSS)
    kept = s.kept.total_bytes - sum(k.num_bytes for k in s.kept.rest if k.line in after) - s.wide
    yield Point("backward", "the last norm", kept, NORM * s.wide, "gradients", 0, head, new)
    tied, waiting = (head, new) if c.tied_head else (0, 0)  # the head's, for the embedding's
    first = every - layer - head + tied
    yield from _layer_backward(s, "the last layer", c.num_layers, head, waiting)
    yield from _layer_backward(s, "the first layer", 1, first, waiting)
    # A tied head's gradient, the embedding's, and their sum.
    yield Point("backward", "the embedding", 0, 0, "", head, every, new + 2 * tied)


def _layer_backward(s: Sizes, name: str, place: int, done: int, waiting: int) -> Iterator[Point]:
    """One of its: w2, the product it was given, the norm before it, attention, the queries' norm.

    The layers after `place` have their gradients, `done` parameters, and what the layer kept
    after the line at hand is gone.
    """
    w2, used = s.config.dim * s.config.ffn_dim, layer_params(s.config)
    narrow = s.stream if s.stream < s.wide else 0
    others = (place if s.checkpointing else place - 1) * s.kept.layer_bytes
    if s.checkpointing and not narrow:  # the checkpoint's input is the first norm's
        others -= s.stream
    in_layer = dict(phase="backward", used=used)
    kept = others + s.before(Line.W2) + s.casts
    yield Point(
        at=f"w2 of {name}",
        activations=kept + s.inside,
        temporaries=s.inside + s.stream,  # the gradients of its input and of its output
        passing="two gradients",
        grown=done + w2,
        new=waiting + (w2 if s.accumulating else 0),
        **in_layer,
    )
    yield Point(
        at=f"SwiGLU of {name}",
        activations=kept,
        temporaries=3 * s.inside + s.stream,  # of the product, both factors, and the residual path
        passing="three gradients, tokens × ffn",
        grown=done + w2,
        new=waiting,
        **in_layer,
    )
    yield Point(
        at=f"norm of {name}",
        activations=others + s.before(Line.W1_W3) - s.wide,
        temporaries=NORM * s.wide + narrow,
        passing="gradients in float32",
        grown=done + 3 * w2,
        new=waiting,
        **in_layer,
    )
    # Of the output, q, k and v; or of the softmax and the scores.
    attention = max(4 * s.heads, s.softmax if s.checkpointing else 2 * s.scores)
    yield Point(
        at=f"attention of {name}",
        activations=others + s.before(Line.WO),
        temporaries=attention + s.stream,
        passing="two gradients, T × T" if s.scores else "gradients of q, k, v, output",
        grown=done + 3 * w2,
        new=waiting,
        **in_layer,
    )
    if s.config.qk_norm:  # the queries' after the keys'
        queries = s.config.num_heads * s.config.head_dim
        yield Point(
            at=f"q_norm of {name}",
            activations=others + s.before(Line.QK_NORM) + s.wide_heads,
            temporaries=NORM * s.wide_heads + s.narrow_heads + s.stream,
            passing="gradients in float32",
            grown=done + used - s.config.dim * queries - s.config.dim,
            new=waiting,
            **in_layer,
        )
