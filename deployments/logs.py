"""Logging of a replica: our own loggers to standard error, which Ray keeps per process. Request ids, never prompts."""

import logging
import sys


def configure_logs(level: str = "INFO") -> None:
    """Send `kvtide.*` at `level` (a name of `logging`) to standard error; calling it again changes nothing."""
    logger = logging.getLogger("kvtide")
    if logger.handlers:
        return
    # Serve turns sys.stderr into a logger that holds lines back until a thousand have come.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
