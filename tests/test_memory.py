"""The ledger against live models to the byte, and against published tables."""

import csv
import gc
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from course_lib import facts, memory_trace, models
from course_lib.facts import ModelConfig
from course_lib.live_bytes import Tracer
from course_lib.memory import (
    CONVENTIONS,
    OPTIMIZERS,
    Role,
    compare,
    ledger,
    ledger_of,
    num_params,
)
from course_lib.precision import MasterWeights
from course_lib.shapes import DTYPES
from course_lib.training import train_step

FACTS = Path(__file__).parent / "facts"
CONFIG = ModelConfig(
    vocab_size=40, dim=16, num_layers=2, num_heads=2, ffn_dim=24, max_seq_len=8, name="tiny"
)


def read(name):
    with open(FACTS / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- published ---


@pytest.mark.parametrize(
    "row", read("zero_table1.csv"), ids=lambda row: "-".join(row.values())[:24]
)
def test_the_zero_paper_s_table(row):
    """46 cells are rounded, 8 cut off."""
    given = ledger(
        int(row["params"]),
        "zero-fp16",
        zero_stage=int(row["zero_stage"]),
        data_parallel=int(row["data_parallel"]),
    )
    published, gb = row["published_gb"], given.total_bytes / 1e9
    digits = len(published.partition(".")[2])
    assert float(published) in (round(gb + 1e-9, digits), int(gb * 10**digits) / 10**digits)


def test_deepspeed_s_estimates_are_its_code_s_and_not_all_its_documentation_s():
    zero2, zero3, *_ = read("deepspeed_estimates.csv")
    params, devices = int(zero2["params"]), int(zero2["devices"])
    ours = ledger(params, "both-gradients", zero_stage=2, data_parallel=devices)
    assert round(ours.total_bytes / 2**30, 2) == float(zero2["code_gib"])
    documented = (4 + 16 / devices) * params / 2**30  # stage 2 without dividing 16-bit gradients
    assert round(documented, 2) == float(zero2["documented_gib"]) != float(zero2["code_gib"])
    ours = ledger(params, "megatron-bf16", zero_stage=3, data_parallel=devices)
    gathered = 4 * int(zero3["largest_layer"])  # one layer's weights and gradients in 16 bits
    assert round((ours.total_bytes + gathered) / 2**30, 2) == float(zero3["code_gib"])


@pytest.mark.parametrize(
    ("convention", "bytes_per_param"),
    [
        ("fp32", 16), ("autocast", 16), ("zero-fp16", 16), ("megatron-bf16", 18),
        ("both-gradients", 20), ("seed-1b", 18), ("seed-7b", 12), ("pure-bf16", 8),
    ],
)  # fmt: skip
def test_each_convention_has_its_figure_its_source_and_what_it_leaves_out(
    convention, bytes_per_param
):
    given = ledger(10**9, convention)
    assert given.bytes_per_param == bytes_per_param
    assert sum(row.bytes_per_param for row in given.rows) == bytes_per_param
    assert CONVENTIONS[convention].source and CONVENTIONS[convention].leaves_out


@pytest.mark.parametrize(
    ("optimizer", "state"), [("sgd", 0), ("momentum", 4), ("adamw", 8), ("adam8bit", 2.03125)]
)
def test_the_optimizer_is_the_other_axis(optimizer, state):
    assert ledger(2**20, "fp32", optimizer=optimizer).bytes_per_param == 8 + state


@pytest.mark.parametrize("n", [2, 8, 64])
def test_what_the_distributed_optimizers_publish(n):
    """6 + 12/d and 4 + 16/d: Megatron's; 18/d: everything divided."""
    params = 64 * 10**6
    for convention, stage, each in (
        ("megatron-bf16", 1, 6 + 12 / n),
        ("both-gradients", 1, 4 + 16 / n),
        ("both-gradients", 2, 2 + 18 / n),
        ("megatron-bf16", 3, 18 / n),
        ("zero-fp16", 0, 16),
    ):
        given = ledger(params, convention, zero_stage=stage, data_parallel=n)
        assert given.total_bytes == each * params


# --- live ---


def mlp():
    return models.mlp(8, 16, 4), torch.ones(3, 8)


def tied():
    config = CONFIG.__class__(**{**vars(CONFIG), "tied_head": True})
    return models.Transformer(config), torch.zeros((2, 8), dtype=torch.int64)


def frozen():
    model, batch = mlp()
    model[0].requires_grad_(False)
    return model, batch


def shared():
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.BatchNorm1d(8)), torch.ones(3, 8)


