"""Secure sums: right to their quantisation, uniform to the server, never twice, and refused where unsound."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engines.network import Network, Policy, SiteRefused
from fedstrata.engines.network.federation import Federation
from fedstrata.engines.network.kits import Identity, KitError, make
from fedstrata.engines.network.masks import LARGEST, Fixed, Masker, SumRequest, met, total
from fedstrata.engines.network.site import Site

from .test_engine import CASES, assert_same
from .test_host import TERMS, Hosts

SHARES = np.array([0.5, 0.2, 0.3])
COUNTS = np.array([1, 2**40, 3])


def asked(number=1, shares=SHARES, message=b"m", what="round 0"):
    return SumRequest.of(what, number, [shares, np.frombuffer(message, np.uint8)])


def masked(uploads, fixed, sum_of=None):
    sum_of = asked() if sum_of is None else sum_of
    found = []
    for site, upload, share in zip(met("run", len(uploads)), uploads, SHARES, strict=True):
        site.admit(sum_of, True, share)
        found.append(site.mask(fixed.encode([upload], share), COUNTS, sum_of))
    return zip(*found, strict=True)


@pytest.mark.parametrize(("clip", "noise", "bits"), [(2.0, 0.0, 32), (2.0, 1.0, 32), (None, 0.0, 64)])
def test_masks_cancel_in_the_sum(clip, noise, bits):
    """Each site's numbers are right to half a unit of the scale; counts are exact."""
    fixed = Fixed(clip, noise, SHARES)
    uploads = SHARES[:, None] * np.random.default_rng(0).uniform(-2, 2, (3, 1000))
    vectors, counts = masked(uploads, fixed)
    found = fixed.decode(total(vectors))
    assert fixed.bits == bits == 8 * vectors[0].itemsize
    assert np.abs(found - uploads.sum(0)).max() <= 1.5 / fixed.scale < 1e-7
    assert total(counts).tolist() == (3 * COUNTS).tolist()


@pytest.mark.parametrize("clip", [1.0, 1e-30, 1e30, None])
def test_the_largest_numbers_fit_and_larger_ones_are_refused(clip):
    fixed = Fixed(clip, 0.0, SHARES)
    most = np.outer(SHARES * clip, [1, -1]) if clip else np.outer(np.full(3, LARGEST), [1, -1])
    vectors, _ = masked(most, fixed)
    np.testing.assert_allclose(fixed.decode(total(vectors)), most.sum(0), rtol=1e-6)
    for bad in (2 * most[0], np.array([np.nan, 0]), np.array([-np.inf, 0])):
        with pytest.raises(SiteRefused, match="has no room"):
            fixed.encode([bad], SHARES[0])


def test_what_the_server_sees_is_uniform():
    """χ² of the bytes with 255 degrees of freedom, of zeros, and of two sites' sum: within 5 σ."""
    vectors, _ = masked(np.zeros((3, 2**15)), Fixed(1.0, 0.0, SHARES))
    for seen in (vectors[0], vectors[2], total(vectors[:2])):
        bins = np.bincount(seen.view(np.uint8), minlength=256)
        chi2 = ((bins - bins.mean()) ** 2 / bins.mean()).sum()
        assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)
    again, _ = masked(np.zeros((3, 2**15)), Fixed(1.0, 0.0, SHARES))
    assert (again[0] == vectors[0]).mean() < 1e-3  # keys are new in every run


def test_masks_are_never_used_twice():
    """A retry has another number, and so other masks; sites that were told different things give no sum."""
    sites, fixed = met("run", 3), Fixed(1.0, 0.0, SHARES)
    zeros = fixed.encode([np.zeros(100)], 1.0)
    one, retry, other = (
        sites[0].mask(zeros, COUNTS, a)[0] for a in (asked(1), asked(2), asked(1, message=b"n"))
    )
    assert (one != retry).mean() > 0.99 < (one != other).mean()
    told = zip(sites, (b"m", b"m", b"n"), strict=True)
    lied_to = [site.mask(zeros, COUNTS, asked(message=m))[0] for site, m in told]
    assert total(lied_to).any()


