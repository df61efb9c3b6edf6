"""Formats against torch's own casts, bit for bit; the scaler against torch's, step by step."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from course_lib.precision import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    TF32,
    Format,
    LossScaler,
    MasterWeights,
    decode,
    encode,
    neighbours,
    round_to,
)

TORCH = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    FP8_E4M3: torch.float8_e4m3fn,
    FP8_E5M2: torch.float8_e5m2,
}
MX = [  # of the OCP's Microscaling Formats v1.0; see https://onnx.ai/onnx/technical/float6.html
    Format("fp4 e2m1", 2, 1, "numbers", saturates=True),
    Format("fp6 e2m3", 2, 3, "numbers", saturates=True),
    Format("fp6 e3m2", 3, 2, "numbers", saturates=True),
]
FORMATS = [FP32, TF32, *TORCH, *MX]

with (Path(__file__).parent / "facts" / "number_formats.csv").open(encoding="utf-8") as file:
    ROWS = {row["format"]: row for row in csv.DictReader(file)}


def name(format):
    return format.name


def all_patterns(format):
    """Every pattern of bits, read by torch, in float32."""
    patterns = torch.arange(2**format.bits, dtype=torch.int32)
    return patterns.to(torch.uint8 if format.bits == 8 else torch.int16).view(TORCH[format]).float()


def same(a, b):
    """Equal numbers, signs of zero included, and NaN in the same places."""
    equal = (a == b) & (a.signbit() == b.signbit())
    return (equal | (a.isnan() & b.isnan())).all().item()


@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_the_formats_are_the_published_ones(format):
    row = ROWS[format.name.replace(" ", "_")]
    fields = format.exponent_bits, format.mantissa_bits, format.bits, format.bias
    assert fields == tuple(int(row[key]) for key in ("exponent", "mantissa", "bits", "bias"))
    for key in ("max", "min_normal", "min_subnormal", "eps"):
        assert getattr(format, key) == float(row[key])


@pytest.mark.parametrize("format", [*TORCH, *MX], ids=name)
def test_the_published_ends_are_those_of_all_patterns(format):
    row = ROWS[format.name.replace(" ", "_")]
    numbers = torch.tensor([decode(bits, format) for bits in range(2**format.bits)]).double()
    positive = numbers[numbers.isfinite() & (numbers > 0)]
    assert positive.max() == format.max == float(row["max"])
    assert positive.min() == format.min_subnormal == float(row["min_subnormal"])
    one = positive[positive > 1].min() - 1
    assert one == format.eps == float(row["eps"])
    assert (positive < format.min_normal).sum() == 2**format.mantissa_bits - 1


INFINITE_AND_NAN = {  # as published
    "fp16": (2, 2046), "bf16": (2, 254), "fp8 e5m2": (2, 6), "fp8 e4m3fn": (0, 2),
    "fp4 e2m1": (0, 0), "fp6 e2m3": (0, 0), "fp6 e3m2": (0, 0),
}  # fmt: skip


@pytest.mark.parametrize("format", [*TORCH, *MX], ids=name)
def test_as_many_patterns_are_infinite_and_nan_as_published(format):
    numbers = torch.tensor([decode(bits, format) for bits in range(2**format.bits)])
    counts = numbers.isinf().sum().item(), numbers.isnan().sum().item()
    assert counts == INFINITE_AND_NAN[format.name]
    values = numbers[numbers.isfinite()].unique()
    assert len(values) == 2**format.bits - sum(counts) - 1  # 0 has two patterns


def test_fp4_is_these_numbers():
    """https://github.com/jax-ml/ml_dtypes"""
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    read = torch.tensor([decode(bits, MX[0]) for bits in range(16)])
    assert same(read, torch.tensor([*sizes, *(-float(size) for size in sizes)]))


