"""A party's account of its actions: lines of JSON, each with the hash of the previous one.

    hash_n = SHA-256(hash_{n−1} ‖ line n without its hash),   hash_0 = 64 zeros

Changing, removing or inserting a line breaks the chain from there on. Lines that were cut off the end are
found by comparison with another party's account (`compare`) or with a signed manifest that names the last
hash. Lines hold names, counts and digests, never numbers of a message or a sample.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.engines.engine import Unfinished
from fedstrata.engines.network.transport import Connected, Outcome, Request, Through
from fedstrata.support.writing import append

FIRST = "0" * 64


class AuditError(ValueError):
    """The account was changed, or two parties' accounts differ; the message says where."""


class Audit:
    """One party's account, an append-only file.

    Args:
        file: its file; created if it does not exist.
        party: the party's name.

    Attributes:
        answered: the number of answered exchanges, in all runs.
    """

    def __init__(self, file: Path, party: str) -> None:
        self.file, self.party = file, party
        self._lock = threading.Lock()
        if file.is_file() and not (content := file.read_bytes()).endswith(b"\n"):  # its writer was killed
            os.truncate(file, content.rfind(b"\n") + 1)
        self.lines, self.last = len(entries := read(file)), entries[-1]["hash"] if entries else FIRST
        self.answered = sum(map(_answered, entries))

    def note(self, event: str, **facts: Any) -> None:
        """Add a line; it has been handed to the system when this returns.

        Raises:
            OSError: if it cannot be written; the account is then unchanged.
        """
        with self._lock:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            entry = {"n": self.lines, "time": now, "party": self.party, "event": event, **facts}
            entry["hash"] = _hash(self.last, entry)
            append(self.file, json.dumps(entry).encode() + b"\n")
            self.lines, self.last = self.lines + 1, entry["hash"]
            self.answered += _answered(entry)


def _answered(entry: Mapping[str, Any]) -> bool:
    return entry["event"] == "answered" and entry.get("op") == "exchange"


def read(file: Path) -> list[dict[str, Any]]:
    """All complete lines of an account, checked; its party may be writing the next.

    Raises:
        AuditError: if a line does not follow from the previous one.
    """
    if not file.is_file():
        return []
    content = file.read_bytes()
    content = content[: content.rfind(b"\n") + 1]  # the last line is being written, or its writer was killed
    entries, last = [], FIRST
    for number, line in enumerate(content.splitlines()):
        try:
            entry = json.loads(line)
            told = entry.pop("hash")
        except (ValueError, KeyError, AttributeError) as error:
            raise AuditError(f"{file}: line {number + 1} cannot be read.") from error
        # A line that was changed, removed or inserted breaks the chain. Lines cut off the end do not, but the
        # other party's account still has them, see `compare`.
        if told != _hash(last, entry) or entry.get("n") != number:
            raise AuditError(f"{file}: line {number + 1} does not follow from those before it.")
        last = entry["hash"] = told
        entries.append(entry)
    return entries


def compare(server: Sequence[Mapping[str, Any]], site: Sequence[Mapping[str, Any]]) -> list[str]:
    """The differences between the accounts of a server and a site, in their exchanges.

    The two are compared from the site's first exchange on: earlier ones belong to another site.
    """
    party = next((entry["party"] for entry in site), "")
    # A server that was killed during an exchange has written only that it asks.
    asked = {e["seq"]: e for e in server if e["event"] == "asking" and party in e["sites"]}
    asked |= {e["seq"]: e for e in server if e["event"] == "asked" and e["site"] == party}
    answered = {e["seq"]: e for e in site if e["event"] == "answered"}
    differences = []
    for seq in sorted(asked.keys() | answered.keys()):
        there, here = asked.get(seq), answered.get(seq)
        # An exchange that failed may or may not have reached the site: only replies are compared.
        outcome = None if there is None else there.get("outcome")
        if here is None and outcome == "replied":
            differences.append(f"{seq}: the server had a reply of {party}, who does not know of it")
        elif there is None:
            differences.append(f"{seq}: {party} answered what the server does not know of")
        elif here is not None and outcome in ("replied", None):
            for name in ("run", "what", "round", "digest", *(("down", "up") if outcome else ())):
                if (its := there.get(name)) != (own := here.get(name)):
                    differences.append(f"{seq}: {name} is {its!r} at the server, {own!r} at {party}")
    return differences


