"""What trace counts, against torch's own hooks; what it draws from, against the expression."""

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib import facts, models
from course_lib.autograd import Tensor
from course_lib.graph import trace, trace_module
from course_lib.live_bytes import Tracer

TINY = facts.ModelConfig(
    vocab_size=50, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64,
    max_seq_len=16, name="tiny",
)  # fmt: skip


def hooks_count(run, model):
    """Bytes that torch hands to saved_tensors_hooks: each storage once, the model's left out."""
    own = (*model.parameters(), *model.buffers())
    weights = {tensor.untyped_storage()._cdata for tensor in own}
    sizes, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)  # or a later storage could get the same address
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for key, size in sizes.items() if key not in weights)


def mlp_and_cross_entropy():
    model, x = models.mlp(8, 16, 16, 4), torch.randn(32, 8)
    return model, lambda: F.cross_entropy(model(x), torch.arange(32) % 4)


def conv_and_batch_norm():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(72, 5),
    )  # fmt: skip
    x = torch.randn(4, 3, 8, 8)
    return model, lambda: model(x).square().mean()


def layer_norm_and_dropout():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3))
    x = torch.randn(16, 8)
    return model, lambda: (model(x) / 3.0).sum()


def transformer(attention, checkpointing):
    def build():
        model = models.Transformer(TINY, attention=attention, checkpointing=checkpointing)
        ids = torch.arange(32).reshape(2, 16)
        return model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return build


def checkpointed_block():
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(64, 8)
    return block, lambda: checkpoint(block, x * 1.0, use_reentrant=False).sum()


def frozen_part():
    model, run = mlp_and_cross_entropy()
    model[2].requires_grad_(False)
    return model, run


def tied_weights():
    first, last = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    last.weight = first.weight
    model, ids = nn.Sequential(first, nn.Tanh(), last), torch.arange(12)
    return model, lambda: F.cross_entropy(model(ids), ids)


def recurrent(kind, autocast):
    """oneDNN has no bfloat16 LSTM for CPUs without AVX-512: that one isn't run in autocast."""

    def build():
        model, x = kind(8, 8), torch.randn(5, 2, 8)

        def run():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return model(x)[0].float().sum()

        return model, run

    return build


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.variable, ctx.name = "mine", 3  # names that torch's own nodes use otherwise
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def custom_function():
    model = models.mlp(4, 4)
    return model, lambda: Square.apply(model(torch.ones(2, 4))).sum()


def parts_and_double_backward():
    model = models.mlp(4, 6)

    def run():
        first, *rest = model(torch.ones(2, 4)).exp().unbind(1)
        values, _ = torch.stack([first * rest[0], rest[1].sin()]).topk(1)
        (g,) = torch.autograd.grad(values.sum(), model[0].weight, create_graph=True)
        return g.square().sum() + values.sum()

    return model, run


def complex_numbers():
    model = models.mlp(4, 4)
    return model, lambda: (model(torch.ones(2, 4)) * (1 + 2j)).abs().sum()


BUILDERS = {
    "MLP + cross entropy": mlp_and_cross_entropy,
    "conv + BatchNorm": conv_and_batch_norm,
    "LayerNorm + dropout": layer_norm_and_dropout,
    "SDPA attention": transformer("sdpa", False),
    "a checkpointed block": checkpointed_block,
    "explicit attention": transformer("explicit", False),
    "checkpointed layers": transformer("sdpa", True),
    "a frozen part": frozen_part,
    "tied weights": tied_weights,
    "LSTM": recurrent(nn.LSTM, autocast=False),
    "GRU in autocast": recurrent(nn.GRU, autocast=True),
    "a custom function": custom_function,
    "several results, double backward": parts_and_double_backward,
    "complex numbers": complex_numbers,
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_saved_bytes_are_what_the_hooks_count(build):
    model, run = build()
    counted = hooks_count(run, model)
    assert counted > 0
    assert trace(run(), model).saved_bytes == counted


def alive_behind(run, *given):
    """Live bytes by the tracer, once all but the result and what is given has gone out of sight."""
    with Tracer(fake=False) as tracer:
        result = run()
        gc.collect()
        known = {t.untyped_storage()._cdata for t in (result, *given)}
        return result, sum(s.num_bytes for key, s in tracer.storages.items() if key not in known)


def checkpointed(function, *args, **options):
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options)


