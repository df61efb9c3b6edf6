import dataclasses
import gc
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from course_lib import facts, models
from course_lib.compute import count_flops
from course_lib.lessons import start
from course_lib.memory_trace import CATEGORIES, measure
from course_lib.training import PHASES, train_step

SMALL = facts.ModelConfig(
    vocab_size=211, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=160, max_seq_len=64
)
LARGER = facts.ModelConfig(
    vocab_size=2000, dim=256, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=688,
    max_seq_len=128,
)  # fmt: skip
CONFIGURATIONS = list(
    itertools.product(("sdpa", "explicit"), (False, True), (None, torch.bfloat16), (False, True))
)


def tokens(batch, length):
    return lambda: (torch.zeros(batch, length, dtype=torch.int64),) * 2


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def adamw(model):
    return torch.optim.AdamW(model.parameters())


def small(**options):
    return measure(lambda: models.Transformer(SMALL), tokens(4, 64), loss_fn, adamw, **options)


# --- against other ways of knowing ---


@pytest.mark.parametrize(("attention", "checkpointing", "autocast", "foreach"), CONFIGURATIONS)
def test_fake_and_real_agree_to_the_byte(attention, checkpointing, autocast, foreach):
    fake, real = (
        measure(
            lambda: models.Transformer(SMALL, attention=attention, checkpointing=checkpointing),
            tokens(4, 64),
            loss_fn,
            lambda model: torch.optim.AdamW(model.parameters(), foreach=foreach),
            autocast=autocast,
            fake=fake,
        )
        for fake in (True, False)
    )
    assert fake.peak_bytes == real.peak_bytes
    assert (fake.peak_by, fake.peak_at) == (real.peak_by, real.peak_at)
    assert sorted(fake.events) == sorted(real.events)  # autocast frees its copies in any order
    assert [(p.bytes_after, p.flops) for p in fake.phases] == [
        (p.bytes_after, p.flops) for p in real.phases
    ]


@pytest.mark.parametrize(
    ("attention", "checkpointing", "autocast", "foreach"),
    [c for c in CONFIGURATIONS if c[3] == (c[0] == "explicit")],
)
def test_real_is_what_the_profilers_allocator_saw(attention, checkpointing, autocast, foreach):
    """Within 0.1 % on one thread: the rest is what kernels take inside themselves, and the
    random-number state that each checkpoint keeps."""

    def build():
        return models.Transformer(LARGER, attention=attention, checkpointing=checkpointing)

    def optimizer(model):
        return torch.optim.AdamW(model.parameters(), foreach=foreach)

    def run():
        model = build()
        adam = optimizer(model)
        for _ in range(2):
            train_step(model, [tokens(2, 128)()], loss_fn, adam, autocast=autocast)

    ours = measure(build, tokens(2, 128), loss_fn, optimizer, autocast=autocast, fake=False)
    assert ours.peak_bytes == pytest.approx(allocator_peak(run), rel=1e-3)


