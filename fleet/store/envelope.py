"""DSSE envelopes, version 1: a payload and who signed it.

What is signed is the pre-authentication encoding of the protocol (github.com/secure-systems-lab/dsse): the type and
the payload with their lengths, so that a signature for one kind of document serves for no other.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Sequence
from typing import Any

from . import fields
from .errors import SignatureError
from .fields import Refuse
from .signing import PrivateKey, PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"


@dataclasses.dataclass(frozen=True)
class Signature:
    """One signature; the id says which key may have made it, and is not to be believed."""

    keyid: str
    sig: bytes


@dataclasses.dataclass(frozen=True)
class Envelope:
    """A payload with its signatures, none to many."""

    payload: bytes
    signatures: tuple[Signature, ...] = ()

    def signed(self, key: PrivateKey, payload_type: str = PAYLOAD_TYPE) -> Envelope:
        """Return the envelope with this key's signature; itself where it has that."""
        made = Signature(key.public.keyid, key.sign(encode(self.payload, payload_type)))
        if made in self.signatures:
            return self
        others = tuple(one for one in self.signatures if one.keyid != made.keyid)
        return Envelope(self.payload, (*others, made))

    def with_signatures(self, other: Envelope) -> Envelope:
        """Return the envelope with another's signatures as well, which has to have the same payload."""
        more = tuple(one for one in other.signatures if one not in self.signatures)
        return Envelope(self.payload, (*self.signatures, *more))


def encode(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return the bytes that are signed: PAE of DSSE v1."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def dump_envelope(envelope: Envelope) -> bytes:
    """Return the JSON of an envelope."""
    signatures = dump_signatures(envelope.signatures)
    content = {"payloadType": PAYLOAD_TYPE, "payload": _base64(envelope.payload), "signatures": signatures}
    return fields.dump(content)


def dump_signatures(signatures: Sequence[Signature]) -> list[dict[str, str]]:
    """Return signatures as JSON values."""
    return [{"keyid": one.keyid, "sig": _base64(one.sig)} for one in signatures]


def load_envelope(raw: bytes, refuse: Refuse) -> Envelope:
    """Return the envelope of its JSON, nothing of it checked but its form."""
    value = fields.load(raw, refuse)
    kind = fields.text(value, "payloadType", refuse)
    if kind != PAYLOAD_TYPE:
        raise refuse(f"has the payload type {kind!r}, wanted {PAYLOAD_TYPE!r}")
    return Envelope(_bytes(fields.text(value, "payload", refuse), refuse), load_signatures(value, refuse))


def load_signatures(value: dict[str, Any], refuse: Refuse) -> tuple[Signature, ...]:
    """Return the signatures of an object that has an array of them."""
    return tuple(_load_signature(one, refuse) for one in fields.array(value, "signatures", refuse))


def check_signatures(
    envelope: Envelope, trust: Sequence[PublicKey], what: str, payload_type: str = PAYLOAD_TYPE
) -> tuple[str, ...]:
    """Return the ids of the trusted keys that signed the payload; all of them are tried, whatever the ids say.

    what   : how an error calls the payload
    raises : SignatureError when trust lists keys and none of them signed
    """
    signed = encode(envelope.payload, payload_type)
    signers = tuple(
        key.keyid for key in trust if any(key.verifies(one.sig, signed) for one in envelope.signatures)
    )
    if trust and not signers:
        raise SignatureError(f"{what} {_why(envelope, trust)}")
    return signers


def _why(envelope: Envelope, trust: Sequence[PublicKey]) -> str:
    keys = f"{len(trust)} trusted key{'s' * (len(trust) > 1)}"
    if not envelope.signatures:
        return (
            f"is not signed, and wanted is a signature of one of {keys}; where it was built, build or push it again "
            "with --sign-key KEY.pem, or PLANSMITH_SIGNING_KEY"
        )
    claimed = [one.keyid for one in envelope.signatures if one.keyid in {key.keyid for key in trust}]
    if claimed:
        return (
            f"was altered after it was signed: the signature of the trusted key {claimed[0][:16]} does not fit; delete "
            "it there and push it again"
        )
    others = ", ".join(sorted(one.keyid[:16] for one in envelope.signatures))
    return (
        f"is signed by {others}, which is none of the {keys}; add the signer's public key to those that are trusted, "
        "or build it here"
    )


def _load_signature(value: Any, refuse: Refuse) -> Signature:
    if not isinstance(value, dict):
        raise refuse("has a signature that is no object")
    return Signature(fields.text(value, "keyid", refuse), _bytes(fields.text(value, "sig", refuse), refuse))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str, refuse: Refuse) -> bytes:
    """Return what base64 text says; DSSE allows both alphabets."""
    try:
        return base64.b64decode(text.translate(str.maketrans("-_", "+/")), validate=True)
    except (binascii.Error, ValueError) as error:
        raise refuse(f"has text that is no base64 ({error})") from None
