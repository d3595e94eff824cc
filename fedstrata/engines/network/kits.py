"""Certificates: one authority for a federation, and a folder for each party with only its own.

A certificate can be renewed during a run: the server reads its kit at each handshake and a site at
each dial, and two certificates of one key are valid side by side. A revoked one is refused from the next
message on. A site can make its own key and have it signed (`request`, `sign`).
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.hazmat.primitives.serialization import load_pem_private_key as private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstrata.support.writing import append, write_atomically

AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"
REQUEST, REVOKED, ISSUED = "request.pem", "revoked", "issued.jsonl"
SERVER, AUTHORITY_FOLDER = "server", "authority"
MASK_KEY = "mask key"  # what a site signs
DAYS, SOON = 825, 30  # of a certificate's validity; before its end at which a party is warned
FLARE = {
    "server": ("rootCA.pem", "server.crt", "server.key"),
    "site": ("rootCA.pem", "client.crt", "client.key"),
}


class KitError(ValueError):
    """The folder is not a kit; the message says what is missing."""


def read(kit: Path) -> tuple[bytes, bytes, bytes]:
    """A kit's authority, certificate and key; also of a folder of FLARE's provisioning.

    Raises:
        KitError: if the folder is not a kit, or others may read its key.
    """
    for folder, names in (
        (kit, (AUTHORITY, CERTIFICATE, KEY)),
        *((kit / "startup", n) for n in FLARE.values()),
    ):
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            # FLARE sets the mode of its own keys
            if folder is kit and _others_read(files[2]):
                raise KitError(
                    f"Other users can read the private key {files[2]}: `chmod 600` it, or make new kits."
                )
            authority, certificate, key = (file.read_bytes() for file in files)
            return authority, certificate, key
    raise KitError(
        f"{kit} is not a kit: it needs {AUTHORITY}, {CERTIFICATE} and {KEY} (`fedstrata net kits` makes "
        "them), or the startup folder of FLARE's provisioning."
    )


def _others_read(key: Path) -> bool:
    """Whether other users can read a private key.

    A key of root may be readable by a group: an administrator, or a Kubernetes secret with `fsGroup`, gives a
    service a key that it can read but not change.
    """
    if os.name != "posix":
        return False
    found = key.stat()
    handed = found.st_uid == 0 != os.geteuid()
    return bool(found.st_mode & (0o037 if handed else 0o077))


def name_of(kit: Path) -> str:
    """The common name in a kit's certificate.

    Raises:
        KitError: if the certificate or its key cannot be used: gRPC would only say that a socket closed.
    """
    _, certificate, key = read(kit)
    try:
        known = x509.load_pem_x509_certificate(certificate)
        own = private_key(key, None)
    except (ValueError, TypeError) as error:
        raise KitError(f"The certificate or the key in {kit} is damaged: {error}.") from error
    if own.public_key() != known.public_key():
        raise KitError(f"The key in {kit} is not that of its certificate.")
    if not _valid_now(known):
        raise KitError(
            f"The certificate in {kit} has expired, or is not valid yet: renew it (`net kits --renew`)."
        )
    if not (names := _names(known)):
        raise KitError(f"The certificate in {kit} has no common name.")
    return names[0]


def _names(owned: x509.Certificate | x509.CertificateSigningRequest) -> list[str]:
    """The common names: one, in a certificate that an `Authority` issued."""
    return [str(found.value) for found in owned.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]


def _valid_now(certificate: x509.Certificate) -> bool:
    now = datetime.datetime.now(datetime.UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def expiry(kit: Path) -> datetime.datetime:
    """The end of a kit's certificate's validity."""
    return x509.load_pem_x509_certificate(read(kit)[1]).not_valid_after_utc


def serial_of(certificate: bytes) -> tuple[str, float]:
    """A certificate's serial number, and the time (of `time.time`) at which it expires."""
    found = x509.load_pem_x509_certificate(certificate)
    return f"{found.serial_number:x}", found.not_valid_after_utc.timestamp()


def days_left(kit: Path) -> float:
    """Days until a kit's certificate expires."""
    return (expiry(kit) - datetime.datetime.now(datetime.UTC)).total_seconds() / 86_400


def expires_soon(kit: Path, name: str) -> str | None:
    """The warning in the last `SOON` days of a kit's certificate."""
    days = days_left(kit)
    if days > SOON:
        return None
    return f"The certificate of {name} expires in {days:.0f} days: `fedstrata net kits --renew {name}`."


