import dataclasses
import itertools

import pytest
import torch

from course_lib import facts
from course_lib.models import Transformer


def test_names_are_found_in_any_case():
    assert facts.accelerator("a100-sxm4-80gb") is facts.accelerator("A100-SXM4-80GB")
    assert facts.model("LLAMA-2-7B") is facts.model("llama-2-7b")


@pytest.mark.parametrize(
    ("look_up", "typed", "suggested"),
    [
        (facts.accelerator, "A100-80GB", "A100-SXM4-80GB"),
        (facts.accelerator, "rtx 4090", "RTX-4090"),
        (facts.model, "llama2-7b", "llama-2-7b"),
        (facts.model, "gpt-2", "gpt2"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(look_up, typed, suggested):
    with pytest.raises(ValueError, match=f"did you mean '{suggested}'"):
        look_up(typed)


@pytest.mark.parametrize("look_up", [facts.accelerator, facts.model])
def test_a_name_is_text(look_up):
    with pytest.raises(TypeError, match="must be text"):
        look_up(7)


@pytest.mark.parametrize("records", [facts.accelerators(), facts.models()])
def test_every_record_is_frozen_named_once_and_has_a_source(records):
    assert len({record.name.lower() for record in records}) == len(records)
    for record in records:
        assert record.source and record.verified in ("primary", "secondary", "from memory")
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.name = "another"


def test_no_matmul_is_faster_than_published_and_the_tables_agree():
    published = {"H100 SXM": "H100-SXM5-80GB", "A100 SXM": "A100-SXM4-80GB", "B200 SXM": "B200-SXM"}
    assert len({(row.name, row.format) for row in facts.matmuls()}) == len(facts.matmuls())
    for row in facts.matmuls():
        assert 0.5 < row.reached_flops_per_s / row.published_flops_per_s < 1
        assert row.source and row.verified == "primary"
        if row.name in published:
            card = facts.accelerator(published[row.name])
            assert getattr(card, f"{row.format}_flops_per_s") == row.published_flops_per_s


def test_the_units_of_an_accelerator_are_those_of_its_columns():
    a100 = facts.accelerator("A100-SXM4-80GB")
    assert a100.memory_bytes == 80e9
    assert a100.bf16_flops_per_s == 312e12
    assert a100.link_bytes_per_s == 300e9  # one way; 600 GB/s are sold, both ways together
    least = {"memory_bytes_per_s": 2e11, "link_bytes_per_s": 1e10} | dict.fromkeys(
        (f.name for f in dataclasses.fields(a100) if f.name.endswith("flops_per_s")), 5e12
    )
    for card, (name, bound) in itertools.product(facts.accelerators(), least.items()):
        rate = getattr(card, name)  # from the slowest card to the fastest it is less than 1,000
        assert rate is None or bound < rate < 1000 * bound, (card.name, name)


REPORTED = [card for card in facts.accelerators() if card.reported_bytes]


@pytest.mark.parametrize("card", REPORTED, ids=lambda card: card.name)
def test_what_torch_reports_of_a_card_is_a_little_less_than_is_sold_read_as_gib(card):
    sold = card.memory_bytes / 1e9
    assert 0.88 < card.reported_bytes / 2**30 / sold <= 1.0
    assert card.capacity_bytes == card.reported_bytes and "torch's" in card.source


def test_cards_sold_alike_hold_alike():
    """80 GB of an H100 and of an A100 differ by less than a per cent."""
    cards = [card for card in REPORTED if card.memory_bytes == 80e9]
    sizes = [card.reported_bytes for card in cards]
    assert len(cards) == 4 and max(sizes) < 1.01 * min(sizes)


LLAMAS = [c for c in facts.models() if c.family == "llama" and c.published_params]


@pytest.mark.parametrize("config", LLAMAS, ids=lambda config: config.name)
def test_the_transformer_has_the_published_number_of_parameters(config):
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == config.published_params


SIZES = dict(vocab_size=27, dim=32, num_layers=2, num_heads=4, ffn_dim=64, max_seq_len=16)


def test_heads_default_to_the_usual():
    config = facts.ModelConfig(**SIZES)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim must be at least 1"),
        ({"num_layers": 2.0}, TypeError, "num_layers must be a whole number"),
        ({"vocab_size": True}, TypeError, "vocab_size"),
        ({"num_heads": 5}, ValueError, "isn't a multiple of num_heads"),
        ({"num_kv_heads": 3}, ValueError, "multiple of num_kv_heads"),
        ({"head_dim": -8}, ValueError, "head_dim must be at least 1"),
    ],
)
def test_impossible_dimensions_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        facts.ModelConfig(**{**SIZES, **change})
