"""What `plansmith inspect` finds out with --runs-on and --upgrade; _portability_text.py says it."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import InvalidArgumentError
from ..runtime.manifest import BUILDABLE
from ..sizing import releases
from ..sizing.portability import REBUILT, Problem, Verdict, runs_on, stale_after, upgrade_notes
from ..sizing.skus import Sku, find_sku
from ..sizing.upgrades import UPGRADABLE
from ._engine_memory import Fit, fit

if TYPE_CHECKING:
    from ..runtime.executors.kernel_bundle import BundleEntry
    from ..runtime.manifest import Manifest

_FLEET_FILE = "plansmith.yaml"

Place = Sku | str | None
"""A GPU, the compute capability of one, or a machine without."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is known of the machine that is asked about, from the command line; None = not said.

    versions : of the compilers' libraries there, by the compilers' names in manifests
    """

    driver: tuple[int, ...] | None
    versions: Mapping[str, str]
    platform: str | None


def words_of(options: Sequence[str]) -> list[str]:
    """Return the words of an option that may be given several times and hold commas."""
    return list(dict.fromkeys(word.strip() for one in options for word in one.split(",") if word.strip()))


def find_place(word: str) -> Place:
    """Return what a word of --runs-on stands for: "l40s", "sm89" or "8.9", "cpu"."""
    number = re.fullmatch(r"sm_?([0-9]{2,3})|([0-9]{1,2})\.([0-9])", word.lower())
    if word.lower() == "cpu":
        return None
    return find_sku(word) if number is None else f"sm{number[1] or number[2] + number[3]}"


def machine(driver: str | None, with_: Sequence[str], platform: str | None) -> Machine:
    """Return the machine of --driver, --with and --platform; raises InvalidArgumentError."""
    versions = pairs(with_, "--with", tuple(releases.COMPILERS))
    return Machine(
        None if driver is None else releases.parse_driver(driver),
        versions,
        None if platform is None else releases.parse_platform(platform),
    )


def pairs(options: Sequence[str], flag: str, names: Sequence[str]) -> dict[str, str]:
    """Return NAME=VERSION words by their names; raises InvalidArgumentError.

    `plansmith` alone is the plansmith that runs.
    """
    from .. import __version__

    found: dict[str, str] = {}
    for word in words_of(options):
        name, equals, version = word.partition("=")
        name = name.strip().lower().replace("-", "_")
        if name == "plansmith" and not equals:
            equals, version = "=", __version__
        if name not in names or not equals or not releases.version_numbers(version):
            raise InvalidArgumentError(
                f"{flag} {word!r} is not understood; give NAME=VERSION, e.g. {names[0]}=1.8.0, with a name of "
                f"{', '.join(names)}"
            )
        if name in found:
            raise InvalidArgumentError(f"{flag} names {name} twice; give one version of it")
        found[name] = version.strip()
    return found


# ---------------------------------------------------------------- --runs-on


def where_it_runs(
    manifest: Manifest, words: Sequence[str], there: Machine, kernels: Mapping[str, BundleEntry]
) -> dict[str, Any]:
    """Return, by the words of --runs-on, what each target does there, as JSON values.

    kernels : the bundles beside the plans, by target
    """
    return {word: _place_facts(manifest, find_place(word), there, kernels) for word in words}


def _judge(
    manifest: Manifest, name: str, place: Place, there: Machine, bundle: BundleEntry | None
) -> Verdict:
    """Return the verdict on a target, with a warning where its draft does not run there."""
    entry, sms = manifest.targets[name], None if bundle is None else bundle.sms()
    ask = functools.partial(
        runs_on,
        where=place,
        driver=there.driver,
        platform=there.platform,
        compiler_version=there.versions.get(entry.compiler),
    )
    verdict = ask(entry, kernel_sms=sms)
    if isinstance(place, Sku) and place.sm in entry.sm:
        verdict = _with_memory(verdict, fit(manifest, name, place))
    draft = None if manifest.draft is None else manifest.draft.targets.get(name)
    if draft is None or not verdict.ok:
        return verdict
    texts = tuple(f"its draft does not run there: {reason}" for reason in ask(draft).reasons)
    return dataclasses.replace(verdict, warnings=(*verdict.warnings, *texts))


def _with_memory(verdict: Verdict, found: Fit) -> Verdict:
    """Return a verdict with what a GPU's memory adds: a problem where it is too small whatever is estimated."""
    if found.is_impossible:
        fix = "take a GPU with more memory, a precision with fewer bits, or --weight-streaming"
        problem = Problem("memory", found.words(), fix)
        return dataclasses.replace(verdict, problems=(*verdict.problems, problem))
    if not found.sequences:
        warning = f"by estimate {found.words()}; serve shorter sequences, or build with a smaller batch"
        return dataclasses.replace(verdict, warnings=(*verdict.warnings, warning))
    return verdict


