"""Keys and envelopes: who may have made a record, and each way in which that can be wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from plansmith.fleet.store import (
    DamagedError,
    PrivateKey,
    PublicKey,
    Ref,
    SignatureError,
    load_private,
    load_public,
    make_key,
    open_store,
    pull,
    push,
    verify,
)
from plansmith.fleet.store.envelope import encode
from plansmith.fleet.store.record import dump_ref
from plansmith.fleet.store.ref_signatures import sign_ref
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError
from stores import put, remotes, set_raw, sha256

PEM, RAW = serialization.Encoding.PEM, serialization.NoEncryption()


def key_pair(seed: int) -> tuple[PrivateKey, PublicKey]:
    private = PrivateKey(bytes([seed]) * 32)
    return private, private.public


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_keys_survive_their_files(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    text = make_key(path)
    assert re.fullmatch(r"ed25519:[A-Za-z0-9+/]{43}=", text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    private = load_private(path)
    assert private == load_private(path.read_text()) == load_private("\n" + path.read_text())
    assert private.public == load_public(text)
    assert private.public.text == text
    assert load_public(private.public.pem) == private.public
    (tmp_path / "key.pub").write_text(private.public.pem)
    assert load_public(tmp_path / "key.pub") == private.public
    assert private.public.verifies(private.sign(b"data"), b"data")
    assert not private.public.verifies(private.sign(b"data"), b"date")
    assert not private.public.verifies(b"", b"data")
    assert base64.b64encode(private.raw).decode() not in repr(private)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    make_key(tmp_path / "key.pem")
    before = (tmp_path / "key.pem").read_text()
    with pytest.raises(InvalidArgumentError, match="is there already"):
        make_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").read_text() == before
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        make_key(tmp_path / "absent" / "key.pem")


def test_what_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    make_key(path)
    curve = ec.generate_private_key(ec.SECP256R1())
    locked = ed25519.Ed25519PrivateKey.generate().private_bytes(
        PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    public = curve.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
    for private, words in (
        (tmp_path / "absent", "cannot be read"),
        (tmp_path / "binary", "is no private key in PEM form"),
        ("-----BEGIN PRIVATE KEY-----\nrubbish", "is no private key in PEM form"),
        ("MC4CAQAwBQYDK2VwBCIEIrubbish" + "A" * 36, "the key given as text is no private key in PEM form"),
        (
            "MC4CAQAwBQ\nrubbish\n-----END PRIVATE KEY-----",
            "the key given as text is no private key in PEM form",
        ),
        (curve.private_bytes(PEM, serialization.PrivateFormat.PKCS8, RAW).decode(), "wanted is Ed25519"),
        (locked.decode(), "has a passphrase"),
    ):
        with pytest.raises(InvalidArgumentError, match=words) as caught:
            load_private(private)
        assert "rubbish" not in str(caught.value)
    for text, words in (
        ("ed25519:" + "A" * 43, "is no public key"),
        ("ed25519:AAAA", "3 bytes, wanted are 32"),
        ("ed25519:!", "is no public key"),
        (path.read_text(), "is a private key"),
        (str(path), "is a private key"),
        (str(tmp_path / "binary"), "is no public key"),
        (public, "wanted is Ed25519"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            load_public(text)


def test_the_encoding_is_the_protocols() -> None:
    """The example of the protocol's own text."""
    assert encode(b"hello world", "http://example.com/HelloWorld") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    assert encode("grün".encode(), "é") == b"DSSEv1 2 \xc3\xa9 5 gr\xc3\xbcn"


def test_an_envelope_is_what_other_tools_read(tmp_path: Path) -> None:
    """Checked with openssl and json alone, as docs/store.md says it can be done by hand."""
    private, public = key_pair(1)
    store = open_store(tmp_path / "store", key=private)
    record = put(store, tmp_path, "a", {"targets/cpu/model.plan": b"plan"})
    envelope = json.loads((store.root / "records" / f"{record.key}.json").read_text())
    payload = base64.b64decode(envelope["payload"])
    statement = json.loads(payload)
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    (subject,) = statement["subject"]
    assert subject["name"] == "targets/cpu/model.plan"
    assert subject["digest"] == {"sha256": sha256(b"plan")}
    kind = envelope["payloadType"].encode()
    (tmp_path / "signed").write_bytes(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload))
    (tmp_path / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    (tmp_path / "pub.pem").write_text(public.pem)
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "pub.pem", "-rawin", "-in", "signed"]
    done = subprocess.run([*command, "-sigfile", "sig"], cwd=tmp_path, capture_output=True, text=True)
    assert "Signature Verified Successfully" in done.stdout, done.stderr
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", "pub.pem", "-outform", "DER"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert envelope["signatures"][0]["keyid"] == hashlib.sha256(der.stdout).hexdigest() == public.keyid


