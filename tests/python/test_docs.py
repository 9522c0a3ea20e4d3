"""The Python blocks of the README and of docs/python.md, and the examples, run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = {
    f"{page}, block {number}": block
    for page in ("README.md", "docs/python.md")
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL), 1
    )
}
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 5
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("place", BLOCKS)
def test_block(place: str) -> None:
    exec(compile(BLOCKS[place], place, "exec"), {"__name__": "block"})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(example)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example shows something"
