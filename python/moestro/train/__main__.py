"""``python -m moestro.train``; see cli.py."""

import sys

from moestro.train.cli import main

sys.exit(main())
