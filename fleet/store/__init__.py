"""A content-addressed store: files by content, records in signed envelopes, refs; in a folder or behind a URL.

It knows nothing of models, targets or compilers.
"""

from __future__ import annotations

from .collect import collect
from .collected import Collected
from .errors import DamagedError, RemoteError, SignatureError
from .local import LocalStore
from .locks import Held
from .opening import open_store
from .pull import pull
from .push import push
from .record import FileRef, Record, Ref
from .remote import RemoteStore
from .signing import PrivateKey, PublicKey, load_private, load_public, make_key
from .store import Store
from .transfer import Transferred
from .verify import Problem, verify

__all__ = [
    "Collected",
    "DamagedError",
    "FileRef",
    "Held",
    "LocalStore",
    "PrivateKey",
    "Problem",
    "PublicKey",
    "Record",
    "Ref",
    "RemoteError",
    "RemoteStore",
    "SignatureError",
    "Store",
    "Transferred",
    "collect",
    "load_private",
    "load_public",
    "make_key",
    "open_store",
    "pull",
    "push",
    "verify",
]
