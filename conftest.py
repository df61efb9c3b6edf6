"""Rules for the whole test run: no network, nothing of the user's, and what `cuda` cells do."""

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

OFFLINE = Path(__file__).parent / "tests" / "offline"


def pytest_configure(config):
    """Guard this process and its children, kernels among them, against sockets going outside."""
    spec = importlib.util.spec_from_file_location("offline", OFFLINE / "sitecustomize.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    earlier = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OFFLINE), earlier]))
    config.ipython_folder = tempfile.TemporaryDirectory(prefix="ipython-")
    os.environ["IPYTHONDIR"] = config.ipython_folder.name


def pytest_unconfigure(config):
    config.ipython_folder.cleanup()


def pytest_xdist_make_scheduler(config, log):
    """A notebook's cells go to one process, with their kernel; so do the browser's tests.

    Every other test goes to the process that is free.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.rpartition("::")[0]
            return file if "ipynb" in file or "test_browser" in file else nodeid

    return Together(config, log)


def pytest_collection_modifyitems(items):
    """`cuda` cells keep what is stored: skipped here, compared with nothing elsewhere.

    What takes longest comes first.
    """
    import torch

    items.sort(key=lambda item: item.path.name != "test_chapters.py")
    for item in items:
        if "cuda" in getattr(item, "cell", {}).get("metadata", {}).get("tags", []):
            if torch.cuda.is_available():
                item.options["check"] = False
            else:
                item.add_marker(pytest.mark.skip(reason="needs CUDA; what is stored stays"))
