"""Ed25519 keys: PEM files to sign with, one line of text to trust."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import os
import pathlib
import re

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ...runtime.errors import InvalidArgumentError

_PREFIX = "ed25519:"
_PEM = "-----BEGIN "
_LIKE_A_KEY = re.compile(
    r"M[A-Za-z0-9+/=\s]{40,}|.*\n.*", re.DOTALL
)  # the base64 of any DER key begins with M


@dataclasses.dataclass(frozen=True)
class PublicKey:
    """A key that signatures are checked with.

    raw : its 32 bytes
    """

    raw: bytes

    @property
    def text(self) -> str:
        """The key as a line of text, such as a list in YAML holds."""
        return _PREFIX + base64.b64encode(self.raw).decode()

    @property
    def keyid(self) -> str:
        """The sha256 of the key's DER form, hexadecimal: what `openssl pkey -pubin -outform DER | sha256sum` prints."""
        return hashlib.sha256(self._key().public_bytes(_DER, _PUBLIC)).hexdigest()

    @property
    def pem(self) -> str:
        """The key as other tools take it."""
        return self._key().public_bytes(serialization.Encoding.PEM, _PUBLIC).decode()

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Return whether this key's owner signed data."""
        try:
            self._key().verify(signature, data)
        except InvalidSignature:
            return False
        return True

    def _key(self) -> Ed25519PublicKey:
        return Ed25519PublicKey.from_public_bytes(self.raw)


@dataclasses.dataclass(frozen=True)
class PrivateKey:
    """A key to sign with. Its text form shows the public half only."""

    raw: bytes = dataclasses.field(repr=False)

    @property
    def public(self) -> PublicKey:
        """The half that others trust."""
        return PublicKey(self._key().public_key().public_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """Return the signature of data, 64 bytes; the same for the same data."""
        return self._key().sign(data)

    def __repr__(self) -> str:
        return f"PrivateKey(of {self.public.text})"

    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.raw)


_DER = serialization.Encoding.DER
_PUBLIC = serialization.PublicFormat.SubjectPublicKeyInfo


def make_key(path: pathlib.Path) -> str:
    """Write a new private key (PEM, readable by its owner alone) and return its public key as text.

    raises InvalidArgumentError when there is such a file already, or none can be written.
    """
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InvalidArgumentError(
            f"{path} is there already, and a key that signed something must not be lost; give another name"
        ) from None
    except OSError as error:
        raise InvalidArgumentError(
            f"{path} cannot be written ({error.strerror}); give another name"
        ) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(descriptor)
    return PublicKey(key.public_key().public_bytes_raw()).text


def load_private(source: str | pathlib.Path) -> PrivateKey:
    """Return the key of a PEM file, or of PEM text (what a secret of a CI system holds).

    raises InvalidArgumentError when it is none, has a passphrase, or is of another kind than Ed25519.
    """
    pem, where = _pem(source)
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except TypeError:
        raise InvalidArgumentError(
            f"{where} has a passphrase, and nobody is there to type it in; give a key without one, from a secret"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidArgumentError(
            f"{where} is no private key in PEM form, which begins with {_PEM}; give all of the file that "
            "`plansmith fleet keygen` makes"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidArgumentError(
            f"{where} is of another kind, wanted is Ed25519; make one with `plansmith fleet keygen`"
        )
    return PrivateKey(key.private_bytes_raw())


def load_public(source: str | pathlib.Path) -> PublicKey:
    """Return the key of its text (ed25519:<base64>), of PEM text, or of a PEM file.

    raises InvalidArgumentError when it is none.
    """
    if isinstance(source, str) and source.startswith(_PREFIX):
        return _from_text(source)
    pem, where = _pem(source)
    if "PRIVATE KEY" in pem:
        raise InvalidArgumentError(
            f"{where} is a private key; give the public one, and keep that to yourself"
        )
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidArgumentError(
            f"{where} is no public key; wanted is ed25519:<base64>, as `plansmith fleet keygen` prints it, or PEM"
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidArgumentError(f"{where} is of another kind, wanted is Ed25519")
    return PublicKey(key.public_bytes_raw())


def _from_text(text: str) -> PublicKey:
    try:
        raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
        if len(raw) != 32:
            raise ValueError(f"{len(raw)} bytes, wanted are 32")
        Ed25519PublicKey.from_public_bytes(raw)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgumentError(
            f"{text!r} is no public key ({error}); wanted is what `plansmith fleet keygen` prints"
        ) from None
    return PublicKey(raw)


def _pem(source: str | pathlib.Path) -> tuple[str, str]:
    """Return the PEM text, and how an error calls it."""
    if isinstance(source, str) and source.lstrip().startswith(_PEM):
        return source.strip() + "\n", "the key given as text"
    try:
        return pathlib.Path(source).read_text("ascii"), str(source)
    except UnicodeDecodeError:
        return "", str(source)
    except (OSError, ValueError) as error:
        if _LIKE_A_KEY.fullmatch(str(source)) or not isinstance(error, OSError):
            return "", "the key given as text"  # never shown: it may be a secret that lost its first line
        raise InvalidArgumentError(
            f"the key {source} cannot be read ({error.strerror}); name a PEM file"
        ) from error