def allocator_peak(run) -> int:
    """The largest sum of what torch's CPU allocator gave out and took back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return max(itertools.accumulate(num_bytes for _, num_bytes in changes))


def test_activations_are_what_autograd_saved():
    """At the end of the loss: the unique saved storages, weights and inputs left out."""
    model, batch = models.mlp(64, 32, 32, 10), (torch.zeros(8, 64), torch.zeros(8).long())
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(batch[0]), batch[1])
    for tensor in (*model.parameters(), *batch):
        saved.pop(tensor.untyped_storage()._cdata, None)
    trace = measure(
        lambda: models.mlp(64, 32, 32, 10),
        lambda: (torch.zeros(8, 64), torch.zeros(8).long()),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda model: torch.optim.SGD(model.parameters()),
    )
    backward = next(i for i, e in enumerate(trace.events) if e.phase == "backward")
    two_scalars = 2 * loss.nbytes  # the loss and its weighted copy live on, but aren't saved
    assert trace.live["activations"][backward - 1] == sum(saved.values()) + two_scalars - 4


def test_one_linear_layer_by_hand():
    """4 × 3 weights, 2 rows in float32: each number of the timeline from the definition."""
    trace = measure(
        lambda: nn.Linear(4, 3, bias=False),
        lambda: torch.zeros(2, 4),
        lambda model, x: model(x).sum(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    weights = gradients = momentum = 4 * 3 * 4
    inputs = 2 * 4 * 4
    first, second = ({p.name: p for p in trace.phases if p.step == step} for step in (1, 2))
    assert first["forward"].bytes_before == weights + inputs
    assert first["forward"].bytes_after == weights + inputs + 2 * 3 * 4  # the output
    assert first["step"].bytes_before == weights + inputs + gradients + 4  # 4: the loss's value
    assert first["step"].bytes_after - first["step"].bytes_before == momentum
    assert first["zero_grad"].bytes_before - first["zero_grad"].bytes_after == gradients
    assert second["step"].bytes_after == second["step"].bytes_before
    assert trace.peak_by["optimizer state"] == momentum
    assert first["forward"].flops == 2 * 2 * 4 * 3
    assert first["backward"].flops == 2 * 2 * 4 * 3  # the input needs no gradient


@pytest.mark.parametrize("name", ["llama-2-7b"])
def test_a_7b_step_peaks_in_the_optimizer_at_101_39_gib(name):
    config = facts.model(name)
    trace = measure(lambda: models.Transformer(config), tokens(1, 2048), loss_fn, adamw)
    n, num_tensors = config.published_params, 3 + 9 * config.num_layers
    assert round(trace.peak_bytes / 2**30, 2) == 101.39
    assert trace.peak_by["weights"] == trace.peak_by["gradients"] == 4 * n
    assert trace.peak_by["optimizer state"] == 8 * n + 4 * num_tensors
    assert trace.peak_at.phase == "step"
    share = 100 * trace.peak_by["weights"] / trace.peak_bytes
    assert round(share, 1) == start.weights_share.expected  # what its feedback is written for


# --- laws of a timeline ---


def test_live_bytes_add_up_and_the_peak_is_their_largest_sum():
    trace = small()
    total = sum(trace.live[name] for name in CATEGORIES)
    assert total.max() == trace.peak_bytes == sum(trace.peak_by.values())
    assert all((trace.live[name] >= 0).all() for name in CATEGORIES)
    assert {name: trace.live[name][total.argmax()] for name in CATEGORIES} == trace.peak_by


def test_nothing_but_weights_and_state_outlives_a_step():
    trace = small()
    left = {name: trace.live[name][-1] for name in CATEGORIES}
    alive = {name for name, num_bytes in left.items() if num_bytes}
    assert alive == {"weights", "optimizer state"}


def test_the_optimizer_state_appears_in_the_first_step_and_stays():
    first, second = (p for p in small().phases if p.name == "step")
    assert first.bytes_after > first.bytes_before
    assert second.bytes_after == second.bytes_before


def test_phases_follow_each_other_and_their_flops_are_counted():
    trace = small()
    assert [p.name for p in trace.phases] == list(PHASES) * 2
    forward, backward = (
        next(p for p in trace.phases if p.name == n) for n in ("forward", "backward")
    )
    model = models.Transformer(SMALL)
    assert forward.flops == count_flops(lambda: model(tokens(4, 64)()[0]))
    assert backward.flops == 2 * forward.flops
    assert all(p.peak_bytes >= max(p.bytes_before, p.bytes_after) for p in trace.phases)


def test_building_is_step_0_and_each_event_lies_in_a_phase_of_its_step():
    trace = small()
    assert {e.phase for e in trace.events if e.step == 0} == {"build"}
    assert {e.step for e in trace.events if e.phase == "build"} == {0}
    for phase in trace.phases:
        events = trace.events[phase.first : phase.end]
        assert {(e.step, e.phase) for e in events} <= {(phase.step, phase.name)}
        assert phase.bytes_before + sum(e.num_bytes for e in events) == phase.bytes_after


def test_only_a_real_run_takes_time():
    assert all(p.seconds is None for p in small().phases)
    assert all(p.seconds >= 0 for p in small(fake=False).phases)


def test_where_zero_grad_stands_changes_the_peak():
    """Activations dominate here: gradients kept through forward come on top of them."""
    after, forward, backward = (
        small(zero_grad=where) for where in ("after step", "before forward", "before backward")
    )
    assert after.peak_bytes == forward.peak_bytes < backward.peak_bytes
    assert small(set_to_none=False).peak_bytes > backward.peak_bytes
    order = [p.name for p in backward.phases if p.step == 2]
    assert order == ["forward", "loss", "zero_grad", "backward", "sync", "step"]


def test_accumulation_keeps_gradients_and_shares_out_activations():
    whole, parts = (
        measure(
            lambda: models.Transformer(SMALL),
            tokens(batch, 64),
            loss_fn,
            adamw,
            accumulate=accumulate,
        )
        for batch, accumulate in ((8, 1), (2, 4))
    )
    assert parts.peak_bytes < whole.peak_bytes
    assert [p.name for p in parts.phases if p.step == 1].count("backward") == 4
    assert max(parts.live["activations"]) < max(whole.live["activations"]) / 3


def test_half_precision_halves_weights_gradients_and_state():
    full, half = small(), small(dtype=torch.bfloat16)
    assert 2 * half.peak_by["weights"] == full.peak_by["weights"]
    assert 2 * max(half.live["gradients"]) == max(full.live["gradients"])


def test_recomputed_activations_are_activations():
    plain, checkpointed = (
        measure(
            lambda c=c: models.Transformer(SMALL, checkpointing=c), tokens(4, 64), loss_fn, adamw
        )
        for c in (False, True)
    )
    kept = [p for p in checkpointed.phases if p.name == "loss"][0].bytes_after
    grown = [i for i, e in enumerate(checkpointed.events) if e.phase == "backward" and e.step == 1]
    assert kept < [p for p in plain.phases if p.name == "loss"][0].bytes_after
    assert any(
        checkpointed.events[i].category == "activations" and checkpointed.events[i].num_bytes > 0
        for i in grown
    )


class ConvNet(nn.Module):
    """A reader's own module, with buffers, outside constants, and a loss in another shape."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x):
        return self.out(self.norm(self.conv(x)).relu().flatten(1))


