"""The largest moments of a training step by arithmetic: a sum of parts is no forecast.

Activations die in backward while gradients grow, and the update's temporaries come last. So the
peak is one of a few moments, and which one depends on the setting. Counted for
`models.Transformer` in eager torch; an allocator's rounding and a device's context come on top.

Within 5 % of the trace for the shapes of published models. Not counted yet, so too low: a very
wide feed-forward or very wide heads with few layers, and the head's new gradient beside the old
one under accumulation with a large vocabulary and few layers.
"""

from dataclasses import dataclass

import torch

from course_lib.facts import ModelConfig
from course_lib.memory import BYTES, CONVENTIONS, Ledger, ledger
from course_lib.shapes import Activations, activations, matrices, num_params

WEIGHTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STEPS = ("one tensor at a time", "foreach", "fused")  # how the optimizer goes over the weights


@dataclass(frozen=True)
class Moment:
    """What is alive at one moment of the step, on one device: bytes by part."""

    name: str
    parts: dict[str, int]

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
    step: str = "one tensor at a time",
    attention: str = "sdpa",
    checkpointing: bool = False,
    accumulate: int = 1,
    zero_stage: int = 0,
    data_parallel: int = 1,
) -> Moments:
    """The moments of a training step of `batch` sequences of `seq` tokens on one device.

    `convention`, `optimizer`, `zero_stage` and `data_parallel` as in `memory.ledger`, `attention`
    and `checkpointing` as in `shapes.activations`, `step` one of STEPS. With `accumulate` above 1
    `batch` is one of so many micro-batches, and the gradients stay alive between them. With ZeRO
    stage 3 a layer's weights and gradients are there in full while it is computed.
    """
    if step not in STEPS:
        raise ValueError(f"step must be one of {', '.join(STEPS)}, got {step!r}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number of at least 1, got {accumulate!r}")
    if not isinstance(checkpointing, bool):
        raise TypeError(f"checkpointing must be True or False, got {checkpointing!r}")
    states = ledger(
        num_params(config),
        convention,
        optimizer=optimizer,
        zero_stage=zero_stage,
        data_parallel=data_parallel,
    )
    kind = CONVENTIONS[convention]
    how = dict(batch=batch, seq=seq, attention=attention, dtype=WEIGHTS[kind.weights])
    how["autocast"] = torch.bfloat16 if convention == "autocast" else None
    kept = activations(config, checkpointing=checkpointing, **how)
    size = {row.name: row.num_bytes for row in states.rows}
    weights, gradients = size.pop("weights"), size.pop("gradients")
    gradients += size.pop("fp32 gradient copies", 0)
    per_param = gradients / states.num_params
    base = {"weights": weights, "optimizer state": sum(size.values())}
    update = dict(base)
    if zero_stage == 3 and data_parallel > 1:
        each = BYTES[kind.weights] + BYTES[kind.gradients]
        base["gathered layer"] = each * _layer_params(config)
    loss = 4 if convention == "autocast" else BYTES[kind.weights]
    logits = batch * seq * config.vocab_size * loss
    alive = {"activations": kept.total_bytes, "temporaries": 2 * logits}
    found = [Moment("backward begins", base | alive)]
    if convention == "autocast" and checkpointing:  # the casts are kept until its block ends
        casts = config.num_layers * 2 * matrices(config)
        found.insert(0, Moment("loss", found[0].parts | {"temporaries": logits * 3 // 2 + casts}))
    if checkpointing:
        again = activations(config, **how).layer_bytes
        found += _recomputed(config, base, convention, batch * seq, kept, again, per_param)
    if attention == "explicit":
        found += _softmax(config, base, convention, kept, how, checkpointing, per_param)
    if config.tied_head:  # the embedding's gradient is added to the head's, which makes a third
        third = 2 * round(per_param * config.vocab_size * config.dim)
        alive = {"gradients": gradients, "temporaries": third}
        found.append(Moment("backward ends", base | alive))
    if accumulate > 1:  # those of the batches before
        found = [Moment(m.name, m.parts | {"gradients": gradients}) for m in found]
    temporaries = _update(config, states, optimizer, step)
    alive = {"gradients": gradients, "temporaries": temporaries}
    found.append(Moment("optimizer step", update | alive))
    return Moments(tuple(found), states, kept)


def _recomputed(config, base, convention, tokens, kept, again, per_param) -> list[Moment]:
    """Checkpointing: the last layer, and the first, computed again, in SwiGLU's backward.

    Then w2 is done, its input gone, and three gradients of that width are there.
    """
    kind = CONVENTIONS[convention]
    operand = 2 if convention == "autocast" else BYTES[kind.weights]
    stream = BYTES[kind.weights]
    inside, beside = tokens * config.ffn_dim * operand, tokens * config.dim * stream
    if stream == 4:
        again -= beside  # the checkpoint's input is the norm's
    w2, layer = config.dim * config.ffn_dim, _layer_params(config)
    embedding = config.vocab_size * config.dim
    params = num_params(config)
    late = params - layer + w2 - (0 if config.tied_head else embedding)
    found = []
    for name, inputs, done in (
        ("the last layer is computed again", config.num_layers, embedding + w2),
        ("the first layer is computed again", 1, late),
    ):
        parts = {
            "gradients": round(per_param * done),
            "activations": inputs * kept.layer_bytes + again - inside,
            "temporaries": 3 * inside + beside,
        }
        found.append(Moment(name, base | parts))
    return found


def _softmax(config, base, convention, kept, how, checkpointing, per_param) -> list[Moment]:
    """Written-out attention: its softmax in the last layer's backward, two T × T tensors more.

    What that layer keeps after attention, and the head and the loss, are gone by then.
    """
    layer = activations(config, **how).layer
    first = next(i for i, entry in enumerate(layer) if entry.where == "wo")
    before = sum(entry.num_bytes for entry in layer[:first])
    squares = next(entry.num_bytes for entry in layer if entry.what == "softmax, T × T")
    beside = how["batch"] * how["seq"] * config.dim * BYTES[CONVENTIONS[convention].weights]
    others = config.num_layers if checkpointing else config.num_layers - 1
    ffn, embedding = 3 * config.dim * config.ffn_dim, config.vocab_size * config.dim
    parts = {
        "gradients": round(per_param * (embedding + ffn)),
        "activations": others * kept.layer_bytes + before,
        "temporaries": 2 * squares + beside,
    }
    return [Moment("attention's softmax in backward", base | parts)]


def _update(config: ModelConfig, states: Ledger, optimizer: str, step: str) -> int:
    """The update's temporaries: AdamW's two for the largest tensor, or one for all at once.

    16-bit gradients get float32 copies first, where there are masters.
    """
    kind = CONVENTIONS[states.title.partition(",")[0]]
    updated, each = ("master weights", 4) if kind.masters else ("weights", BYTES[kind.weights])
    params = next(row.num_bytes for row in states.rows if row.name == updated) // each
    copies = 4 * params if kind.masters and kind.gradients != "fp32" and not kind.copies else 0
    if step == "fused" or optimizer in ("sgd", "momentum"):
        return copies
    # Two for the tensor at hand, beside the one of the tensor before it: in a layer, as large.
    inside = 3 * config.dim * max(config.ffn_dim, config.num_heads * config.head_dim)
    at_most = min(2 * params, max(2 * config.vocab_size * config.dim, inside))
    return copies + BYTES[kind.moments] * (params if step == "foreach" else at_most)


def _layer_params(config: ModelConfig) -> int:
    one, two = (
        num_params(ModelConfig(**{**vars(config), "num_layers": layers})) for layers in (1, 2)
    )
    return two - one
