#!/usr/bin/env python3
"""Checks what tracked text says about the repository, and what it must not say.

In Markdown files: every relative link and its #anchor exists; every path in backquotes that starts with one
of the repository's folders exists (`*` must match something, `<stage>` stands for each of the six stages);
every `make target` named is in the Makefile. In all files: no path of somebody's machine and no host of a
package registry. Prints one line for each fault; exits with 1 when there is any.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("router", "dispatch", "up", "activation", "down", "combine")
FOLDERS = (
    "bench",
    "cli",
    "cmake",
    "docs",
    "examples",
    "include",
    "python",
    "src",
    "tests",
    "tools",
    ".ci",
)

FORBIDDEN = (
    (re.compile(r"(?<![\w.~}$)*-])/(work|opt|root|home)/"), "a path of one machine"),
    (
        re.compile(r"\b(pypi\.org|pythonhosted\.org|deb\.debian\.org|conda\.anaconda\.org|ghcr\.io)"),
        "a registry",
    ),
)

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
QUOTED_PATH = re.compile(r"`((?:" + "|".join(re.escape(f) for f in FOLDERS) + r")/[\w./<>*{},-]+)`")
MAKE_TARGET = re.compile(r"`make ([a-z-]+)[^`]*`")


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", without_code_blocks(text), flags=re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower()
        found.add(plain.replace(" ", "-"))
    return found


def check_link(file: Path, target: str) -> str | None:
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    destination = (file.parent / name).resolve() if name else file
    if not destination.exists():
        return f"link to {target}, which does not exist"
    if anchor and destination.suffix == ".md" and anchor not in anchors(destination.read_text()):
        return f"link to {target}: no such heading"
    return None


def expand_braces(path: str) -> list[str]:
    match = re.search(r"\{([^}]*)\}", path)
    if not match:
        return [path]
    return [
        full
        for choice in match.group(1).split(",")
        for full in expand_braces(path[: match.start()] + choice + path[match.end() :])
    ]


def check_path(path: str) -> str | None:
    path = path.rstrip(".,")
    for stage in STAGES if "<stage>" in path else ("",):
        for full in expand_braces(path.replace("<stage>", stage)):
            if "<" in full:
                continue
            if "*" in full:
                if not any(ROOT.glob(full)):
                    return f"names {path}, which matches nothing"
            elif not (ROOT / full).exists():
                return f"names {full}, which does not exist"
    return None


def check_markdown(file: Path, targets: set[str]) -> list[str]:
    text = without_code_blocks(file.read_text())
    faults = [check_link(file, next(filter(None, groups))) for groups in LINK.findall(text)]
    faults += [check_path(path) for path in QUOTED_PATH.findall(text)]
    faults += [
        f"names `make {target}`, which is not in the Makefile"
        for target in MAKE_TARGET.findall(text)
        if target not in targets
    ]
    return [fault for fault in faults if fault]


def check_forbidden(file: Path) -> list[str]:
    try:
        text = file.read_text()
    except UnicodeDecodeError:
        return []
    return [
        f"line {number}: {what}: {match.group(0)}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, what in FORBIDDEN
        if (match := pattern.search(line))
    ]


def main() -> int:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    faults = []
    files = tracked_files()
    for file in files:
        found = check_forbidden(file)
        if file.suffix == ".md":
            found += check_markdown(file, targets)
        faults += [f"{file.relative_to(ROOT)}: {fault}" for fault in found]
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"docs: {len(files)} files checked, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
