"""The tests run on the package in python/, over the library that MOESTRO_LIBRARY names (else build/'s).

MOESTRO_TEST_DEVICE=cuda, or cuda:1, runs them on that GPU; what needs float64 is skipped there.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "python" / "csrc" / "libmoestro_torch.so"

if "MOESTRO_LIBRARY" not in os.environ and BUILT.is_file():
    os.environ["MOESTRO_LIBRARY"] = str(BUILT)
if os.environ.get("MOESTRO_LIBRARY"):
    sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every torch.empty, the operators' included, starts as NaN (floats) or all ones (bytes): an output
    or scratch that is read before it is written shows. Filling megabytes of scratch takes longer than a
    tiny layer, so tests of many calls are marked `unpoisoned`."""
    torch.manual_seed(0)
    if request.node.get_closest_marker("unpoisoned"):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
