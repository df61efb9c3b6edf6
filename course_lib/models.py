"""The models that the course trains: an MLP, and a Llama-like Transformer.

The Transformer is written plainly: each line that keeps a tensor for backward stands by itself,
so the activation formulas can be read off it. Shapes: B batch, T sequence, d model width,
H heads, K key-value heads, h head width, F feed-forward width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib.checks import one_of, whole
from course_lib.facts import ModelConfig


def mlp(
    *sizes: int, activation: type[nn.Module] = nn.ReLU, dtype: torch.dtype | None = None
) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them.

    >>> mlp(64, 32, 10)[2].out_features
    10
    """
    if len(sizes) < 2:
        raise ValueError(f"mlp needs an input and an output size, got {sizes}")
    sizes = tuple(whole("a size of mlp", size) for size in sizes)
    if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
        raise TypeError(f"activation must be a module class such as nn.ReLU, got {activation!r}")
    layers = []
    for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(fan_in, fan_out, dtype=dtype), activation()]
    return nn.Sequential(*layers[:-1])


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 at least.

    Source: https://arxiv.org/abs/1910.07467
    """

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).type_as(x)


def rotary_table(seq_len: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (T, h/2), in the dtype and on the device of `like`.

    Source: https://arxiv.org/abs/2104.09864
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    pair = torch.arange(0, head_dim, 2, dtype=wide, device=like.device)
    position = torch.arange(seq_len, dtype=wide, device=like.device)
    angle = torch.outer(position, 10_000.0 ** (-pair / head_dim))
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + h/2}) by its angle; x is (B, H, T, h)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with the T × T scores written out; q, k, v are (B, H, T, h)."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # (B, H, T, T)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return F.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by torch's fused kernel, which keeps no T × T tensor."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION = {"sdpa": sdpa_attention, "explicit": explicit_attention}


class Attention(nn.Module):
    """Grouped-query attention: K key-value heads, each shared by H/K query heads."""

    def __init__(self, config: ModelConfig, attention: str):
        super().__init__()
        d, h, bias = config.dim, config.head_dim, config.qkv_bias
        self.head_dim = h
        self.queries_per_kv = config.num_heads // config.num_kv_heads
        self.attend = ATTENTION[attention]
        self.wq = nn.Linear(d, config.num_heads * h, bias=bias)
        self.wk = nn.Linear(d, config.num_kv_heads * h, bias=bias)
        self.wv = nn.Linear(d, config.num_kv_heads * h, bias=bias)
        self.wo = nn.Linear(config.num_heads * h, d, bias=False)
        self.q_norm = RMSNorm(h) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(h) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.q_norm(self._heads(self.wq(x))), cos, sin)  # (B, H, T, h)
        k = rotate(self.k_norm(self._heads(self.wk(x))), cos, sin)  # (B, K, T, h)
        v = self._heads(self.wv(x))
        if self.queries_per_kv > 1:
            k = k.repeat_interleave(self.queries_per_kv, dim=1)
            v = v.repeat_interleave(self.queries_per_kv, dim=1)
        out = self.attend(q, k, v).transpose(1, 2)  # (B, T, H, h)
        return self.wo(out.reshape(*x.shape[:2], -1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) · w3 x). Source: https://arxiv.org/abs/2002.05202"""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig, attention: str):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config, attention)
        self.ffn_norm = RMSNorm(config.dim)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """A decoder like Llama's: token ids (B, T) in, logits (B, T, V) out.

    `attention` is "sdpa" or "explicit"; `checkpointing` keeps only each layer's input and
    computes the layer again in backward. Weights are drawn with a standard deviation of 0.02.
    Source: https://arxiv.org/abs/2302.13971
    """

    def __init__(
        self, config: ModelConfig, *, attention: str = "sdpa", checkpointing: bool = False
    ):
        super().__init__()
        check_options(config, attention, checkpointing)
        self.config = config
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        self._check(tokens)
        x = self.embedding(tokens)
        cos, sin = rotary_table(tokens.shape[1], self.config.head_dim, like=x)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.head(self.norm(x))

    def _check(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError("tokens must be a tensor of int64 or int32 token ids")
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have shape (batch, sequence), got {tuple(tokens.shape)}")
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"the sequence has {tokens.shape[1]} tokens, max_seq_len is "
                f"{self.config.max_seq_len}"
            )


def check_options(config: ModelConfig, attention: str, checkpointing: bool) -> None:
    """Raise TypeError or ValueError for what Transformer can't be built from."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}")
    if config.family != "llama":
        raise ValueError(f"Transformer builds the llama family, not {config.family!r}")
    if config.head_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {config.head_dim}")
    one_of("attention", attention, ATTENTION)
    one_of("checkpointing", checkpointing, (True, False))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
