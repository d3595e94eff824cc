"""Secure sums: pairwise masks that cancel, so that the server learns only the sum of the sites' uploads.

    1  site i, once in a run: a pair of X25519 keys; the public one, signed with the site's certificate
    2  sites i, j: s_ij ← X25519 of i's private and j's public key, after j's certificate was checked
    3  in an exchange c (run, number of the message, cohort, digest of the message):
    4      k_ij ← HKDF-SHA256(s_ij, c);  m_ij ← AES-256-CTR(k_ij), read as integers modulo 2^b
    5      site i: round(2^s · u_i) + Σ_{j>i} m_ij − Σ_{j<i} m_ij modulo 2^b
    6  server: the sum over the cohort modulo 2^b, read as a signed number, times 2^−s

u_i is site i's weighted sum. b is 32 if its numbers have a bound (``clip``), else 64; s is as large as the
sum's bound B allows, so that each coordinate is right to n·2^−s−1. Masks are those of Bonawitz et al. (2017)
without their recovery: if a site is lost the attempt ends, and the next one has another number and thus other
masks.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedstrata.channels.link import LEAST_SUM
from fedstrata.engines.network.states import SiteRefused
from fedstrata.support.writing import append, write_atomically

FEWEST = LEAST_SUM
LEAST_SHARE = 1e-3  # the least share of a sum's weight for a site to count towards `FEWEST`
LARGEST = 2.0**24  # the bound of a site's numbers if none is known
MARGIN = 1.01  # for rounding: of a norm that was clipped in float32, and of each site's integers
TAILS = 12.0  # deviations of noise within a bound, exceeded with probability 1e-32
BLOCK = 2**13  # numbers at a time: a processor's cache has room for them, which halves the time
KEY, ANSWERED = "mask.key", "answered"  # files in the run's folder
_INFO = b"fedstrata mask 1"


class SumRequest(NamedTuple):
    """A sum that a message contributes to.

    Attributes:
        what: the exchange as program, position, phase, round, turn.
        number: the message's number.
        shares: the weight of each site's clients in the sum; negative if it is not asked.
        digest: of all this but the number, and of key and message. Masks depend on it, so that masks of sites
            with different requests do not cancel.
    """

    what: str
    number: int
    shares: np.ndarray
    digest: bytes

    @classmethod
    def of(cls, what: str, number: int, arrays: Sequence[np.ndarray]) -> SumRequest:
        """From the arrays that all sites get: shares, key, message."""
        code = hashlib.sha256(what.encode())
        for array in arrays:
            code.update(f"{array.dtype} {array.shape}".encode())
            code.update(np.ascontiguousarray(array).data)
        return cls(what, number, arrays[0], code.digest())


def bound_of(clip: float | None, noise: float | None, shares: np.ndarray) -> tuple[float | None, float]:
    """The bound of a site's numbers per weight, or None; and the bound B of the sum.

    Args:
        clip: the bound C of an upload's norm.
        noise: the deviation of an upload's own noise over C.
        shares: each site's weight, negative if it is not asked.
    """
    shares = shares[shares >= 0]
    if clip is None or not math.isfinite(clip):
        return None, MARGIN * LARGEST * len(shares)
    each = MARGIN * clip * (1 + TAILS * (noise or 0.0))
    return each, each * float(shares.sum())


class Fixed:
    """The fixed-point format that sites and server share for an exchange.

    Args:
        clip, noise, shares: see `bound_of`.
    """

    def __init__(self, clip: float | None, noise: float | None, shares: np.ndarray) -> None:
        self.each, bound = bound_of(clip, noise, shares)
        self.bits = 64 if self.each is None else 32
        self.dtype = np.dtype(np.uint64 if self.each is None else np.uint32)
        # the largest power of two that makes sums within the bound integers below 2^(bits−1)
        self.scale = 2.0 ** math.floor(self.bits - 1 - math.log2(MARGIN * max(bound, 1e-280)))

    def encode(self, arrays: Sequence[np.ndarray], share: float) -> np.ndarray:
        """A site's weighted sums as one vector of integers.

        Raises:
            SiteRefused: for a number outside the range of the sum.
        """
        most = MARGIN * LARGEST if self.each is None else self.each * share
        flat = [np.asarray(a).reshape(-1) for a in arrays]
        found, at, room = np.empty(sum(a.size for a in flat), self.dtype), 0, np.empty(BLOCK)
        for part in (a[k : k + BLOCK] for a in flat for k in range(0, a.size, BLOCK)):
            scaled = np.multiply(part, self.scale, out=room[: part.size], dtype=np.float64)
            if not max(scaled.max(), -scaled.min()) <= most * self.scale:
                raise SiteRefused(
                    f"An upload has a number that is not finite or beyond {most:.3g}, for which a secure sum "
                    "has no room: the method diverges, or its uploads need clip=."
                )
            found[at : at + part.size] = np.rint(scaled, out=scaled).astype(np.int64)
            at += part.size
        return found

    def decode(self, total: np.ndarray) -> np.ndarray:
        """The sum of the vectors as numbers."""
        signed: np.ndarray = total.view(np.int32 if self.bits == 32 else np.int64)
        return signed * (1 / self.scale)  # a power of two


class Masker:
    """One site's part in one run.

    The private key and the answers are on disk before they are used: after a restart, the site has the same
    masks for the same message, and gives no other answer.

    Args:
        run: the run's name.
        folder: the folder of both; None keeps them in this process.
    """

    def __init__(self, run: str, folder: Path | None = None) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.run, self.folder, self.index = run, folder, -1
        self._shared: Mapping[int, bytes] = {}
        self._answered: dict[str, str] = {}
        self._highest = 0
        if folder is None:
            self._private = X25519PrivateKey.generate()
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / KEY
        if not file.exists():
            write_atomically(file, X25519PrivateKey.generate().private_bytes_raw(), secret=True)
        self._private = X25519PrivateKey.from_private_bytes(file.read_bytes())
        log = folder / ANSWERED
        for line in log.read_text("utf-8").splitlines() if log.is_file() else ():
            what, digest, number = line.rsplit(" ", 2)
            self._answered[what], self._highest = digest, max(self._highest, int(number))

    @property
    def public(self) -> bytes:
        """The public key: line 1."""
        return self._private.public_key().public_bytes_raw()

    def meet(self, publics: Sequence[bytes]) -> None:
        """Agree on masks with every other site; keys are in the sites' order, with checked signatures."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        if len(publics) < FEWEST or len(set(publics)) < len(publics) or self.public not in publics:
            raise SiteRefused(
                f"A secure sum needs at least {FEWEST} sites with keys of their own, this one's among them."
            )
        self.index = publics.index(self.public)
        self._shared = {
            j: self._private.exchange(X25519PublicKey.from_public_bytes(key))
            for j, key in enumerate(publics)
            if j != self.index
        }  # line 2

    def admit(self, asked: SumRequest, everyone: bool, own: float) -> None:
        """Check what a sum would reveal, and record the answer: an exchange has one cohort and one message.

        Args:
            asked: the sum.
            everyone: whether the text asks every client in it.
            own: the weights of this site's clients.

        Raises:
            SiteRefused: if it would reveal more than the text's sums do.
        """
        shares, what, number = asked.shares, asked.what, asked.number
        if shares.shape != (1 + len(self._shared),) or shares.dtype != np.float64:
            raise SiteRefused("The request lacks the weight of each site in the sum.")
        there = shares >= 0  # a site that is left out has a negative one
        if everyone and not there.all():
            raise SiteRefused("The text asks every client there, but this sum is over some sites alone.")
        total = shares[there].sum()
        if not (np.isfinite(total) and np.isclose(shares[self.index], own, rtol=1e-5)):
            raise SiteRefused("The weights of the sites in a sum are not those of their clients.")
        if (shares[there] >= LEAST_SHARE * total).sum() < FEWEST or total == 0:
            raise SiteRefused(
                f"A sum of fewer than {FEWEST} sites with a share of its weight shows too much of one."
            )
        digest = asked.digest.hex()[:32]
        if self._answered.get(what, digest) != digest:
            raise SiteRefused(
                f"The exchange {what} was answered before, for another cohort or another message: the "
                "difference of both sums would show a site's part. Begin another run."
            )
        if number <= self._highest:
            raise SiteRefused("The message number was used before: masks would be used twice.")
        self._highest = number
        if self.folder is not None:
            append(self.folder / ANSWERED, f"{what} {digest} {number}\n".encode())
        self._answered[what] = digest

    def mask(self, vector: np.ndarray, counts: np.ndarray, asked: SumRequest) -> list[np.ndarray]:
        """Lines 3 to 5, for a vector and for counts (modulo 2^64)."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        vector, counts = vector.copy(), np.asarray(counts, np.uint64).copy()
        context = _INFO + struct.pack("<Q", asked.number) + asked.digest + self.run.encode()
        zeros, room = bytes(8 * BLOCK), bytearray(8 * BLOCK + 16)
        for j in np.flatnonzero(asked.shares >= 0).tolist():
            if j != self.index:
                key = HKDF(SHA256(), 48, None, context).derive(self._shared[j])
                # Zeros in counter mode give the cipher's stream, which only these two can compute.
                stream = Cipher(algorithms.AES(key[:32]), modes.CTR(key[32:])).encryptor()
                # one site of a pair adds what the other subtracts
                sign = np.add if self.index < j else np.subtract
                for whole in (counts, vector):
                    for part in (whole[k : k + BLOCK] for k in range(0, whole.size, BLOCK)):
                        stream.update_into(memoryview(zeros)[: part.nbytes], room)
                        sign(part, np.frombuffer(room, part.dtype, part.size), out=part)
        return [vector, counts]


def met(run: str, sites: int) -> list[Masker]:
    """The maskers of sites in one process."""
    maskers = [Masker(run) for _ in range(sites)]
    for one in maskers:
        one.meet([other.public for other in maskers])
    return maskers


def total(masked: Sequence[np.ndarray]) -> np.ndarray:
    """Line 6: the sum of the sites' vectors, modulo 2^b."""
    found = masked[0].copy()
    for k in range(0, found.size, BLOCK):
        for one in masked[1:]:
            found[k : k + BLOCK] += one[k : k + BLOCK]
    return found
