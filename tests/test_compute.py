import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from course_lib import facts, models
from course_lib.compute import FORMULAS, MULTIPLIES, count_flops, flops_of

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


def twice_the_products(expression, *operands):
    """By brute force: for each place of the expression's letters, one multiply-add."""
    sizes = {}
    for letters, operand in zip(expression.split(","), operands, strict=True):
        sizes |= dict(zip(letters, operand.shape, strict=True))
    return 2 * sum(1 for _ in itertools.product(*map(range, sizes.values())))


A, B, V = torch.ones(3, 5), torch.ones(5, 7), torch.ones(5)
BATCH, OTHER = torch.ones(2, 3, 5), torch.ones(2, 5, 7)
BYTES = torch.ones(32, 16, dtype=torch.int8)


@pytest.mark.parametrize(
    ("run", "expression", "operands"),
    [
        (lambda: A @ B, "ij,jk", (A, B)),
        (lambda: torch.mm(A, B, out=torch.empty(3, 7)), "ij,jk", (A, B)),
        (lambda: torch.zeros(3, 7).addmm_(A, B), "ij,jk", (A, B)),
        (lambda: torch._addmm_activation(torch.zeros(7), A, B), "ij,jk", (A, B)),
        (lambda: torch._int_mm(BYTES, BYTES.T), "ij,jk", (BYTES, BYTES.T)),
        (lambda: A @ V, "ij,j", (A, V)),
        (lambda: V @ B, "j,jk", (V, B)),
        (lambda: torch.ones(3).addmv(A, V), "ij,j", (A, V)),
        (lambda: torch.ones(3).addmv_(A, V), "ij,j", (A, V)),
        (lambda: V @ V, "j,j", (V, V)),
        (lambda: torch.vdot(V, V), "j,j", (V, V)),
        (lambda: torch.addr(A, A[:, 0], V), "i,j", (A[:, 0], V)),
        (lambda: BATCH @ OTHER, "bij,bjk", (BATCH, OTHER)),
        (lambda: BATCH @ B, "bij,jk", (BATCH, B)),
        (lambda: BATCH @ V, "bij,j", (BATCH, V)),
        (lambda: torch.addbmm(torch.zeros(3, 7), BATCH, OTHER), "bij,bjk", (BATCH, OTHER)),
        (lambda: torch.zeros(2, 3, 7).baddbmm_(BATCH, OTHER), "bij,bjk", (BATCH, OTHER)),
        (lambda: torch.einsum("bij,jk->kbi", BATCH, B), "bij,jk", (BATCH, B)),
        (lambda: F.linear(BATCH, B.T), "bij,jk", (BATCH, B)),
    ],
)
def test_each_product_is_twice_its_multiply_adds(run, expression, operands):
    assert count_flops(run) == twice_the_products(expression, *operands)
    with torch.inference_mode():
        assert count_flops(run) == twice_the_products(expression, *operands)


def test_a_bilinear_layer_multiplies_twice_and_adds_once_for_each_weight_and_example():
    layer = nn.Bilinear(3, 4, 5)
    x, y = torch.ones(2, 3, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    assert forward_and_total(layer, [x, y]) == (3 * 2 * 3 * 4 * 5, 4 * 3 * 2 * 3 * 4 * 5)


CONVOLUTIONS = [
    (nn.Conv1d(4, 6, 3, stride=2), (2, 4, 9)),
    (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 7)),
    (nn.Conv3d(2, 3, 2, dilation=2), (2, 2, 5, 5, 5)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 7)),
    (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 5, 7)),
    (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 5, 7)),
    (nn.ConvTranspose2d(4, 8, 3, groups=2), (2, 4, 5, 7)),
]


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS)
def test_a_convolution_uses_its_weight_at_each_place_and_backward_is_twice_forward(layer, shape):
    x = torch.ones(shape, requires_grad=True)
    places = x if layer.transposed else layer(x)
    each = places[:, 0].numel() * layer.weight.numel()
    assert forward_and_total(layer, [x]) == (2 * each, 3 * 2 * each)
    assert forward_and_total(layer, [x.detach()]) == (2 * each, 2 * 2 * each)