def trained(build, convention):
    """A model of this convention, its optimizer, after backward and before the second update."""
    (model, batch), masters = build(), CONVENTIONS[convention].masters
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    narrow = dtype[CONVENTIONS[convention].weights]
    model, batch = model.to(narrow), batch.to(narrow) if batch.is_floating_point() else batch
    own = [p for p in model.parameters() if p.requires_grad]
    kept = MasterWeights(own) if masters else None
    optimizer = torch.optim.AdamW(kept.masters if kept else own)
    for step in (1, 2):
        model(batch).float().square().mean().backward()
        if kept and (step == 1 or CONVENTIONS[convention].gradients == "fp32"):
            kept.take_gradients()
        if CONVENTIONS[convention].copies and step == 2:
            for parameter, master in zip(own, kept.masters, strict=True):
                master.grad = parameter.grad.float()
        if step == 1:
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
    return model, optimizer, kept


RUNNABLE = ("fp32", "zero-fp16", "megatron-bf16", "both-gradients", "pure-bf16")


@pytest.mark.parametrize("build", [mlp, tied, frozen, shared])
@pytest.mark.parametrize("convention", RUNNABLE)
def test_the_live_ledger_is_what_is_resident_to_the_byte(build, convention):
    gc.collect()
    with Tracer(fake=False) as tracer:
        model, optimizer, kept = trained(build, convention)
        gc.collect()
        resident = tracer.live_bytes
    live = ledger_of(model, optimizer)
    assert live.total_bytes == resident
    # And the formula's, for what is trained: the live model adds counters, buffers, frozen weights.
    trained_params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    extra = ("step counters", "buffers", "frozen weights")
    counted = sum(row.num_bytes for row in live.rows if row.name not in extra)
    assert counted == ledger(trained_params, convention).total_bytes
    masters = [row.num_bytes for row in live.rows if row.name == "master weights"]
    assert masters == ([] if kept is None else [4 * trained_params])


def test_autocast_leaves_weights_gradients_and_state_as_they_are():
    model, batch = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        if not optimizer.state:
            optimizer.step()
            optimizer.zero_grad()
    params = sum(p.numel() for p in model.parameters())
    assert (
        ledger_of(model, optimizer).total_bytes
        == ledger(params, "autocast").total_bytes + 4 * 4  # four tensors' step counters
    )


def test_a_view_keeps_the_whole_storage_and_counts_it():
    model = nn.Linear(4, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(100, 4)[:2])
    rows = ledger_of(model, torch.optim.SGD(model.parameters())).rows
    assert [(row.name, row.num_bytes) for row in rows] == [("weights", 1600)]


def test_a_buffer_counts_by_its_own_size():
    model = nn.BatchNorm1d(4)  # two buffers of 4 floats, one counter of int64
    rows = ledger_of(model, torch.optim.SGD(model.parameters())).rows
    assert [(r.name, r.dtype, r.num_bytes) for r in rows] == [
        ("weights", "fp32", 32), ("buffers", "fp32", 32), ("buffers", "int64", 8),
    ]  # fmt: skip


def test_state_in_lists_is_counted_and_only_counters_are_called_counters():
    model = nn.Linear(64, 8, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64)).exp().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    rows = {row.name: row.num_bytes for row in ledger_of(model, optimizer).rows}
    steps = len(optimizer.state[model.weight]["old_dirs"])
    assert steps and rows["state old_dirs"] == steps * 64 * 8 * 4
    nadam = torch.optim.NAdam(model.parameters())
    nadam.step()
    rows = {row.name: row.num_bytes for row in ledger_of(model, nadam).rows}
    assert rows["step counters"] == rows["state mu_product"] == 4


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_wrapped_is_counted_and_what_cannot_be_is_named():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(8, 8), torch.zeros(8, 8)))
    optimizer = torch.optim.SGD(model.parameters())
    held = {row.name: row.num_bytes for row in ledger_of(model, optimizer).rows}
    assert held["weights"] == 2 * 8 * 8 * 4
    model = nn.Linear(8, 8)
    model.register_buffer("rows", torch.eye(8).to_sparse_csr())
    with pytest.raises(TypeError, match="can't count a tensor of layout torch.sparse_csr"):
        ledger_of(model, torch.optim.SGD(model.parameters()))


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        empty = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"weights are on the meta device.*ledger\(72, conv"):
        ledger_of(empty, torch.optim.SGD(empty.parameters()))
    there = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="not in the model are on the meta device"):
        ledger_of(there, torch.optim.SGD([*there.parameters(), *empty.parameters()], lr=0.1))


