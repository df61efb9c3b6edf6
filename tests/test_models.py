import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course_lib import facts, models

SIZES = dict(
    vocab_size=31, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=12
)
CONFIG = facts.ModelConfig(**SIZES)
TOKENS = torch.randint(0, 31, (3, 12), generator=torch.Generator().manual_seed(0))


def transformer(config=CONFIG, **options):
    torch.manual_seed(0)
    return models.Transformer(config, **options).double()


def gradients(model):
    model.zero_grad()
    F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [{"attention": "explicit"}, {"checkpointing": True},
     {"attention": "explicit", "checkpointing": True}],
)  # fmt: skip
def test_attention_kind_and_checkpointing_change_no_gradient(options):
    for plain, other in zip(
        gradients(transformer()), gradients(transformer(**options)), strict=True
    ):
        assert torch.allclose(plain, other, rtol=0, atol=1e-12)


def test_logits_have_the_shape_of_tokens_and_vocabulary():
    assert transformer()(TOKENS).shape == (3, 12, 31)


def test_no_position_sees_a_later_token():
    model = transformer()
    changed = TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 31
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amin(dim=(0, 2)).sum() > 0


def test_a_shared_key_value_head_is_the_same_head_repeated():
    """Grouped queries equal full attention whose key and value weights are repeated."""
    grouped = transformer()
    full = transformer(facts.ModelConfig(**{**SIZES, "num_kv_heads": 4}))
    state = grouped.state_dict()
    for name in state:
        if "wk" in name or "wv" in name:
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    assert torch.allclose(grouped(TOKENS), full(TOKENS), rtol=0, atol=1e-12)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cos, sin = models.rotary_table(10, 8, like=q)
    turned_q, turned_k = (models.rotate(x.expand(1, 1, 10, 8), cos, sin)[0, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(9):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), rtol=0, atol=1e-12)
    assert torch.allclose(turned_q[0], q)  # position 0 turns nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_is_torchs(dtype):
    x = torch.randn(5, 32, dtype=dtype, generator=torch.Generator().manual_seed(2))
    ours, theirs = models.RMSNorm(32).to(dtype), torch.nn.RMSNorm(32, eps=1e-5, dtype=dtype)
    assert torch.allclose(ours(x), theirs(x), rtol=0, atol=10 * torch.finfo(dtype).eps)


def test_rms_norm_of_half_precision_is_computed_in_float32():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # 300² is past float16's largest number
    assert torch.equal(models.RMSNorm(4).half()(x), torch.ones(1, 4, dtype=torch.float16))


def test_a_tied_head_is_the_embedding_itself():
    model = models.Transformer(facts.ModelConfig(**{**SIZES, "tied_head": True}))
    assert model.head.weight is model.embedding.weight


def test_the_rotary_angle_of_a_pair_falls_from_1_to_nearly_1_in_10_000():
    """Position t turns pair i by t · 10000^(−2i/h): https://arxiv.org/abs/2104.09864, eq. 15."""
    cos, sin = models.rotary_table(5, 8, like=torch.zeros(1, dtype=torch.float64))
    for t in range(5):
        for i in range(4):
            angle = t / 10 ** (4 * 2 * i / 8)
            assert (cos[t, i].item(), sin[t, i].item()) == pytest.approx(
                (math.cos(angle), math.sin(angle)), abs=1e-14
            )


def test_weights_are_drawn_with_0_02_and_biases_and_gains_are_as_they_start():
    config = facts.ModelConfig(**{**SIZES, "dim": 256, "ffn_dim": 256, "qkv_bias": True})
    for name, parameter in transformer(config).named_parameters():
        if parameter.dim() == 2:
            scale = parameter.std().item()
            assert scale == pytest.approx(0.02, rel=0.06), name  # 5 sigma of 31 × 256 draws
        else:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name


def test_queries_and_keys_of_any_length_attend_alike_behind_their_norms():
    """What q/k norms are for: the scores don't grow with the projections."""
    plain, normed = (
        transformer(facts.ModelConfig(**{**SIZES, "qk_norm": on})) for on in (False, True)
    )
    for model in (plain, normed):
        model.before = model(TOKENS)
        for layer in model.layers:
            for linear in (layer.attention.wq, layer.attention.wk):
                linear.weight.data *= 1000
    assert (normed(TOKENS) - normed.before).abs().max() < 0.01 < normed.before.abs().max()
    assert (plain(TOKENS) - plain.before).abs().max() > 0.01


def test_a_norm_of_queries_is_torch_s_over_each_head_before_rotation():
    attention = transformer(facts.ModelConfig(**{**SIZES, "qk_norm": True})).layers[0].attention
    x = torch.randn(2, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    attention.q_norm.weight.data = torch.rand(8, dtype=torch.float64)
    seen = []
    attention.attend = lambda q, k, v: (seen.extend((q, k)), models.explicit_attention(q, k, v))[1]
    attention(x, *models.rotary_table(1, 8, like=x))  # position 0 turns nothing
    for got, linear, norm in zip(seen, (attention.wq, attention.wk), ("q", "k"), strict=True):
        gain = getattr(attention, f"{norm}_norm").weight
        wanted = F.rms_norm(linear(x).unflatten(-1, (-1, 8)), (8,), gain, eps=1e-5).transpose(1, 2)
        if norm == "k":
            wanted = wanted.repeat_interleave(2, dim=1)
        assert torch.allclose(got, wanted, rtol=0, atol=1e-12)


def test_numpy_s_whole_numbers_are_whole_numbers():
    assert models.mlp(np.int64(4), np.int32(2))[0].weight.shape == (2, 4)
    config = facts.ModelConfig(**{name: np.int64(size) for name, size in SIZES.items()})
    assert config == CONFIG and all(type(getattr(config, name)) is int for name in SIZES)


def test_mlp_puts_an_activation_between_layers_only():
    model = models.mlp(4, 8, 8, 2, activation=torch.nn.Tanh, dtype=torch.float64)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    assert model(torch.ones(3, 4, dtype=torch.float64)).shape == (3, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: models.mlp(4), ValueError, "input and an output"),
        (lambda: models.mlp(4, 0), ValueError, "at least 1"),
        (lambda: models.mlp(4, 2.5), TypeError, "whole number"),
        (lambda: models.mlp(4, 2, activation=3), TypeError, "module class"),
        (lambda: models.mlp(4, 2, activation=torch.relu), TypeError, "module class"),
        (lambda: models.Transformer("llama-2-7b"), TypeError, "must be a ModelConfig"),
        (lambda: models.Transformer(facts.model("gpt2")), ValueError, "llama family"),
        (lambda: models.Transformer(CONFIG, attention="flash"), ValueError, "explicit"),
        (lambda: models.Transformer(CONFIG, checkpointing="off"), ValueError, "True, False"),
        (
            lambda: facts.ModelConfig(**SIZES, num_experts=8),
            ValueError,
            "mixture of experts .* memory.ledger",
        ),
        (lambda: facts.ModelConfig(**SIZES, num_experts=0), ValueError, "num_experts"),
        (lambda: facts.ModelConfig(**SIZES, qk_norm="yes"), ValueError, "qk_norm must be"),
        (
            lambda: models.Transformer(facts.ModelConfig(**{**SIZES, "head_dim": 7})),
            ValueError,
            "even head_dim",
        ),
        (lambda: transformer()(TOKENS.double()), TypeError, "int64"),
        (lambda: transformer()(TOKENS[0]), ValueError, "batch, sequence"),
        (lambda: transformer()(torch.cat([TOKENS, TOKENS], 1)), ValueError, "max_seq_len is 12"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
