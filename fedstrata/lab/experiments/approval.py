"""A site's consent: its policy file, and the runs that a person there has approved.

Both are files of the site alone (`POLICY`, `APPROVED` in its kit). The server never sees or writes them; it
is told a refusal in words. Once a site has approved a run, it opens no other.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedstrata.channels.sent import Sent
from fedstrata.engines.network.allowance import Allowance
from fedstrata.engines.network.audit import Audit
from fedstrata.engines.network.host import Host, columns_of
from fedstrata.engines.network.kits import Identity, name_of, read
from fedstrata.engines.network.line import Rates
from fedstrata.engines.network.rules import Asks, Rules
from fedstrata.lab.experiments.base import Experiment
from fedstrata.lab.experiments.networked import SiteRun, terms_of
from fedstrata.lab.experiments.settings import checked, settings_of, whole
from fedstrata.solving.pose import Posed
from fedstrata.solving.sent import exchanges_of
from fedstrata.support.writing import write_atomically

POLICY, APPROVED, AUDIT = "policy.toml", "approved.json", "audit.jsonl"
TIME = r"([01]\d|2[0-3]):[0-5]\d"
MOST = 2**53
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SitePolicy(BaseModel):
    """The entries of a policy file; each may be left out.

    Attributes:
        approval: whether runs need an approval even before the first is given.
        share: whether the server may fetch what clients remember (`net collect`).
        epsilon, delta: a privacy budget for the site's samples, in all runs together.
        cores: the most processor cores.
        upload, download: how fast messages may travel, in megabits per second.
        reveals, secure, rounds, answers, memory, hours, starters: see `Rules`.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    approval: bool = Field(False, description="true or false")
    reveals: Literal["averages", "replies"] = Field("replies", description="'averages' or 'replies'")
    secure: bool = Field(False, description="true or false")
    share: bool = Field(False, description="true or false")
    starters: list[str] | None = Field(None, description="a list of names", min_length=1)
    epsilon: Positive | None = Field(None, description="a number above 0")
    delta: float = Field(1e-5, description="a number between 0 and 1", gt=0, lt=1)
    rounds: int | None = whole(None, 1, MOST)
    answers: int | None = whole(None, 1, MOST)
    memory: int | None = whole(None, 1, MOST)
    cores: int | None = whole(None, 1, 100_000)
    upload: Positive | None = Field(None, description="megabits per second, a number above 0")
    download: Positive | None = Field(None, description="megabits per second, a number above 0")
    hours: str | None = Field(
        None, description="two times of the day, HH:MM-HH:MM", pattern=rf"^{TIME}-{TIME}$"
    )  # fmt: skip

    @classmethod
    def of(cls, kit: Path) -> SitePolicy:
        """The policy in a site's kit; the default where there is none.

        Raises:
            ValueError: if an entry is unknown or not what it should be.
        """
        file = kit / POLICY
        try:
            return checked(cls, tomllib.loads(file.read_text("utf-8")) if file.is_file() else {})
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def rules(self, kit: Path) -> Rules:
        """The rules of the policy, with the approvals in the kit."""
        known = approved(kit)
        hours = None
        if self.hours is not None:
            begin, end = map(datetime.time.fromisoformat, self.hours.split("-"))
            hours = begin, end
        limits = self.model_dump(include={"reveals", "secure", "rounds", "answers", "memory", "starters"})
        return Rules(approved=known if known or self.approval else None, hours=hours, **limits)

    def allowance(self, folder: Path) -> Allowance | None:
        """The privacy budget, kept in a folder."""
        return None if self.epsilon is None else Allowance(folder / "privacy.json", self.epsilon, self.delta)

    @property
    def rates(self) -> Rates:
        """How fast messages may travel."""
        return Rates(self.upload, self.download)

    def limit_cores(self) -> None:
        """Limit this process to the policy's number of cores; call it before JAX starts its threads."""
        if self.cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.cores])


def approved(kit: Path) -> dict[str, Any]:
    """The runs that were approved at a site, by their digests."""
    file = kit / APPROVED
    try:
        return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file} cannot be read: approve the runs again after removing it. {error}"
        ) from None