NESTS = {
    "one": lambda x, w: checkpointed(lambda h: (h @ w).tanh(), x * 1.0),
    "one in another": lambda x, w: checkpointed(
        lambda h: checkpointed(lambda h: (h @ w).tanh(), (h @ w).tanh()), x * 1.0
    ),
    "three deep": lambda x, w: checkpointed(
        lambda h: checkpointed(lambda h: checkpointed(torch.tanh, h @ w), h @ w), x * 1.0
    ),
    "a chain in another": lambda x, w: checkpointed(
        lambda h: checkpointed(torch.exp, checkpointed(torch.tanh, h @ w)), x * 1.0
    ),
    "two inputs": lambda x, w: checkpointed(torch.mul, x * 1.0, x * 2.0),
    "an input by name": lambda x, w: checkpointed(
        lambda h, other: (h * other).tanh(), x * 1.0, other=x.detach() * 2.0
    ),
    "part of the way": lambda x, w: (checkpointed(lambda h: (h @ w).tanh(), x * 1.0) @ w).exp(),
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS.keys())
def test_what_checkpoints_keep_is_what_is_alive(nest):
    x, w = torch.rand(80, 100, requires_grad=True), torch.rand(100, 100, requires_grad=True)
    result, alive = alive_behind(lambda: nest(x, w).sum(), x, w)
    assert trace(result, {"x": x, "w": w}).saved_bytes == alive >= x.nbytes


class KeepsOnItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.doubled, ctx.parts, ctx.again = x * 2, {"halves": [x / 2, x / 2]}, x
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return ctx.doubled * g


def test_what_a_custom_function_keeps_on_its_ctx_is_kept():
    x = torch.rand(10, 10, requires_grad=True)
    result, alive = alive_behind(lambda: KeepsOnItself.apply(x * 1.0).sum(), x)
    graph = trace(result, {"x": x})
    assert graph.saved_bytes == alive == 4 * x.nbytes
    assert {saved.name for saved in graph.nodes[-2].saved} >= {"doubled", "parts"}


def test_a_models_buffers_are_there_anyway():
    model, x = nn.BatchNorm1d(8), torch.rand(4, 8)
    statistics = model.running_mean.nbytes + model.running_var.nbytes
    loss = model(x).sum()
    assert trace(loss).saved_bytes - trace(loss, model).saved_bytes == statistics
    assert trace_module(model, lambda: model(x * 1.0)).saved_bytes == trace(loss, model).saved_bytes


def test_tracing_a_checkpointed_block_does_not_compute_it_again():
    calls = []
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    out = checkpoint(block, torch.randn(4, 8), use_reentrant=False).sum()
    trace(out)
    assert calls == [1]
    out.backward()
    assert calls == [1, 1]


def test_canary_torch_shows_what_a_node_saved():
    """If this fails, torch has changed how a node shows what it saved: `_kept_by_torch` reads
    `_raw_saved_*`, `.data` and `.unpack_hook`, and the `saved_args` of a checkpoint's frame with
    the `kwargs` of its `recompute_fn`."""
    w = torch.ones(3, requires_grad=True)
    node = (w * w).grad_fn
    assert node._raw_saved_self.data is not None and node._raw_saved_self.unpack_hook is None
    out = checkpoint(torch.sin, w * 1, use_reentrant=False)  # the raw entry dies with its node
    saved = out.grad_fn._raw_saved_self
    frames = [cell.cell_contents for cell in saved.unpack_hook.__closure__]
    frame = next(frame for frame in frames if hasattr(frame, "saved_args"))
    assert "kwargs" in frame.recompute_fn.__code__.co_freevars
    assert tuple(node._input_metadata[0].shape) == (3,)


@pytest.mark.parametrize(
    ("factor", "num_bytes"),
    [
        (2.0, 0),
        (3, 0),
        (2j, 0),
        (torch.tensor(2.0, dtype=torch.float64), 8),
        (torch.tensor(3), 8),
        (torch.tensor(2j, dtype=torch.complex128), 16),
    ],
)
def test_a_python_number_is_not_kept_but_a_tensor_without_dimensions_is(factor, num_bytes):
    x = torch.ones(3, requires_grad=True)
    assert trace(x * factor, {"x": x}).saved_bytes == num_bytes


def test_a_times_a_has_one_leaf_one_operation_and_two_edges():
    for a in (torch.tensor(3.0, requires_grad=True), Tensor(3.0, requires_grad=True)):
        graph = trace(a * a)
        assert [node.role for node in graph.nodes] == ["leaf", "operation"]
        assert graph.edges == ((0, 1), (0, 1))


def test_nodes_have_names_operations_and_shapes():
    model = models.mlp(8, 16, 4)
    graph = trace(F.cross_entropy(model(torch.randn(32, 8)), torch.zeros(32).long()), model)
    given = {node.name: node.shape for node in graph.nodes if node.role == "parameter"}
    assert given == {name: tuple(p.shape) for name, p in model.named_parameters()}
    made = [(node.op, node.shape) for node in graph.nodes if node.role == "operation"]
    assert made[-3:] == [("addmm", (32, 4)), ("log_softmax", (32, 4)), ("nll_loss", ())]
    kept = {node.op: node.saved_bytes for node in graph.nodes if node.saved}
    assert kept["relu"] == 32 * 16 * 4  # its output, which the next addmm keeps too