# --- three sets of parameters: the model's, the optimizer's, and those with a gradient ---


def held(model, optimizer):
    return {(r.name, r.dtype): r.num_bytes for r in ledger_of(model, optimizer).rows}


def test_masters_are_float32_and_have_the_shape_of_a_16_bit_weight():
    model = nn.Linear(8, 4, bias=False).to(torch.bfloat16)
    for dtype, shape, name in (
        (torch.float32, (4, 8), "master weights"),
        (torch.float32, (8, 4), "not in the model"),
        (torch.float64, (4, 8), "not in the model"),
        (torch.bfloat16, (4, 8), "not in the model"),
    ):
        own = nn.Parameter(torch.zeros(shape, dtype=dtype))
        own.grad = torch.zeros_like(own)
        found = {name: size for (name, _), size in held(model, torch.optim.SGD([own])).items()}
        updated = name == "master weights"
        assert found == {
            "weights" if updated else "not in the optimizer": 64,
            name: 32 * dtype.itemsize,
            "fp32 gradient copies" if updated else "their gradients": 32 * dtype.itemsize,
        }


def test_another_model_s_weights_are_no_masters():
    """An optimizer built on an older model: before, its weights were called masters."""
    old, new = nn.Linear(8, 4), nn.Linear(8, 4)
    assert held(new, torch.optim.SGD(old.parameters())) == {
        ("not in the optimizer", "fp32"): 144, ("not in the model", "fp32"): 144,
    }  # fmt: skip