def test_groups_cost_what_they_cost_apart():
    whole, part = nn.Conv2d(6, 6, 3, groups=3), nn.Conv2d(2, 2, 3)
    x = torch.ones(2, 6, 5, 5, requires_grad=True)
    parts = [forward_and_total(part, [group]) for group in x.split(2, dim=1)]
    assert forward_and_total(whole, [x]) == tuple(map(sum, zip(*parts, strict=True)))


def test_a_convolution_over_time_first_is_a_convolution():
    x, weight = torch.ones(9, 2, 4, requires_grad=True), nn.Parameter(torch.ones(3, 4, 6))
    usual = nn.Conv1d(4, 6, 3)
    first = lambda x: torch.conv_tbc(x, weight, torch.ones(6), pad=0)  # noqa: E731
    assert forward_and_total(first, [x]) == forward_and_total(usual, [x.permute(1, 2, 0)])


@pytest.mark.parametrize("directions", [1, 2])
def test_an_lstm_multiplies_each_word_by_its_matrices(directions):
    lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=directions == 2)
    x = torch.ones(6, 5, 3, requires_grad=True)
    matrices = sum(p.numel() for name, p in lstm.named_parameters() if "weight" in name)
    forward = lambda: lstm(x)[0]  # noqa: E731
    assert count_flops(forward) == 2 * 6 * 5 * matrices
    if torch.backends.mkldnn.is_available():
        assert count_flops(lambda: forward().sum().backward()) == 3 * count_flops(forward)
    lstm, x = lstm.double(), x.double()  # as matmuls, one after the other
    assert count_flops(forward) == 2 * 6 * 5 * matrices


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_costs_the_same_in_eval(norm_first):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    x = torch.ones(2, 8, 16)
    train = count_flops(lambda: layer(x))
    with torch.no_grad():
        assert count_flops(lambda: layer.eval()(x)) == train
    assert train == 2 * 2 * 8 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * 2 * 8 * 8 * 16


def test_an_attention_module_costs_the_same_in_eval():
    attention, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.ones(2, 8, 16)
    train = count_flops(lambda: attention(x, x, x))
    with torch.inference_mode():
        assert count_flops(lambda: attention.eval()(x, x, x)) == train


def shaped(*shape):
    return torch.empty(shape, device="meta")


KERNELS = [
    "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable",
]  # fmt: skip


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("widths", [(8, 8), (8, 6)])
def test_every_kernel_of_attention_counts_two_matmuls_and_backward_four(kind, widths):
    """Also those of GPUs: the formula needs shapes alone."""
    q, k, v = shaped(2, 4, 5, widths[0]), shaped(2, 4, 7, widths[0]), shaped(2, 4, 7, widths[1])
    forward = count_flops(lambda: torch.softmax(q @ k.transpose(-2, -1), -1) @ v)
    name = f"_scaled_dot_product_{kind}"
    kernel = getattr(torch.ops.aten, name).default
    backward = getattr(torch.ops.aten, name + "_backward").default
    assert flops_of(kernel, (q, k, v), {}, None) == forward
    assert flops_of(backward, (shaped(2, 4, 5, widths[1]), q, k, v), {}, None) == 2 * forward


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("_scaled_mm", (shaped(3, 5), shaped(5, 7), shaped(), shaped())),
        ("_foreach_mm", ([shaped(3, 5), shaped(2, 4)], [shaped(5, 7), shaped(4, 6)])),
    ],
)
def test_products_that_not_every_cpu_or_torch_has_count_by_their_shapes(name, args):
    if not hasattr(torch.ops.aten, name):
        pytest.skip(f"this torch has no {name}")
    expected = 2 * 3 * 5 * 7 + (2 * 2 * 4 * 6 if name == "_foreach_mm" else 0)
    assert flops_of(getattr(torch.ops.aten, name).default, args, {}, None) == expected


