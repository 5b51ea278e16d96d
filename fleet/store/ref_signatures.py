"""Signatures of refs: who said that a member has a record, so that nobody else can lead a pull to another one.

A record's signature says that its plan is genuine, not whose it is. A ref's covers the fleet and the member besides the
key and the time, as DSSE signs them; it lies in the ref beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from . import fields
from .envelope import Envelope, check_signatures
from .record import Ref
from .signing import PrivateKey, PublicKey

PAYLOAD_TYPE = "application/vnd.plansmith.ref+json"


def sign_ref(fleet: str, member: str, ref: Ref, key: PrivateKey) -> Ref:
    """Return the ref of a fleet's member with this key's signature."""
    signed = _envelope(fleet, member, ref).signed(key, PAYLOAD_TYPE)
    return dataclasses.replace(ref, signatures=signed.signatures)


def check_ref(fleet: str, member: str, ref: Ref, trust: Sequence[PublicKey], what: str) -> None:
    """Raise SignatureError when trust lists keys, and none of them signed the ref for this member.

    what : how the error calls it
    """
    check_signatures(_envelope(fleet, member, ref), trust, what, PAYLOAD_TYPE)


def _envelope(fleet: str, member: str, ref: Ref) -> Envelope:
    said = {"fleet": fleet, "member": member, "key": ref.key, "time": ref.time}
    return Envelope(fields.dump(said), ref.signatures)