def test_each_16_bit_weight_has_one_master_and_none_if_it_is_updated_itself():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).to(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    two = held(model, torch.optim.SGD(wide[:2]))
    assert two == {
        ("weights", "bf16"): 64, ("not in the optimizer", "bf16"): 32,
        ("master weights", "fp32"): 128,
    }  # fmt: skip
    own = held(model, torch.optim.SGD([*model.parameters(), wide[0]]))
    assert own == {("weights", "bf16"): 96, ("not in the model", "fp32"): 64}


def test_what_the_optimizer_has_not_is_named_in_any_group_frozen_or_not():
    body, head, stranger = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 1)
    model = nn.Sequential(body, head)
    body.bias.requires_grad_(False)
    groups = [{"params": [head.weight], "lr": 0.1}, {"params": [head.bias, *stranger.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    model(torch.ones(1, 8)).sum().backward()
    assert held(model, optimizer) == {
        ("not in the optimizer", "fp32"): 4 * 64, ("frozen weights", "fp32"): 4 * 8,
        ("weights", "fp32"): 4 * 18, ("gradients not used", "fp32"): 4 * 64,
        ("gradients", "fp32"): 4 * 18, ("not in the model", "fp32"): 4 * 9,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_what_is_given_twice_or_shares_its_storage_counts_once():
    model = nn.Linear(8, 4, bias=False)
    twice = torch.optim.SGD([model.weight, model.weight])
    assert held(model, twice) == {("weights", "fp32"): 128}
    alias = torch.optim.SGD([nn.Parameter(model.weight.detach()[:2])])  # a part of the same storage
    assert held(model, alias) == {("weights", "fp32"): 128}
    narrow = nn.Linear(8, 4, bias=False).half()
    master = nn.Parameter(narrow.weight.detach().float())
    twice = torch.optim.SGD([master, master])
    assert held(narrow, twice) == {("weights", "fp16"): 64, ("master weights", "fp32"): 128}


# --- names are shown, and nothing else ---


def test_a_row_s_bytes_are_those_of_its_dtype():
    sizes = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {"int8": 1 + 4 / 256}
    for convention, optimizer in itertools.product(CONVENTIONS, OPTIMIZERS):
        for row in ledger(10**6, convention, optimizer=optimizer).rows:
            assert row.bytes_per_param == sizes[row.dtype], (convention, row)


def test_a_better_word_for_a_row_changes_no_bytes(monkeypatch):
    def all_bytes():
        for convention, stage in itertools.product(CONVENTIONS, range(4)):
            given = ledger(1000, convention, zero_stage=stage, data_parallel=8)
            yield [row.num_bytes for row in given.rows]
        found = compare(ledger(params, "both-gradients"), traced)
        yield [(line.category, line.ledger_bytes, line.reason) for line in found.lines]
        found = compare(ledger(params, "fp32"), traced)
        yield [(line.category, line.ledger_bytes, line.reason) for line in found.lines]

    traced = timeline()
    params = sum(p.numel() for p in models.mlp(64, 128, 10).parameters())
    before = list(all_bytes())
    for number, role in enumerate(Role):
        monkeypatch.setattr(role, "_value_", f"phrase {number}")
    assert ledger(1, "fp32").rows[0].name == "phrase 0"
    assert list(all_bytes()) == before


def test_numpy_s_whole_numbers_are_whole_numbers():
    given = ledger(np.int64(1000), "fp32", zero_stage=np.int32(2), data_parallel=np.int64(8))
    assert given == ledger(1000, "fp32", zero_stage=2, data_parallel=8)
    assert type(given.num_params) is type(given.rows[0].num_bytes) is int


def test_a_mixture_of_experts_has_the_states_of_all_its_parameters():
    """Mixtral-8x7B, 46,702,792,704: entered as a dense model it was Mistral-7B to the last one."""
    mistral = facts.model("mistral-7b-v0.1")
    dense = {field: getattr(mistral, field) for field in ("vocab_size", "dim", "num_layers")}
    with pytest.raises(ValueError, match=r"mixture of experts.*memory.ledger\(number"):
        ModelConfig(**dense, num_heads=32, ffn_dim=14336, max_seq_len=4096, num_experts=8)
    expert, router = 3 * 4096 * 14336, 8 * 4096
    mixture = num_params(mistral) + 32 * (7 * expert + router)
    assert mixture == 46_702_792_704
    assert ledger(mixture, "zero-fp16").total_bytes == 16 * 46_702_792_704


def test_a_sparse_gradient_counts_its_values_and_its_indices():
    model = nn.Embedding(1000, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([3, 7])).sum().backward()
    rows = {row.name: row.num_bytes for row in ledger_of(model, optimizer).rows}
    assert rows["weights"] == 1000 * 16 * 4 and rows["gradients"] == 2 * 16 * 4 + 2 * 8


# --- ledger and peak ---


def timeline(optimizer=torch.optim.AdamW, steps=2):
    return memory_trace.measure(
        lambda: models.mlp(64, 128, 10),
        lambda: torch.zeros(32, 64),
        lambda model, x: model(x).square().mean(),
        lambda model: optimizer(model.parameters()),
        steps=steps,
    )


def test_the_comparison_adds_up_to_the_peak_and_says_why():
    params = sum(p.numel() for p in models.mlp(64, 128, 10).parameters())
    traced, counted = timeline(), ledger(params, "fp32")
    found = compare(counted, traced)
    assert sum(line.ledger_bytes for line in found.lines) == counted.total_bytes
    assert sum(line.peak_bytes for line in found.lines) == traced.peak_bytes
    reasons = {line.category: line.reason for line in found.lines}
    assert reasons["weights"] == "" and reasons["optimizer state"] == "step counters"
    assert reasons["temporaries"] == "not in a ledger"
    assert "total" in repr(found) and max(map(len, repr(found).splitlines())) <= 70


def test_a_peak_in_the_first_backward_has_not_all_gradients_and_no_state_yet():
    wide = memory_trace.measure(
        lambda: models.mlp(64, 8, 10),
        lambda: torch.zeros(4096, 64),
        lambda model, x: model(x).exp().mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
        steps=1,
    )
    params = sum(p.numel() for p in models.mlp(64, 8, 10).parameters())
    reasons = {d.category: d.reason for d in compare(ledger(params, "fp32"), wide).lines}
    assert reasons["optimizer state"] == "made by the first update"
    assert reasons["gradients"].startswith("not all there in ")
    assert reasons["activations"] == "not in a ledger"


def test_a_reason_is_given_only_where_the_trace_bears_it_out():
    def reasons(counted, traced):
        return {line.category: line.reason for line in compare(counted, traced).lines}

    params = sum(p.numel() for p in models.mlp(64, 128, 10).parameters())
    plain = timeline(lambda p: torch.optim.SGD(p, lr=0.1))
    assert reasons(ledger(params, "fp32"), plain)["optimizer state"] == "another optimizer"
    scalars = memory_trace.measure(
        lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)),
        lambda: torch.zeros(4, 1),
        lambda model, x: model(x).mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    counted = ledger(4, "fp32", optimizer="momentum")  # six are there
    assert reasons(counted, scalars)["optimizer state"] == "another optimizer"
    late = memory_trace.measure(
        lambda: models.mlp(64, 8, 10),
        lambda: torch.zeros(4096, 64),
        lambda model, x: model(x).exp().mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
    )
    other = reasons(ledger(10**6, "fp32"), late)
    assert late.peak_at.phase == "backward"
    assert other["gradients"] == "another model or convention"


def test_another_model_s_ledger_is_called_one_and_many_counters_are_still_counters():
    traced = timeline()
    reasons = {d.category: d.reason for d in compare(ledger(10**6, "fp32"), traced).lines}
    assert traced.peak_at.phase == "step"
    assert reasons["weights"] == "another model, or buffers"
    assert reasons["gradients"] == "another model or convention"
    assert reasons["optimizer state"] == "another optimizer"
    small = memory_trace.measure(
        lambda: models.mlp(2, 3, 2),
        lambda: torch.zeros(1, 2),
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
    )
    reasons = {d.category: d.reason for d in compare(ledger(17, "fp32"), small).lines}
    assert reasons["optimizer state"] == "step counters"  # 16 bytes beside 136


def test_masters_belong_to_the_optimizer():
    lines = compare(ledger(1000, "zero-fp16"), timeline()).lines
    counted = {line.category: line.ledger_bytes for line in lines}
    assert (counted["weights"], counted["optimizer state"]) == (2000, 12_000)


# --- refusals and text ---


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ledger(0, "fp32"), ValueError, "num_params must be at least 1"),
        (lambda: ledger(7e9, "fp32"), TypeError, "num_params must be a whole number"),
        (lambda: ledger(1, "fp64"), ValueError, "convention must be one of"),
        (lambda: ledger(1, "fp32", optimizer="lion"), ValueError, "optimizer must be one of"),
        (lambda: ledger(1, "fp32", zero_stage=4), ValueError, "zero_stage must be one of 0, 1"),
        (lambda: ledger(1, "fp32", zero_stage=True), TypeError, "zero_stage must be a whole"),
        (lambda: ledger(1, "fp32", zero_stage=-1), ValueError, "zero_stage must be at least 0"),
        (lambda: ledger(1, "fp32", data_parallel=0), ValueError, "data_parallel must be"),
        (lambda: ledger_of("model", None), TypeError, "needs a module"),
        (lambda: ledger_of(nn.Linear(1, 1), None), TypeError, "needs a torch optimizer"),
        (
            lambda: ledger_of(nn.ReLU(), torch.optim.SGD(nn.Linear(1, 1).parameters())),
            ValueError,
            "no parameters",
        ),
        (lambda: compare(None, None), TypeError, "needs a Ledger"),
        (lambda: compare(ledger(1, "fp32"), None), TypeError, "needs a MemoryTimeline"),
    ],
)
def test_what_cannot_be_counted_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_ledger_prints_its_rows_who_holds_them_and_both_units():
    text = repr(ledger(7 * 10**9, "seed-7b", zero_stage=1, data_parallel=8))
    assert "84.00" not in text and "1/8 each" in text and "each device" in text
    assert "84.00 GB = 78.23 GiB" in repr(ledger(7 * 10**9, "seed-7b"))
    assert max(map(len, text.splitlines())) <= 58


def test_an_uneven_division_is_rounded_up_to_a_byte():
    given = ledger(10, "fp32", zero_stage=3, data_parallel=3)
    assert [row.num_bytes for row in given.rows] == [14, 14, 14, 14]


def test_llama_2_7b_under_the_budgets_of_public_texts():
    params = num_params(facts.model("llama-2-7b"))
    gib = {c: ledger(params, c).total_bytes / 2**30 for c in ("seed-7b", "zero-fp16")}
    assert {c: round(size, 2) for c, size in gib.items()} == {"seed-7b": 75.31, "zero-fp16": 100.41}


def test_a_step_needs_no_more_than_its_ledger_before_the_first_activation():
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, [batch], lambda m, x: m(x).mean(), optimizer)
    live = ledger_of(model, optimizer)
    assert [row.name for row in live.rows] == ["weights"]
