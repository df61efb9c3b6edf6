"""What follows from a model's shapes alone: its parameters, and the bytes kept for backward.

The second is counted for `models.Transformer`, line by line: each entry belongs to a line that
keeps a tensor. Published formulas such as 34·s·b·h describe other code: count your own.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from course_lib.checks import one_of, whole
from course_lib.facts import ModelConfig
from course_lib.models import check_options

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIDE = torch.float32.itemsize  # norms compute in float32


def num_params(config: ModelConfig) -> int:
    """The exact number of parameters of a dense model, by its family's shapes.

    >>> from course_lib import facts
    >>> f"{num_params(facts.model('llama-2-7b')):,}"
    '6,738,415,616'
    """
    layer = layer_params(config)
    d, vocab = config.dim, config.vocab_size
    embeddings = vocab * d * (1 if config.tied_head else 2)
    if config.family == "gpt2":
        embeddings += config.max_seq_len * d + d  # positions; the last norm's bias
    return embeddings + config.num_layers * layer + d


def layer_params(config: ModelConfig) -> int:
    """The parameters of one layer."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}")
    if config.family not in _LAYER_PARAMS:
        raise ValueError(
            f"family must be one of {', '.join(_LAYER_PARAMS)}, got {config.family!r}: another "
            "model's states follow from its published parameters, memory.ledger(number, convention)"
        )
    return _LAYER_PARAMS[config.family](config)


def _llama_layer(c: ModelConfig) -> int:
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = 2 * c.dim * queries + 2 * c.dim * keys  # wq, wo; wk, wv
    biases = (queries + 2 * keys) * c.qkv_bias
    norms = 2 * c.dim + 2 * c.head_dim * c.qk_norm
    return attention + biases + 3 * c.dim * c.ffn_dim + norms  # SwiGLU has three matrices


def _gpt2_layer(c: ModelConfig) -> int:
    same = c.num_kv_heads == c.num_heads and c.num_heads * c.head_dim == c.dim
    if not same or c.qk_norm or not (c.qkv_bias and c.tied_head):
        raise ValueError(
            "the gpt2 family has as many key-value heads as heads, head_dim dim / num_heads, "
            f"qkv_bias, a tied head and no qk_norm: {c.name or 'this one'} is another"
        )
    attention = 4 * c.dim * c.dim + 4 * c.dim
    return attention + 2 * c.dim * c.ffn_dim + c.ffn_dim + c.dim + 4 * c.dim  # two LayerNorms


_LAYER_PARAMS = {"llama": _llama_layer, "gpt2": _gpt2_layer}


class Line(Enum):
    """A line of the model that keeps something, and what it is called."""

    ATTENTION_NORM = "attention_norm"
    QKV = "wq wk wv"
    QK_NORM = "q_norm k_norm"
    ATTENTION = "attention"
    WO = "wo"
    FFN_NORM = "ffn_norm"
    W1_W3 = "w1 w3"
    SILU = "silu"
    PRODUCT = "silu · w3"
    W2 = "w2"
    LAYER = "layer"
    ROTARY = "rotary"
    NORM = "norm"
    HEAD = "head"
    LOSS = "loss"
    AUTOCAST = "autocast"


@dataclass(frozen=True)
class Kept:
    """What one line of the model keeps."""

    line: Line
    what: str
    num_bytes: int

    @property
    def where(self) -> str:
        return self.line.value


@dataclass(frozen=True, repr=False)
class Activations:
    """What is kept after the loss and before backward; `layer` is one of `num_layers`."""

    num_layers: int
    layer: tuple[Kept, ...]
    rest: tuple[Kept, ...]

    @property
    def layer_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self.layer)

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.layer_bytes + sum(kept.num_bytes for kept in self.rest)

    @property
    def copied_bytes(self) -> int:
        """Of these, autocast's copies of the weights."""
        entries = (*self.layer * self.num_layers, *self.rest)
        return sum(kept.num_bytes for kept in entries if kept.line is Line.AUTOCAST)

    def __repr__(self) -> str:
        rows = [f"{kept.where:<15}{kept.what:<25}{kept.num_bytes:>16,} B" for kept in self.layer]
        times = [f"{'':<15}{f'times {self.num_layers} layers':<25}"]
        times[0] += f"{self.num_layers * self.layer_bytes:>16,} B"
        rest = [f"{kept.where:<15}{kept.what:<25}{kept.num_bytes:>16,} B" for kept in self.rest]
        return "\n".join([*rows, *times, *rest, f"{'total':<40}{self.total_bytes:>16,} B"])