CLASS_WEIGHTS = torch.ones(10)


@pytest.mark.parametrize("fake", [True, False])
def test_a_readers_own_module_is_measured(fake):
    trace = measure(
        ConvNet,
        lambda: {"image": torch.zeros(5, 1, 8, 8), "label": [torch.zeros(5).long()]},
        lambda m, b: F.cross_entropy(m(b["image"]), b["label"][0], CLASS_WEIGHTS),
        lambda m: torch.optim.Adam(m.parameters()),
        fake=fake,
    )
    model = ConvNet()
    assert trace.peak_by["weights"] == sum(
        t.nbytes for t in (*model.parameters(), *model.buffers())
    )
    assert max(trace.live["inputs"]) == 4 * 5 * 64 + 8 * 5 + CLASS_WEIGHTS.nbytes


def test_a_slice_holds_the_whole_of_what_it_was_cut_from():
    data = torch.zeros(1000, 4)
    for fake in (True, False):
        trace = measure(
            lambda: nn.Linear(4, 1),
            lambda: data[:10],
            lambda m, x: m(x).mean(),
            lambda m: torch.optim.SGD(m.parameters()),
            fake=fake,
        )
        assert max(trace.live["inputs"]) == data.nbytes


def test_the_peak_names_the_line_of_the_forward_operation():
    config = dataclasses.replace(SMALL, vocab_size=8)  # few logits: the last layer is the peak
    trace = measure(
        lambda: models.Transformer(config),
        tokens(32, 64),
        loss_fn,
        lambda model: torch.optim.SGD(model.parameters()),
    )
    assert trace.peak_at.phase == "backward"
    assert trace.peak_at.function == "SwiGLU.forward"
    assert trace.peak_at.line == "return self.w2(F.silu(self.w1(x)) * self.w3(x))"


