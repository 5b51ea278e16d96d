"""Collection of a remote store: what nothing names is taken aside first, and removed by a later collection.

No lock reaches all who push to a URL, so an object is never removed from under its name. A collection moves it to
trash/<time>/<name>; one that runs at least a grace period later removes it there, unless something names it by then, in
which case it is put back. Readers that find a name absent look in trash/, so nothing is ever missing.

Why that is safe: a push relies on an object only if it found it under its own name, and sends it otherwise. Say it
found it at time t and took less than the grace period G. A collection that takes the object aside does so at T >= t,
and one that removes it runs at T + G or later, when the record of that push is there and names it: then it is put
back. A record that a push relied on is protected by its ref in the same way: a collection first puts back whatever any
record names, then takes aside records before what they name. What has to hold: no push takes longer than G, less the
time a request takes and the difference between the clocks of the machines that collect.
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable, Iterable, Sequence

from .collected import Collected
from .names import CHUNKS, FILES, RECORDS, TMP, TRASH
from .reach import named_by_lists, named_by_records, named_by_refs
from .remote_objects import STAMP, RemoteObjects
from .store import Store
from .threads import side_by_side

_STEP_S = 600


class _Listing:
    """The names of a remote store, kept true while objects are moved; `trash` has the newest place of each name."""

    def __init__(self, objects: RemoteObjects, dry_run: bool) -> None:
        self.objects = objects
        self.dry_run = dry_run
        self.here = {name for folder in (RECORDS, FILES, CHUNKS) for name in objects.names(folder)}
        self.trash: dict[str, str] = {}
        self.old: list[str] = []
        for folder in objects.trash_folders():
            for place in objects.names(folder):
                name = place.removeprefix(f"{folder}/")
                self.old.append(place)
                self.trash[name] = place

    def below(self, folder: str) -> set[str]:
        """Return the names in a folder."""
        return {name for name in self.here if name.startswith(f"{folder}/")}

    def restore(self, names: Iterable[str]) -> int:
        """Put back what is named and absent; return how many that were."""
        absent = sorted(name for name in names if name not in self.here and name in self.trash)
        self._each(lambda name: self.objects.move(self.trash[name], name), absent)
        restored = {self.trash[name] for name in absent}
        self.old = [place for place in self.old if place not in restored]
        self.here |= set(absent)
        return len(absent)

    def take_aside(self, names: Sequence[str]) -> int:
        """Move objects to trash/, each under a time soon after, and return their bytes."""
        num_bytes = sum(side_by_side(self.objects.size, names, self.objects.jobs))
        self._each(lambda name: self.objects.move(name, f"{TRASH}/{_stamp()}/{name}"), names)
        return num_bytes

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects for good, and return their bytes."""
        num_bytes = sum(side_by_side(self.objects.size, names, self.objects.jobs))
        self._each(self.objects.remove, names)
        return num_bytes

    def _each(self, work: Callable[[str], None], names: Sequence[str]) -> None:
        if not self.dry_run:
            for _ in side_by_side(work, names, self.objects.jobs):
                pass


def collect_remote(
    store: Store, objects: RemoteObjects, keep_s: float, dry_run: bool, grace_s: float
) -> Collected:
    """Collect a remote store; see `collect`. Counts what is removed, and what is taken aside, apart."""
    now = _now()
    listing = _Listing(objects, dry_run)
    referred = named_by_refs(store)
    restored = listing.restore(referred)
    records = listing.below(RECORDS)
    restored += listing.restore(lists := named_by_records(store, records))
    restored += listing.restore(named_by_lists(store, lists))
    kept = {name for name in records if name in referred or _is_young(objects, name, keep_s)}
    kept_lists = named_by_records(store, kept)
    needed = kept | kept_lists | named_by_lists(store, kept_lists)
    # What names comes before what is named: a kill leaves nothing that names what is aside alone.
    gone = [sorted(listing.below(folder) - needed) for folder in (RECORDS, FILES, CHUNKS)]
    aside_bytes = sum([listing.take_aside(names) for names in gone])
    old = [place for place in listing.old if _is_old(place.split("/")[1], now, grace_s)]
    left = [name for name in objects.names(TMP) if _is_old(name.split("/")[1].split("-")[0], now, grace_s)]
    num_bytes = listing.remove([*old, *left])
    kinds = collections.Counter(place.split("/")[2] for place in old)
    return Collected(
        records=kinds[RECORDS],
        files=kinds[FILES],
        chunks=kinds[CHUNKS],
        num_bytes=num_bytes,
        leftovers=len(left),
        kept_records=len(kept),
        aside=sum(map(len, gone)),
        aside_bytes=aside_bytes,
        restored=restored,
    )


def _stamp() -> str:
    """Return a time that is not before now, one of few: each is a folder that readers look into."""
    now = _now()
    return (now + datetime.timedelta(seconds=_STEP_S - now.timestamp() % _STEP_S)).strftime(STAMP)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _is_young(objects: RemoteObjects, name: str, than_s: float) -> bool:
    age_s = objects.age_s(name)
    return age_s is None or age_s < than_s


def _is_old(stamp: str, now: datetime.datetime, grace_s: float) -> bool:
    try:
        then = datetime.datetime.strptime(stamp, STAMP).replace(tzinfo=datetime.timezone.utc)
    except ValueError:
        return False
    return (now - then).total_seconds() > grace_s
