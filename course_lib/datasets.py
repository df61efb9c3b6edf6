"""Three small data sets that need no download: digits, first names, moons."""

from dataclasses import dataclass

import numpy as np
import torch

from course_lib.facts import DATA


@dataclass(frozen=True, repr=False)
class Split:
    """Training and test examples: inputs (n, features), integer labels (n,)."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor

    def __repr__(self) -> str:
        features = self.train_x.shape[1]
        return f"Split({len(self.train_x)} train, {len(self.test_x)} test, {features} features)"


def digits(*, dtype: torch.dtype = torch.float32, test_size: int = 360) -> Split:
    """Handwritten digits: 1,797 images of 8 × 8 pixels, scaled to 0…1, labels 0…9.

    The shuffle is fixed. Source: UCI, Optical Recognition of Handwritten Digits, the test set,
    https://archive.ics.uci.edu/dataset/80 (see data/README.md).
    """
    _floating(dtype)
    with np.load(DATA / "digits.npz", allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    if isinstance(test_size, bool) or not isinstance(test_size, int):
        raise TypeError(f"test_size must be a whole number, got {test_size!r}")
    if not 0 < test_size < len(images):
        raise ValueError(f"test_size must lie between 1 and {len(images) - 1}, got {test_size}")
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.from_numpy(images[order].reshape(len(images), -1)).to(dtype) / 16
    y = torch.from_numpy(labels[order].astype(np.int64))
    return Split(x[test_size:], y[test_size:], x[:test_size], y[:test_size])


def names() -> tuple[str, ...]:
    """5,163 first names, lower case, in alphabetical order.

    Source: the 1990 census of the United States, public domain (see data/README.md).
    """
    return tuple((DATA / "names.txt").read_text(encoding="utf-8").split())


def moons(
    n: int = 200, *, noise: float = 0.1, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two interleaved half circles: points (n, 2) and labels (n,), half 0 and half 1."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n must be a whole number, got {n!r}")
    if n < 2:
        raise ValueError(f"n must be at least 2, got {n}")
    if not 0 <= noise < np.inf:
        raise ValueError(f"noise must be finite and at least 0, got {noise}")
    _floating(dtype)
    upper = n // 2
    angle = np.concatenate([np.linspace(0, np.pi, upper), np.linspace(0, np.pi, n - upper)])
    label = np.repeat([0, 1], [upper, n - upper])
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = np.where(label[:, None] == 0, points, [1.0, 0.5] - points)
    points += np.random.default_rng(seed).normal(0, noise, points.shape)
    return torch.from_numpy(points).to(dtype), torch.from_numpy(label)


def _floating(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
