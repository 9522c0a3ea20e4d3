"""Finds the compiled operators, checks that they were built for this torch, and loads them.

MOESTRO_LIBRARY=/path/to/libmoestro_torch.so takes a library from a CMake build folder instead of the
installed one; `libmoestro_torch.json` must lie beside it, as the build writes it.
"""

import json
import os
import pathlib

import torch

NAME = "libmoestro_torch.so"
INSTALL_HINT = (
    "install it for this environment with `pip install --no-build-isolation .` in moestro's source folder"
)


def path() -> pathlib.Path:
    """The library that this process uses."""
    chosen = os.environ.get("MOESTRO_LIBRARY")
    return pathlib.Path(chosen) if chosen else pathlib.Path(__file__).parent / NAME


def build_info() -> dict[str, str]:
    """What the library was built from and for: its version, torch's version, CUDA (ON or OFF), date."""
    library = path()
    note = library.with_suffix(".json")
    if not library.is_file() or not note.is_file():
        missing = library if not library.is_file() else note
        raise ImportError(f"moestro's compiled library is missing ({missing}); {INSTALL_HINT}")
    return json.loads(note.read_text())


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def load() -> dict[str, str]:
    """Loads the operators into torch.ops.moestro; ImportError, in one sentence, where that cannot be."""
    info = build_info()
    if _release(info["torch"]) != _release(torch.__version__):
        raise ImportError(
            f"moestro was built for torch {info['torch']}, but this is torch {torch.__version__}; {INSTALL_HINT}"
        )
    try:
        torch.ops.load_library(str(path()))
    except OSError as error:
        raise ImportError(
            f"moestro's library, built for torch {info['torch']}, does not load under torch "
            f"{torch.__version__} ({error}); {INSTALL_HINT}"
        ) from error
    return info