@pytest.mark.parametrize("format", [*TORCH, *MX], ids=name)
def test_every_pattern_decodes_as_torch_reads_it_and_encodes_back(format):
    decoded = [decode(bits, format) for bits in range(2**format.bits)]
    assert format in MX or same(torch.tensor(decoded), all_patterns(format))
    for bits, number in enumerate(decoded):
        if not math.isnan(number):
            assert encode(number, format) == bits
    assert format in MX or math.isnan(decode(encode(math.nan, format), format))


@pytest.mark.parametrize("format", TORCH, ids=name)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_million_float32_patterns_round_as_torch_casts_them(format, seed):
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31, (10**6,), generator=generator)
    x = patterns.to(torch.int32).view(torch.float32)
    assert same(round_to(x, format), x.to(TORCH[format]).float())


@pytest.mark.parametrize("format", TORCH, ids=name)
def test_around_every_number_ties_go_to_even_as_in_torch(format):
    read = all_patterns(format).double()
    numbers = read[read.isfinite()].unique()
    halves = ((numbers[1:] + numbers[:-1]) / 2).float()  # exact in float32, but for bf16's ends
    near = [halves, *(halves.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf))]
    for x in near:
        assert same(round_to(x, format), x.to(TORCH[format]).float())


@given(x=st.floats(allow_nan=False), format=st.sampled_from(FORMATS))
def test_rounding_finds_the_nearest_number(x, format):
    rounded = round_to(torch.tensor(x, dtype=torch.float64), format, overflow="saturate").item()
    bits = encode(rounded, format)
    assert decode(bits, format) == rounded
    size = bits & 2 ** (format.bits - 1) - 1
    sizes = range(2 ** (format.bits - 1))
    beside = [decode(bits - size + n, format) for n in (size - 1, size + 1) if n in sizes]
    for other in beside:
        if math.isfinite(other) and abs(x) <= format.max:
            assert abs(x - rounded) <= abs(x - other)
            if abs(x - rounded) == abs(x - other) and x != rounded:
                assert size % 2 == 0
    assert round_to(torch.tensor(rounded).double(), format).item() == rounded


def test_tf32_is_fp16_s_mantissa_with_fp32_s_exponent():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert same(round_to(x, TF32), round_to(x, FP16))  # in fp16's normal range, nearly all
    assert round_to(torch.tensor(1.0001), TF32) == 1
    large = torch.tensor([1e38, -1e-30])
    bits = round_to(large, TF32).view(torch.int32)
    assert ((bits & 0x1FFF) == 0).all() and (round_to(large, TF32) / large - 1).abs().max() < 5e-4


def test_torch_rounds_twice_from_float64_and_we_once():
    x = torch.tensor(1 + 2**-11 + 2**-40, dtype=torch.float64)
    assert x.to(torch.float16).double().item() == 1.0
    assert round_to(x, FP16).item() == 1.0009765625


@pytest.mark.parametrize(
    ("format", "overflow", "expected"),
    [
        (FP16, None, math.inf),
        (FP16, "saturate", 65504.0),
        (FP8_E4M3, None, 448.0),
        (FP8_E4M3, "ieee", math.nan),
        (FP8_E5M2, None, math.inf),
        (FP8_E5M2, "saturate", 57344.0),
        (MX[0], None, 6.0),
        (MX[1], "saturate", 7.5),
        (MX[2], None, 28.0),
    ],
)
def test_beyond_the_largest(format, overflow, expected):
    for x in (1e6, math.inf):
        got = round_to(torch.tensor([x, -x]), format, overflow=overflow)
        assert same(got, torch.tensor([expected, -expected]))
        if not math.isnan(expected):
            assert decode(encode(x, format, overflow=overflow), format) == expected


def test_numbers_that_learners_get_wrong():
    def of(x, format):
        return round_to(torch.tensor(x), format).item()

    assert of(257.0, BF16) == 256 and of(257.0, FP16) == 257
    assert of(65519.0, FP16) == 65504 and of(65520.0, FP16) == math.inf
    assert of(300.0**2, FP16) == math.inf and of(300.0**2, BF16) == 90112
    assert of(1e-8, FP16) == 0 and abs(of(1e-8, BF16) / 1e-8 - 1) < 2**-8


