"""Fake tensors that take the bytes a real kernel would take, or say that shapes can't tell.

torch gives each operation a rule for the shapes of its results, and the rule needn't know what
the kernel allocates. Every operation in torch's own test samples was compared with its rule, and
common modules in training (`tests/test_fake_tensors.py`); the differences are what stands here.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class ShapesCantTell(RuntimeError):
    """What shapes alone don't tell, by name, and what to do `instead` of running it on them."""

    def __init__(self, what: str, instead: str = ""):
        super().__init__(what)
        self.instead = instead


def _of_every_element(out: Tensor, prediction: Tensor, target: Tensor, *_) -> dict:
    """The loss of every element, whose storage then holds their mean: it lives as long."""
    count = math.prod(torch.broadcast_shapes(prediction.shape, target.shape))
    return {out: count * out.element_size()}


def _of_columns(out: Tensor, columns: Tensor, *_) -> dict:
    """The result is made in the shape of the columns, and resized."""
    return {out: max(columns.numel(), out.numel()) * out.element_size()}


def _one_more(out: tuple[Tensor, ...], *_) -> dict:
    """`offset2bag` is made one longer and resized."""
    offset2bag = out[1]
    return {offset2bag: offset2bag.nbytes + (offset2bag.element_size() if len(offset2bag) else 0)}


# Storages that are larger than the tensors in them: (result, *arguments) -> {tensor: bytes}.
LARGER: dict[Any, Callable[..., dict]] = {
    aten.mse_loss.default: _of_every_element,
    aten.smooth_l1_loss.default: _of_every_element,
    aten.soft_margin_loss.default: _of_every_element,
    aten.binary_cross_entropy.default: _of_every_element,
    aten.col2im.default: _of_columns,
    aten._embedding_bag.default: _one_more,
}

# oneDNN's LSTM keeps a workspace for backward; its size is known to oneDNN alone.
UNKNOWN = {aten.mkldnn_rnn_layer}

# A number is written into the result, and the kernel raises for one that its type can't hold.
WRITES_A_NUMBER = {
    aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_, aten.full, aten.full_like,
    aten.new_full, aten.index_fill, aten.index_fill_, aten.scatter, aten.scatter_,
    aten.constant_pad_nd, aten.clamp, aten.clamp_, aten.clamp_min, aten.clamp_min_,
    aten.clamp_max, aten.clamp_max_, aten.threshold, aten.hardtanh,
}  # fmt: skip


class ShapesAlone(FakeTensorMode):
    """torch's mode for fake tensors, with the real sizes, and refusals where there are none."""

    def __init__(self):
        # The fallback would run an operation that has no rule for real, in real memory.
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", None)
        if packet in UNKNOWN:
            raise ShapesCantTell(f"shapes alone don't tell what {func} keeps")
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if packet in WRITES_A_NUMBER:
            _refuse_overflow(func, out.dtype, (*args, *kwargs.values()))
        if func in LARGER:
            for tensor, num_bytes in LARGER[func](out, *args).items():
                if num_bytes > tensor.untyped_storage().nbytes():
                    tensor.untyped_storage().resize_(num_bytes)
        return out


class Copies(TorchFunctionMode):
    """Copies of fake tensors, such as nn.TransformerEncoder makes of its layer.

    torch's own would copy the mode with the tensor, and each use of a copied weight would be a
    tensor of its own.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copy = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy)
            memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def _refuse_overflow(func: Any, dtype: torch.dtype, values: tuple) -> None:
    largest = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    for value in values:
        if type(value) in (int, float) and math.isfinite(value) and abs(value) > largest:
            raise ShapesCantTell(
                f"{value} is too large for {dtype}, so that {func} fails when it is run for real",
                f"write float('-inf') or torch.finfo({dtype}).min instead",
            )