class Identity:
    """A party's proofs to sites, through a server that they need not trust: certificate and signatures.

    Args:
        kit: its folder.
        sites: the names of the federation's sites, from its own `federation.toml`.
    """

    def __init__(self, kit: Path, sites: Sequence[str] = ()) -> None:
        self.kit, self.sites = kit, list(sites)

    def proof(self, run: str, content: bytes, what: str = MASK_KEY) -> bytes:
        """32 bytes (a public key, a digest) for a run, with signature and certificate, as JSON."""
        _, certificate, key = read(self.kit)
        signature = signature_of(_signed_words(what, run, content), key)
        return json.dumps([content.hex(), signature.hex(), certificate.decode()]).encode()

    def checked(
        self, run: str, proof: bytes, what: str = MASK_KEY, names: Sequence[str] | None = None
    ) -> tuple[str, bytes]:
        """Who signed a proof, one of these names (the sites' by default), and its content.

        Raises:
            KitError: unless the federation's authority has signed the certificate of one of them, and that
                party the content.
        """
        try:
            content, signature, pem = json.loads(proof)
            signed = bytes.fromhex(content)
            words = _signed_words(what, run, signed)
            certificate = check_signed(words, bytes.fromhex(signature), pem.encode(), read(self.kit)[0])
        except InvalidSignature as error:
            raise KitError(f"The {what} is not signed by a party of this federation.") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise KitError(f"The certificate or signature of a {what} cannot be read: {error}") from error
        owner, known = _names(certificate), self.sites if names is None else list(names)
        if not _valid_now(certificate):
            raise KitError(f"The certificate of {owner} has expired, or is not valid yet.")
        if len(owner) != 1 or owner[0] not in known or len(signed) != 32:
            raise KitError(f"The {what} is of {owner}, and only {known} are accepted.")
        return owner[0], signed


def _signed_words(what: str, run: str, content: bytes) -> bytes:
    return f"fedstrata {what} 1\n{run}\n".encode() + content


def signature_of(message: bytes, key: bytes) -> bytes:
    """A message's signature by a kit's key."""
    signing: Any = private_key(key, None)
    return bytes(signing.sign(message, *_scheme(signing)))


def check_signed(message: bytes, signature: bytes, pem: bytes, authorities: bytes) -> x509.Certificate:
    """The certificate, if its key signed the message and one of the authorities the certificate.

    Raises:
        InvalidSignature: if not.
    """
    certificate = x509.load_pem_x509_certificate(pem)
    for authority in x509.load_pem_x509_certificates(authorities):
        with suppress(ValueError, TypeError, InvalidSignature):
            certificate.verify_directly_issued_by(authority)
            break
    else:
        raise InvalidSignature
    key: Any = certificate.public_key()
    key.verify(signature, message, *_scheme(key))
    return certificate


def _scheme(key: Any) -> tuple[Any, ...]:
    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        return (ec.ECDSA(hashes.SHA256()),)
    return padding.PKCS1v15(), hashes.SHA256()  # RSA, as FLARE's are


