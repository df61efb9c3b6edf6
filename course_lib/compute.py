"""FLOPs, counted as torch dispatches them. One multiply-add is two FLOPs.

Counted are products of matrices and vectors, convolutions, attention and recurrent layers.
Element-wise operations, reductions (norms, softmax, pooling, distances) and moves of data
(embeddings, sorting, interpolation) are 0 on purpose, as in torch.utils.flop_counter. What
multiplies otherwise is refused by name: decompositions and FFTs, sparse and quantized products,
attention of ragged batches, and other libraries' operations.
"""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoFormula(ValueError):
    """An operation whose FLOPs aren't known."""


def _product(a: Tensor, b: Tensor) -> int:
    """Of vectors, or of matrices, perhaps with a batch: a's last axis is summed over."""
    return 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def _convolution(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> int:
    """The weight, used at each place of the output, or of the input if transposed."""
    places = x if transposed else out
    return 2 * places.shape[0] * prod(places.shape[2:]) * weight.numel()


def _convolution_backward(grad_out: Tensor, x: Tensor, weight: Tensor, *options) -> int:
    """The gradients of the input and of the weight cost a forward each, where they're needed."""
    transposed, (for_input, for_weight, _) = options[4], options[-1]
    return (for_input + for_weight) * _convolution(x, weight, grad_out, transposed)


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *axes: list[int]) -> int:
    """Two multiplications and an addition at each place of the shape that all three expand to."""
    shapes = []
    for tensor, inserted in zip((a, b, c), axes, strict=False):
        shape = list(tensor.shape)
        for axis in inserted:
            shape.insert(axis, 1)
        shapes.append(shape)
    return 3 * prod(torch.broadcast_shapes(*shapes))


def _attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Scores, and their product with the values. A causal mask isn't subtracted."""
    places = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * places * (query.shape[-1] + value.shape[-1])


def _self_attention(x: Tensor, in_weight: Tensor, out_weight: Tensor) -> int:
    """A whole module of it, the heads together as wide as x."""
    tokens = x.shape[0] * x.shape[1]
    return 2 * tokens * (in_weight.numel() + out_weight.numel()) + _attention(x, x, x)


def _encoder_layer(x: Tensor, attention: tuple[Tensor, ...], ffn: tuple[Tensor, ...]) -> int:
    tokens = x.shape[0] * x.shape[1]
    return _self_attention(x, *attention) + 2 * tokens * sum(weight.numel() for weight in ffn)


def _lstm(x: Tensor, of_input: Tensor, of_hidden: Tensor) -> int:
    """The matrices of the four gates, at each step of each sequence."""
    return 2 * x.shape[0] * x.shape[1] * (of_input.numel() + of_hidden.numel())


FUSED_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention",
                   "cudnn_attention", "fused_attention_overrideable")  # fmt: skip

# By torch's name: (result, *arguments) -> FLOPs. Kernels that compute the scores of attention
# again in backward do 2.5 times forward; a model's own FLOPs are 2.0 times, on every device.
FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm"),
                    lambda out, a, b, *_: _product(a, b)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"),
                    lambda out, added, a, b, *_: _product(a, b)),
    "addr": lambda out, added, a, b: 2 * a.numel() * b.numel(),
    "_foreach_mm": lambda out, a, b: sum(map(_product, a, b)),
    "_trilinear": lambda out, *args: _trilinear(*args),
    "convolution": lambda out, x, w, *options: _convolution(x, w, out, options[4]),
    "convolution_backward": lambda out, *args: _convolution_backward(*args),
    "conv_tbc": lambda out, x, w, *_: 2 * prod(out.shape[:2]) * w.numel(),
    "mkldnn_rnn_layer": lambda out, x, a, b, *_: _lstm(x, a, b),
    "mkldnn_rnn_layer_backward": lambda out, x, a, b, *_: 2 * _lstm(x, a, b),
    **{f"_scaled_dot_product_{kind}": lambda out, q, k, v, *_: _attention(q, k, v)
       for kind in FUSED_ATTENTION},
    **{f"_scaled_dot_product_{kind}_backward": lambda out, g, q, k, v, *_: 2 * _attention(q, k, v)
       for kind in FUSED_ATTENTION},
    "_native_multi_head_attention": lambda out, *a: _self_attention(a[0], a[5], a[7]),
    "_transformer_encoder_layer_fwd":
        lambda out, *a: _encoder_layer(a[0], (a[3], a[5]), (a[14], a[16])),
}  # fmt: skip

# Words in the names of what multiplies matrices or transforms, and names that only look so.
MULTIPLIES = re.compile(
    r"(?:^|_)(?:\w*mm|v?dot|mv|addmv|addr|conv(?:olution)?(?:\dd)?|rnn|lstm|gru|attention|linear|"
    r"trilinear|matmul|fft|linalg|solve|spsolve|cholesky|geqrf|ormqr|transformer)(?:_|\d|$)"
)
NO_PRODUCT = re.compile(
    r"_?fft_r?fftfreq|_?linalg_(?:vector_norm|cross|_powsum|check_errors)|"
    r"_thnn_fused_(?:lstm|gru)_cell\w*|_cudnn_rnn_flatten_weight|mkldnn_reorder\w*"
)
WITHOUT_PRODUCTS = {"profiler", "c10d", "_c10d_functional", "fsdp"}


def flops_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """FLOPs of one dispatched operation. Raises NoFormula if they aren't known."""
    library, name = func._schema.name.split("::")
    formula = FORMULAS.get(name) or FORMULAS.get(name.removesuffix("_"))
    if library == "aten" and formula:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(tensor.layout is torch.strided and not tensor.is_nested for tensor in inputs):
            return formula(out, *args)
    elif library in WITHOUT_PRODUCTS or (
        library == "aten" and (NO_PRODUCT.fullmatch(name) or not MULTIPLIES.search(name))
    ):
        return 0
    raise NoFormula(f"the FLOPs of {func} can't be counted: leave it out, and count it by hand")


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question, no operation
            return func(*args, **kwargs)
        with self:  # under inference_mode some arrive whole, as linear does
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
            self.flops += flops_of(func, args, kwargs, out)
        return out


def count_flops(fn: Callable[[], object]) -> int:
    """FLOPs of the products, convolutions and attention that `fn()` runs, backward included.

    What counts as 0 stands at the top of this file. Raises TypeError for what is no function,
    ValueError for an operation whose FLOPs aren't known.

    >>> count_flops(lambda: torch.ones(32, 1024) @ torch.ones(1024, 4096))
    268435456
    """
    if not callable(fn):
        raise TypeError(f"count_flops needs a function to call, got {type(fn).__name__}")
    with _Counter() as counter:
        fn()
    return counter.flops
