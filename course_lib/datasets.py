"""Two small data sets that need no download: digits and first names."""

from dataclasses import dataclass

import numpy as np
import torch

from course_lib.facts import DATA

TEST_SIZE = 360  # of the digits


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


def digits(*, dtype: torch.dtype = torch.float32) -> Split:
    """Handwritten digits: 1,797 images of 8 × 8 pixels, scaled to 0…1, labels 0…9.

    The shuffle is fixed. Source: UCI, Optical Recognition of Handwritten Digits, the test set,
    https://archive.ics.uci.edu/dataset/80 (see data/README.md).
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    with np.load(DATA / "digits.npz", allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.from_numpy(images[order].reshape(len(images), -1)).to(dtype) / 16
    y = torch.from_numpy(labels[order].astype(np.int64))
    return Split(x[TEST_SIZE:], y[TEST_SIZE:], x[:TEST_SIZE], y[:TEST_SIZE])


def names() -> tuple[str, ...]:
    """5,163 first names, lower case, in alphabetical order.

    Source: the 1990 census of the United States, public domain (see data/README.md).
    """
    return tuple((DATA / "names.txt").read_text(encoding="utf-8").split())