def test_each_way_a_signature_can_be_wrong(tmp_path: Path) -> None:
    private, public = key_pair(1)
    stranger, strange = key_pair(2)
    signed = open_store(tmp_path / "store", key=private)
    key, other = (put(signed, tmp_path, name, {"plan": name.encode()}).key for name in "ab")
    path = signed.root / "records" / f"{key}.json"
    store = open_store(signed.root, trust=[strange, public])
    record = store.record(key)
    assert record is not None
    assert record.signers == (public.keyid,)
    good = path.read_bytes()

    edit(path, signatures=[])
    with pytest.raises(
        SignatureError, match=r"is not signed, and wanted is a signature of one of 2 trusted keys"
    ):
        store.record(key)
    path.write_bytes(good)
    with pytest.raises(
        SignatureError, match=f"is signed by {public.keyid[:16]}, which is none of the 1 trusted key;"
    ):
        open_store(store.root, trust=[strange]).record(key)
    edit(path, payload=base64.b64encode(base64.b64decode(json.loads(good)["payload"]) + b" ").decode())
    with pytest.raises(SignatureError, match="was altered after it was signed"):
        store.record(key)
    # The id is a hint: a stranger's signature under a trusted id is none, a trusted one under any id is one.
    kind = {"keyid": public.keyid, "sig": base64.b64encode(stranger.sign(b"x")).decode()}
    path.write_bytes(good)
    edit(path, signatures=[kind])
    with pytest.raises(SignatureError, match="was altered after it was signed"):
        store.record(key)
    path.write_bytes(good)
    edit(path, signatures=[json.loads(good)["signatures"][0] | {"keyid": ""}])
    assert store.record(key) == record
    # A record with a good signature, under another's name.
    path.write_bytes((signed.root / "records" / f"{other}.json").read_bytes())
    with pytest.raises(EngineFileError, match=f"is the record of another key, {other}"):
        store.record(key)
    assert [problem.name for problem in verify(store)] == [f"records/{key}.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"payloadType": "text/plain"}, "has the payload type 'text/plain'"),
        ({"payload": 1}, "has no text 'payload'"),
        ({"payload": "%"}, "is no base64"),
        ({"signatures": {}}, "has no array 'signatures'"),
        ({"signatures": ["x"]}, "has a signature that is no object"),
        ({"signatures": [{"keyid": "x"}]}, "has no text 'sig'"),
    ],
)
def test_broken_envelopes(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", {"plan": b"x"}).key
    edit(store.root / "records" / f"{key}.json", **changes)
    with pytest.raises(EngineFileError, match=f"records/{key}.json .*{words}"):
        store.record(key)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_type": "https://in-toto.io/Statement/v2"}, "has _type"),
        ({"predicateType": "x"}, "has predicateType 'x'"),
        ({"predicate": []}, "has no object 'predicate'"),
        ({"subject": [1]}, "has a subject that is no object"),
        ({"subject": [{"name": "a"}]}, "has no object 'annotations'"),
        ({"_type": "x" * 1000}, r"has _type 'x{80}'\.\.\., wanted"),
        ({"more": 10**400}, "is no JSON .a number of 401 digits"),
        ({"more": float("nan")}, "is no JSON .NaN is no number"),
        ({"more": ["\ud800"]}, "has text that is not UTF-8"),
    ],
)
def test_broken_statements(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", {"plan": b"x"}).key
    path = store.root / "records" / f"{key}.json"
    statement = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))
    edit(path, payload=base64.b64encode(json.dumps(statement | changes).encode()).decode())
    with pytest.raises(EngineFileError, match=words):
        store.record(key)