def _place_facts(
    manifest: Manifest, place: Place, there: Machine, kernels: Mapping[str, BundleEntry]
) -> dict[str, Any]:
    verdicts = {name: _judge(manifest, name, place, there, kernels.get(name)) for name in manifest.targets}
    # A cpu plan runs beside every GPU, which is no answer to a question about a GPU.
    device = "cpu" if place is None else "gpu"
    running = [name for name, one in verdicts.items() if one.ok and one.device == device]
    facts: dict[str, Any] = {"runs": bool(running), "targets": {}, **_title(place)}
    for name, verdict in verdicts.items():
        own = {"sm": list(manifest.targets[name].sm), "commands": _commands(manifest, name, verdict)}
        facts["targets"][name] = _verdict_facts(verdict) | own | {"memory": _memory(manifest, name, place)}
    return facts | {"build": None if running else _build(manifest, place)}


def _memory(manifest: Manifest, name: str, place: Place) -> dict[str, Any] | None:
    """Return how a target for a GPU of the table fits it; None for others."""
    if not isinstance(place, Sku) or place.sm not in manifest.targets[name].sm:
        return None
    found = fit(manifest, name, place)
    return {
        "sequences": found.sequences,
        "max_seq_len": found.max_seq_len,
        "bytes_of_one": dataclasses.asdict(found.use),
        "words": found.words(),
    }


def _title(place: Place) -> dict[str, Any]:
    if isinstance(place, Sku):
        return {"title": place.title, "sm": place.sm, "memory_bytes": place.memory_bytes}
    return {"title": "a machine without a GPU" if place is None else f"a GPU of {place}", "sm": place}


def _verdict_facts(verdict: Verdict) -> dict[str, Any]:
    return {
        "runs": verdict.ok,
        "device": verdict.device,
        "reasons": list(verdict.reasons),
        "fixes": list(verdict.fixes),
        "needs": list(verdict.needs),
        "warnings": list(verdict.warnings),
        "notes": list(verdict.notes),
    }


def _commands(manifest: Manifest, name: str, verdict: Verdict) -> list[str]:
    """Return what builds a target again, where that helps."""
    if any(one.kind in REBUILT for one in verdict.problems):
        return [_rebuild(manifest, name)]
    return []


def _fleet_dir(manifest: Manifest) -> Path | None:
    """Return the directory of the fleet file that an engine is of: `plansmith fleet build` makes engines/NAME there."""
    folder = manifest.root.absolute().parent
    is_fleet = folder.name == "engines" and (folder.parent / _FLEET_FILE).is_file()
    return folder.parent if is_fleet else None


def _rebuild(manifest: Manifest, targets: str) -> str:
    """Return the command that builds targets again: of a fleet's engine its fleet's, which compiles what is stale."""
    fleet = _fleet_dir(manifest)
    if fleet is None:
        return f"{manifest.build_command(targets)} --force"
    return f"plansmith fleet build -f {shlex.quote(str(fleet))}"


def _build(manifest: Manifest, place: Place) -> dict[str, Any] | None:
    """Return the command that makes a target which runs somewhere, whether it takes the GPU itself, and a remark.

    None where this version builds no such target, and where the engine has one, which only lacks something there
    """
    from ..builder.targets.registry import find_targets
    from ..builder.targets.support import takes
    from ..builder.targets.support_table import WORDS

    name = place.sm if isinstance(place, Sku) else place or "cpu"
    has = any(name in entry.sm or name == own for own, entry in manifest.targets.items())
    if has or name not in BUILDABLE:
        return None
    (target,) = find_targets([name])
    fleet = _fleet_dir(manifest)
    if fleet is not None:
        sku = place.name if isinstance(place, Sku) else name
        return {
            "command": f"plansmith fleet build -f {shlex.quote(str(fleet))}",
            "on_that_gpu": target.compiler == "tensorrt",
            "remark": f"add {sku} to the engine's skus in {fleet / _FLEET_FILE} first",
        }
    remark, need = None, manifest.precision
    if need in WORDS and not takes(target.compiler, target.sm, need):
        remark = f"{name} has no {WORDS[need]}, so as an engine of its own"
        root = manifest.root.with_name(f"{manifest.root.name}-fp16")
        manifest = dataclasses.replace(manifest, precision="fp16", root=root, draft=None)
    command = manifest.build_command(name)
    return {"command": command, "on_that_gpu": target.compiler == "tensorrt", "remark": remark}


# ---------------------------------------------------------------- --upgrade


def after_upgrade(manifest: Manifest, options: Sequence[str]) -> dict[str, Any]:
    """Return what the upgrades of --upgrade mean for each plan, as JSON values; drafts go with their targets."""
    upgrades = pairs(options, "--upgrade", UPGRADABLE)
    if not upgrades:
        raise InvalidArgumentError("--upgrade is empty; give NAME=VERSION, e.g. --upgrade tensorrt_rtx=1.8.0")
    targets: dict[str, Any] = {}
    for name, entry in manifest.targets.items():
        draft = None if manifest.draft is None else manifest.draft.targets.get(name)
        entries = [entry] if draft is None else [entry, draft]
        reasons = list(dict.fromkeys(reason for one in entries for reason in stale_after(one, upgrades)))
        targets[name] = {
            "rebuild": bool(reasons),
            "reasons": reasons,
            "notes": upgrade_notes(entry, upgrades),
        }
    stale = [name for name, one in targets.items() if one["rebuild"]]
    command = _rebuild(manifest, ",".join(stale)) if stale else None
    return {"upgrades": upgrades, "targets": targets, "command": command}
