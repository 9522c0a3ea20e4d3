"""Prints where torch is and which version, as JSON, without importing it (an import takes seconds)."""

import importlib.util
import json
import pathlib
import re
import sys

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(f"the interpreter {sys.executable} has no torch; install torch >= 2.9 or set Python_EXECUTABLE")
root = pathlib.Path(spec.origin).parent
match = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", (root / "version.py").read_text())
if match is None:
    sys.exit(f"no version in {root / 'version.py'}")
version = match.group(1)
if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (2, 9):
    sys.exit(f"torch {version} at {root} is too old: 2.9 or newer is needed")
print(json.dumps({"root": str(root), "version": version}))
