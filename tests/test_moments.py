"""The moments by arithmetic, against the traced step."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course_lib import facts, memory_trace, models
from course_lib.facts import ModelConfig
from course_lib.ledgers import CONVENTIONS, Role
from course_lib.moments import ONE_BY_ONE, PHASES, STEPS, moments
from course_lib.shapes import Line, num_params

SMALL = ModelConfig(
    vocab_size=500, dim=64, num_layers=6, num_heads=4, ffn_dim=160, max_seq_len=64, name="small"
)
LLAMA = dataclasses.replace(facts.model("llama-2-7b"), num_layers=2)


def traced(config, convention, batch, seq, optimizer, step, accumulate=1, **how):
    many = {"foreach": step == "foreach", "fused": step == "fused"}
    if step == "fused":
        many = {"fused": True}
    build = {
        "adamw": lambda m: torch.optim.AdamW(m.parameters(), **many),
        "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, **many),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **many),
    }[optimizer]
    return memory_trace.measure(
        lambda: models.Transformer(config, **how),
        lambda: torch.zeros((batch, seq), dtype=torch.int64),
        lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()),
        build,
        dtype=torch.bfloat16 if convention == "pure-bf16" else torch.float32,
        autocast=torch.bfloat16 if convention == "autocast" else None,
        accumulate=accumulate,
    )


LONG = dataclasses.replace(SMALL, num_heads=8, head_dim=8, num_kv_heads=8, max_seq_len=512)
WIDE = dataclasses.replace(SMALL, ffn_dim=4096)
TIED = dataclasses.replace(SMALL, tied_head=True, vocab_size=20_000)
SHALLOW = dataclasses.replace(
    SMALL, vocab_size=256, dim=512, num_layers=1, num_heads=8, num_kv_heads=8, ffn_dim=4096,
    head_dim=64, max_seq_len=128,
)  # fmt: skip
SETTINGS = [
    (LONG, "fp32", 2, 512, "adamw", ONE_BY_ONE, {"attention": "explicit"}),
    (LONG, "fp32", 2, 512, "adamw", ONE_BY_ONE, {"attention": "explicit", "checkpointing": True}),
    (LONG, "autocast", 2, 512, "sgd", ONE_BY_ONE, {"attention": "explicit", "checkpointing": True}),
    (LONG, "pure-bf16", 1, 256, "adamw", "fused", {"attention": "explicit"}),
    (WIDE, "fp32", 1, 16, "adamw", ONE_BY_ONE, {}),
    (TIED, "fp32", 1, 16, "momentum", ONE_BY_ONE, {}),
    (TIED, "pure-bf16", 1, 16, "sgd", ONE_BY_ONE, {}),
    (TIED, "autocast", 2, 64, "adamw", "fused", {"checkpointing": True}),
    (LLAMA, "fp32", 1, 2048, "adamw", ONE_BY_ONE, {}),
    (LLAMA, "fp32", 8, 2048, "adamw", ONE_BY_ONE, {}),
    (LLAMA, "fp32", 1, 512, "adamw", "foreach", {}),
    (LLAMA, "autocast", 8, 2048, "adamw", ONE_BY_ONE, {}),
    (LLAMA, "autocast", 8, 2048, "adamw", ONE_BY_ONE, {"checkpointing": True}),
    (LLAMA, "pure-bf16", 1, 2048, "adamw", "fused", {}),
    (SMALL, "fp32", 16, 64, "sgd", ONE_BY_ONE, {}),
    (SMALL, "fp32", 1, 16, "momentum", "foreach", {}),
    (SMALL, "autocast", 16, 64, "adamw", ONE_BY_ONE, {"attention": "explicit"}),
    (SMALL, "pure-bf16", 16, 64, "adamw", "fused", {"checkpointing": True}),
    (SMALL, "fp32", 32, 64, "adamw", ONE_BY_ONE, {"checkpointing": True}),
    (LLAMA, "fp32", 4, 2048, "adamw", ONE_BY_ONE, {"accumulate": 2}),
    (LONG, "fp32", 2, 512, "adamw", ONE_BY_ONE, {"attention": "explicit", "accumulate": 2}),
    (LLAMA, "autocast", 4, 2048, "adamw", ONE_BY_ONE, {"accumulate": 2, "checkpointing": True}),
    (SHALLOW, "fp32", 1, 128, "sgd", "fused", {"accumulate": 2}),
    (SHALLOW, "autocast", 1, 128, "sgd", "fused", {"accumulate": 2, "checkpointing": True}),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_peak_is_within_5_percent_of_the_traced_one(setting):
    config, convention, batch, seq, optimizer, step, how = setting
    measured = traced(config, convention, batch, seq, optimizer, step, **how)
    found = moments(config, convention, batch=batch, seq=seq, optimizer=optimizer, step=step, **how)
    assert found.peak.total_bytes == pytest.approx(measured.peak_bytes, rel=0.05)


def drawn(number):
    """Settings that nobody chose: odd widths, grouped heads, every way to keep and to step."""
    draw = random.Random(number)
    heads, head_dim = draw.choice([1, 2, 4, 8, 16]), draw.choice([8, 16, 32, 64])
    config = ModelConfig(
        vocab_size=draw.choice([27, 500, 5000, 32_000, 128_000]),
        dim=heads * head_dim * draw.choice([1, 1, 2]),
        num_layers=draw.choice([1, 2, 3, 4]),
        num_heads=heads,
        num_kv_heads=draw.choice([1, heads]),
        head_dim=head_dim,
        ffn_dim=heads * head_dim * draw.choice([1, 3, 4, 8]),
        max_seq_len=2048,
        tied_head=draw.random() < 0.3,
        qkv_bias=draw.random() < 0.2,
        qk_norm=number % 2 == 1,
        name="drawn",
    )
    how = {"attention": draw.choice(["sdpa", "sdpa", "explicit"])}
    how |= {"checkpointing": draw.random() < 0.4, "accumulate": draw.choice([1, 1, 2])}
    convention = draw.choice(["fp32", "autocast", "pure-bf16"])
    batch, seq = draw.choice([1, 2, 4, 8, 16]), draw.choice([16, 128, 512, 2048])
    optimizer = draw.choice(["adamw", "momentum", "sgd"])
    return config, convention, batch, seq, optimizer, draw.choice(STEPS), how


@pytest.mark.parametrize("number", range(40))
def test_the_peak_of_a_setting_drawn_by_chance_is_within_5_percent(number):
    setting = config, convention, batch, seq, optimizer, step, how = drawn(number)
    measured = traced(config, convention, batch, seq, optimizer, step, **how)
    found = moments(config, convention, batch=batch, seq=seq, optimizer=optimizer, step=step, **how)
    assert found.peak.total_bytes == pytest.approx(measured.peak_bytes, rel=0.05), setting


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("convention", ["fp32", "autocast", "pure-bf16"])
def test_each_phase_has_its_own_peak(convention, checkpointing, attention):
    how = dict(attention=attention, checkpointing=checkpointing)
    measured = traced(LLAMA, convention, 2, 1024, "adamw", ONE_BY_ONE, **how)
    found = moments(LLAMA, convention, batch=2, seq=1024, step=ONE_BY_ONE, **how)
    peaks = {phase.name: phase.peak_bytes for phase in measured.phases if phase.step == 2}
    assert [moment.phase for moment in found.phases] == list(PHASES)
    for moment in found.phases:
        assert moment.total_bytes == pytest.approx(peaks[moment.phase], rel=0.01), moment.name


def test_each_moment_of_a_checkpointed_step_is_the_traced_one():
    """Where the peak lies while a layer is computed again, part by part."""
    found = moments(LLAMA, "pure-bf16", batch=8, seq=2048, step="fused", checkpointing=True)
    setting = (LLAMA, "pure-bf16", 8, 2048, "adamw", "fused")
    measured = traced(*setting, checkpointing=True)
    assert found.peak.name == "backward, SwiGLU of the first layer"
    assert found.peak.parts["gradients"] == measured.peak_by["gradients"]
    for part in ("activations", "temporaries"):
        assert found.peak.parts[part] == pytest.approx(measured.peak_by[part], rel=1e-3)


QWEN = dataclasses.replace(facts.model("qwen3-0.6b"), num_layers=2)
NARROW = dataclasses.replace(QWEN, vocab_size=27, dim=256, num_heads=8, head_dim=64, ffn_dim=128)


@pytest.mark.parametrize("config", [QWEN, NARROW], ids=["qwen", "narrow"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("convention", ["fp32", "autocast", "pure-bf16"])
def test_norms_of_queries_and_keys_are_in_the_peak(convention, checkpointing, config):
    how = dict(checkpointing=checkpointing)
    measured = traced(config, convention, 4, 512, "sgd", "fused", **how)
    how |= dict(batch=4, seq=512, optimizer="sgd", step="fused")
    found = moments(config, convention, **how).peak
    assert found.total_bytes == pytest.approx(measured.peak_bytes, rel=0.05)


def test_qwen3_s_norms_are_a_fifth_of_its_peak():
    """A public case, unsloth#2661: without them 45.43 GiB, where the trace has 55.97."""
    qwen = facts.model("qwen3-0.6b")
    how = dict(batch=8, seq=2048, step=ONE_BY_ONE)
    found = moments(qwen, "pure-bf16", **how).peak
    measured = traced(qwen, "pure-bf16", 8, 2048, "adamw", ONE_BY_ONE)
    assert found.total_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
    plain = moments(dataclasses.replace(qwen, qk_norm=False), "pure-bf16", **how).peak
    kept = 28 * 8 * 2048 * (16 + 8) * (2 * 128 + 1) * 4  # input, normed; and a root for each head
    assert found.total_bytes - plain.total_bytes == kept + 28 * 2 * 128 * 3 * 2  # gains, moments