@pytest.mark.parametrize(
    ("name", "size", "mode", "digest", "words"),
    [
        ("../../etc/passwd", 1, "0644", "a" * 64, "names a file that cannot be"),
        ("/etc/passwd", 1, "0644", "a" * 64, "names a file that cannot be"),
        ("plan", -1, "0644", "a" * 64, "has no whole number 'size'"),
        ("plan", True, "0644", "a" * 64, "has no whole number 'size'"),
        ("plan", 10**400, "0644", "a" * 64, "a number of 401 digits"),
        ("plan", 1, "4755", "a" * 64, "has the mode '4755'"),
        ("plan", 1, "0000", "a" * 64, "has the mode '0000', wanted is one of 0400 to 0777"),
        ("plan", 1, "0377", "a" * 64, "has the mode '0377'"),
        ("plan", 1, "0" * 999, "a" * 64, r"has the mode '0{80}'\.\.\., wanted"),
        ("plan", 1, "0644", "\x1b[31m", "has sha256 .*, which is not printable"),
        ("plan", 1, "0644", "../x", "which is no sha256"),
        ("x" * 256, 1, "0644", "a" * 64, "names a file that cannot be"),
    ],
)
def test_broken_subjects(tmp_path: Path, name: str, size: object, mode: str, digest: str, words: str) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", {"plan": b"x"}).key
    path = store.root / "records" / f"{key}.json"
    statement = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))
    statement["subject"] = [
        {"name": name, "digest": {"sha256": digest}, "annotations": {"size": size, "mode": mode}}
    ]
    edit(path, payload=base64.b64encode(json.dumps(statement).encode()).decode())
    with pytest.raises(EngineFileError, match=words):
        store.record(key)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": "0"}, "names the key '0', which is no sha256"),
        ({"key": "\x1b[31m"}, r"has key '\\x1b\[31m', which is not printable"),
        ({"kind": "\x1b[31m"}, r"has kind '\\x1b\[31m', which is not printable"),
        ({"inputs": {"\x1b]0;t\x07": "x"}}, r"has the input '\\x1b\]0;t\\x07' 'x', which is not printable"),
        ({"inputs": {"x": "a\nb"}}, r"has the input 'x' 'a\\nb', which is not printable"),
        ({"inputs": {"x": "\u202e"}}, r"has the input 'x' '\\u202e', which is not printable"),
        ({"inputs": {"x": "\ud800"}}, "has text that is not UTF-8"),
    ],
)
def test_what_a_record_shows_is_printable(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", {"plan": b"x"}).key
    path = store.root / "records" / f"{key}.json"
    statement = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))
    statement["predicate"] |= changes
    edit(path, payload=base64.b64encode(json.dumps(statement).encode()).decode())
    with pytest.raises(DamagedError, match=words) as caught:
        store.record(key)
    assert str(caught.value).isprintable()


