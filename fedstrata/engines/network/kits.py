"""Certificates: one authority for a federation, and a folder for each party with its own and no more."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"
FLARE = {
    "server": ("rootCA.pem", "server.crt", "server.key"),
    "site": ("rootCA.pem", "client.crt", "client.key"),
}


class KitError(ValueError):
    """The folder is not a kit; the message says what is missing."""


def read(kit: Path) -> tuple[bytes, bytes, bytes]:
    """A kit's authority, certificate and key; a folder of FLARE's provisioning will do.

    Raises:
        KitError: where it is none, or others may read its key.
    """
    for folder, names in (
        (kit, (AUTHORITY, CERTIFICATE, KEY)),
        *((kit / "startup", n) for n in FLARE.values()),
    ):
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            # the mode of FLARE's keys is its own affair
            if folder is kit and os.name == "posix" and files[2].stat().st_mode & 0o077:
                raise KitError(
                    f"Others may read the private key {files[2]}: `chmod 600` it, or make new kits."
                )
            authority, certificate, key = (file.read_bytes() for file in files)
            return authority, certificate, key
    raise KitError(
        f"{kit} is not a kit: it needs {AUTHORITY}, {CERTIFICATE} and {KEY} (`fedstrata net kits` makes "
        "them), or the startup folder of FLARE's provisioning."
    )


def name_of(kit: Path) -> str:
    """The common name in a kit's certificate.

    Raises:
        KitError: where the certificate or its key cannot be used: gRPC would only say that a socket closed.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import NameOID

    _, certificate, key = read(kit)
    try:
        known = x509.load_pem_x509_certificate(certificate)
        own = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise KitError(f"The certificate or the key in {kit} is damaged: {error}.") from error
    if own.public_key() != known.public_key():
        raise KitError(f"The key in {kit} is not that of its certificate.")
    if not known.not_valid_before_utc <= datetime.datetime.now(datetime.UTC) <= known.not_valid_after_utc:
        raise KitError(f"The certificate in {kit} has expired, or is not valid yet: make new kits.")
    found = known.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not found:
        raise KitError(f"The certificate in {kit} has no common name.")
    return str(found[0].value)


def make(folder: Path, sites: Sequence[str], hosts: Sequence[str], days: int = 825) -> None:
    """An authority and a kit for the server (``server``) and each site, in subfolders of ``folder``.

    The authority's own key is in ``authority/``: it signs, and belongs to nobody's kit.

    Raises:
        KitError: where there are kits already; certificates are not replaced by accident.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    if (folder / "authority").exists():
        raise KitError(f"{folder} has kits already. Give another folder, or remove them.")
    now = datetime.datetime.now(datetime.UTC)

    def certificate(
        name: str, key: Any, issuer: Any, signing: Any, extensions: list[tuple[Any, bool]]
    ) -> Any:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signing, hashes.SHA256())

    def usage(signs: bool) -> x509.KeyUsage:
        return x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, key_cert_sign=signs, crl_sign=signs,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip

    root_key = ec.generate_private_key(ec.SECP256R1())
    own = [(x509.BasicConstraints(ca=True, path_length=0), True), (usage(True), True)]
    root = certificate("fedstrata authority", root_key, None, root_key, own)
    pem = serialization.Encoding.PEM
    authority = root.public_bytes(pem)

    def private(key: Any) -> bytes:
        return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())

    _write(folder / "authority", {AUTHORITY: authority, KEY: private(root_key)})
    for party in ("server", *sites):
        key = ec.generate_private_key(ec.SECP256R1())
        is_server = party == "server"
        # A site's certificate cannot be used to pose as the server, nor the server's as a site.
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        extensions: list[tuple[Any, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (usage(False), True),
            (x509.ExtendedKeyUsage([purpose]), True),
        ]
        if is_server:
            extensions.append((x509.SubjectAlternativeName([_host(host) for host in hosts]), False))
        signed = certificate(party, key, root.subject, root_key, extensions)
        files = {AUTHORITY: authority, CERTIFICATE: signed.public_bytes(pem), KEY: private(key)}
        _write(folder / party, files)


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, content in files.items():
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
