"""Parameters and kept bytes by arithmetic, against real models and the traced step."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course_lib import facts, memory_trace, models
from course_lib.facts import ModelConfig
from course_lib.shapes import Line, activations, num_params

SMALL = ModelConfig(
    vocab_size=50, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6, ffn_dim=48,
    max_seq_len=16, name="small",
)  # fmt: skip
KINDS = ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None))


def kept(config, batch, seq, attention="sdpa", checkpointing=False, dtype=None, autocast=None):
    """The live activations after the loss, traced on shapes without numbers."""
    timeline = memory_trace.measure(
        lambda: models.Transformer(config, attention=attention, checkpointing=checkpointing),
        lambda: torch.zeros((batch, seq), dtype=torch.int64),
        lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()),
        lambda model: torch.optim.SGD(model.parameters()),
        dtype=dtype or torch.float32,
        autocast=autocast,
        steps=1,
    )
    loss = next(phase for phase in timeline.phases if phase.name == "loss")
    return timeline.live["activations"][loss.end - 1]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "autocast"), KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_the_activations_are_the_traced_ones_to_the_byte(
    kv_heads, attention, checkpointing, dtype, autocast
):
    how = dict(attention=attention, checkpointing=checkpointing, dtype=dtype, autocast=autocast)
    for on, batch, seq in ((False, 1, 16), (True, 3, 5)):
        config = dataclasses.replace(
            SMALL, num_kv_heads=kv_heads, qkv_bias=on, tied_head=on, qk_norm=on
        )
        formula = activations(config, batch=batch, seq=seq, **how)
        assert formula.total_bytes == kept(config, batch, seq, **how)


def test_two_layers_of_llama_are_counted_to_the_byte():
    config = dataclasses.replace(facts.model("llama-2-7b"), num_layers=2)
    for autocast in (None, torch.bfloat16):
        formula = activations(config, batch=2, seq=512, autocast=autocast)
        assert formula.total_bytes == kept(config, 2, 512, autocast=autocast)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize(("dtype", "autocast"), KINDS)
def test_one_head_or_one_token_is_joined_without_a_copy(dtype, autocast, attention):
    how = dict(attention=attention, dtype=dtype, autocast=autocast)
    for heads, batch, seq in ((1, 2, 16), (1, 1, 1), (4, 3, 1), (4, 1, 2)):
        config = dataclasses.replace(SMALL, num_heads=heads, num_kv_heads=1, head_dim=8)
        formula = activations(config, batch=batch, seq=seq, **how)
        assert formula.total_bytes == kept(config, batch, seq, **how)


def test_head_dim_2_has_no_fused_kernel():
    config = dataclasses.replace(SMALL, head_dim=2)
    with pytest.raises(ValueError, match="no fused kernel for head_dim 2"):
        activations(config, batch=2, seq=16)
    formula = activations(config, batch=2, seq=16, attention="explicit")
    assert formula.total_bytes == kept(config, 2, 16, attention="explicit")


class GeluInstead(models.SwiGLU):
    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class NormTwice(models.RMSNorm):
    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize(("name", "changed"), [("SwiGLU", GeluInstead), ("RMSNorm", NormTwice)])
def test_another_line_in_the_model_is_noticed(monkeypatch, name, changed):
    assert activations(SMALL, batch=2, seq=8).total_bytes == kept(SMALL, 2, 8)
    monkeypatch.setattr(models, name, changed)
    assert activations(SMALL, batch=2, seq=8).total_bytes != kept(SMALL, 2, 8)


LINES = {  # what a module keeps, at the latest while its forward runs
    "attention_norm": [Line.ATTENTION_NORM],
    "attention.wq": [Line.QKV],
    "attention.q_norm": [Line.QK_NORM],
    "attention": [Line.ATTENTION],
    "attention.wo": [Line.WO],
    "ffn_norm": [Line.FFN_NORM],
    "ffn.w1": [Line.W1_W3],
    "ffn": [Line.SILU, Line.PRODUCT],
    "ffn.w2": [Line.W2],
}


def kept_by_module(block, *inputs):
    """Bytes that autograd keeps, by the module whose forward kept a storage first."""
    stack, found, seen = [], {}, {p.untyped_storage()._cdata for p in block.parameters()}
    seen |= {x.untyped_storage()._cdata for x in inputs[1:]}  # the rotary table
    alive = []

    def keep(tensor):
        alive.append(tensor)  # or its address comes back
        if (key := tensor.untyped_storage()._cdata) not in seen:
            seen.add(key)
            found[stack[-1]] = found.get(stack[-1], 0) + tensor.untyped_storage().nbytes()
        return tensor

    for name, module in block.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: stack.append(name))
        module.register_forward_hook(lambda *_: stack.pop() and None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(*inputs)
    return found


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_each_line_keeps_what_its_module_keeps(attention):
    config = dataclasses.replace(SMALL, qk_norm=True)
    x = torch.randn(2, 16, SMALL.dim, requires_grad=True)
    block = models.Block(config, attention)
    found = kept_by_module(block, x, *models.rotary_table(16, SMALL.head_dim, like=x))
    found["attention.q_norm"] += found.pop("attention.k_norm")
    entries = activations(config, batch=2, seq=16, attention=attention).layer
    for name, lines in LINES.items():
        assert found.pop(name) == sum(e.num_bytes for e in entries if e.line in lines), name
    assert not found


def test_each_entry_is_called_what_it_is():
    layer = activations(dataclasses.replace(SMALL, qk_norm=True), batch=2, seq=8).layer
    norm = ["input, in float32", "1 / root mean square", "normed, before the gain"]
    called = {}
    for entry in layer:
        called.setdefault(entry.where, []).append(entry.what)
    assert called == {
        "attention_norm": norm, "wq wk wv": ["input"], "q_norm k_norm": norm,
        "attention": ["q, k, v", "output", "log of the sums"], "wo": ["input"],
        "ffn_norm": norm, "w1 w3": ["input"], "silu": ["input"], "silu · w3": ["both factors"],
        "w2": ["input"],
    }  # fmt: skip
    sizes = {(entry.where, entry.what): entry.num_bytes for entry in layer}
    assert sizes["attention", "q, k, v"] == 3 * sizes["attention", "output"]
    assert sizes["attention", "log of the sums"] == 2 * 8 * SMALL.num_heads * 4
    rest = {(e.where, e.what): e.num_bytes for e in activations(SMALL, batch=2, seq=8).rest}
    assert rest["loss", "log-probabilities"] == 2 * 8 * SMALL.vocab_size * 4
    assert rest["loss", "itself, the weights' sum"] == 8
    written = activations(SMALL, batch=2, seq=8, attention="explicit").layer
    sizes = {entry.what: entry.num_bytes for entry in written}
    assert sizes["mask, T × T"] == 8 * 8 and sizes["softmax, T × T"] == 2 * 4 * 8 * 8 * 4


def test_what_autocast_copies_are_the_matrices_in_16_bits():
    model = models.Transformer(SMALL)
    used = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    how = dict(batch=2, seq=8)
    assert activations(SMALL, autocast=torch.bfloat16, **how).copied_bytes == 2 * sum(used)
    assert activations(SMALL, **how).copied_bytes == 0


def test_the_entries_add_up_and_print():
    formula = activations(SMALL, batch=2, seq=8)
    rest = sum(entry.num_bytes for entry in formula.rest)
    assert formula.total_bytes == 3 * formula.layer_bytes + rest
    assert repr(formula).splitlines()[-1].endswith(f"{formula.total_bytes:,} B")
    assert max(map(len, repr(formula).splitlines())) <= 58


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": 0}, ValueError, "batch must be at least 1"),
        ({"batch": True}, TypeError, "batch must be a whole number"),
        ({"seq": 2.0}, TypeError, "seq must be a whole number"),
        ({"seq": 17}, ValueError, "max_seq_len 16"),
        ({"checkpointing": "off"}, ValueError, "checkpointing must be one of True, False"),
        ({"attention": "flash"}, ValueError, "attention must be one of sdpa, explicit"),
        ({"dtype": torch.float64}, ValueError, "dtype must be one of"),
        ({"autocast": torch.float32}, ValueError, "autocast must be"),
        ({"autocast": torch.bfloat16, "dtype": torch.bfloat16}, ValueError, "float32 weights"),
    ],
)
def test_what_the_model_would_not_run_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        activations(SMALL, **({"batch": 2, "seq": 8} | changes))


def test_a_config_is_needed():
    for call in (num_params, lambda config: activations(config, batch=1, seq=1)):
        with pytest.raises(TypeError, match="ModelConfig"):
            call("llama-2-7b")
    with pytest.raises(ValueError, match="llama family"):
        activations(facts.model("gpt2"), batch=1, seq=1)
    with pytest.raises(ValueError, match="family must be one of"):
        num_params(dataclasses.replace(SMALL, family="mamba"))
    for change in ({"num_kv_heads": 4}, {"head_dim": 32}, {"qk_norm": True}, {"qkv_bias": False}):
        with pytest.raises(ValueError, match="another"):  # silently the same before
            num_params(dataclasses.replace(facts.model("gpt2"), **change))


def test_numpy_s_whole_numbers_are_whole_numbers():
    given = activations(SMALL, batch=np.int64(2), seq=np.int32(8))
    assert given == activations(SMALL, batch=2, seq=8) and type(given.total_bytes) is int


PUBLISHED = [config for config in facts.models() if config.published_params]


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config.name)
def test_the_number_of_parameters_is_the_published_one(config):
    assert num_params(config) == config.published_params


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=3)))
def test_the_number_of_parameters_is_the_model_s(flags):
    config = dataclasses.replace(
        SMALL, **dict(zip(("tied_head", "qkv_bias", "qk_norm"), flags, strict=True))
    )
    model = models.Transformer(config)
    assert num_params(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("heads", "seq", "width", "scores", "saved"),
    [(96, 2048, 12288, 80, 70), (128, 2048, 20480, 64, 65)],
)
def test_the_share_of_attention_s_scores_that_was_published(heads, seq, width, scores, saved):
    """5·a·s²·b beside 34·s·b·h: https://arxiv.org/abs/2205.05198, GPT-3 and MT-NLG."""
    assert 5 * heads * seq / width == scores
    assert round(100 * scores / (34 + scores)) == saved


def test_the_paper_counts_three_tensors_of_scores_where_this_model_keeps_one_and_a_mask():
    """Its 5 bytes are a softmax, a dropout mask and dropout's output; there is no dropout here."""
    how = dict(batch=2, seq=16, dtype=torch.bfloat16)
    written, fused = (activations(SMALL, attention=a, **how) for a in ("explicit", "sdpa"))
    squares = SMALL.num_heads * 16 * 16 * 2  # a · s² · b
    more = written.layer_bytes - fused.layer_bytes
    heads = SMALL.num_heads * SMALL.head_dim * 2 + SMALL.num_heads * 4  # sdpa's output, its sums
    assert more == 2 * squares + 16 * 16 - 2 * 16 * heads