def test_a_terminal_obeys_nothing_of_what_has_lines(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    content = {"error": "one\n\ttwo\x1b[31m", "lines": [{"\x9b2J": "\x07"}, 1, None]}
    key = put(store, tmp_path, "a", {"plan": b"x"}, content=content, provenance={"tool": "\x7f\r"}).key
    record = store.record(key)
    assert record is not None
    assert record.content == {
        "error": "one\n\ttwo\ufffd[31m",
        "lines": [{"\ufffd2J": "\ufffd"}, 1, None],
    }
    assert record.provenance == {"tool": "\ufffd\ufffd"}


def test_a_store_that_trusts_keys_takes_nothing_else(tmp_path: Path) -> None:
    private, public = key_pair(1)
    stranger, _ = key_pair(2)
    for key in (None, stranger):
        with pytest.raises(SignatureError):
            put(open_store(tmp_path / "store", trust=[public], key=key), tmp_path, "a", {"plan": b"x"})
    store = open_store(tmp_path / "store", trust=[public], key=private)
    assert put(store, tmp_path, "a", {"plan": b"x"}).signers == (public.keyid,)


@pytest.mark.parametrize("kind", ["file", "plain", "memory"])
def test_a_ref_is_signed_for_its_member(tmp_path: Path, kind: str) -> None:
    """Who has no key cannot give a member another one's record, or an old record a new time."""
    private, public = key_pair(1)
    stranger, _ = key_pair(2)
    remote = remotes(tmp_path)[kind]
    builder = open_store(tmp_path / "builder", key=private)
    one, two = (put(builder, tmp_path, name, {"plan": name.encode()}).key for name in "ab")
    push(builder, remote, [one, two], {("chat", "a"): Ref.now(one), ("chat", "b"): Ref.now(two)})
    remote.trust = (public,)
    good = remote.refs("chat")
    assert {name: ref.key for name, ref in good.items()} == {"a": one, "b": two}
    for name, ref in good.items():
        remote.check_ref("chat", name, ref)
    assert verify(remote) == []

    for ref, words in (
        (Ref.now(two), "is not signed"),
        (good["b"], "was altered after it was signed"),
        (Ref(one, "2099-01-31T12:00:00Z", good["a"].signatures), "was altered after it was signed"),
        (sign_ref("chat", "a", Ref.now(two), stranger), "is none of the 1 trusted key"),
        (sign_ref("code", "a", Ref.now(two), private), "was altered after it was signed"),
    ):
        with pytest.raises(SignatureError, match=f"refs/chat/a.json .*{words}"):
            remote.set_ref("chat", "a", ref)
        set_raw(remote, "refs/chat/a.json", dump_ref(ref))
        with pytest.raises(SignatureError, match=f"refs/chat/a.json .*{words}"):
            remote.check_ref("chat", "a", remote.refs("chat")["a"])
        assert [problem.name for problem in verify(remote)] == ["refs/chat/a.json"]
    # A push puts it right; it is as signed in a folder that it was pulled into.
    push(builder, remote, [], {("chat", "a"): Ref.now(one)})
    assert verify(remote) == []
    folder = open_store(tmp_path / "folder", trust=[public])
    pull(remote, folder, [one])
    folder.set_ref("chat", "a", remote.refs("chat")["a"])
    assert verify(folder) == []


def test_a_push_without_the_key_leaves_refs_alone(tmp_path: Path) -> None:
    private, public = key_pair(1)
    remote = remotes(tmp_path)["memory"]
    remote.trust = (public,)
    builder = open_store(tmp_path / "builder", key=private)
    key = put(builder, tmp_path, "a", {"plan": b"x"}).key
    push(builder, remote, [key])
    without = open_store(builder.root)
    with pytest.raises(SignatureError, match=r"refs/chat/a\.json is not signed"):
        push(without, remote, [key], {("chat", "a"): Ref.now(key)})
    assert remote.refs("chat") == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signatures": {}}, "has no array 'signatures'"),
        ({"signatures": ["x"]}, "has a signature that is no object"),
        ({"signatures": [{"keyid": "x", "sig": "%"}]}, "is no base64"),
        ({"key": "x"}, "which is no sha256"),
        ({"time": 1}, "has no text 'time'"),
        ({"time": "\x1b[31mPWN\x1b]0;t\x07"}, r"has time '\\x1b\[31mPWN.*', which is not printable"),
        ({"time": "\x1b[31m\ud800" + "9" * 1000}, "has text that is not UTF-8"),
        ({"time": "2026-01-31"}, "has the time '2026-01-31', wanted is one such as"),
        ({"time": "2026-1-31T12:00:00Z"}, "has the time"),
        ({"time": "2026-02-31T12:00:00Z"}, "has the time"),
        ({"time": "9" * 1000}, r"has the time '9{80}'\.\.\., wanted"),
    ],
)
def test_broken_refs(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    private, _ = key_pair(1)
    store = open_store(tmp_path / "store", key=private)
    store.set_ref("chat", "a", Ref.now(put(store, tmp_path, "a", {"plan": b"x"}).key))
    edit(store.root / "refs/chat/a.json", **changes)
    with pytest.raises(EngineFileError, match=f"refs/chat/a.json .*{words}") as caught:
        store.refs("chat")
    assert str(caught.value).isprintable()


def test_what_was_made_here_needs_no_signature_where_nobody_else_writes(tmp_path: Path) -> None:
    private, public = key_pair(1)
    stranger = open_store(tmp_path / "stranger")
    foreign = put(stranger, tmp_path, "foreign", {"plan": b"foreign"}).key
    remote = remotes(tmp_path)["memory"]
    push(stranger, remote, [foreign])

    # Pulled before anybody thought of trust.
    root = tmp_path / "store"
    pull(remote, open_store(root), [foreign])
    store = open_store(root, trust=[public], trusts_own=True)
    own = put(store, tmp_path, "own", {"plan": b"own"})
    assert store.record(own.key) == own and own.signers == ()
    with pytest.raises(SignatureError, match="is not signed"):
        store.record(foreign)
    with pytest.raises(SignatureError, match="is not signed"):
        pull(remote, store, [foreign])
    assert [problem.name for problem in verify(store)] == [f"records/{foreign}.json"]
    # A signed one takes its place.
    push(open_store(stranger.root, key=private), remote, [foreign])
    assert pull(remote, store, [foreign]).records == 1
    found = store.record(foreign)
    assert found is not None and found.signers == (public.keyid,)
    # Others are not believed what they say of themselves.
    with pytest.raises(SignatureError):
        open_store(root, trust=[public]).record(own.key)


def test_an_untrusted_record_gives_way_to_a_trusted_one(tmp_path: Path) -> None:
    private, public = key_pair(1)
    key = put(open_store(tmp_path / "store"), tmp_path, "a", {"plan": b"unsigned"}).key
    store = open_store(tmp_path / "store", trust=[public], key=private)
    with pytest.raises(SignatureError):
        store.record(key)
    put(store, tmp_path, "a", {"plan": b"signed"})
    found = store.record(key)
    assert found is not None
    assert found.files[0].sha256 == sha256(b"signed")


@pytest.mark.parametrize("kind", ["file", "plain", "memory"])
def test_push_signs_what_was_built_here(tmp_path: Path, kind: str) -> None:
    private, public = key_pair(1)
    remote = remotes(tmp_path)[kind]
    builder = open_store(tmp_path / "builder")
    mine = put(builder, tmp_path, "mine", {"plan": b"mine"}).key
    push(builder, remote, [mine])

    # Another pulls it, unsigned, builds one of its own, and has a key: that signs its own one alone.
    other = open_store(tmp_path / "other")
    pull(remote, other, [mine])
    theirs = put(other, tmp_path, "theirs", {"plan": b"theirs"}).key
    other = open_store(other.root, key=private)
    push(other, remote, [mine, theirs], {("chat", "theirs"): Ref.now(theirs)})
    remote.trust = (public,)
    with pytest.raises(SignatureError, match="is not signed"):
        remote.record(mine)
    found = remote.record(theirs)
    assert found is not None
    assert found.signers == (public.keyid,)

    # The builder gets the key later: its record is there, and gets its signature.
    remote.trust = ()
    sent = push(open_store(builder.root, key=private), remote, [mine])
    assert (sent.records, sent.chunks) == (1, 0)
    remote.trust = (public,)
    assert remote.record(mine) is not None
    assert push(open_store(builder.root, key=private), remote, [mine]).records == 0


def test_push_refuses_what_the_other_side_would_not_read(tmp_path: Path) -> None:
    _, public = key_pair(1)
    remote = remotes(tmp_path)["file"]
    remote.trust = (public,)
    builder = open_store(tmp_path / "builder")
    key = put(builder, tmp_path, "a", {"plan": b"x"}).key
    with pytest.raises(SignatureError, match="is not signed"):
        push(builder, remote, [key])
    assert list(remote.objects.names("chunks")) == []


@pytest.mark.parametrize("who", ["remote", "local"])
def test_pull_checks_signatures_of_both_sides_before_it_reads(tmp_path: Path, who: str) -> None:
    private, public = key_pair(1)
    remote = remotes(tmp_path)["memory"]
    builder = open_store(tmp_path / "builder")
    key = put(builder, tmp_path, "a", {"plan": b"x"}).key
    push(builder, remote, [key])
    remote.trust = (public,) if who == "remote" else ()
    local = open_store(tmp_path / "local", trust=[public] if who == "local" else [])
    with pytest.raises(SignatureError, match=r"memory://.*is not signed"):
        pull(remote, local, [key])
    assert sorted(path.name for path in local.root.rglob("*") if path.is_file()) == [
        "plansmith-store.json",
        "store",
    ]
    remote.trust = ()
    push(open_store(builder.root, key=private), remote, [key])
    pull(remote, local, [key])
    raw = remote.objects.read(f"records/{key}.json")
    assert raw is not None
    set_raw(remote, f"records/{key}.json", raw.replace(b'"payload":"', b'"payload":"IA'))
    with pytest.raises(EngineFileError):
        pull(remote, open_store(tmp_path / "third", trust=[public]), [key])
