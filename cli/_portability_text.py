"""The words of `plansmith inspect --runs-on` and `--upgrade`, from what _portability.py found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..runtime.manifest import BUILDABLE

if TYPE_CHECKING:
    from ..runtime.manifest import Manifest


def refusal(manifest: Manifest, places: Mapping[str, Any]) -> str | None:
    """Return the sentence on the places where no target runs; None = there is one everywhere."""
    nowhere = [word for word, facts in places.items() if not facts["runs"]]
    if not nowhere:
        return None
    on = "runs without a GPU" if nowhere == ["cpu"] else f"runs on {' or '.join(nowhere)}"
    told = dict.fromkeys(text for word in nowhere for text in _advice(places[word]))
    return f"no target of {manifest.root} {on}; {', or '.join(told)}"


def _advice(facts: Mapping[str, Any]) -> list[str]:
    """Return what to do where nothing runs."""
    if facts["build"] is not None:
        return [f"build one{_how(facts['build'])}: {facts['build']['command']}"]
    # A target for it is there, so what it lacks is the answer; what is for other GPUs has none.
    lacking = [one for one in facts["targets"].values() if facts["sm"] in one["sm"] or facts["sm"] is None]
    advice = [": ".join([", and ".join(one["fixes"]), *one["commands"]]) for one in lacking if one["fixes"]]
    return advice or [f"this version builds for {', '.join(BUILDABLE)}"]


def _how(build: Mapping[str, Any]) -> str:
    """Return what there is to say before a command that builds a target."""
    there = " on a machine with that GPU" if build["on_that_gpu"] else ""
    return there + (f" ({build['remark']})" if build["remark"] else "")


def print_places(places: Mapping[str, Any]) -> None:
    """Print a paragraph a place, a line or more a target."""
    for word, facts in places.items():
        sm = f", {facts['sm']}" if facts["sm"] and facts["sm"] not in facts["title"] else ""
        print(f"{word} ({facts['title']}{sm}): {'runs' if facts['runs'] else 'no target runs there'}")
        for name, one in facts["targets"].items():
            _print_target(name, one)
        if facts["build"] is not None:
            print(f"  to build one that does{_how(facts['build'])}: {facts['build']['command']}")


def _print_target(name: str, one: Mapping[str, Any]) -> None:
    needs = f", with {' and '.join(one['needs'])}" if one["needs"] and one["runs"] else ""
    head = f"runs on the {one['device'].upper()}{needs}" if one["runs"] else "does not run"
    print(f"  {name}: {head}")
    lines = [
        *(f"why: {reason}; {fix}" for reason, fix in zip(one["reasons"], one["fixes"], strict=True)),
        *(f"to build it again: {command}" for command in one["commands"]),
        *(f"warning: {text}" for text in one["warnings"]),
        *(f"memory: {one['memory']['words']}" for _ in range(one["runs"] and one["memory"] is not None)),
        *(f"note: {text}" for text in one["notes"] if one["runs"]),
    ]
    for line in lines:
        print(f"    {line}")


def print_upgrade(facts: Mapping[str, Any]) -> None:
    """Print a line or more a target, and the command that builds what is stale."""
    listed = ", ".join(f"{name} {version}" for name, version in facts["upgrades"].items())
    print(f"after an upgrade to {listed}:")
    for name, one in facts["targets"].items():
        print(f"  {name}: {'has to be built again' if one['rebuild'] else 'stays'}")
        for text in (*(f"why: {reason}" for reason in one["reasons"]), *(f"note: {n}" for n in one["notes"])):
            print(f"    {text}")
    if facts["command"]:
        print(f"with the new versions installed, run: {facts['command']}")
