"""Each module either takes the same bytes on shapes alone and for real, or is refused by name."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from course_lib.fake_tensors import ShapesAlone
from course_lib.memory_trace import measure

WORDS, ROWS = (4, 5, 8), (6, 8)
IMAGE, VOLUME, IDS = (2, 3, 8, 8), (2, 3, 6, 6, 6), "ids"


class Calls(nn.Module):
    """`function(x, w)` with a weight, so that there is something to train."""

    def __init__(self, function, shape=(8, 8)):
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.rand(shape))

    def forward(self, x):
        return self.function(x, self.w)


class OfItself(nn.Module):
    """A module that takes its input several times, as attention does."""

    def __init__(self, module, times, **options):
        super().__init__()
        self.module, self.times, self.options = module, times, options

    def forward(self, x):
        out = self.module(*[x] * self.times, **self.options)
        return out[0] if isinstance(out, tuple) else out


def step(build, shape, fake, autocast=None):
    def batch():
        if shape == IDS:
            return torch.arange(12).reshape(3, 4)
        return torch.rand(shape, generator=torch.Generator().manual_seed(0))

    def loss_fn(model, x):
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).float().mean()

    return measure(
        build,
        batch,
        loss_fn,
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        fake=fake,
        autocast=autocast,
    )


def bytes_over_time(timeline):
    """Live bytes before and after each phase, its peak and FLOPs, and the peak by category."""
    phases = [(p.bytes_before, p.bytes_after, p.peak_bytes, p.flops) for p in timeline.phases]
    return phases, timeline.peak_bytes, timeline.peak_by


def after(layer, dims):
    """`layer` behind a convolution that is trained: most layers have no weights of their own."""
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    channels = 5 if dims == 1 else 3
    return lambda: nn.Sequential(conv(channels, channels, 1), layer())


def attention(**options):
    return lambda: nn.MultiheadAttention(8, 2, batch_first=True, **options)


def encoder_layer(**options):
    return lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


def heads(x, w, **options):
    q = (x @ w).reshape(4, 5, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, **options)


POOLS = {
    f"{kind}Pool{dims}d": (
        after(lambda k=kind, d=dims: getattr(nn, f"{k}Pool{d}d")(2), dims),
        shape,
    )
    for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax")
    for dims, shape in ((1, WORDS), (2, IMAGE), (3, VOLUME))
    for name in [f"{kind}Pool{dims}d"]
}
OF_AN_IMAGE = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "BatchNorm2d in eval": lambda: nn.BatchNorm2d(3).eval(),
    "BatchNorm2d without statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(3, affine=True),
    "GroupNorm": lambda: nn.GroupNorm(3, 3),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
    "Dropout": lambda: nn.Dropout(0.2),
    "Dropout of all": lambda: nn.Dropout(1.0),
    "Dropout in eval": lambda: nn.Dropout(0.2).eval(),
    "Dropout2d": lambda: nn.Dropout2d(0.2),
    "AlphaDropout": lambda: nn.AlphaDropout(0.2),
    "Upsample nearest": lambda: nn.Upsample(scale_factor=2),
    "Upsample bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "Upsample bicubic": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "ReflectionPad2d": lambda: nn.ReflectionPad2d(2),
    "CircularPad2d": lambda: nn.CircularPad2d(2),
    "Unfold and Fold": lambda: nn.Sequential(nn.Unfold(3), nn.Fold(8, 3)),
    "FractionalMaxPool2d": lambda: nn.FractionalMaxPool2d(2, output_size=3),
    "PReLU": lambda: nn.PReLU(),
}
TARGET, CLASSES = torch.ones(6, 8), torch.arange(6)
LOSSES = {
    "cross entropy": lambda y: F.cross_entropy(y, CLASSES),
    "cross entropy, smoothed": lambda y: F.cross_entropy(y, CLASSES, label_smoothing=0.1),
    "MSE": lambda y: F.mse_loss(y, TARGET),
    "MSE, summed": lambda y: F.mse_loss(y, TARGET, reduction="sum"),
    "MSE of each": lambda y: F.mse_loss(y, TARGET, reduction="none"),
    "L1": lambda y: F.l1_loss(y, TARGET),
    "smooth L1": lambda y: F.smooth_l1_loss(y, TARGET),
    "Huber": lambda y: F.huber_loss(y, TARGET),
    "binary cross entropy": lambda y: F.binary_cross_entropy(y.sigmoid(), TARGET),
    "binary cross entropy of logits": lambda y: F.binary_cross_entropy_with_logits(y, TARGET),
    "soft margin": lambda y: F.soft_margin_loss(y, TARGET),
    "KL divergence": lambda y: F.kl_div(y.log_softmax(1), TARGET, reduction="batchmean"),
    "Poisson": lambda y: F.poisson_nll_loss(y, TARGET),
    "triplet": lambda y: F.triplet_margin_loss(y, y + 1, y * 2),
    "cosine embedding": lambda y: F.cosine_embedding_loss(y, y * 2, torch.ones(6)),
}
FUNCTIONS = {
    "matrix @ vector": lambda x, w: w @ x[0, 0],
    "einsum": lambda x, w: torch.einsum("abc,cd->bad", x, w),
    "cdist": lambda x, w: torch.cdist(x @ w, x, p=1.0),
    "FFT": lambda x, w: torch.fft.irfft(torch.fft.rfft(x @ w) * 2),
    "STFT": lambda x, w: torch.stft(
        (x @ w).flatten(), 16, window=torch.ones(16), return_complex=True
    ).abs(),
    "sort": lambda x, w: (x @ w).sort(1)[0],
    "topk": lambda x, w: (x @ w).topk(3)[0],
    "cumsum": lambda x, w: (x @ w).cumsum(1),
    "scatter_add": lambda x, w: torch.zeros(8, 8).scatter_add(0, torch.zeros(8, 8).long(), w),
    "index": lambda x, w: w[torch.tensor([1, 1, 2])],
    "gather": lambda x, w: w.take_along_dim(w.argmax(1, keepdim=True), 1),
    "embedding in a product": lambda x, w: F.embedding(torch.arange(4), w) @ x[0].T,
    "cholesky": lambda x, w: torch.linalg.cholesky(w @ w.T + torch.eye(8)),
    "SVD": lambda x, w: torch.linalg.svd(w)[1],
    "solve": lambda x, w: torch.linalg.solve(w + 8 * torch.eye(8), w),
    "softmax": lambda x, w: (x @ w).softmax(-1).log(),
    "gumbel_softmax": lambda x, w: F.gumbel_softmax(x @ w),
    "grid_sample": lambda x, w: F.grid_sample(
        w[None, None], torch.zeros(1, 3, 3, 2), align_corners=False
    ),
    "SDPA": heads,
    "SDPA, causal": lambda x, w: heads(x, w, is_causal=True),
    "SDPA, dropout": lambda x, w: heads(x, w, dropout_p=0.1),
    "SDPA, masked": lambda x, w: heads(x, w, attn_mask=torch.ones(5, 5).bool()),
    "complex numbers": lambda x, w: ((x + 1j) @ (w + 0j)).abs(),
    "float8": lambda x, w: (x @ w).to(torch.float8_e4m3fn).float(),
    "vmap": lambda x, w: torch.func.vmap(lambda row: row @ w)(x),
}
MODULES = {
    "RNN": (lambda: nn.RNN(8, 8), WORDS),
    "GRU": (lambda: nn.GRU(8, 8, 2, bidirectional=True, dropout=0.1), WORDS),
    "LSTMCell": (lambda: nn.LSTMCell(8, 8), ROWS),
    "Conv1d": (lambda: nn.Conv1d(5, 7, 3), WORDS),
    "Conv2d": (lambda: nn.Conv2d(3, 7, 3, padding=1, padding_mode="circular"), IMAGE),
    "Conv2d in groups": (lambda: nn.Conv2d(3, 6, 3, groups=3, dilation=2), IMAGE),
    "Conv3d": (lambda: nn.Conv3d(3, 7, 3), VOLUME),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 7, 3, 2), IMAGE),
    **POOLS,
    **{name: (after(layer, 2), IMAGE) for name, layer in OF_AN_IMAGE.items()},
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), WORDS),
    "RMSNorm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), WORDS),
    "BatchNorm1d": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), ROWS),
    "Embedding": (lambda: nn.Embedding(20, 8, padding_idx=1, scale_grad_by_freq=True), IDS),
    **{
        f"EmbeddingBag, {mode}": (lambda mode=mode: nn.EmbeddingBag(20, 8, mode=mode), IDS)
        for mode in ("sum", "mean", "max")
    },
    "MultiheadAttention": (lambda: OfItself(attention()(), 3), WORDS),
    "MultiheadAttention without weights": (
        lambda: OfItself(attention(dropout=0.1, add_bias_kv=True)(), 3, need_weights=False),
        WORDS,
    ),
    "TransformerEncoderLayer": (encoder_layer(), WORDS),
    "TransformerEncoderLayer, norm first": (encoder_layer(norm_first=True), WORDS),
    "TransformerEncoderLayer in eval": (lambda: encoder_layer()().eval(), WORDS),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(encoder_layer()(), 2), WORDS),
    "Transformer": (lambda: OfItself(nn.Transformer(8, 2, 1, 1, 16, batch_first=True), 2), WORDS),
    "Bilinear": (lambda: OfItself(nn.Bilinear(8, 8, 5), 2), ROWS),
    "a weight's spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        ROWS,
    ),
    **{name: (lambda f=f: Calls(lambda x, w: f(x @ w)), ROWS) for name, f in LOSSES.items()},
    **{name: (lambda f=f: Calls(f), WORDS) for name, f in FUNCTIONS.items()},
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_takes_the_same_bytes_on_shapes_alone_and_for_real(name):
    fake, real = (step(*MODULES[name], fake=fake) for fake in (True, False))
    assert bytes_over_time(fake) == bytes_over_time(real)


AUTOCAST = ["GRU", "Conv2d", "MultiheadAttention", "TransformerEncoder", "MSE", "SDPA"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", AUTOCAST)
def test_so_it_does_under_autocast(name, dtype):
    fake, real = (step(*MODULES[name], fake=fake, autocast=dtype) for fake in (True, False))
    assert bytes_over_time(fake) == bytes_over_time(real)


def own_loss(**sizes):
    return lambda x, w: F.ctc_loss((x @ w).log_softmax(-1), torch.ones(5, 3).long(), **sizes)


def test_a_broadcast_loss_is_as_large_as_its_largest():
    sizes = []
    for mode in (ShapesAlone(), nullcontext()):
        with mode, pytest.warns(UserWarning, match="target size"):
            loss = F.mse_loss(torch.ones(6, 1, requires_grad=True), torch.ones(6, 8))
            sizes.append(loss.untyped_storage().nbytes())
    assert sizes == [6 * 8 * 4, 6 * 8 * 4]


REFUSED = {
    "CTC loss": (own_loss(input_lengths=(4,) * 5, target_lengths=(2,) * 5), "hold no values"),
    "unique": (lambda x, w: (x @ w).unique().detach() * w.sum(), "hold no values"),
    "a mask as an index": (lambda x, w: w[w > 0.5], "hold no values"),
    "one_hot without a number": (lambda x, w: F.one_hot(torch.arange(8)) @ w, "hold no values"),
    "multi_margin": (lambda x, w: F.multi_margin_loss(w, torch.arange(8)), "multi_margin_loss_b"),
    "gamma": (lambda x, w: torch._standard_gamma(w), "aten._standard_gamma_grad.default on shapes"),
    "sparse": (lambda x, w: torch.sparse.mm(torch.eye(8).to_sparse(), w), "aten._to_sparse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_shapes_cannot_tell_is_refused_by_name(name):
    function, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*measure with fake=False"):
        step(lambda: Calls(function), WORDS, fake=True)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_an_lstm_is_refused_by_name_since_onednn_alone_knows_what_it_keeps(options):
    build = lambda: OfItself(nn.LSTM(8, 8, **options), 1)  # noqa: E731
    with pytest.raises(ValueError, match=r"mkldnn_rnn_layer.* OfItself.forward: out = self.mod"):
        step(build, WORDS, fake=True)
    assert step(build, WORDS, fake=False).peak_bytes


def test_one_hot_has_temporaries_an_eighth_larger_on_shapes_alone():
    """Composed otherwise by torch, and not seen as one operation: the docstring says so."""
    classes = lambda x, w: F.one_hot(torch.arange(64), 1000).sum() * w  # noqa: E731
    fake, real = (step(lambda: Calls(classes), WORDS, fake=fake).peak_bytes for fake in (1, 0))
    assert real < fake < 9 / 8 * real + 8 * 1000


# --- conversions, copies, numbers that don't fit ---


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to(memory_format=torch.channels_last),
    ],
)
def test_a_built_model_cannot_be_converted_and_is_told_how_to_be_built(convert):
    build = lambda: convert(nn.Sequential(nn.Conv2d(3, 3, 1)))  # noqa: E731
    with pytest.raises(
        ValueError, match=r"converted .*<lambda>: lambda model: .*dtype=torch.bfloat16"
    ):
        step(build, IMAGE, fake=True)


def test_the_way_that_the_refusal_names_works():
    def run(**options):
        return measure(
            options.pop("build"),
            lambda: torch.ones(2, 8, dtype=torch.bfloat16),
            lambda model, x: model(x).mean(),
            lambda model: torch.optim.SGD(model.parameters()),
            **options,
        )

    told = run(build=lambda: nn.Linear(8, 8), dtype=torch.bfloat16)
    converted = run(build=lambda: nn.Linear(8, 8).to(torch.bfloat16), fake=False, steps=1)
    assert told.peak_by["weights"] == converted.phases[0].bytes_before - 2 * 8 * 2 == 2 * 72


def test_copied_layers_are_weights_as_any_other():
    """torch copies the mode with a fake tensor: each use of the copy was a tensor of its own."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    copies = lambda: nn.Sequential(*[copy.deepcopy(build()) for _ in range(3)])  # noqa: E731
    build = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # noqa: E731
    trace = step(copies, ROWS, fake=True)
    num_bytes = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    assert trace.peak_by["weights"] == 3 * num_bytes
    assert set(trace.peak_by) >= {"inputs"} and trace.peak_by["inputs"] == 6 * 8 * 4