@pytest.mark.parametrize("overflow", [None, "saturate"])
@pytest.mark.parametrize("format", TORCH, ids=name)
def test_rounding_has_the_gradient_of_torchs_cast(format, overflow):
    ours = torch.tensor([0.1, -1e-9, 1e6, 257.0], requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    slope = torch.tensor([1.0, 2.0, -3.0, 0.5])  # what a cast's backward rounds, all formats hold
    (round_to(ours, format, overflow=overflow) * slope).nansum().backward()
    (theirs.to(TORCH[format]).float() * slope).nansum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_numpys_numbers_are_numbers():
    half = np.float32(0.5)
    assert encode(half, FP16) == encode(0.5, FP16) and encode(np.int64(3), FP16) == encode(3, FP16)
    assert decode(np.uint16(0x3E00), FP16) == 1.5 and neighbours(half, FP16) == neighbours(
        0.5, FP16
    )
    assert Format("fp16", np.int64(5), np.int8(10)) == FP16
    assert type(encode(half, Format("own", np.int64(5), np.int8(10)))) is int


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: round_to(torch.ones(2), MX[0], overflow="ieee"), ValueError, "one of saturate"),
        (lambda: round_to(torch.tensor([1, math.nan]), MX[0]), ValueError, "e2m1 has no NaN"),
        (lambda: encode(math.nan, MX[2]), ValueError, "e3m2 has no NaN"),
        (lambda: neighbours("1", FP16), TypeError, "a number, got str"),
        (lambda: Format("fp4", 2, 1, "numbers"), ValueError, "saturates=True"),
        (lambda: Format("fp4", 2, 1, "none"), ValueError, "highest must be one of infinity, nan"),
        (lambda: Format("fp9", 8, 7, "nan"), ValueError, "2 to 7 exponent bits"),
        (lambda: Format("half", 4.5, 2), TypeError, "exponent_bits must be a whole number"),
        (lambda: round_to(1.0, FP16), TypeError, "float32 or float64 tensor, got float"),
        (lambda: round_to(torch.ones(2).half(), FP16), TypeError, "got torch.float16"),
        (lambda: round_to(torch.ones(2), FP16, overflow="wrap"), ValueError, "overflow must be"),
        (lambda: encode("1", FP16), TypeError, "a number, got str"),
        (lambda: encode(True, FP16), TypeError, "a number, got bool"),
        (lambda: decode(65536, FP16), ValueError, "patterns 0 to 65535"),
        (lambda: decode(256, FP8_E5M2), ValueError, "patterns 0 to 255"),
        (lambda: decode(-1, FP8_E5M2), ValueError, "bits must be at least 0"),
        (lambda: decode(1.0, FP16), TypeError, "bits must be a whole number"),
        (lambda: LossScaler(0.0), ValueError, "a scale above 0"),
        (lambda: LossScaler(growth_factor=1.0), ValueError, "growth factor above 1"),
        (lambda: LossScaler(backoff_factor=1.0), ValueError, "backoff factor"),
        (lambda: LossScaler(growth_interval=0), ValueError, "at least 1"),
        (lambda: LossScaler(growth_interval=1.5), TypeError, "a whole number"),
        (lambda: MasterWeights([]), TypeError, "a model's parameters"),
        (lambda: MasterWeights([torch.ones(1)]), TypeError, "a model's parameters"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


SETTINGS = [
    {},
    {"init_scale": 4.0, "growth_interval": 3},
    {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 5},
    {"init_scale": 2.0**126, "growth_interval": 1},
]


def run(scaler, overflows):
    """The scale after each step, whether it moved, and the weights; overflows are planted."""
    generator = torch.Generator().manual_seed(0)
    weights = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([weights], lr=0.01, momentum=0.9)
    history = []
    for k in range(200):
        before = weights.detach().clone()
        target = torch.randn(5, generator=generator)
        loss = (weights - target).square().mean()
        scaler.scale(loss).backward()
        if k in overflows:
            weights.grad[k % 5] = math.inf if k % 2 else math.nan
        if k % 3 == 0:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append((scaler.get_scale(), torch.equal(before, weights)))
    return history, weights.detach()


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_the_scaler_is_torch_s_step_by_step(options):
    overflows = {0, 1, 7, 8, 50, 120, 121, 122, 199}
    scaler = LossScaler(**options)
    ours, our_weights = run(scaler, overflows)
    torchs, weights = run(torch.amp.GradScaler("cpu", **options), overflows)
    assert ours == torchs and torch.equal(our_weights, weights)
    assert scaler.skipped == sum(stayed for _, stayed in ours) >= len(overflows)


def half_step(scaler, gradient):
    """One step of a fp16 weight with fp32 master whose true gradient is `gradient`."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    pair = MasterWeights([weight])
    optimizer = torch.optim.SGD(pair.masters, lr=0.25)
    scaler.scale((gradient * weight).sum()).backward()
    pair.take_gradients()
    scaler.step(optimizer)
    scaler.update()
    pair.give_weights()
    return weight.item()


def test_a_unit_gradient_is_skipped_once_then_the_scale_is_32768():
    scaler = LossScaler()
    assert half_step(scaler, 1.0) == 0 and scaler.get_scale() == 32768 and scaler.skipped == 1
    assert half_step(scaler, 1.0) == -0.25 and scaler.skipped == 1


def test_a_gradient_of_4_is_skipped_three_times():
    scaler = LossScaler()
    moved = [half_step(scaler, 4.0) for _ in range(4)]
    assert moved == [0, 0, 0, -1] and scaler.skipped == 3 and scaler.get_scale() == 8192


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["update"], "update.. comes after step"),
        (["unscale_", "unscale_"], "unscaled already"),
        (["step", "step"], "called already"),
        (["step", "unscale_"], "comes before step"),
        (["step", "update", "update"], "comes after step"),
    ],
)
def test_a_wrong_order_is_refused_as_by_torch(calls, message):
    for scaler, error in ((LossScaler(), message), (torch.amp.GradScaler("cpu"), ".")):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum()).backward()
        with pytest.raises((RuntimeError, AssertionError), match=error):
            for call in calls:
                getattr(scaler, call)(*([] if call == "update" else [optimizer]))


def test_no_gradients_and_fp16_gradients_are_refused():
    for dtype, message in ((torch.float32, "no gradients"), (torch.float16, "fp32 masters")):
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        if dtype is torch.float16:
            weight.grad = torch.ones_like(weight)
        with pytest.raises((RuntimeError, ValueError), match=message):
            LossScaler().step(torch.optim.SGD([weight], lr=0.1))


def test_masters_keep_what_bf16_loses():
    alone = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    pair = MasterWeights([weight])
    optimizers = torch.optim.SGD([alone], lr=1e-3), torch.optim.SGD(pair.masters, lr=1e-3)
    for _ in range(100):
        for parameter in (alone, weight):
            parameter.grad = torch.ones_like(parameter)
        pair.take_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.give_weights()
    assert alone.item() == 1 and abs(pair.masters[0].item() - 0.9) < 1e-5
    assert weight.item() == round_to(pair.masters[0].detach(), BF16).item()
    assert weight.grad is None


def test_masters_add_up_what_a_16_bit_gradient_cannot():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    pair = MasterWeights([weight])
    for _ in range(300):
        weight.sum().backward()
        pair.take_gradients()
    assert pair.masters[0].grad == 300 and weight.grad is None
    pair.take_gradients()  # nothing new
    assert pair.masters[0].grad == 300


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ([], TypeError),
        ([torch.zeros(1)], TypeError),
        ([nn.Parameter(torch.zeros(1, dtype=torch.float64))], TypeError),
        ([nn.Parameter(torch.zeros(1))] * 2, ValueError),
    ],
)
def test_what_masters_cannot_hold_is_refused(parameters, error):
    with pytest.raises(error, match="takes a model|can't hold|given twice"):
        MasterWeights(parameters)


def test_the_scaler_follows_torch_with_two_optimizers_groups_and_a_missing_gradient():
    def run(scaler):
        generator, weights = torch.Generator().manual_seed(0), []
        for _ in range(4):
            weights.append(nn.Parameter(torch.randn(3, generator=generator)))
        groups = [{"params": weights[:1]}, {"params": weights[1:2], "lr": 0.5}]
        both = torch.optim.SGD(groups, lr=0.1), torch.optim.Adam(weights[2:], lr=0.1)
        scales = []
        for k in range(60):
            loss = sum((w**2).sum() for w in weights[: 3 if k % 2 else 4])
            scaler.scale(loss).backward()
            if k % 7 == 3:
                weights[1].grad[0] = math.inf
            for optimizer in both:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in both:
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, torch.cat(weights)

    ours, our_weights = run(LossScaler(growth_interval=2))
    torchs, weights = run(torch.amp.GradScaler("cpu", growth_interval=2))
    assert ours == torchs and len(set(ours)) > 2 and torch.equal(our_weights, weights)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e39, 1e-50])
def test_a_scale_that_float32_cannot_use_is_refused(scale):
    with pytest.raises(ValueError, match="a scale above 0"):
        LossScaler(scale)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        LossScaler().step(torch.optim.SGD(table.parameters(), lr=0.1))


def test_a_scale_of_0_skips_and_says_so():
    from course_lib.training import train_step

    model = nn.Linear(2, 1)
    scaler = LossScaler(1e-45)
    for _ in range(3):
        step = train_step(
            model,
            [torch.full((3, 2), math.nan)],
            lambda m, x: m(x).mean(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            scaler=scaler,
        )
        assert not step.stepped
    assert scaler.get_scale() == 0 and scaler.skipped == 3


def test_a_training_step_takes_the_scaler():
    from course_lib.training import train_step

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(init_scale=4.0)
    batch = torch.ones(3, 2)
    step = train_step(model, [batch], lambda m, x: m(x).mean(), optimizer, scaler=scaler)
    assert step.stepped and scaler.skipped == 0
    bad = train_step(model, [batch], lambda m, x: m(x).mean() * 3e38, optimizer, scaler=scaler)
    assert not bad.stepped and scaler.skipped == 1 and scaler.get_scale() == 2.0


@pytest.mark.parametrize("bits", [(1, 10), (11, 52), (8, 24), (5, 0)])
def test_a_format_wider_than_float32_is_refused(bits):
    with pytest.raises(ValueError, match="as float32 at most"):
        Format("wide", *bits)


def test_a_format_prints_and_compares_by_its_fields():
    assert Format("fp16", 5, 10) == FP16


@pytest.mark.parametrize("format", [*TORCH, *MX], ids=name)
def test_neighbours_are_the_next_numbers(format):
    read = torch.tensor([decode(bits, format) for bits in range(2**format.bits)]).double()
    numbers = read[read.isfinite()].unique().tolist()
    each = 1 if format.bits < 16 else 9
    triples = list(zip(numbers, numbers[1:], numbers[2:], strict=False))
    for below, x, above in triples[:99] + triples[::each] + triples[-99:]:
        assert neighbours(x, format) == (below, above)
    beyond = torch.tensor([-math.inf, math.inf])
    beyond = beyond if format.highest == "infinity" else beyond * math.nan
    ends = neighbours(-format.max, format)[0], neighbours(format.max, format)[1]
    assert same(torch.tensor(ends), beyond)
    assert neighbours(format.max, format)[0] == -neighbours(-format.max, format)[1] == numbers[-2]


def test_infinity_and_nan_have_the_neighbours_that_there_are():
    for format in (FP16, BF16, FP8_E5M2):
        assert neighbours(math.inf, format) == (format.max, math.inf)
        assert neighbours(-math.inf, format) == (-math.inf, -format.max)
    for format in TORCH:
        assert all(math.isnan(x) for x in neighbours(math.nan, format))