def approve(kit: Path, digests: dict[str, str]) -> None:
    """Record that a person has approved runs."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    new = {digest: {"run": run, "time": now} for digest, run in digests.items()}
    write_atomically(kit / APPROVED, json.dumps(approved(kit) | new, indent=1).encode())


def host_of(
    kit: Path, folder: Path, experiment: Experiment, opens: Callable[[int], SiteRun], *, steady: bool,
    share: bool = False, once: bool = False, epsilon: float | None = None, delta: float = 1e-5,
) -> Host:  # fmt: skip
    """A site with its account, under the policy in its kit.

    Args:
        kit: its folder.
        folder: for what it keeps.
        experiment: its copy.
        opens: its runs.
        steady: whether its samples are the same in all runs.
        share: as in the policy, where it is said elsewhere.
        epsilon: likewise.
        delta: of that budget.
        once: whether it ends with the server's run.
    """
    policy, name = SitePolicy.of(kit), name_of(kit)
    if epsilon is not None:
        policy = policy.model_copy(update={"epsilon": epsilon, "delta": delta})
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    terms, audit = terms_of(experiment), Audit(folder / AUDIT, name)
    audit.note("started", experiment=experiment.name, terms=terms, policy=policy.model_dump())
    return Host(
        terms, opens, folder, share or policy.share, once, read(kit)[2], audit,
        Identity(kit, settings_of(kit).sites), policy.allowance(folder), policy.rules(kit), steady,
    )  # fmt: skip


@dataclass
class Kind:
    """Runs of an experiment that ask the same; their seeds may differ.

    Attributes:
        label: their settings.
        run: the first of them.
        asks: what it asks.
        number: how many there are.
    """

    label: str
    run: SiteRun
    asks: Asks
    number: int = 0

    @property
    def posed(self) -> Posed:
        """The first run, posed."""
        return self.run.posed()


def kinds(experiment: Experiment, opens: Callable[[int], SiteRun]) -> list[Kind]:
    """The runs of an experiment, those that ask the same together."""
    found: dict[str, Kind] = {}
    for number, setting in enumerate(experiment.settings):
        run = opens(number)
        asks = run.asks()
        label = ", ".join(f"{key} = {value}" for key, value in setting.items()) or experiment.name
        found.setdefault(asks.digest, Kind(label, run, asks)).number += 1
    return list(found.values())


def described(experiment: Experiment, found: list[Kind]) -> Iterator[str]:
    """The demands of the runs on a site, as lines of Markdown."""
    for kind in found:
        run, asks = kind.posed, kind.asks
        times = f"{kind.number} run{'s' * (kind.number > 1)} of {asks.rounds:,} rounds"
        yield f"### {experiment.name}: {kind.label}\n"
        what = f"{type(run.methods[0]).__name__} on a problem of the class {type(run.setup.problem).__name__}"
        yield f"{what}, {times}. Digest {asks.digest}.\n"
        yield "| exchange | when | sent to the site | sent by the site | the server gets |"
        yield "|---|---|---|---|---|"
        yield from (_row(one, asks.secure) for one in exchanges_of(run))
        if run.setup.measure_problem or run.setup.metrics:
            own = ["the problem's own metrics"] * run.setup.measure_problem
            names = ", ".join([*own, *(name for name, _ in run.setup.metrics)])
            when, learnt = f"every {run.eval_every} rounds", _gets(False, asks.secure)
            yield f"| measurement | {when} | the model | means over the site's samples: {names} | {learnt} |"
        yield f"\n{_privacy(run)}\n"


def _row(one: Sent, secure: bool) -> str:
    when = "before the first round" if one.program == "start" else "each round"
    if one.program == "round":
        often = "as often as the method needs" if one.most is None else f"at most {one.most} times"
        when += {None: f", {often}", 1: ""}.get(one.times, f", {one.times} times")
    asked = "" if one.asked == "everyone" else ", if it takes part"
    up = "a number for each sample" if one.per_sample else _numbers(one.shapes)
    cells = (f"{one.phase} ({one.level})", when + asked, _numbers(one.sent), up, _gets(one.gathered, secure))
    return f"| {' | '.join(cells)} |"


def _numbers(shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> str:
    return f"{sum(math.prod(shape) for shape, _ in shapes):,} numbers"


def _gets(gathered: bool, secure: bool) -> str:
    if gathered:
        return "**each client's own**"
    return "the sum over all sites, no site's own" if secure else "this site's mean"


def _privacy(run: Posed) -> str:
    if run.spending is None:
        return "No noise is added: what is sent can reveal samples to whoever receives it."
    epsilon = run.spending.epsilon(run.rounds)
    return f"With noise, {run.rounds:,} rounds cost ε = {epsilon:.3g} at δ = {run.spending.delta:g}."


DOCUMENT = """\
# Data protection: {experiment}

A draft, filled by `fedstrata net approve --document` from what the experiment's text asks of this site. Lines
with […] are for you.

## Purpose and parties

- Purpose, and who answers for it: […]
- Legal basis, and the ethics board's number: […]
- This site: {site}. The other parties: {others}. The server is run by: […]

## Data that stays at the site

- {data}. What the columns are: {columns}.
- Whose data it is, how it was collected, and how long it is kept: […]

No record leaves the site. The site's process reads the samples, computes, and sends the numbers below.

## What leaves the site

{exchanges}
Besides these: numbers of samples, names and shapes of the arrays, and a code by which the server knows the
samples again (HMAC-SHA-256 with the site's private key).

## What the numbers can reveal

Models, gradients and other sums over samples can reveal properties of single records, the more so the fewer
samples a site has. A mean of a site with one client is that client's own, unless sums are secure.

## Safeguards

- Connections: TLS 1.3 or 1.2 with certificates on both sides; the site dials out and opens no port.
- The site runs its own copy of the text and nothing else. Rules on its own disk:
{rules}
- Account: every request and answer is a line of {account}, chained by hashes, without numbers of a sample.
- Shutting out: the site ends its process; `fedstrata net revoke` shuts a site out at the server.

## What is kept at the site

What clients remember between rounds (control variates, personal models) is kept in the site's folder until
another experiment begins. Who may read that disk: […]
"""


def document(
    experiment: Experiment, found: list[Kind], site: str, sites: list[str], policy: SitePolicy
) -> str:
    """A draft of a data protection description, with what the text tells filled in."""
    data = found[0].run.data
    names = ", ".join(columns_of(data).get("x", ["[…]"]))
    rules = {name: value for name, value in policy.model_dump().items() if value not in (None, False)}
    return DOCUMENT.format(
        experiment=experiment.title or experiment.name,
        site=site,
        others=", ".join(name for name in sites if name != site) or "[…]",
        data=", ".join(f"{k}: {v}" for k, v in _forms(data).items()),
        columns=names,
        exchanges="\n".join(described(experiment, found)),
        rules="\n".join(f"  - {name} = {value}" for name, value in rules.items()),
        account="audit.jsonl",
    )


def _forms(data: Any) -> dict[str, str]:
    sample = data.sample_of("train")
    return {str(name): f"{leaf.dtype} {tuple(leaf.shape)}" for name, leaf in sample.items()}
