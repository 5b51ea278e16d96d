"""The files that a profile can be written to: the picture and the JSON."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import BinaryIO

from ..runtime.errors import InvalidArgumentError
from . import _roofline_plot
from ._files import check_output, whole_file
from ._output import json_text
from ._profile import EngineProfile


@dataclasses.dataclass(frozen=True)
class ProfileFiles:
    """--profile-plot and --profile-json; None = not asked for."""

    plot: Path | None
    json: Path | None

    def __bool__(self) -> bool:
        return self.plot is not None or self.json is not None

    def check(self, workload: Path | None) -> None:
        """Refuse, before a long run, what could not be written behind it.

        workload : a file that is read, which neither may replace
        raises InvalidArgumentError; UnsupportedError where matplotlib is missing
        """
        if self.json is not None:
            if str(self.json) == "-":
                raise InvalidArgumentError(
                    "--profile-json - names no file; give one, or take --profile --json, whose object has the profile"
                )
            check_output("--profile-json", self.json)
        if self.plot is not None:
            check_output("--profile-plot", self.plot, _roofline_plot.SUFFIXES)
            _roofline_plot.pyplot()
        named = [("--workload", workload), ("--profile-plot", self.plot), ("--profile-json", self.json)]
        given = [(flag, os.path.realpath(path)) for flag, path in named if path is not None]
        for i, (flag, path) in enumerate(given):
            for other, same in given[:i]:
                if path == same:
                    raise InvalidArgumentError(f"{flag} and {other} are both {path}; give two names")

    def write(self, profile: EngineProfile) -> list[Exception]:
        """Write what is asked for, and return what went wrong; one that fails does not keep the other."""
        failures: list[Exception] = []
        for path, write in ((self.json, _write_json), (self.plot, self._draw)):
            try:
                if path is not None:
                    with whole_file(path) as out:
                        write(profile, out)
            except Exception as error:  # whatever it is, the run's result is still to be printed
                if os.environ.get("PLANSMITH_TRACEBACK") == "1":
                    raise
                failures.append(error)
        return failures

    def _draw(self, profile: EngineProfile, out: BinaryIO) -> None:
        assert self.plot is not None
        _roofline_plot.draw_profile(profile, out, self.plot.suffix.lower()[1:])


def _write_json(profile: EngineProfile, out: BinaryIO) -> None:
    out.write((json_text(profile.to_dict(), "utf-8", 2) + "\n").encode())