def test_a_better_word_for_a_line_or_a_row_changes_no_moment(monkeypatch):
    def sizes():
        for convention, stage in itertools.product(CONVENTIONS, (0, 2, 3)):
            for how in ({}, {"checkpointing": True}, {"attention": "explicit"}):
                how |= dict(batch=2, seq=16, zero_stage=stage, data_parallel=2)
                found = moments(dataclasses.replace(TIED, qk_norm=True), convention, **how)
                yield [moment.parts for moment in found.moments], found.activations.copied_bytes

    before = list(sizes())
    for number, word in enumerate((*Line, *Role)):
        monkeypatch.setattr(word, "_value_", f"phrase {number}")
    assert moments(SMALL, "fp32", batch=1, seq=16).activations.layer[0].where == "phrase 0"
    assert list(sizes()) == before


def test_numpy_s_whole_numbers_are_whole_numbers():
    how = dict(batch=2, seq=16, accumulate=2, zero_stage=1, data_parallel=8)
    given = moments(SMALL, "fp32", **{name: np.int64(value) for name, value in how.items()})
    assert given == moments(SMALL, "fp32", **how)
    assert all(type(size) is int for m in given.moments for size in m.parts.values())


def test_autocast_keeps_its_casts_until_the_loss_is_there():
    config = dataclasses.replace(LLAMA, num_layers=4)
    found = moments(config, "autocast", batch=8, seq=2048, checkpointing=True)
    measured = traced(config, "autocast", 8, 2048, "adamw", ONE_BY_ONE, checkpointing=True)
    assert found.peak.phase == measured.peak_at.phase == "loss"
    assert found.peak.total_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_the_sum_is_more_than_any_moment_of_llama_2_7b_in_the_budget_of_12_bytes():
    """The sum is over the card, the step is under it: what stands in one doesn't peak together."""
    step = moments(facts.model("llama-2-7b"), "seed-7b", batch=1, seq=2048, step=ONE_BY_ONE)
    card = facts.accelerator("A100-SXM4-80GB").capacity_bytes
    assert step.peak.total_bytes < card < step.sum_bytes
    assert step.peak.name == "step" and step.peak == step.phases[-1]


