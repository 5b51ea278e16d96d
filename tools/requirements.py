"""Print the requirements of the project and of the extras given, one a line, self-references resolved.

The Makefile installs them apart from the package, so that a changed source file does not resolve them again.
"""

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def requirements(extras: list[str]) -> list[str]:
    """Return the project's own requirements and those of `extras`, without spaces, in order."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    found: list[str] = list(project["dependencies"])
    pending = list(extras)
    while pending:
        for requirement in project["optional-dependencies"][pending.pop(0)]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
            if own:
                pending += own.group(1).split(",")
            elif requirement not in found:
                found.append(requirement)
    return found


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