def activations(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    attention: str = "sdpa",
    checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
) -> Activations:
    """What `models.Transformer(config)` keeps for `batch` sequences of `seq` tokens.

    `dtype` is that of the weights, `autocast` as in `training.train_step`, on a CPU; the loss is
    torch's cross entropy. Raises ValueError for what `Transformer` wouldn't run.
    """
    batch, seq = _checked(config, batch, seq, attention, checkpointing, dtype, autocast)
    n, stream = batch * seq, dtype.itemsize  # the residual stream has the weights' dtype
    operand = stream if autocast is None else autocast.itemsize
    d, heads = config.dim, config.num_heads * config.head_dim
    if checkpointing:
        layer = [Kept(Line.LAYER, "its input", n * d * stream)]
    else:
        layer = [
            *_norm(Line.ATTENTION_NORM, n * d, n),
            *_linear_inputs(Line.QKV, 3, n * d, stream, autocast),
            *_qk_norm(config, n),
            Kept(Line.ATTENTION, "q, k, v", 3 * n * heads * operand),
            *_attention(config, attention, batch, seq, operand),
            *_joined_heads(config, attention, seq, n * heads * operand),
            *_norm(Line.FFN_NORM, n * d, n),
            *_linear_inputs(Line.W1_W3, 2, n * d, stream, autocast),
            Kept(Line.SILU, "input", n * config.ffn_dim * operand),
            Kept(Line.PRODUCT, "both factors", 2 * n * config.ffn_dim * operand),
            Kept(Line.W2, "input", n * config.ffn_dim * operand),
        ]
        if autocast is not None:
            layer.append(Kept(Line.AUTOCAST, "copies of the weights", matrices(config) * operand))
    vocab, loss = config.vocab_size, stream if autocast is None else WIDE
    rest = [
        Kept(Line.ROTARY, "cos and sin", seq * config.head_dim * stream),
        *_norm(Line.NORM, n * d, n),
        *_linear_inputs(Line.HEAD, 1, n * d, stream, autocast),
        Kept(Line.LOSS, "log-probabilities", n * vocab * loss),
        Kept(Line.LOSS, "itself, the weights' sum", 2 * loss),
    ]
    if autocast is not None:
        rest.append(Kept(Line.AUTOCAST, "copy of the head", vocab * d * operand))
    return Activations(config.num_layers, tuple(layer), tuple(rest))


def _norm(line: Line, elements: int, rows: int) -> list[Kept]:
    return [
        Kept(line, "input, in float32", elements * WIDE),
        Kept(line, "1 / root mean square", rows * WIDE),
        Kept(line, "normed, before the gain", elements * WIDE),
    ]


def _qk_norm(config: ModelConfig, n: int) -> list[Kept]:
    rows = n * (config.num_heads + config.num_kv_heads)
    return _norm(Line.QK_NORM, rows * config.head_dim, rows) if config.qk_norm else []


def _linear_inputs(line, layers, elements, stream, autocast) -> list[Kept]:
    """One input for all the layers that share it; autocast casts it for each anew."""
    if autocast is None:
        return [Kept(line, "input", elements * stream)]
    return [Kept(line, f"input, cast {layers} times", layers * elements * autocast.itemsize)]


def _attention(config, attention, batch, seq, operand) -> list[Kept]:
    n, heads = batch * seq, config.num_heads
    if attention == "sdpa":
        return [
            Kept(Line.ATTENTION, "output", n * heads * config.head_dim * operand),
            Kept(Line.ATTENTION, "log of the sums", n * heads * WIDE),
        ]
    return [
        Kept(Line.ATTENTION, "softmax, T × T", n * heads * seq * operand),
        Kept(Line.ATTENTION, "mask, T × T", seq * seq),
    ]


def _joined_heads(config, attention, seq, num_bytes) -> list[Kept]:
    """One head, or one token, is joined without a copy: it is the fused kernel's output."""
    if attention == "sdpa" and 1 in (config.num_heads, seq):
        return [Kept(Line.WO, "input: the output", 0)]
    return [Kept(Line.WO, "input", num_bytes)]


def matrices(config: ModelConfig) -> int:
    """The parameters of a layer's linear maps."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.dim * (2 * queries + 2 * keys + 3 * config.ffn_dim)


def _checked(config, batch, seq, attention, checkpointing, dtype, autocast) -> tuple[int, int]:
    """Batch and sequence, once all the rest could be run."""
    check_options(config, attention, checkpointing)
    batch, seq = whole("batch", batch), whole("seq", seq)
    if seq > config.max_seq_len:
        raise ValueError(f"seq is {seq}, and the model's max_seq_len {config.max_seq_len}")
    if attention == "sdpa" and config.head_dim == 2:
        raise ValueError("torch has no fused kernel for head_dim 2: ask for attention='explicit'")
    one_of("dtype", dtype, DTYPES.values())
    if autocast is not None:
        one_of("autocast", autocast, (torch.bfloat16, torch.float16))
        if dtype != torch.float32:
            raise ValueError("autocast is counted for float32 weights only")
    return batch, seq