def test_an_exchange_has_one_cohort_and_one_message(tmp_path):
    """Also after a restart: key and answers are on disk."""
    others = [Masker("run") for _ in range(3)]
    for restart in range(2):
        site = Masker("run", tmp_path)
        publics = [site.public, *(one.public for one in others)]
        site.meet(publics)
        shares = np.full(4, 0.25)
        if not restart:
            site.admit(asked(5, shares), True, 0.25)
            first = site.public
        assert site.public == first
        for sum_of, why in (
            (asked(5, shares), "message number was used before"),
            (asked(9, shares, b"other"), "answered before"),
            (asked(9, np.array([0.25, 0.25, 0.25, -1])), "answered before"),
        ):
            with pytest.raises(SiteRefused, match=why):
                site.admit(sum_of, False, 0.25)
    site.admit(asked(10, shares), True, 0.25)  # a retry


@pytest.mark.parametrize(
    ("shares", "everyone", "why"),
    [
        ([0.5, 0.5, -1], False, "fewer than 3 sites"),
        ([0.5, 0.5, 1e-9], False, "fewer than 3 sites"),
        ([0.4, 0.3, 0.3], True, "not those of their clients"),
        ([0.5, np.nan, 0.3], False, "fewer than|some sites|not those"),
        ([0.5, 0.2], False, "weight of each site"),
    ],
)
def test_sums_that_show_too_much_are_refused(shares, everyone, why):
    with pytest.raises(SiteRefused, match=why):
        met("run", 3)[0].admit(asked(shares=np.array(shares)), everyone, 0.5)


def test_a_sum_over_some_sites_is_refused_where_the_text_asks_everyone():
    with pytest.raises(SiteRefused, match="some sites alone"):
        met("run", 4)[0].admit(asked(shares=np.array([0.5, 0.2, 0.3, -1])), True, 0.5)


@pytest.mark.parametrize(
    ("name", "channel", "tolerance"),
    [
        ("scaffold", fs.Channel(secure=True), 1e-6),
        ("scaffold", fs.Channel(clip=8.0, noise=1.0, noise_at="clients", secure=True), 1e-6),
        ("fedavg", fs.Channel(clip=64.0, secure=True), 1e-6),
    ],
)
@pytest.mark.slow
def test_sites_are_as_simulated(name, channel, tolerance):
    """To the rounding of float32, which is larger than a quantum of either modulus here; ledgers too."""
    case = CASES[name]
    simulated = case.run(channel=channel)
    assert_same(case.run(channel=channel, engine=Network()), simulated, tolerance)


class Known(Hosts):
    """Sites with certificates, of a run with secure sums."""

    def __init__(self, folder, name, sites):
        super().__init__(folder, name, sites)
        make(folder / "kits", self.names, [])
        for i in range(sites):
            self.restart(i)

    def restart(self, i, data=None):
        super().restart(i, data)
        self.hosts[i].identity = Identity(self.folder / "kits" / self.names[i], self.names)
        opens = self.hosts[i].opens

        def secure(number):
            opened = opens(number)
            return SecureRun(opened)

        self.hosts[i].opens = secure


class SecureRun:
    def __init__(self, plain):
        self.plain, self.data = plain, plain.data

    def text(self, clients, server):
        text, identity = self.plain.text(clients, server)
        return replace(text, setup=replace(text.setup, secure=True)), identity


