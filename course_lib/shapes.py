"""What follows from a model's shapes alone: its parameters, and the bytes kept for backward.

The second is counted for `models.Transformer`, line by line: each entry belongs to a line that
keeps a tensor. Published formulas such as 34·s·b·h describe other code: count your own.
"""

from dataclasses import dataclass

import torch

from course_lib.facts import ModelConfig

WIDE = 4  # bytes: norms compute in float32
SIZES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


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
        raise ValueError(f"family must be one of {sorted(_LAYER_PARAMS)}, got {config.family!r}")
    return _LAYER_PARAMS[config.family](config)


def _llama_layer(c: ModelConfig) -> int:
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = 2 * c.dim * queries + 2 * c.dim * keys  # wq, wo; wk, wv
    biases = (queries + 2 * keys) * c.qkv_bias
    return attention + biases + 3 * c.dim * c.ffn_dim + 2 * c.dim  # SwiGLU; two norms


def _gpt2_layer(c: ModelConfig) -> int:
    attention = 4 * c.dim * c.dim + 4 * c.dim
    return attention + 2 * c.dim * c.ffn_dim + c.ffn_dim + c.dim + 4 * c.dim  # two LayerNorms


_LAYER_PARAMS = {"llama": _llama_layer, "gpt2": _gpt2_layer}


@dataclass(frozen=True)
class Kept:
    """What one line of the model keeps: `where` it is made, `what` it is."""

    where: str
    what: str
    num_bytes: int


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
        return sum(kept.num_bytes for kept in entries if kept.where == "autocast")

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
    _check(config, batch, seq, attention, checkpointing, dtype, autocast)
    n, stream = batch * seq, SIZES[dtype]  # the residual stream has the weights' dtype
    operand = stream if autocast is None else SIZES[autocast]
    d, heads = config.dim, config.num_heads * config.head_dim
    if checkpointing:
        layer = [Kept("layer", "its input", n * d * stream)]
    else:
        layer = [
            *_norm("attention_norm", n * d, n),
            *_linear_inputs("wq wk wv", 3, n * d, stream, autocast),
            Kept("attention", "q, k, v", 3 * n * heads * operand),
            *_attention(config, attention, batch, seq, operand),
            *_joined_heads(config, attention, seq, n * heads * operand),
            *_norm("ffn_norm", n * d, n),
            *_linear_inputs("w1 w3", 2, n * d, stream, autocast),
            Kept("silu", "input", n * config.ffn_dim * operand),
            Kept("silu · w3", "both factors", 2 * n * config.ffn_dim * operand),
            Kept("w2", "input", n * config.ffn_dim * operand),
        ]
        if autocast is not None:
            layer.append(Kept("autocast", "copies of the weights", matrices(config) * operand))
    vocab, loss = config.vocab_size, stream if autocast is None else WIDE
    rest = [
        Kept("rotary", "cos and sin", seq * config.head_dim * stream),
        *_norm("norm", n * d, n),
        *_linear_inputs("head", 1, n * d, stream, autocast),
        Kept("loss", "log-probabilities", n * vocab * loss),
        Kept("loss", "itself, the weights' sum", 2 * loss),
    ]
    if autocast is not None:
        rest.append(Kept("autocast", "copy of the head", vocab * d * operand))
    return Activations(config.num_layers, tuple(layer), tuple(rest))


def _norm(where: str, elements: int, tokens: int) -> list[Kept]:
    return [
        Kept(where, "input, in float32", elements * WIDE),
        Kept(where, "1 / root mean square", tokens * WIDE),
        Kept(where, "normed, before the gain", elements * WIDE),
    ]


def _linear_inputs(where, layers, elements, stream, autocast) -> list[Kept]:
    """One input for all the layers that share it; autocast casts it for each anew."""
    if autocast is None:
        return [Kept(where, "input", elements * stream)]
    return [Kept(where, f"input, cast {layers} times", layers * elements * SIZES[autocast])]


def _attention(config, attention, batch, seq, operand) -> list[Kept]:
    n, heads = batch * seq, config.num_heads
    if attention == "sdpa":
        return [
            Kept("attention", "output", n * heads * config.head_dim * operand),
            Kept("attention", "log of the sums", n * heads * WIDE),
        ]
    return [
        Kept("attention", "softmax, T × T", n * heads * seq * operand),
        Kept("attention", "mask, T × T", seq * seq),
    ]


def _joined_heads(config, attention, seq, num_bytes) -> list[Kept]:
    """One head, or one token, is joined without a copy: it is the fused kernel's output."""
    if attention == "sdpa" and 1 in (config.num_heads, seq):
        return [Kept("wo", "input: the output", 0)]
    return [Kept("wo", "input", num_bytes)]


def matrices(config: ModelConfig) -> int:
    """The parameters of a layer's linear maps."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.dim * (2 * queries + 2 * keys + 3 * config.ffn_dim)


def _check(config, batch, seq, attention, checkpointing, dtype, autocast) -> None:
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}")
    if config.family != "llama":
        raise ValueError(f"Transformer builds the llama family, not {config.family!r}")
    for name, value in (("batch", batch), ("seq", seq)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if seq > config.max_seq_len:
        raise ValueError(f"seq is {seq}, and the model's max_seq_len {config.max_seq_len}")
    if config.head_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {config.head_dim}")
    if not isinstance(checkpointing, bool):
        raise TypeError(f"checkpointing must be True or False, got {checkpointing!r}")
    if attention not in ("sdpa", "explicit"):
        raise ValueError(f"attention must be sdpa or explicit, got {attention!r}")
    if attention == "sdpa" and config.head_dim == 2:
        raise ValueError("torch has no fused kernel for head_dim 2: ask for attention='explicit'")
    if dtype not in SIZES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, SIZES))}, got {dtype}")
    if autocast is not None and (autocast not in SIZES or autocast == torch.float32):
        raise ValueError(f"autocast must be torch.bfloat16 or torch.float16, got {autocast}")
    if autocast is not None and dtype != torch.float32:
        raise ValueError("autocast is counted for float32 weights only")
