"""The fleet of deploy/ci on tiny checkpoints: its files where a user puts them, a store in a folder, its own key."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ci_runner import Machine, Site

ROOT = Path(__file__).parents[2]
CI = ROOT / "deploy" / "ci"
HOSTED = Machine(frozenset({"ubuntu-24.04", "ubuntu-latest"}))
H100 = ("self-hosted", "linux", "gpu", "h100")
_SHARED = (
    "plansmith.yaml",
    "checkpoints.txt",
    "fetch-checkpoints.sh",
    "requirements.txt",
    "requirements-gpu.txt",
)
_PLACES = {
    "github": {
        "github/fleet.yml": ".github/workflows/fleet.yml",
        "github/setup/action.yml": ".github/actions/setup/action.yml",
    },
    "gitlab": {
        "gitlab/fleet.gitlab-ci.yml": ".gitlab-ci.yml",
        "gitlab/plansmith-jobs.yml": ".gitlab/plansmith-jobs.yml",
    },
}
System = Literal["github", "gitlab"]


def places(system: System) -> dict[str, str]:
    """Return where the files of deploy/ci go in a repository."""
    return {**{name: name for name in _SHARED}, **_PLACES[system]}


def lay_out(system: System, repository: Path) -> None:
    """Copy the files of deploy/ci to where they go."""
    for name, place in places(system).items():
        (repository / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CI / name, repository / place)


def checkpoints() -> dict[str, tuple[str, str]]:
    """Return the models of checkpoints.txt: name -> repository and commit."""
    lines = [line.split() for line in (CI / "checkpoints.txt").read_text().splitlines()]
    return {words[0]: (words[1], words[2]) for words in lines if words and words[0] != "#"}


def make_site(
    root: Path, system: System, environ: Mapping[str, str], models: Mapping[str, Path]
) -> tuple[Site, str]:
    """Return a place with the fleet's repository and its checkpoints, and the private key that it trusts.

    models : the tiny checkpoint that is downloaded for each model
    Of the committed files only plansmith.yaml is edited: the store, the key, the fingerprints, small limits.
    """
    from plansmith.builder.checkpoint import open_checkpoint
    from plansmith.fleet.store.signing import make_key

    site = Site(root, environ, [HOSTED])
    lay_out(system, site.repository)
    pairs = [
        ("s3://acme-engines/fleet", site.store.as_uri()),
        ("ed25519:the-line-that-plansmith-fleet-keygen-prints", make_key(root / "key.pem")),
        (
            "{max_seq_len: 4096, max_batch_size: 16}",
            "{max_seq_len: 64, max_batch_size: 2, max_num_tokens: 64}",
        ),
    ]
    text = (site.repository / "plansmith.yaml").read_text()
    for model, (repository, commit) in checkpoints().items():
        shutil.copytree(models[model], site.hub / repository / commit)
        (pinned,) = re.findall(rf'checkpoint: checkpoints/{model}\n +revision: "0{{64}}"', text)
        fingerprint = open_checkpoint(site.hub / repository / commit).fingerprint()
        pairs.append((pinned, pinned.replace("0" * 64, fingerprint)))
    site.edit("plansmith.yaml", *pairs)
    return site, (root / "key.pem").read_text()


def fork(site: Site, root: Path) -> Site:
    """Return a copy of a place, to go on from where it is; the store's URL is the copy's."""
    skipped = shutil.ignore_patterns("jobs")
    shutil.copytree(site.root, root, ignore=skipped, symlinks=True)
    copy = Site(root, site.environ, site.machines)
    copy.edit("plansmith.yaml", (site.store.as_uri(), copy.store.as_uri()))
    return copy


def leaks(site: Site, key: str) -> list[str]:
    """Return the files of jobs, caches, artifacts and the store in which a private key's text is."""
    secret = key.splitlines()[1].encode()
    files = [path for path in site.root.rglob("*") if path.is_file() and not path.is_symlink()]
    kept = [
        path for path in files if path.name != "key.pem" and path.suffix != ".secret"
    ]  # who has to have it
    return [str(path) for path in kept if secret in path.read_bytes()]


def members(site: Site) -> set[str]:
    """Return the members that the shared store has a plan of."""
    folder = site.store / "refs" / "chat"
    return {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.json")}


def records(site: Site) -> set[str]:
    """Return the keys of the plans that the members in the shared store have."""
    folder = site.store / "refs" / "chat"
    return {json.loads(path.read_text())["key"] for path in folder.rglob("*.json")}


def spoil(site: Site) -> None:
    """Change a byte of what the shared store holds."""
    chunk = max(
        (site.store / "chunks").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0
    )
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.chmod(0o644)
    chunk.write_bytes(content)


def unsign(site: Site, member: str) -> None:
    """Take the signatures off the record of a member's plan in the shared store."""
    ref = json.loads((site.store / "refs" / "chat" / f"{member}.json").read_text())
    path = site.store / "records" / f"{ref['key']}.json"
    path.chmod(0o644)
    path.write_text(json.dumps({**json.loads(path.read_text()), "signatures": []}))