class Looks(nn.Linear):
    """Its peak is in the gradient of exp. What comes next isn't recorded, and has no gradient."""

    def forward(self, x):
        y = super().forward(x).exp()
        with torch.no_grad():
            self.seen = y.mean()
        return y.sum()


class Scales(nn.Linear):
    """Its peak is in what isn't recorded."""

    def forward(self, x):
        with torch.no_grad():
            scale = torch.cat([self.weight] * 200).abs().mean()
        return super().forward(x) * scale


class Again(nn.Linear):
    """Its peak is where backward computes it again, for the gradient of the last operation."""

    def wide(self, x):
        x = torch.cat([super().forward(x)] * 9)
        return x.exp().sum()

    def forward(self, x):
        return checkpoint(self.wide, x, use_reentrant=False)


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize(
    ("module", "phase", "line"),
    [
        (Looks, "backward", "y = super().forward(x).exp()"),
        (Scales, "forward", "scale = torch.cat([self.weight] * 200).abs().mean()"),
        (Again, "backward", "return x.exp().sum()"),
    ],
)
def test_the_peaks_line_is_its_own_with_and_without_recording(module, phase, line, fake):
    trace = small_with(
        model=lambda: module(2, 100), batch=lambda: torch.zeros(50, 2), fake=fake, steps=1
    )
    assert (trace.peak_at.phase, trace.peak_at.line) == (phase, line)


class Grows(nn.Linear):
    """Shrinks and regrows a storage during forward, as sharded weights are freed and gathered."""

    def forward(self, x):
        spare = torch.zeros(100)
        for size in SIZES:
            spare.untyped_storage().resize_(4 * size)
            spare.new_zeros(1)  # the next operation with it: the new size is seen
        return super().forward(x)


SIZES = (10, 60, 0, 200, 100)


@pytest.mark.parametrize("fake", [True, False])
def test_a_storage_that_shrinks_and_regrows_counts_by_its_size_each_time(fake):
    trace = small_with(model=lambda: Grows(2, 1), fake=fake)
    changes = [e.num_bytes for e in trace.events if (e.step, e.phase) == (1, "forward")]
    sizes = (100, *SIZES, 0)
    expected = [4 * (after - before) for before, after in itertools.pairwise((0, *sizes))]
    assert [change for change in changes if abs(change) >= 40] == expected


def test_a_timeline_prints_its_peak_and_no_address():
    text = repr(small())
    assert text.startswith("MemoryTimeline(peak") and "0x" not in text


# --- what is left behind, and what is refused ---


def test_measuring_leaves_the_readers_settings_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    small(fake=False, dtype=torch.float64)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ZeroDivisionError):
        small_with(loss=lambda m, b: 1 / 0, dtype=torch.float64)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("fake", [True, False])
def test_measuring_leaves_no_tensor_behind(fake):
    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    small(fake=fake)
    before = tensors()
    trace = small(fake=fake)
    assert tensors() == before and trace.peak_bytes