def described(header: Mapping[str, Any], arrays: Sequence[Any]) -> dict[str, Any]:
    """The entry of an account for a request: its exchange, and the number of its numbers.

    If a site joins, also the digest of the run's programs and hyper-parameters.
    """
    what, identity = header.get("what"), header.get("identity")
    joined = {} if identity is None else {"digest": digest_of(identity)}
    return {
        "seq": header.get("seq"), "op": header.get("op"), "run": header.get("run"), "what": what,
        "round": header.get("round"), "down": numbers(arrays), **joined,
    }  # fmt: skip


def digest_of(identity: Any) -> str:
    """A digest of a run's programs and hyper-parameters."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:24]


def numbers(arrays: Sequence[Any]) -> int:
    """The number of entries of all arrays."""
    return sum(int(array.size) for array in arrays)


class Audited(Through):
    """A server's transport that records every exchange in an account."""

    def __init__(self, inner: Connected, audit: Audit) -> None:
        super().__init__(inner)
        self.audit = audit

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        """See `Transport.exchange`; what is asked is written down before, as the server may be killed."""
        for header, _ in itertools.islice(requests.values(), 1):  # one exchange, so that all have its facts
            facts = {name: fact for name, fact in described(header, []).items() if name != "down"}
            self._note("asking", sites=[self.names[i] for i in requests], **facts)
        replies, failures = self.inner.exchange(requests, timeout)
        for i, request in requests.items():
            facts = {"site": self.names[i], **described(*request)}
            if i in replies:
                outcome = {"outcome": "replied", "up": numbers(replies[i].arrays)}
            else:
                outcome = {"outcome": failures[i].kind, "why": failures[i].why[:200], "up": 0}
            self._note("asked", **facts, **outcome)
        return replies, failures

    def _note(self, event: str, **facts: Any) -> None:
        try:
            self.audit.note(event, **facts)
        except OSError as error:
            raise Unfinished(f"The account {self.audit.file} cannot be written: {error}.") from error


def manifest(
    facts: Mapping[str, Any], files: Sequence[Path], key: bytes, certificate: bytes
) -> dict[str, Any]:
    """A description of a finished run, signed with a party's key; the authority's certificate verifies it.

    Args:
        facts: plain values: versions, digests, participants.
        files: further files that it vouches for, by SHA-256.
        key: the private key, as in a kit.
        certificate: the key's certificate, which is sent with it.
    """
    from fedstrata.engines.network.kits import signature_of

    named = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    body = {**facts, "files": named, "certificate": certificate.decode()}
    return {**body, "signature": signature_of(_canonical(body), key).hex()}


def check_manifest(signed: Mapping[str, Any], authority: bytes, folder: Path) -> None:
    """Raise if a manifest was not signed by a party of this authority, or a file differs from it.

    Raises:
        AuditError: says what is wrong.
    """
    from cryptography.exceptions import InvalidSignature

    from fedstrata.engines.network.kits import check_signed

    body = {name: value for name, value in signed.items() if name != "signature"}
    try:
        signature, certificate = bytes.fromhex(signed["signature"]), body["certificate"].encode()
        check_signed(_canonical(body), signature, certificate, authority)
    except (InvalidSignature, AttributeError, KeyError, TypeError, ValueError) as error:
        raise AuditError(
            "The manifest was changed, or was not signed by a party of this authority."
        ) from error
    for name, digest in body["files"].items():
        file = folder / Path(name).name  # a manifest must not name files outside of its folder
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise AuditError(f"{file} is not the file that the manifest vouches for.")


def _canonical(body: Mapping[str, Any]) -> bytes:
    # Equal values give equal text, in any order of insertion: signatures and hashes are of text.
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _hash(last: str, entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(last.encode() + _canonical(entry)).hexdigest()