def test_a_parameter_without_a_model_is_known_as_one():
    model = models.mlp(2, 2)
    assert {n.role for n in trace(model(torch.ones(1, 2))).nodes} == {"parameter", "operation"}


def test_what_a_hook_packs_elsewhere_is_still_kept():
    w = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        out = (w * 1.0).exp()
    assert trace(out, {"w": w}).saved_bytes == 16


def test_what_hides_is_named():
    w = torch.ones(4, requires_grad=True)
    y = w * 1.0
    y[1:3].exp_()
    assert trace(y).hiding == ["copy_slices"]
    assert trace(w * 1.0).hiding == []


def test_a_parameter_is_left_out_even_if_no_model_is_given():
    model = models.mlp(4, 4, 4)
    loss = model(torch.ones(2, 4)).sum()
    assert trace(loss).saved_bytes == trace(loss, model).saved_bytes == 2 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda x: torch.nn.functional.max_pool2d(x, 2), "max_pool2d_with_indices"),
        (lambda x: torch.nn.functional.avg_pool2d(x, 2), "avg_pool2d"),
        (lambda x: torch.log1p(x), "log1p"),
        (lambda x: x.log_softmax(0), "log_softmax"),
        (lambda x: x @ x, "bmm"),
        (lambda x: Square.apply(x), "square"),
    ],
)
def test_an_operation_is_called_as_torch_calls_it(run, op):
    x = torch.ones(1, 4, 4, requires_grad=True)
    assert op in [node.op for node in trace(run(x)).nodes]


def test_sparse_tensors_are_refused():
    w = torch.ones(3, 3, requires_grad=True)
    out = torch.sparse.mm(torch.eye(3).to_sparse(), w)
    with pytest.raises(ValueError, match="only strided"):
        trace(out)


@pytest.mark.parametrize("build", [mlp_and_cross_entropy, custom_function, checkpointed_block])
def test_after_backward_the_nodes_are_there_and_nothing_is_kept(build):
    model, run = build()
    loss = run()
    before = trace(loss, model)
    loss.backward()
    after = trace(loss, model)
    assert before.saved_bytes > 0 == after.saved_bytes
    assert len(after.nodes) == len(before.nodes)


@pytest.mark.parametrize(
    ("tensor", "role"),
    [
        (torch.ones(3), "constant"),
        (torch.ones(3, requires_grad=True), "leaf"),
        ((torch.ones(3, requires_grad=True) * 2).detach(), "constant"),
        (nn.Parameter(torch.ones(3)), "parameter"),
        (Tensor([1.0, 2.0, 3.0]), "constant"),
        (Tensor([1.0, 2.0, 3.0]) * 2, "constant"),
    ],
)
def test_a_tensor_without_a_graph_is_one_node(tensor, role):
    graph = trace(tensor)
    assert [(n.role, n.shape) for n in graph.nodes] == [(role, (3,))] and graph.edges == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((models.mlp(2, 2),), "not the model itself"),
        ((3.0,), "got float"),
        ((np.ones(3),), "got ndarray"),
        ((torch.ones(3), [torch.ones(3)]), "by name, got list"),
        ((torch.ones(3), {"x": 3}), "x must be a tensor"),
    ],
)
def test_what_is_no_tensor_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        trace(*arguments)


def test_only_leaves_have_names_in_torch():
    w = torch.ones(3, requires_grad=True)
    h = w * 2.0
    with pytest.raises(ValueError, match="h is a result"):
        trace((h * h).sum(), {"w": w, "h": h})


def test_a_named_result_of_our_engine_is_kept_all_the_same():
    w = Tensor(np.ones(4), requires_grad=True)
    h = w * 2.0
    out = (h * h).sum()
    assert trace(out, {"w": w, "h": h}).saved_bytes == trace(out, {"w": w}).saved_bytes
    assert "h" in [node.name for node in trace(out, {"h": h}).nodes]


def test_a_cycle_is_refused():
    a = Tensor(1.0, requires_grad=True)
    b = a * 2.0
    c = b + 1.0
    b.parents = (c, a)
    with pytest.raises(ValueError, match="cycle"):
        trace(c)


def test_a_deep_graph_is_no_problem():
    x = torch.ones((), requires_grad=True)
    y = x
    for _ in range(10_000):
        y = y + 1.0
    assert len(trace(y).nodes) == 10_001


def test_every_node_comes_after_what_it_was_made_from():
    model, run = transformer("explicit", False)()
    graph = trace(run(), model)
    assert all(parent < child for parent, child in graph.edges)
    assert [child for _, child in graph.edges] == sorted(child for _, child in graph.edges)


# --- one module ---