class ReadsValues(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def small_with(
    model=lambda: nn.Linear(2, 1),
    batch=lambda: torch.zeros(3, 2),
    loss=lambda m, x: m(x).mean(),
    optimizer=lambda m: torch.optim.SGD(m.parameters()),
    **options,
):
    return measure(model, batch, loss, optimizer, **options)


BUILT = nn.Linear(2, 1)


def sparse_gradients():
    small_with(
        model=lambda: nn.Embedding(5, 2, sparse=True), batch=lambda: torch.zeros(3).long(),
        fake=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: small_with(model=BUILT), TypeError, "build_model must be a function"),
        (lambda: small_with(model=lambda: BUILT), ValueError, "one that existed"),
        (lambda: small_with(model=lambda: BUILT, fake=False), ValueError, "one that existed"),
        (lambda: small_with(model=lambda: 3), TypeError, "must return a torch.nn.Module"),
        (lambda: small_with(batch=torch.zeros(3, 2)), TypeError, "build_batch must be a function"),
        (lambda: small_with(batch=lambda: "text"), TypeError, "must return tensors"),
        (lambda: small_with(loss=None), TypeError, "loss_fn must be a function"),
        (lambda: small_with(loss=lambda m, x: m(x)), ValueError, "scalar mean"),
        (lambda: small_with(optimizer=None), TypeError, "build_optimizer"),
        (lambda: small_with(optimizer=lambda m: None), TypeError, "torch optimizer, got NoneType"),
        (lambda: small_with(optimizer=torch.optim.SGD), TypeError, r"lambda model: SGD\(model"),
        (lambda: small_with(dtype="float32"), TypeError, "torch.dtype"),
        (lambda: small_with(dtype=torch.int8), TypeError, "floating-point"),
        (lambda: small_with(autocast=torch.float64), ValueError, "autocast must be"),
        (lambda: small_with(steps=0), ValueError, "steps must be at least 1"),
        (lambda: small_with(steps=1.5), TypeError, "steps must be a whole number"),
        (lambda: small_with(accumulate=0), ValueError, "accumulate"),
        (lambda: small_with(zero_grad="never"), ValueError, "after step"),
        (sparse_gradients, ValueError, "only strided tensors"),
        (
            lambda: small_with(model=lambda: ReadsValues(2, 1)),
            ValueError,
            "ReadsValues.forward: return y if y.sum",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_numpys_whole_numbers_count_steps_too():
    plain, numpys = (small_with(steps=n, accumulate=n) for n in (2, np.int64(2)))
    assert numpys.peak_bytes == plain.peak_bytes and len(numpys.phases) == len(plain.phases)
    assert {type(phase.step) for phase in numpys.phases} == {int}


def test_what_fake_tensors_refuse_can_be_measured_for_real():
    assert small_with(model=lambda: ReadsValues(2, 1), fake=False).peak_bytes > 0


def test_frozen_weights_have_no_gradients():
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        return model

    run = measure(
        build,
        lambda: torch.zeros(4, 8),
        lambda model, x: model(x).mean(),
        lambda model: torch.optim.AdamW(p for p in model.parameters() if p.requires_grad),
    )
    assert run.live["gradients"].max() == 9 * 4 and run.peak_by["weights"] == (72 + 9) * 4


FUSED = [
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    lambda model: torch.optim.Adagrad(model.parameters(), fused=True),
]


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_fused_update_needs_no_memory_either(optimizer):
    """Some have no version for shapes alone; 4 TB of weights tell whether one is run."""
    fake, real = (small_with(optimizer=optimizer, fake=fake) for fake in (True, False))
    assert fake.peak_by == real.peak_by
    huge = measure(
        lambda: nn.Linear(10**6, 10**6),
        lambda: torch.zeros(1, 10**6),
        lambda model, x: model(x).mean(),
        optimizer,
    )
    assert huge.peak_bytes > 8e12


def test_an_operation_that_shapes_alone_cannot_run_is_named():
    library = torch.library.Library("chapters", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")

    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(torch.ops.chapters.twice(x))

    with pytest.raises(ValueError, match="can't run chapters.twice.* on shapes alone: .*forward"):
        small_with(model=lambda: Twice(2, 1))
    assert small_with(model=lambda: Twice(2, 1), fake=False).peak_bytes
    library._destroy()


def test_canary_for_the_private_interfaces_of_torch():
    """When this fails: `live_bytes` names the forward line of a backward peak by matching
    autograd's sequence numbers. Without them let `_here` always use `_readers_frame`, and say
    in PeakAt that a peak in backward names the line that called it. FakeTensorMode lies in
    torch._subclasses: look there for where it moved."""
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    assert torch._C._autograd._get_sequence_nr() == y.grad_fn._sequence_nr() + 1
    seen = []
    y.grad_fn.register_prehook(lambda _: seen.append(torch._C._current_autograd_node()))
    y.backward()
    assert seen[0]._sequence_nr() == y.grad_fn._sequence_nr()
    assert torch._subclasses.fake_tensor.FakeTensorMode
