"""The tests run on the package in python/, over the library that MOESTRO_LIBRARY names (else build/'s)."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "python" / "csrc" / "libmoestro_torch.so"

if "MOESTRO_LIBRARY" not in os.environ and BUILT.is_file():
    os.environ["MOESTRO_LIBRARY"] = str(BUILT)
if os.environ.get("MOESTRO_LIBRARY"):
    sys.path.insert(0, str(ROOT / "python"))