def test_what_torch_counts_too_is_the_same():
    layers = [layer for layer, _ in CONVOLUTIONS if layer.groups == 1]
    inputs = [torch.ones(shape, requires_grad=True) for _, shape in CONVOLUTIONS]
    model, tokens = models.Transformer(CONFIG, attention="explicit"), torch.zeros(2, 9).long()

    def run():
        sum(layer(x).sum() for layer, x in zip(layers, inputs, strict=False)).backward()
        model(tokens).sum().backward()

    with FlopCounterMode(display=False) as torchs:
        run()
    assert count_flops(run) == torchs.get_total_flops()


def a_step_without_products():
    w = torch.rand(2, 4, 8, 8, requires_grad=True)
    y = F.interpolate(F.gelu(w).lgamma(), scale_factor=2, mode="bilinear").cumsum(0)
    y = F.max_pool2d(F.layer_norm(y, [16]).softmax(-1), 2).clamp(0, 1).addcmul(w, w)
    (y.mean() + torch.cdist(w[0, 0], w[1, 0], p=1).sum() + torch.cummax(w, 0)[0].sum()).backward()
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    torch.optim.AdamW([w]).step()
    return torch.fft.fftfreq(8), torch.linalg.cross(w[0, 0, :, :3], w[0, 1, :, :3]), w.sort()


def test_element_wise_operations_reductions_and_moves_count_as_nothing():
    assert count_flops(a_step_without_products) == 0


SQUARE = 4 * torch.eye(4) + 1
REFUSED = {
    "_fft_c2c": lambda: torch.fft.fft(SQUARE + 1j),
    "_fft_r2c": lambda: torch.stft(torch.ones(64), 16, window=torch.ones(16), return_complex=True),
    "linalg_cholesky_ex": lambda: torch.linalg.cholesky(SQUARE),
    "linalg_inv_ex": lambda: torch.linalg.inv(SQUARE),
    "_linalg_solve_ex": lambda: torch.linalg.solve(SQUARE, SQUARE),
    "_linalg_svd": lambda: torch.linalg.svd(SQUARE),
    "linalg_matrix_exp": lambda: torch.linalg.matrix_exp(SQUARE),
    "linalg_solve_triangular": lambda: torch.linalg.solve_triangular(SQUARE, SQUARE, upper=True),
    "mm": lambda: SQUARE.to_sparse() @ SQUARE,
    "_sparse_addmm": lambda: torch.sparse.addmm(SQUARE, SQUARE.to_sparse(), SQUARE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_multiplies_and_has_no_formula_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"the FLOPs of aten.{name}\\W.* can't be counted"):
        count_flops(REFUSED[name])


LIKE_A_PRODUCT = re.compile(
    r"(mm|mv|dot|addr|matmul|trilinear|cdist)(_|$)|conv|rnn|lstm|gru|attention|linear|fft|linalg|solve"
)
NONE = re.compile(
    r"_?upsample_.*|_convert_.*|_?linalg_(vector_norm|cross|_powsum|check_errors)|fft_r?fftfreq|"
    r"_thnn_fused_.*|mkldnn_reorder_.*|_cudnn_rnn_flatten_weight|_cdist_(forward|backward)"
)


def test_canary_each_of_torchs_products_is_counted_refused_or_known_as_none():
    """If this fails, torch has an operation whose name reads like a product and that counts as
    0: give it a formula in `compute`, or, if it multiplies no matrices, add it to NONE."""
    uncounted = set()
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::").split(".")[0]
        if not full.startswith("aten::") or not LIKE_A_PRODUCT.search(name):
            continue
        if name in FORMULAS or name.removesuffix("_") in FORMULAS or MULTIPLIES.search(name):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
            uncounted.add(name)
    assert {name for name in uncounted if not NONE.fullmatch(name)} == set()


def test_another_librarys_operation_is_refused():
    library = torch.library.Library("elsewhere", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    with pytest.raises(ValueError, match="FLOPs of elsewhere.twice"):
        count_flops(lambda: torch.ops.elsewhere.twice(V))
    library._destroy()


@pytest.mark.parametrize("bad", [None, 3, torch.ones(2)])
def test_only_a_function_can_be_counted(bad):
    with pytest.raises(TypeError, match="needs a function"):
        count_flops(bad)
