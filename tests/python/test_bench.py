"""The parts of bench/ that need no GPU: names of shapes, and documents that follow from their rows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench" / "peers"))
from shapes import SHAPES, Shape, parse_case, parse_shape  # noqa: E402


def test_shapes_by_name_and_number() -> None:
    assert parse_shape("olmoe") == ("olmoe", SHAPES["olmoe"])
    assert parse_shape("olmoe@16") == ("olmoe@16", SHAPES["olmoe"]._replace(T=16))
    assert parse_shape("5,8,4,3,2") == ("5,8,4,3,2", Shape(5, 8, 4, 3, 2))
    assert Shape(5, 8, 4, 3, 2).forward_flop() == 2 * 5 * 2 * (8 * 8 + 4 * 8)
    assert Shape(5, 8, 4, 3, 2).forward_flop(gated=False) == 2 * 5 * 2 * (8 * 4 + 4 * 8)


def test_the_tool_has_the_same_shapes() -> None:
    rows = re.findall(r'\{"([^"]+)", ([0-9, ]+)\}', (ROOT / "cli" / "shapes.hpp").read_text())
    assert {name: Shape(*map(int, numbers.split(","))) for name, numbers in rows} == SHAPES


def test_cases_name_an_activation() -> None:
    assert parse_case("conf1") == ("conf1", SHAPES["conf1"], "swiglu")
    assert parse_case("olmoe@16:silu") == ("olmoe@16", SHAPES["olmoe"]._replace(T=16), "silu")
    with pytest.raises(ValueError, match="swiglu or silu"):
        parse_case("conf1:relu")


@pytest.mark.parametrize(
    "text", ["", "olmo", "olmoe@", "olmoe@0", "olmoe@x", "1,2,3,4", "1,2,3,4,0", "5,8,4,3,2@7"]
)
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shape: "):
        parse_shape(text)


def test_documents_say_what_the_rows_say() -> None:
    pytest.importorskip("matplotlib")
    run = subprocess.run(
        [sys.executable, ROOT / "bench" / "figures" / "peers.py", "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
