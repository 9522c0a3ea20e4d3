#!/usr/bin/env python3
"""Adds up JUnit files: prints 'N passed, N failed, N skipped', and exits with 1 when any failed.

Usage: count_tests.py PATH...   a file, or a folder whose *.xml files are read
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def count(path: Path) -> tuple[int, int, int]:
    passed = failed = skipped = 0
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"} or case.get("status") == "fail":
            failed += 1
        elif "skipped" in kinds or case.get("status") in ("disabled", "notrun"):
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main() -> int:
    total = [0, 0, 0]
    for argument in sys.argv[1:]:
        path = Path(argument)
        for file in sorted(path.glob("*.xml")) if path.is_dir() else [path]:
            total = [a + b for a, b in zip(total, count(file))]
    passed, failed, skipped = total
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
