"""FLOPs, counted as torch dispatches them. One multiply-add is two FLOPs."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

aten = torch.ops.aten


def _sdpa_forward(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(query, key, value)


def _sdpa_backward(grad_out, query, key, value, *args, out_shape=None, **kwargs) -> int:
    return 2 * sdpa_flop_count(query, key, value)


# torch's counter has no entry for the CPU kernel and gives it 0. Its entries for the CUDA
# kernels count backward as 2.5 times forward, since those compute the scores again; a model's
# own FLOPs are 2.0 times, on every device. A causal mask is not subtracted.
SDPA_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
    aten._scaled_dot_product_flash_attention_backward: _sdpa_backward,
    aten._scaled_dot_product_efficient_attention_backward: _sdpa_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _sdpa_backward,
}


def flop_counter() -> FlopCounterMode:
    """torch's FLOP counter, silent, with fused attention counted by the same rule everywhere."""
    return FlopCounterMode(display=False, custom_mapping=SDPA_FLOPS)


def count_flops(fn: Callable[[], object]) -> int:
    """FLOPs of the matmuls, convolutions and attention that `fn()` runs, backward included.

    Element-wise operations count as 0, as in torch.utils.flop_counter.

    >>> count_flops(lambda: torch.ones(32, 1024) @ torch.ones(1024, 4096))
    268435456
    """
    if not callable(fn):
        raise TypeError(f"count_flops needs a function to call, got {type(fn).__name__}")
    with flop_counter() as counter:
        fn()
    return counter.get_total_flops()
