"""The shapes that peers are compared on: name -> (T, d, n, E, K)."""

from typing import NamedTuple


class Shape(NamedTuple):
    T: int
    d: int
    n: int
    E: int
    K: int

    def forward_flop(self, gated: bool = True) -> int:
        return (6 if gated else 4) * self.T * self.K * self.d * self.n


SHAPES: dict[str, Shape] = {
    "1.4B-n256": Shape(40960, 768, 256, 128, 8),
    "1.4B-n512": Shape(40960, 768, 512, 64, 4),
    "1.4B-n1024": Shape(40960, 768, 1024, 32, 2),
    "7B-n256": Shape(24576, 1536, 256, 128, 8),
    "7B-n512": Shape(24576, 1536, 512, 64, 4),
    "7B-n1024": Shape(24576, 1536, 1024, 32, 2),
    "30B-n256": Shape(32768, 4096, 256, 256, 16),
    "30B-n512": Shape(32768, 4096, 512, 128, 8),
    "30B-n1024": Shape(32768, 4096, 1024, 64, 4),
    "120B-n512": Shape(32768, 4096, 512, 256, 16),
    "120B-n1024": Shape(32768, 4096, 1024, 128, 8),
    "120B-n2048": Shape(32768, 4096, 2048, 64, 4),
    "olmoe": Shape(32768, 2048, 1024, 64, 8),
    "qwen3-next": Shape(32768, 2048, 512, 512, 10),
    "qwen3-235b": Shape(32768, 4096, 1536, 128, 8),
    "qwen3-30b": Shape(32768, 2048, 768, 128, 8),
    "gpt-oss-20b": Shape(32768, 2880, 2880, 32, 4),
    "deepseek-v3": Shape(16384, 7168, 2048, 256, 8),
    "conf1": Shape(32768, 512, 2048, 4, 1),
    "conf2": Shape(65536, 512, 2048, 8, 2),
    "conf3": Shape(65536, 1024, 4096, 16, 4),
    "conf4": Shape(32768, 2048, 8192, 16, 4),
    "conf5": Shape(32768, 1024, 4096, 8, 2),
    "conf6": Shape(32768, 2048, 8192, 8, 2),
    "conf7": Shape(65536, 1024, 4096, 8, 4),
}


def parse_shape(text: str) -> tuple[str, Shape]:
    """A name of SHAPES, the same with another number of tokens ("olmoe@16"), or "T,d,n,E,K"."""
    name, at, tokens = text.partition("@")
    if name in SHAPES and not at:
        return text, SHAPES[name]
    if name in SHAPES and tokens.isdecimal() and int(tokens) > 0:
        return text, SHAPES[name]._replace(T=int(tokens))
    try:
        values = [int(part) for part in text.split(",")]
        if len(values) == 5 and min(values) > 0:
            return text, Shape(*values)
    except ValueError:
        pass
    raise ValueError(f"shape: {text!r} is neither T,d,n,E,K nor one of {', '.join(SHAPES)}, nor NAME@T")


def parse_case(text: str) -> tuple[str, Shape, str]:
    """A shape as parse_shape takes it, with ":silu" after it for a layer without gate: name, shape and
    activation."""
    plain, colon, activation = text.partition(":")
    if colon and activation not in ("swiglu", "silu"):
        raise ValueError(f"shape: after the colon of {text!r} swiglu or silu is expected")
    return *parse_shape(plain), activation or "swiglu"
