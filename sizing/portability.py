"""Which plan runs where, and what an upgrade makes stale: from a manifest's entry alone. Standard library only.

verdict = runs_on(manifest.targets["sm89"], find_sku("l40s"), driver=(580, 65))
if not verdict.ok:
    print(*verdict.reasons, *verdict.fixes)

Nothing here asks this machine anything. docs/portability.md has the rules with their sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from ..runtime.errors import InvalidArgumentError
from . import releases
from .releases import COMPILERS, CPU_PLAN_FORMAT
from .skus import Sku, find_sku
from .upgrades import stale_after as stale_after
from .upgrades import upgrade_notes as upgrade_notes

if TYPE_CHECKING:
    from ..runtime.manifest_entries import TargetEntry

Kind = Literal["gpu", "compiler", "version", "platform", "driver", "kernels", "format", "memory"]
"""What a problem is about. "version", "platform", "kernels" and "format" go away when the target is built again;
"memory" is for callers that know the GPU's."""

REBUILT: frozenset[Kind] = frozenset({"version", "platform", "kernels", "format"})
# GPUs that are sold with a processor of their own, and so with a platform.
_OWN_PLATFORM = {"gh200": "linux-aarch64"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One reason why a plan does not run somewhere, and what to do about it, in words."""

    kind: Kind
    text: str
    fix: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a plan runs somewhere.

    device : what it would run on there
    problems : why it does not; () = it does
    needs : what has to be there, of what nobody said whether it is
    warnings : what may go wrong, or slower, all the same
    notes : what to know besides
    """

    device: Literal["gpu", "cpu"]
    problems: tuple[Problem, ...] = ()
    needs: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it runs."""
        return not self.problems

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it does not run."""
        return tuple(one.text for one in self.problems)

    @property
    def fixes(self) -> tuple[str, ...]:
        """What to do about it."""
        return tuple(one.fix for one in self.problems)


@dataclasses.dataclass(frozen=True)
class _Place:
    """The machine that is asked about; what is None was not said."""

    title: str
    sm: str
    sku: Sku | None
    driver: tuple[int, ...] | None
    version: str | None
    platform: str | None


def runs_on(
    entry: TargetEntry,
    where: Sku | str | None,
    *,
    driver: tuple[int, ...] | None = None,
    compiler_version: str | None = None,
    platform: str | None = None,
    kernel_sms: Sequence[int] | None = None,
) -> Verdict:
    """Return whether a target's plan runs on a GPU.

    where : the GPU, or its compute capability such as "sm89"; None = a machine without one
    driver : the NVIDIA driver's version there, e.g. (580, 65, 6)
    compiler_version : of the library there that runs this compiler's plans; of a cpu plan the format that is read there
    platform : e.g. "linux-x86_64"
    kernel_sms : what the kernels beside the plan are compiled for, 89 for 8.9 (BundleEntry.sms()); None = not looked at
    """
    if not entry.sm:
        return _on_cpu(entry, where, compiler_version)
    if where is None:
        text = f"the plan is for GPUs ({_listed(entry.sm)}), and that machine has none"
        return Verdict("gpu", (Problem("gpu", text, "open a cpu target there"),))
    if entry.compiler not in COMPILERS:
        text = f"the plan was made by {entry.compiler!r}, whose plans this version does not run"
        return Verdict("gpu", (Problem("compiler", text, "build the target again with this version"),))
    place = _place(where, driver, compiler_version, platform)
    return _Judge(entry, place, kernel_sms).verdict()


def _place(
    where: Sku | str, driver: tuple[int, ...] | None, version: str | None, platform: str | None
) -> _Place:
    if isinstance(where, str):
        return _Place(f"a GPU of {where}", where, None, driver, version, platform)
    own = platform or _OWN_PLATFORM.get(where.name)
    return _Place(where.title, where.sm, where, driver, version, own)


def _on_cpu(entry: TargetEntry, where: Sku | str | None, version: str | None) -> Verdict:
    """Return the verdict on a cpu plan, which any processor runs whose plansmith reads its format."""
    held = releases.version_numbers(entry.compiler_version)[:1]
    read = releases.version_numbers(version or str(CPU_PLAN_FORMAT))[:1]
    notes = () if where is None else ("it runs on that machine's processor, not on its GPU",)
    if held == read:
        return Verdict("cpu", notes=notes)
    text = f"the plan has format {_dotted(held)}, plansmith there reads format {_dotted(read)}"
    return Verdict("cpu", (Problem("format", text, "build the cpu target again"),), notes=notes)


class _Judge:
    """The rules for GPU plans, one a method; each adds to what it finds."""

    def __init__(self, entry: TargetEntry, place: _Place, kernel_sms: Sequence[int] | None) -> None:
        self.entry, self.place, self.kernel_sms = entry, place, kernel_sms
        self.compiler = COMPILERS[entry.compiler]
        self.made_by = f"{self.compiler.title} {entry.compiler_version}"
        self.problems: list[Problem] = []
        self.needs: list[str] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def verdict(self) -> Verdict:
        """Return what all rules say."""
        if self.place.sm in self.entry.sm:
            self._version()
            self._driver()
            self._platform()
            self._model()
            self._kernels()
        else:  # what else is amiss would be another plan's affair
            self._problem(
                "gpu",
                f"the plan is for {_listed(self.entry.sm)}, {self.place.title} is {self.place.sm}"
                if self.place.sku
                else f"the plan is for {_listed(self.entry.sm)}, not for {self.place.sm}",
                f"build a target for {self.place.sm}",
            )
        return Verdict(
            "gpu", tuple(self.problems), tuple(self.needs), tuple(self.warnings), tuple(self.notes)
        )

    def _problem(self, kind: Kind, text: str, fix: str) -> None:
        self.problems.append(Problem(kind, text, fix))

    def _version(self) -> None:
        entry, there, title = self.entry, self.place.version, self.compiler.title
        tied_to = releases.release(entry.compiler, entry.compiler_version)
        install = f"install {self.compiler.package}=={entry.compiler_version} there"
        if there is None:
            self.needs.append(f"{title} {tied_to}")
        elif not releases.is_same_release(entry.compiler, entry.compiler_version, there):
            self._problem(
                "version",
                f"the plan was made by {self.made_by}, {there} is there, and plans run on their own release alone "
                f"({tied_to})",
                f"{install}, or build the target again with {there}",
            )
        elif not releases.tells_release(entry.compiler, there):
            self.warnings.append(f"{title} {there} may be any release of that name; the plan needs {tied_to}")

    def _driver(self) -> None:
        entry, driver = self.entry, self.place.driver
        cuda = releases.package_cuda(entry)
        least = releases.least_driver(entry.compiler, cuda, self.place.sm)
        if driver is None:
            self.needs.append(f"an NVIDIA driver of r{least} or later")
        elif driver[0] < least:
            package = f"{self.made_by} for CUDA {cuda}" if cuda else self.made_by
            self._problem(
                "driver",
                f"the driver there is {_dotted(driver)}, {package} on {self.place.sm} asks for r{least} or later",
                f"install a driver of r{least} or later there",
            )
            if cuda is None:
                self.warnings.append(
                    "the manifest does not say which CUDA version the compiler's package was for; that of "
                    "plansmith's extras is taken"
                )

    def _platform(self) -> None:
        wanted, provenance = self.place.platform, self.entry.provenance
        if wanted is None or (provenance is not None and provenance.platform == wanted):
            return
        title = self.compiler.title
        if provenance is None and not self.compiler.is_portable:
            self.warnings.append(
                f"{title}'s plans run on the platform they were built on alone, and the manifest does not say whether "
                f"that was {wanted}"
            )
        elif not self.compiler.is_portable and provenance is not None:
            self._problem(
                "platform",
                f"the plan was built on {provenance.platform}, and {title}'s plans do not run on another "
                f"platform ({wanted})",
                f"build the target on {wanted}",
            )
        elif not wanted.endswith("-x86_64"):
            self.warnings.append(
                f"NVIDIA documents {title} for Linux and Windows on x86_64, not for {wanted}"
            )

    def _model(self) -> None:
        """Warn where kernels were chosen by their times on another model of GPU."""
        sku, provenance = self.place.sku, self.entry.provenance
        if not self.compiler.picks_by_timing:
            self.notes.append(
                "kernels are compiled for the GPU when it first runs them, and kept for later starts"
            )
            return
        timed = provenance.gpus if provenance is not None else ()
        if sku is not None and any(_is_model(name, sku) for name in timed):
            return
        on = f"on {_listed(timed)}" if timed else "on the GPU that built it"
        self.warnings.append(
            f"its kernels were chosen by their times {on}; another model of {self.place.sm} may run them slower, or "
            f"{self.compiler.title} may refuse"
        )

    def _kernels(self) -> None:
        from ..runtime.executors.kernel_bundle import runs_on as cubin_runs_on

        if not self.entry.kernel_files():
            self.notes.append("there are no device kernels beside the plan: tokens are drawn on the host")
        elif self.kernel_sms is not None:
            sm = releases.version_numbers(self.place.sm)[0]
            if not any(cubin_runs_on(one, sm) for one in self.kernel_sms):
                listed = _listed(f"sm{one}" for one in self.kernel_sms)
                text = f"the kernels beside the plan are compiled for {listed or 'nothing'}, not for sm{sm}"
                self._problem("kernels", text, "build the target again, which makes them")


def _is_model(name: str, sku: Sku) -> bool:
    try:
        return find_sku(name).name == sku.name
    except InvalidArgumentError:  # a GPU that is not in the table is another one
        return False


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers)) or "unknown"
