"""The one exception whose text is meant for the person at the command line."""


class TrainError(Exception):
    """Something the user can put right; printed as one sentence, without a traceback."""
