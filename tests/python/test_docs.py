"""The README's Python blocks and the examples run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL
)
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 2
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block(number: int) -> None:
    exec(compile(BLOCKS[number], f"README.md, Python block {number + 1}", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(example)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example shows something"
