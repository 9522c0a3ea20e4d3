"""What a user meets round the operators: import errors, the doctor, the command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import moestro
import pytest
import torch
from moestro import _library, doctor

PACKAGE = Path(moestro.__file__).parent


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_version() -> None:
    root = PACKAGE.parents[1]
    if (root / "VERSION").is_file():
        assert moestro.__version__ == (root / "VERSION").read_text().strip()


def test_missing_library(tmp_path: Path) -> None:
    done = python("import moestro", MOESTRO_LIBRARY=str(tmp_path / "libmoestro_torch.so"))
    assert done.returncode != 0
    assert "ImportError: moestro's compiled library is missing" in done.stderr
    assert "pip install" in done.stderr


def test_library_for_another_torch(tmp_path: Path) -> None:
    library = tmp_path / "libmoestro_torch.so"
    shutil.copy(_library.path(), library)
    note = {**moestro.BUILD, "torch": "2.1.0+cpu"}
    library.with_suffix(".json").write_text(json.dumps(note))
    done = python("import moestro", MOESTRO_LIBRARY=str(library))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: moestro was built for torch 2.1.0+cpu, but this is torch")


def test_broken_library(tmp_path: Path) -> None:
    library = tmp_path / "libmoestro_torch.so"
    library.write_bytes(b"not a library")
    library.with_suffix(".json").write_text(json.dumps(moestro.BUILD))
    done = python("import moestro", MOESTRO_LIBRARY=str(library))
    assert done.returncode != 0
    assert "ImportError: moestro's library, built for torch" in done.stderr.strip().splitlines()[-1]


def test_the_library_needs_no_python() -> None:
    """One build serves every Python version of the same torch."""
    symbols = subprocess.run(["nm", "-D", str(_library.path())], capture_output=True, text=True)
    if symbols.returncode != 0:
        pytest.skip("no nm")
    assert " Py" not in symbols.stdout and " _Py" not in symbols.stdout


def test_the_library_exports_nothing_of_its_own() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", "-C", str(_library.path())], capture_output=True, text=True
    )
    if symbols.returncode != 0:
        pytest.skip("no nm")
    assert not [line for line in symbols.stdout.splitlines() if "moestro::" in line or "cblas_" in line]


def test_import_loads_nothing_heavy() -> None:
    done = python(
        "import sys, moestro; print([m for m in sys.modules if m.split('.')[0] in ('triton', 'matplotlib')])"
    )
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


def test_doctor(capsys: pytest.CaptureFixture) -> None:
    assert doctor.doctor()
    text = capsys.readouterr().out
    for part in (
        moestro.__version__,
        torch.__version__,
        str(_library.path()),
        "reference,cpu",
        "self-test passed",
    ):
        assert part in text


def test_doctor_command() -> None:
    arguments = [sys.executable, "-m", "moestro.doctor"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)]),
    }

    def run(*more: str, **settings: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*arguments, *more], env={**environment, **settings}, capture_output=True, text=True, timeout=120
        )

    done = run("--shape", "64,32,16,8,2", "--dtype", "float32", "--activation", "relu2")
    assert done.returncode == 0, done.stderr
    assert "T=64 d=32 n=16 E=8 K=2 float32 relu2" in done.stdout
    done = run("--shape", "64,32")
    assert done.returncode == 2 and "is not T,d,n,E,K" in done.stderr
    done = run("--activation", "swish")
    assert done.returncode == 1 and "activation is 'swish'" in done.stderr
    done = run(MOESTRO_LIBRARY="/nowhere/libmoestro_torch.so")
    assert done.returncode == 1 and "compiled library is missing" in done.stderr


def test_reference_backend_for_cpu_tensors() -> None:
    done = python(
        "import torch, moestro\n"
        "moe = moestro.MoE(8, 6, 4, 2)\n"
        "moe(torch.randn(3, 8)).sum().backward()\n"
        "print(torch.ops.moestro.describe_path(4, 8, 6, 4, 2, torch.float32, torch.device('cpu')))",
        MOESTRO_BACKEND="reference",
    )
    assert done.returncode == 0 and "reference" in done.stdout, done.stderr


@pytest.mark.skipif(moestro.BUILD["cuda"] == "ON", reason="this build has the CUDA backend")
def test_no_cuda_backend_is_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match="no CUDA backend"):
        torch.ops.moestro.describe_path(4, 8, 6, 4, 2, torch.float32, torch.device("cuda", 0))
