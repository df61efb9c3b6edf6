"""SGD, Adam and AdamW as torch optimizers, written out with the letters of papers and torch.

θ parameter, g gradient, γ learning rate (`lr`), λ weight decay, μ momentum, k update number.
They are `torch.optim.Optimizer`s, so that parameter groups, `state_dict` and `zero_grad` come
with them. A parameter without a gradient is left alone. Complex and sparse ones are refused.
What a group asks for is checked when it is added, TypeError or ValueError.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from course_lib.checks import number


class SGD(Optimizer):
    """b ← μ b + g, then θ ← θ − γ b; with Nesterov θ ← θ − γ (g + μ b). The first b is g.

    Weight decay is L2: g ← g + λ θ. Source: https://proceedings.mlr.press/v28/sutskever13.html
    """

    keeps = frozenset({"b"})

    def __init__(self, params, lr=1e-3, momentum=0.0, nesterov=False, weight_decay=0.0):
        super().__init__(
            params,
            dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay),
        )

    def add_param_group(self, param_group):
        group = _filled(self, param_group)
        _check_not_negative(group, "lr", "momentum", "weight_decay")
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("Nesterov's momentum needs a momentum above 0")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        loss = _loss_of(closure)
        for theta, group in _with_gradient(self):
            lr, mu = group["lr"], group["momentum"]
            g = _with_l2(theta, group)
            if mu:
                state = self.state[theta]
                if "b" in state:
                    state["b"].mul_(mu).add_(g)
                else:
                    state["b"] = g.clone()  # g may be the gradient itself
                b = state["b"]
                g = g + mu * b if group["nesterov"] else b
            theta -= lr * g
        return loss


class Adam(Optimizer):
    """m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g², then θ ← θ − γ m̂ / (√v̂ + ε).

    m̂ = m / (1 − β₁ᵏ) and v̂ = v / (1 − β₂ᵏ) undo the start at 0. Weight decay is L2:
    g ← g + λ θ. With `amsgrad`, v̂ is made from the largest v so far, as in torch.
    Sources: https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1904.09237
    """

    keeps = frozenset({"step", "m", "v", "largest_v"})
    decoupled = False

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False
    ):
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        )

    def add_param_group(self, param_group):
        group = _filled(self, param_group)
        _check_not_negative(group, "lr", "eps", "weight_decay")
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= number("a beta", beta) < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {betas!r}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        loss = _loss_of(closure)
        for theta, group in _with_gradient(self):
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            state, g = self.state[theta], theta.grad
            if not state:
                state["step"] = _counter()
                state |= {name: torch.zeros_like(theta) for name in ("m", "v")}
                state |= {"largest_v": torch.zeros_like(theta)} if group["amsgrad"] else {}
            m, v, k = state["m"], state["v"], state["step"].add_(1).item()
            if self.decoupled:
                theta *= 1 - lr * decay
            else:
                g = _with_l2(theta, group)
            m.mul_(beta1).add_((1 - beta1) * g)
            v.mul_(beta2).add_((1 - beta2) * g * g)
            if group["amsgrad"]:
                v = torch.maximum(state["largest_v"], v, out=state["largest_v"])
            m_hat, v_hat = m / (1 - beta1**k), v / (1 - beta2**k)
            theta -= lr * m_hat / (v_hat.sqrt() + group["eps"])
        return loss


class AdamW(Adam):
    """Adam, its weight decay beside the gradient: θ ← (1 − γ λ) θ before the step.

    Source: https://arxiv.org/abs/1711.05101, where γ is a schedule's factor alone.
    """

    decoupled = True

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in an optimizer's state, its step counters included.

    >>> adam = Adam([torch.zeros(10, requires_grad=True)])
    >>> state_bytes(adam)
    0
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"state_bytes needs a torch Optimizer, got {type(optimizer).__name__}")
    kept = tree_leaves([list(state.values()) for state in optimizer.state.values()])
    storages = [t.untyped_storage() for t in kept if isinstance(t, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _with_gradient(optimizer: Optimizer) -> list[tuple[Tensor, dict]]:
    """The parameters to move, each with its group; all are checked before any is moved."""
    found = []
    for group in optimizer.param_groups:
        for theta in (p for p in group["params"] if p.grad is not None):
            if theta.grad.layout is not torch.strided or theta.is_complex():
                kind = f"{theta.dtype}, {theta.grad.layout}"
                raise ValueError(f"only real, dense gradients, got {kind}")
            foreign = optimizer.state.get(theta, {}).keys() - optimizer.keeps
            if foreign:
                raise ValueError(f"the state is another optimizer's: it has {sorted(foreign)}")
            found.append((theta, group))
    return found


def _with_l2(theta: Tensor, group: dict) -> Tensor:
    """g + λ θ; without decay the gradient itself, which must not be changed."""
    decay = group["weight_decay"]
    return theta.grad + decay * theta if decay else theta.grad


def _counter() -> Tensor:
    """k as torch keeps it: under this name `load_state_dict` leaves its dtype alone."""
    wide = torch.get_default_dtype() is torch.float64
    return torch.tensor(0.0, dtype=torch.float64 if wide else torch.float32)


def _loss_of(closure):
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _filled(optimizer: Optimizer, group: dict) -> dict:
    """A parameter group with the defaults for what it doesn't say."""
    if not isinstance(group, dict):
        raise TypeError(f"a parameter group is a dict with params, got {type(group).__name__}")
    return optimizer.defaults | group


def _check_not_negative(group: dict, *names: str) -> None:
    for name in names:
        if number(name, group[name]) < 0:
            raise ValueError(f"{name} must be a number of at least 0, got {group[name]!r}")
