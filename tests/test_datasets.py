import hashlib

import pytest
import torch

from course_lib import datasets
from course_lib.facts import DATA

CHECKSUMS = {
    "digits.npz": "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e",
    "names.txt": "cba14f452b7768bd7fe093035a67491d4a334061634ccfd51522fb796910e75e",
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_the_stored_bytes_are_the_ones_that_were_checked(name):
    assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == CHECKSUMS[name]


def test_digits_are_1797_images_split_without_overlap():
    split = datasets.digits(dtype=torch.float64)
    assert split.train_x.shape == (1437, 64) and split.test_x.shape == (360, 64)
    assert split.train_x.dtype == torch.float64 and split.train_y.dtype == torch.int64
    x = torch.cat([split.train_x, split.test_x])
    assert x.min() == 0 and x.max() == 1
    # scikit-learn's load_digits: sum of all pixels, and how often each digit stands
    assert round((x * 16).sum().item()) == 561_718
    counts = torch.cat([split.train_y, split.test_y]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_the_same_every_time():
    assert torch.equal(datasets.digits().train_y, datasets.digits().train_y)


def test_a_split_prints_without_its_numbers():
    assert repr(datasets.digits()) == "Split(1437 train, 360 test, 64 features)"


def test_names_are_lower_case_ascii_in_order():
    names = datasets.names()
    assert len(names) == len(set(names)) == 5163
    assert list(names) == sorted(names)
    assert all(name.isascii() and name.isalpha() and name.islower() for name in names)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, "float32", None])
def test_digits_are_floating_point(dtype):
    with pytest.raises(TypeError, match="floating-point torch.dtype, got"):
        datasets.digits(dtype=dtype)
