"""Certificates that live: sites that come and go, renewal and revocation while a server runs."""

import json
import shutil
import socket
import ssl
import time

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from fedstrata.engines.network import kits
from fedstrata.engines.network.grpc_server import GrpcServer
from fedstrata.lab.cli import app
from fedstrata.lab.experiments.settings import settings_of
from tests.network.test_grpc import Dialled, ask, echo


def net(*words, code=0):
    found = CliRunner().invoke(app, ["net", *map(str, words)])
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    net("init", folder, "--sites", "berlin,lyon")
    net("kits", folder)
    return folder


@pytest.fixture
def federation(made, tmp_path):
    return shutil.copytree(made, tmp_path / "federation")


def test_a_site_is_added_without_a_new_authority(federation):
    before = (federation / "kits" / "berlin" / "certificate.pem").read_bytes()
    net("kits", federation, "--add", "turin")
    assert settings_of(federation / "kits" / "server").sites == ["berlin", "lyon", "turin"]
    assert settings_of(federation / "kits" / "turin").sites == ["berlin", "lyon", "turin"]
    assert (federation / "kits" / "berlin" / "certificate.pem").read_bytes() == before
    server = GrpcServer(["berlin", "lyon", "turin"], federation / "kits" / "server")
    site = Dialled(server, federation / "kits" / "turin", echo)
    assert server.wait([2], 10) == [2]
    site.close()
    server.close()
    assert "must be different names" in net("kits", federation, "--add", "turin", code=2)
    assert settings_of(federation).sites == ["berlin", "lyon", "turin"]


def test_sites_make_their_own_keys(tmp_path):
    place = tmp_path / "federation"
    net("init", place, "--sites", "berlin,lyon")
    net("kits", place, "--server-only")
    net("kits", place, "--add", "turin", "--server-only")
    assert {folder.name for folder in (place / "kits").iterdir()} == {"authority", "server"}
    for name in ("berlin", "turin"):
        net("request", tmp_path / name, name)
        net("sign", place, tmp_path / name / "request.pem")
        for file in (place / "kits" / name).iterdir():
            shutil.copy(file, tmp_path / name)
        assert kits.name_of(tmp_path / name) == name
    assert {file.parent.name for file in place.rglob("key.pem")} == {"authority", "server"}


def test_a_revoked_site_is_cut_off_and_a_renewed_one_goes_on(federation):
    place = federation / "kits"
    server = GrpcServer(["berlin", "lyon"], place / "server")
    lost, fine = Dialled(server, place / "berlin", echo), Dialled(server, place / "lyon", echo)
    assert server.wait([0, 1], 10) == [0, 1]
    for _ in range(2):  # the second time changes nothing
        assert net("revoke", federation, "berlin").startswith("1 certificates of berlin are revoked")
    _, failures = ask(server)
    assert failures[0].why == "its certificate was revoked"
    assert not ask(server, site=1)[1]
    again = Dialled(server, place / "berlin", echo)
    again.thread.join(10)
    assert again.ended is grpc.StatusCode.PERMISSION_DENIED
    net("kits", federation, "--renew", "berlin")  # the certificates of before are revoked, not the site
    renewed = Dialled(server, place / "berlin", echo)
    assert server.wait([0], 10) == [0]
    replies, failures = ask(server, seq=3)
    assert not failures
    np.testing.assert_array_equal(replies[0].arrays[0], np.arange(3))
    for site in (lost, fine, again, renewed):
        site.close()
    server.close()


def test_the_server_shows_its_renewed_certificate_without_a_restart(federation):
    place = federation / "kits"
    server = GrpcServer(["berlin", "lyon"], place / "server")

    def shown():
        context = ssl._create_unverified_context()
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", server.port)) as plain, context.wrap_socket(plain) as tls:
            return ssl.DER_cert_to_PEM_cert(tls.getpeercert(True)).strip()

    def own():
        return (place / "server" / kits.CERTIFICATE).read_text().strip()

    before = own()
    assert shown() == before
    # The same is not shown anew: gRPC would free what handshakes at the same time use.
    assert server._at_handshake() is None
    net("kits", federation, "--renew", "server", "--days", "20")
    assert shown() == own() != before
    assert server._at_handshake() is None
    site = Dialled(server, place / "berlin", echo)
    assert server.wait([0], 10) == [0]
    site.close()
    server.close()
    assert 19 < kits.days_left(place / "server") < 21
    assert "expires in 20 days" in kits.expires_soon(place / "server", "server")
    assert kits.expires_soon(place / "berlin", "berlin") is None


def test_an_expired_connection_is_cut_off(federation):
    place = federation / "kits"
    server = GrpcServer(["berlin", "lyon"], place / "server")
    site = Dialled(server, place / "lyon", echo)
    assert server.wait([1], 10) == [1]
    assert server.expires(1) == pytest.approx(time.time() + 825 * 86_400, abs=3600)
    server._streams[1].until = time.time() - 1
    assert ask(server, site=1)[1][1].why == "its certificate has expired"
    site.close()
    server.close()


def test_a_key_never_leaves_its_site(federation, tmp_path):
    net("request", tmp_path / "own", "lyon")
    shutil.rmtree(federation / "kits" / "lyon")
    net("sign", federation, tmp_path / "own" / "request.pem")
    answer = federation / "kits" / "lyon"
    assert not (answer / "key.pem").exists()
    shutil.copytree(answer, tmp_path / "own", dirs_exist_ok=True)
    assert kits.name_of(tmp_path / "own") == "lyon"
    server = GrpcServer(["berlin", "lyon"], federation / "kits" / "server")
    site = Dialled(server, tmp_path / "own", echo)
    assert server.wait([1], 10) == [1]
    site.close()
    server.close()
    net("request", tmp_path / "other", "oslo")
    assert "the federation's sites are" in net("sign", federation, tmp_path / "other" / "request.pem", code=2)


def test_kits_of_an_authority_that_there_is(made, tmp_path):
    net("init", tmp_path, "--sites", "oslo")
    net("kits", tmp_path, "--authority", made / "kits" / "authority")
    assert not (tmp_path / "kits" / "authority").exists()
    assert kits.name_of(tmp_path / "kits" / "oslo") == "oslo"
    issued = (made / "kits" / "authority" / "issued.jsonl").read_text().splitlines()
    assert {json.loads(line)["party"] for line in issued} == {"server", "berlin", "lyon", "oslo"}