MASK = torch.eye(4) > 0
WRITES = {
    "masked_fill": lambda x, v: x.masked_fill(MASK, v),
    "masked_fill_": lambda x, v: x.clone().masked_fill_(MASK, v),
    "fill_": lambda x, v: x.clone().fill_(v),
    "full": lambda x, v: torch.full((2,), v, dtype=x.dtype),
    "full_like": torch.full_like,
    "new_full": lambda x, v: x.new_full((2,), v),
    "index_fill": lambda x, v: x.index_fill(0, torch.tensor([0]), v),
    "scatter": lambda x, v: x.scatter(0, torch.zeros(1, 1).long(), v),
    "pad": lambda x, v: F.pad(x, (1, 1), value=v),
    "clamp": lambda x, v: x.clamp(min=v),
    "clamp_": lambda x, v: x.clone().clamp_(max=v),
    "clamp_max": lambda x, v: x.clamp_max(v),
    "clamp_min": lambda x, v: x.clamp_min(v),
    "threshold": lambda x, v: F.threshold(x, 0.1, v),
    "hardtanh": lambda x, v: F.hardtanh(x, v, 1),
    "+": lambda x, v: x + v,  # computed in float32: infinite, and no error
    "*": lambda x, v: x * v,
    "where": lambda x, v: torch.where(MASK, x, v),
}
NUMBERS = [
    (torch.float16, -1e9), (torch.float16, -(10**9)), (torch.float16, -65504.0),
    (torch.float16, float("-inf")), (torch.bfloat16, -1e9), (torch.bfloat16, -1e39),
    (torch.float32, -1e9), (torch.float64, -1e39),
]  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(("dtype", "value"), NUMBERS)
def test_a_number_that_its_type_cannot_hold_is_refused_as_the_kernel_refuses_it(name, dtype, value):
    def run():
        try:
            WRITES[name](torch.ones(4, 4, dtype=dtype), value)
        except RuntimeError as error:
            return str(error)

    real = run()
    with ShapesAlone():
        fake = run()
    assert bool(real) == bool(fake)
    assert fake is None or (str(value) in fake and str(dtype) in fake)


