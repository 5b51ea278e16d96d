"""The supervisor's process: options as JSON on standard input, lines about the start on standard error."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys

from ...runtime.errors import Error
from .options import SupervisorOptions
from .supervisor import Supervisor


def main() -> int:
    """Supervise and return the exit status."""
    options = SupervisorOptions.from_json(sys.stdin.read())
    return supervise(options)


def supervise(options: SupervisorOptions) -> int:
    """Run a supervisor in this process, with its log where the options say, and return the exit status."""
    console = logging.StreamHandler(sys.stderr)
    line = "%(asctime)s %(levelname)s %(message)s"
    console.setFormatter(logging.Formatter(line if options.is_foreground else "%(message)s"))
    logger = logging.getLogger("plansmith.triton")
    logger.setLevel(logging.INFO)
    logger.addHandler(console)
    logging.raiseExceptions = False  # a full disk or a closed terminal does not end the supervision

    def detach() -> None:
        """Let go of whoever started this process: from now on the log file alone is written."""
        logger.removeHandler(console)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(null)

    try:
        if not options.is_foreground:
            options.state_dir.mkdir(parents=True, exist_ok=True)
            file = logging.handlers.RotatingFileHandler(
                options.state_dir / "supervisor.log",
                maxBytes=options.log_bytes,
                backupCount=3,
                encoding="utf-8",
            )
            file.setFormatter(logging.Formatter(line))
            logger.addHandler(file)
        return Supervisor(options).run((lambda: None) if options.is_foreground else detach)
    except (Error, OSError) as error:
        logger.removeHandler(console)
        logger.error("%s", error)
        print("error: " + str(error).replace("\n", "\n    "), file=sys.stderr)
        return 1
    except Exception:
        logger.exception("this is a bug in plansmith, report it with these lines")
        return 1


if __name__ == "__main__":
    sys.exit(main())