class Authority:
    """The authority of a federation: a folder with `AUTHORITY`, `KEY`, and a list of issued certificates.

    Args:
        folder: made by `create`, or with the certificate and the key of an existing authority.
    """

    def __init__(self, folder: Path) -> None:

        self.folder = folder
        try:
            self.pem = (folder / AUTHORITY).read_bytes()
            self.certificate = x509.load_pem_x509_certificate(self.pem)
            self._key: Any = private_key((folder / KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise KitError(
                f"{folder} is not an authority: it needs {AUTHORITY} and {KEY}, without a password. {error}"
            ) from error
        if self._key.public_key() != self.certificate.public_key():
            raise KitError(f"The key in {folder} is not that of its certificate.")

    @property
    def expired(self) -> bool:
        """Whether certificates that it signs would be invalid."""
        return bool(self.certificate.not_valid_after_utc <= datetime.datetime.now(datetime.UTC))

    @classmethod
    def create(cls, folder: Path, days: int) -> Authority:
        """Make a new authority. Its key only signs, and is in no kit."""
        key = ec.generate_private_key(ec.SECP256R1())
        extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (_usage(True), True)]
        root = _signed("fedstrata authority", key.public_key(), None, key, days, extensions)
        _write(folder, {AUTHORITY: _pem(root), KEY: private_pem(key)})
        return cls(folder)

    def issue(self, party: str, public_key: Any, hosts: Sequence[str], days: int) -> bytes:
        """A certificate for a party, whose list of `hosts` is empty unless it is the server."""
        # A site's certificate cannot be used to pose as the server, nor the server's as a site.
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if party == SERVER else ExtendedKeyUsageOID.CLIENT_AUTH
        extensions: list[tuple[Any, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(False), True),
            (x509.ExtendedKeyUsage([purpose]), True),
        ]
        if party == SERVER:
            extensions.append((x509.SubjectAlternativeName([_host(host) for host in hosts]), False))
        issued = _signed(party, public_key, self.certificate, self._key, days, extensions)
        serial, until = serial_of(_pem(issued))
        entry = {"party": party, "serial": serial, "until": until}
        append(self.folder / ISSUED, json.dumps(entry).encode() + b"\n")
        return _pem(issued)

    def serials(self, party: str) -> list[str]:
        """The serial numbers of all certificates that it issued to a party."""
        file = self.folder / ISSUED
        lines = file.read_text("utf-8").splitlines() if file.is_file() else []
        entries = [json.loads(line) for line in lines]
        return [entry["serial"] for entry in entries if entry["party"] == party]


def make_kit(authority: Authority, folder: Path, hosts: Sequence[str] = (), days: int = DAYS) -> None:
    """Make a party's kit, with its own key; the folder's name is the party's.

    Raises:
        KitError: if the kit exists, so that certificates are not replaced by accident.
    """
    if (folder / CERTIFICATE).exists():
        raise KitError(f"{folder} is a kit already: renew it, or remove it.")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = authority.issue(folder.name, key.public_key(), hosts, days)
    _write(folder, {AUTHORITY: authority.pem, CERTIFICATE: certificate, KEY: private_pem(key)})


def make(
    folder: Path,
    sites: Sequence[str],
    hosts: Sequence[str],
    days: int = DAYS,
    authority: Authority | None = None,
) -> None:
    """Make kits for the server (``server``) and each site in subfolders, by a new or a given authority.

    Raises:
        KitError: if kits exist already.
    """
    place = folder / AUTHORITY_FOLDER
    if place.exists() or (folder / SERVER).exists():
        raise KitError(f"{folder} has kits already. Use --add or --renew, or give another folder.")
    authority = Authority.create(place, days) if authority is None else authority
    for party in (SERVER, *sites):
        make_kit(authority, folder / party, hosts, days)


def renew(authority: Authority, folder: Path, hosts: Sequence[str], days: int = DAYS) -> None:
    """Issue a new certificate for a kit's key. The old one stays valid until it expires or is revoked."""
    file = folder / CERTIFICATE
    if not file.is_file():
        raise KitError(f"{folder} has no certificate to renew.")
    public_key = x509.load_pem_x509_certificate(file.read_bytes()).public_key()
    write_atomically(file, authority.issue(folder.name, public_key, hosts, days))


def request(folder: Path, name: str) -> Path:
    """Make a site's key, which never leaves it, and a request for its certificate; returns its file."""
    if (folder / KEY).exists():
        raise KitError(f"{folder} has a key already. Give another folder.")
    key = ec.generate_private_key(ec.SECP256R1())
    asked = x509.CertificateSigningRequestBuilder().subject_name(_subject(name)).sign(key, hashes.SHA256())
    _write(folder, {KEY: private_pem(key), REQUEST: _pem(asked)})
    return folder / REQUEST


def sign(authority: Authority, file: Path, kits: Path, sites: Sequence[str], days: int = DAYS) -> Path:
    """Answer a site's request: make its folder among the kits, without a key.

    Raises:
        KitError: if it is not a request, is damaged, or names a party other than the sites.
    """
    try:
        asked = x509.load_pem_x509_csr(file.read_bytes())
    except ValueError as error:
        raise KitError(f"{file} is not a request for a certificate: {error}") from error
    if not asked.is_signature_valid:
        raise KitError(f"{file} is damaged: its signature is not that of its key.")
    names = _names(asked)
    if len(names) != 1 or names[0] not in sites:
        raise KitError(f"{file} is for {names}, and the federation's sites are {list(sites)}.")
    folder = kits / names[0]
    if (folder / KEY).exists():
        raise KitError(f"{folder} is a kit with a key of its own: revoke and remove it first.")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / AUTHORITY, authority.pem)
    write_atomically(folder / CERTIFICATE, authority.issue(names[0], asked.public_key(), (), days))
    return folder


def revoke(authority: Authority, server: Path, party: str) -> int:
    """Refuse all certificates of a party from now on; returns their number.

    The serial numbers go into `REVOKED` in the server's kit, which a running server rereads when it changes.
    """
    if not (serials := authority.serials(party)):
        raise KitError(f"The authority has issued no certificate to {party!r}.")
    known = revoked(server)
    lines = [f"{serial} {party}\n" for serial in serials if serial not in known]
    file = server / REVOKED
    before = file.read_bytes() if file.is_file() else b""
    write_atomically(file, before + "".join(lines).encode())
    return len(serials)


def revoked(server: Path) -> frozenset[str]:
    """The serial numbers that a server refuses."""
    file = server / REVOKED
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return frozenset(line.split()[0] for line in lines if line.strip())


def private_pem(key: Any) -> bytes:
    """The content of a private key's file."""
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _pem(thing: Any) -> bytes:

    return bytes(thing.public_bytes(Encoding.PEM))


def _subject(name: str) -> Any:

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(signs: bool) -> Any:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs, crl_sign=signs,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _signed(
    name: str, public_key: Any, issuer: Any, signing: Any, days: int, extensions: list[tuple[Any, bool]]
) -> Any:
    """A certificate that is valid from an hour ago (clocks differ), at most as long as its issuer's."""
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    if issuer is not None:
        until = min(until, issuer.not_valid_after_utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(_subject(name) if issuer is None else issuer.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(until)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signing, hashes.SHA256())


def _host(host: str) -> Any:

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))  # as written in an address
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, content in files.items():
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