def test_a_graph_is_cut_to_one_module():
    model, run = transformer("sdpa", False)()
    whole, block = trace(run(), model), trace_module(model.layers[0], run)
    names = {node.name for node in block.nodes if node.role == "parameter"}
    assert names == set(dict(model.layers[0].named_parameters()))
    assert [node.op for node in block.nodes if node.role == "input"] == ["embedding"]
    assert len(block.nodes) < len(whole.nodes) / 2 and block.saved_bytes < whole.saved_bytes / 2


def test_the_modules_of_a_chain_partition_its_operations():
    model = nn.Sequential(models.mlp(4, 8, 8), nn.Tanh(), models.mlp(8, 4))
    x = torch.randn(2, 4)
    whole = trace(model(x), model)
    parts = [trace_module(module, lambda: model(x)) for module in model]
    made = [n.op for part in parts for n in part.nodes if n.role == "operation"]
    assert sorted(made) == sorted(n.op for n in whole.nodes if n.role == "operation")


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, *, scale):
        h = self.a(input=x)  # by name, so that hooks need to look there
        h = self.relu(h * scale)
        h += self.b(x).exp()
        return {"out": h}


@pytest.mark.parametrize(
    ("part", "ops"),
    [("a", ["t", "addmm"]), ("relu", ["relu"]), ("b", ["t", "addmm"])],
)
def test_a_cut_ends_where_the_module_ended_whatever_is_changed_in_place(part, ops):
    model, x = InPlace(), torch.ones(2, 4)
    cut = trace_module(getattr(model, part), lambda: model(x * 1.0, scale=2.0)["out"])
    assert [node.op for node in cut.nodes if node.role == "operation"] == ops
    wrapped = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    whole = trace_module(model, lambda: model(wrapped(x), scale=2.0))
    assert [node.op for node in whole.nodes if node.role == "input"] == ["tanh"]


def test_a_cut_may_be_traced_through_backward_too():
    model, run = mlp_and_cross_entropy()
    alone = trace_module(model[0], run)
    assert trace_module(model[0], lambda: run().backward()) == alone


def test_one_module_needs_one_call_that_was_recorded():
    model = models.mlp(4, 4)
    linear, x = model[0], torch.ones(1, 4)
    with pytest.raises(ValueError, match="2 times"):
        trace_module(linear, lambda: model(model(x)))
    with pytest.raises(ValueError, match="0 times"):
        trace_module(linear, lambda: x)
    with torch.no_grad(), pytest.raises(ValueError, match="nothing was recorded"):
        trace_module(linear, lambda: model(x))
    with pytest.raises(TypeError, match="needs a module"):
        trace_module("0", lambda: model(x))
    block = nn.Sequential(linear, nn.Tanh())
    with pytest.raises(ValueError, match="leave it out"):
        trace_module(linear, lambda: checkpoint(block, x, use_reentrant=False).sum().backward())
    assert not linear._forward_hooks and not linear._forward_pre_hooks


# --- our engine ---


def held_arrays(tensor):
    """All arrays that can be reached from a tensor, by Python's own bookkeeping."""
    found, seen, stack = {}, set(), [tensor]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            while isinstance(thing.base, np.ndarray):
                thing = thing.base
            found[id(thing)] = thing
        elif isinstance(thing, (Tensor, tuple, list)) or callable(thing):
            if not isinstance(thing, type):
                stack += [r for r in gc.get_referents(thing) if not isinstance(r, (dict, type))]
        elif type(thing).__name__ == "cell":
            stack.append(thing.cell_contents)
    return found


@given(st.lists(st.sampled_from(["+", "*", "@", "tanh", "exp", "sum", "neg", "**"]), max_size=8))
def test_what_our_engine_keeps_is_all_that_can_be_reached(ops):
    w = Tensor(np.ones((3, 3)), requires_grad=True)
    y = w * 2.0
    for op in ops:
        y = {
            "+": lambda y=y: y + 1.0,
            "*": lambda y=y: y * y,
            "@": lambda y=y: y @ w,
            "tanh": lambda y=y: y.tanh(),
            "exp": lambda y=y: (y * 0.01).exp(),
            "sum": lambda y=y: y.sum(axis=0) + w,
            "neg": lambda y=y: -y,
            "**": lambda y=y: y**2,
        }[op]()
    reached = held_arrays(y)
    for own in (w.data, y.data):  # the weight, and the result itself unless an operation keeps it
        reached.pop(id(own), None)
    kept = trace(y, {"w": w}).saved_bytes
    assert kept - sum(array.nbytes for array in reached.values()) in (0, y.data.nbytes)


def test_a_graph_prints_without_addresses():
    a = Tensor(3.0, requires_grad=True)
    assert repr(trace(a * 2.0, {"a": a})) == "Graph(3 nodes, 2 edges, 8 B kept)"
