"""`python -m moestro.doctor`: what is installed, and which path a shape takes.

Exit code 0 when the library loads and computes, else 1 with one sentence on standard error.
"""

import argparse
import os
import sys


def report(shape: tuple[int, int, int, int, int], dtype_name: str, activation: str) -> list[str]:
    """The report's lines. Imports moestro itself, so that a broken installation can be told apart."""
    import torch

    import moestro
    from moestro import _library

    dtype = getattr(torch, dtype_name)
    info = moestro.BUILD
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    lines = [
        f"moestro   {moestro.__version__} (built {info['date']})",
        f"library   {_library.path()}",
        f"torch     {torch.__version__} (library built for {info['torch']})",
        f"python    {sys.version.split()[0]}",
        f"backends  {torch.ops.moestro.backends()}; CUDA in this build: {info['cuda']}",
        f"shape     T={shape[0]} d={shape[1]} n={shape[2]} E={shape[3]} K={shape[4]} {dtype_name} {activation}",
    ]
    for name in ("MOESTRO_LIBRARY", "MOESTRO_BACKEND", "MOESTRO_PATH"):
        if name in os.environ:
            lines.append(f"setting   {name}={os.environ[name]}")
    for device in devices:
        label = "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"
        try:
            path = torch.ops.moestro.describe_path(*shape, dtype, device, activation=activation)
        except NotImplementedError as error:
            path = str(error)
        lines.append(f"path      {label}: {path}")
    size = moestro.layer_bytes(*shape, dtype=dtype, activation=activation)
    lines.append(
        f"memory    kept {size.saved / 2**20:.1f} MiB (index {size.index / 2**20:.1f}), workspace "
        f"{size.forward_workspace / 2**20:.1f} MiB forward, {size.backward_workspace / 2**20:.1f} MiB backward (cpu)"
    )
    x = torch.ones(3, 4, requires_grad=True)
    y = moestro.experts(
        x,
        torch.tensor([[0], [1], [-1]]),
        torch.ones(3, 1),
        torch.ones(2, 6, 4),
        torch.ones(2, 4, 3),
    )
    y.sum().backward()
    sound = bool(torch.isfinite(x.grad).all()) and y[2].eq(0).all().item() and y[0].ne(0).all().item()
    lines.append(f"self-test {'passed' if sound else 'FAILED'} (forward and backward on the CPU)")
    return lines


def doctor(
    shape: tuple[int, int, int, int, int] = (4096, 512, 512, 32, 4),
    dtype: str = "bfloat16",
    activation: str = "swiglu",
) -> bool:
    """Prints the report; False when the self-test failed."""
    lines = report(shape, dtype, activation)
    print("\n".join(lines))
    return "passed" in lines[-1]


def _shape(text: str) -> tuple[int, int, int, int, int]:
    parts = text.split(",")
    if len(parts) != 5 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not T,d,n,E,K (five whole numbers)")
    return tuple(int(part) for part in parts)  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moestro.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=_shape, default=(4096, 512, 512, 32, 4), metavar="T,d,n,E,K")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), default="bfloat16")
    parser.add_argument("--activation", default="swiglu")
    arguments = parser.parse_args()
    try:
        return 0 if doctor(arguments.shape, arguments.dtype, arguments.activation) else 1
    except (ImportError, ValueError) as error:
        print(f"moestro.doctor: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