def test_a_mask_of_minus_1e9_under_fp16_is_refused_with_what_to_write():
    def masked(x, w):
        return (x @ w).masked_fill(torch.ones(5, 8) > 0, -1e9).softmax(-1)

    assert step(lambda: Calls(masked), WORDS, fake=True).peak_bytes
    with pytest.raises(ValueError, match=r"-1000000000.0 is too large.*masked.*write float\('-inf"):
        step(lambda: Calls(masked), WORDS, fake=True, autocast=torch.float16)
    with pytest.raises(RuntimeError, match="c10::Half"):
        step(lambda: Calls(masked), WORDS, fake=False, autocast=torch.float16)


def test_a_number_in_a_tensor_is_not_seen_by_fake_tensors():
    """`measure` says so: it passes on shapes alone, and fails for real."""

    def masked(x, w):
        return (x @ w).masked_fill(torch.ones(5, 8) > 0, torch.tensor(-1e9)).softmax(-1)

    assert step(lambda: Calls(masked), WORDS, fake=True, autocast=torch.float16).peak_bytes
    with pytest.raises(RuntimeError, match="c10::Half"):
        step(lambda: Calls(masked), WORDS, fake=False, autocast=torch.float16)


@pytest.mark.parametrize("run", [torch.geqrf, lambda x: torch.histogram(x, 4)])
def test_an_operation_without_a_rule_is_never_run_in_real_memory(run):
    """By default torch's mode runs its own operations for real, on tensors of the full size."""
    with ShapesAlone(), pytest.raises(UnsupportedOperatorException):
        run(torch.ones(8, 8))
    with FakeTensorMode():
        run(torch.ones(8, 8))
