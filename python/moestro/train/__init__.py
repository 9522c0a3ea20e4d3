"""Trainer of a small decoder-only Mixture-of-Experts language model: ``python -m moestro.train``.

Read in this order: config.py (what can be set), data.py, model.py, loop.py, then checkpoint.py, metrics.py,
report.py; cli.py holds the commands.
"""
