import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib import facts, models
from course_lib.compute import count_flops

CONFIG = facts.ModelConfig(
    vocab_size=101, dim=64, num_layers=3, num_heads=4, ffn_dim=160, max_seq_len=48
)


def forward_and_total(model, batch):
    """FLOPs of forward, and of forward with backward."""
    forward = count_flops(lambda: model(*batch))
    return forward, count_flops(lambda: model(*batch).sum().backward())


def test_a_multiply_add_is_two():
    linear, x = nn.Linear(1024, 4096), torch.ones(32, 1024)
    assert count_flops(lambda: linear(x)) == 268_435_456 == 2 * 134_217_728


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_a_transformers_forward_is_the_matmul_formula(attention):
    """2 N_matmul T + 4 L d T² for each sequence; embedding and norms have no matmul."""
    model = models.Transformer(CONFIG, attention=attention)
    matmul = sum(
        p.numel() for n, p in model.named_parameters() if "norm" not in n and "embedding" not in n
    )
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    forward = 2 * (2 * matmul * 48 + 4 * 3 * 64 * 48**2)
    assert forward_and_total(model, [tokens]) == (forward, 3 * forward)


def test_fused_attention_counts_like_explicit_and_backward_is_twice_forward():
    q, k, v = (torch.ones(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    fused = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    explicit = lambda: models.explicit_attention(q, k, v)  # noqa: E731
    assert count_flops(fused) == count_flops(explicit) == 4 * 2 * 4 * 16 * 16 * 8
    assert count_flops(lambda: fused().sum().backward()) == 3 * count_flops(fused)
    assert count_flops(lambda: explicit().sum().backward()) == 3 * count_flops(fused)


def test_a_7b_forward_is_counted_without_running_it():
    config = facts.model("llama-2-7b")
    with FakeTensorMode():
        model = models.Transformer(config)
        tokens = torch.zeros(1, 2048, dtype=torch.int64)
        counted = count_flops(lambda: model(tokens))
    norms = 65 * config.dim
    matmul = config.published_params - config.vocab_size * config.dim - norms
    assert counted == 2 * matmul * 2048 + 4 * 32 * config.dim * 2048**2


def test_element_wise_operations_count_as_nothing():
    assert count_flops(lambda: torch.ones(10).exp().sum()) == 0


@pytest.mark.parametrize("bad", [None, 3, torch.ones(2)])
def test_only_a_function_can_be_counted(bad):
    with pytest.raises(TypeError, match="needs a function"):
        count_flops(bad)