@pytest.mark.parametrize(
    ("convention", "zero_stage", "extra", "left"),
    [
        ("zero-fp16", 0, 4, 0), ("both-gradients", 0, 0, 6), ("megatron-bf16", 0, 0, 4),
        ("zero-fp16", 1, 4 / 8, 2), ("zero-fp16", 2, 4 / 8, 0),
    ],
)  # fmt: skip
def test_16_bit_gradients_give_way_to_float32_ones_for_the_update(
    convention, zero_stage, extra, left
):
    """The last is there once more while it is widened: the head's."""
    step = moments(
        LLAMA, convention, batch=1, seq=16, step="fused", zero_stage=zero_stage, data_parallel=8
    )
    params, update = step.ledger.num_params, step.moments[-1].parts
    last = 2 * min(LLAMA.vocab_size * LLAMA.dim, -(-params // (8 if zero_stage else 1)))
    assert update["temporaries"] == pytest.approx(extra * params + last * (extra > 0), abs=2)
    assert update["gradients"] == pytest.approx(left * params, abs=2)


def test_one_tensor_at_a_time_widens_one_gradient_at_a_time():
    """Chapter 06's optimizer, of which it is traced: 155.50 GiB; 192.72 were all at once."""
    wide = dataclasses.replace(facts.model("llama-65b"), num_layers=12)
    step = moments(wide, "zero-fp16", batch=1, seq=2048, step=ONE_BY_ONE)
    assert round(step.peak.total_bytes / 2**30, 2) == 155.50
    largest = wide.vocab_size * wide.dim
    assert step.peak.total_bytes == step.ledger.total_bytes + 3 * 4 * largest
    for convention, optimizer, numbers in (
        ("zero-fp16", "sgd", 1), ("zero-fp16", "momentum", 1), ("zero-fp16", "adam8bit", 1),
        ("seed-7b", "adamw", 3), ("seed-7b", "sgd", 0), ("megatron-bf16", "adamw", 2),
    ):  # fmt: skip
        how = dict(batch=1, seq=16, optimizer=optimizer, step=ONE_BY_ONE)
        update = moments(wide, convention, **how).moments[-1]
        widened = convention != "megatron-bf16" and numbers > 0
        inside = (numbers + 1) * wide.dim * wide.ffn_dim if numbers else 0
        assert update.parts["temporaries"] == 4 * max(numbers * largest, inside)
        assert ("a gradient in float32" in update.passing) == widened


@pytest.mark.parametrize("step", [ONE_BY_ONE, "foreach"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_device_updates_its_share_from_stage_1_on(convention, step):
    how = dict(batch=1, seq=16, step=step, data_parallel=64)
    whole, *shares = (
        moments(LLAMA, convention, zero_stage=stage, **how).moments[-1].parts for stage in range(4)
    )
    for parts in shares:
        assert parts["optimizer state"] == pytest.approx(whole["optimizer state"] / 64, abs=8)
        assert parts["temporaries"] <= max(
            1, whole["temporaries"] / (64 if step == "foreach" else 1)
        )
        assert parts["temporaries"] < whole["temporaries"] or not whole["temporaries"]


def test_a_new_gradient_is_whole_and_in_the_weights_dtype():
    head = TIED.vocab_size * TIED.dim
    how = dict(batch=1, seq=16, accumulate=2, step="fused")
    for convention, each in (
        ("zero-fp16", 2),
        ("both-gradients", 2),
        ("megatron-bf16", 2),
        ("fp32", 4),
    ):
        for stage in (0, 1, 2):
            step = moments(TIED, convention, zero_stage=stage, data_parallel=8, **how)
            (last,) = (m for m in step.moments if m.name == "backward, the embedding")
            assert last.parts["temporaries"] == 3 * each * head  # the head's, its own, their sum
            assert last.passing == "new gradients"


def test_what_zero_divides_is_whole_where_it_is_at_hand():
    how = dict(batch=1, seq=16, data_parallel=8)
    layer = sum(p.numel() for p in models.Block(LLAMA, "sdpa").parameters())
    head = LLAMA.vocab_size * LLAMA.dim
    plain, two, three = (
        {m.name: m.parts for m in moments(LLAMA, "zero-fp16", zero_stage=z, **how).moments}
        for z in (1, 2, 3)
    )
    assert three["backward, SwiGLU of the last layer"]["gathered"] == 2 * layer
    assert three["forward, the last layer"]["gathered"] == 2 * layer
    assert three["backward, the head"]["gathered"] == three["loss"]["gathered"] == 2 * head
    assert "gathered" not in three["step"] and "gathered" not in two["loss"]
    for divided in (two, three):
        for name, new in (("SwiGLU of the last layer", layer), ("the head", head)):
            more = divided[f"backward, {name}"]["temporaries"]
            assert more - plain[f"backward, {name}"]["temporaries"] == 2 * new
    alone, one = (moments(LLAMA, "fp32", batch=1, seq=16, zero_stage=z) for z in (3, 0))
    assert alone.peak.total_bytes == one.peak.total_bytes


def test_temporaries_are_explained_where_there_are_any():
    for convention, stage, accumulate in itertools.product(CONVENTIONS, range(4), (1, 2)):
        how = dict(zero_stage=stage, accumulate=accumulate, data_parallel=8)
        for config in (TIED, SMALL):
            for moment in moments(config, convention, batch=1, seq=16, **how).moments:
                assert (moment.parts["temporaries"] > 0) == (moment.passing != "none"), moment


def test_8_bit_adam_has_no_temporaries_and_float32_copies_stay():
    update = moments(LLAMA, "autocast", batch=1, seq=16, optimizer="adam8bit").moments[-1]
    assert (update.parts["temporaries"], update.passing) == (0, "none")
    update = moments(LLAMA, "zero-fp16", batch=1, seq=16, optimizer="adam8bit").moments[-1]
    last = 2 * LLAMA.vocab_size * LLAMA.dim
    assert update.parts["temporaries"] == 4 * num_params(LLAMA) + last
    assert update.passing == "float32 copies of the gradients"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"accumulate": 0}, ValueError, "accumulate must be at least 1"),
        ({"accumulate": True}, TypeError, "accumulate must be a whole number"),
        ({"accumulate": 2.0}, TypeError, "accumulate must be a whole number"),
        ({"batch": None}, TypeError, "batch must be a whole number"),
        ({"batch": "1", "seq": "16"}, TypeError, "batch must be a whole number"),
        ({"convention": ["fp32"]}, ValueError, "convention must be one of"),
        ({"optimizer": []}, ValueError, "optimizer must be one of"),
        ({"zero_stage": 1.0}, TypeError, "zero_stage must be a whole number"),
        ({"checkpointing": "off"}, ValueError, "checkpointing must be one of True, False"),
        ({"config": dataclasses.replace(SMALL, head_dim=5)}, ValueError, "even head_dim, got 5"),
    ],
)
def test_bad_input_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        moments(**({"config": SMALL, "convention": "fp32", "batch": 1, "seq": 16} | changes))


def test_an_unknown_way_to_step_is_refused():
    with pytest.raises(ValueError, match="step must be one of one tensor at a time"):
        moments(SMALL, "fp32", batch=1, seq=16, step="slowly")