def test_keys_are_those_of_the_federations_sites(tmp_path):
    """The server hands them on, and can put none of its own in their place; a restarted site has its own."""
    hosts = Known(tmp_path, "fedavg", 3)
    there = Federation(hosts, "run", 0, TERMS)
    remote = there.gather()
    there.pose(int(remote.sizes.sum()), 3, None, hosts.identity(3), secure=True)
    assert not there.join({i: [0] for i in range(3)})
    hosts.restart(1)
    assert not there.join({1: [0]})
    maskers = [host.site.masker for host in hosts.hosts]
    assert maskers[0]._shared[1] == maskers[1]._shared[0]
    make(tmp_path / "foreign", hosts.names, [])
    own, kits = there._keys[0].tobytes(), tmp_path / "kits"
    server = Identity(kits / "server", hosts.names)
    for proof, why in (
        (Identity(tmp_path / "foreign" / "site-1", hosts.names).proof("run", b"k" * 32), "not signed"),
        (server.proof("run", b"k" * 32), "only .* are accepted"),
        (own.replace(own[2:6], b"0000"), "not signed"),
        (b"[]", "cannot be read"),
    ):
        with pytest.raises(KitError, match=why):
            Identity(kits / "site-0", hosts.names).checked("run", proof)
    with pytest.raises(KitError, match="not signed"):
        Identity(kits / "site-0", hosts.names).checked("another run", own)
    for keys, why in (([own] * 3, "Two keys"), ([own], "at least 3 sites")):
        there._keys = [np.frombuffer(key, np.uint8) for key in keys]
        hosts.restart(0)
        assert why in there.join({0: [0]})[0].why


def test_a_site_keeps_to_the_texts_number_of_clients(monkeypatch):
    """With another one, a text that asks everyone would answer for some of them."""
    seen, call = [], Site.call
    monkeypatch.setattr(Site, "call", lambda self, *sent: seen.append((self, *sent)) or call(self, *sent))
    run(engine=Network())
    site, header, arrays = seen[-1]
    what = [*header["what"][:3], header["what"][3] - 1]
    with pytest.raises(SiteRefused, match="another number of clients"):
        call(site, {**header, "what": what, "seq": header["seq"] + 1}, arrays)


def test_a_kl_level_with_a_known_shift_needs_sums_alone():
    """exp(ℓ/λ − c) is averaged under masks; the log domain has the same iterates, and gathers."""
    rng, lam, c = np.random.default_rng(0), 2.0, 1.0
    own = [{"a": rng.normal(size=(5, 3)), "b": rng.normal(size=5)} for _ in range(3)]
    data = fs.FederatedData.from_clients(own)
    options = {"rounds": 5, "default_metrics": False, "progress": False, "certify": False}

    def loss(x, s):
        return 0.5 * (s["a"] @ x - s["b"]) ** 2

    levels = [lambda x, s: jnp.exp(loss(x, s) / lam - c), lambda g: lam * (c + jnp.log(g))]
    method, x0 = fs.FedDRO(0.1, 0.5, I=2), np.zeros(3)
    plain = fs.solve(fs.dro.kl(loss, lam), method, data, x0, **options)
    masked = fs.solve(
        fs.Composition(levels), method, data, x0, engine="network", channel=fs.Channel(secure=True), **options
    )
    np.testing.assert_allclose(masked.x, plain.x, rtol=1e-5)
    assert plain.ledger.gathers > masked.ledger.gathers == 0
    with pytest.raises(ValueError, match="single replies"):
        fs.solve(fs.dro.kl(loss, lam), method, data, x0, channel=fs.Channel(secure=True), **options)


def run(**options):
    name, channel = options.pop("name", "fedavg"), fs.Channel(secure=True)
    return CASES[name].run(**{"channel": channel, "rounds": 1, **options})


REFUSED = {
    "single replies": lambda: run(name="fedrzo-scalars"),
    "do not drop out": lambda: run(dropouts=fs.Dropouts(0.1)),
    "at least 3 clients in a round": lambda: run(participation=2),
    "asks 2 of the clients": lambda: run(name="fedmsa"),
    "policy 'wait'": lambda: run(engine=Network(policy=Policy("drop"))),
    "there are 2": lambda: run(engine=Network(clients_per_site=3)),
    "masks are random": lambda: fs.Channel(secure=True, compress=fs.Sign()),
    "needs single uploads": lambda: fs.Channel(secure=True, mean=fs.Median()),
    "applies to a whole run": lambda: run(name="fednest", channel={"main": fs.Channel(secure=True)}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_would_show_more_than_sums_is_refused(reason):
    with pytest.raises(ValueError, match=reason):
        REFUSED[reason]()
