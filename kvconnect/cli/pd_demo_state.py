"""What has happened so far in a run of the P/D demo, and whether it was right."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvconnect.cli.pd_demo_job import (
    Computed,
    Ended,
    Event,
    Held,
    Job,
    Listening,
    Moved,
    Ready,
    Single,
    Token,
)


@dataclass
class Lane:
    """One pair of ranks: what moved from `source` to `target` so far."""

    source: str
    target: str
    expected: int
    """Layers that will move."""
    layers: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    packed: set[bool] = field(default_factory=set)
    why: str = ""
    failure: str = ""

    def take(self, moved: Moved) -> None:
        """Count a push in."""
        self.nbytes += moved.nbytes
        self.seconds += moved.seconds
        self.packed.add(moved.packed)
        self.why = self.why or moved.why
        self.failure = self.failure or moved.failure
        if not moved.failure:
            self.layers += moved.layers[1] - moved.layers[0]


class State:
    """Everything that the ranks said."""

    def __init__(self, job: Job) -> None:
        """Know who will send to whom, by the placements alone."""
        self.job = job
        self.lanes: dict[tuple[str, str], Lane] = {}
        for a in range(job.ranks("prefill")):
            for b in range(job.ranks("decode")):
                source, target = job.placement("prefill", a), job.placement("decode", b)
                part = source.meet(target)
                if part is not None and source.replica == target.replica % source.replicas:
                    key = f"prefill {a}", f"decode {b}"
                    self.lanes[key] = Lane(*key, part.layers.extent)
        self.addresses: dict[str, str] = {}
        self.ready: dict[str, int] = {}
        self.computed: dict[int, float] = {}
        self.first: Token | None = None
        self.tokens: list[Token] = []
        self.held: dict[str, Held] = {}
        self.ended: dict[str, Ended] = {}
        self.single: Single | None = None

    def take(self, name: str, event: Event) -> None:
        """Take one event in."""
        if isinstance(event, Moved):
            self.lanes[name, event.target].take(event)
        elif isinstance(event, Token) and name.startswith("prefill"):
            self.first = event
        elif isinstance(event, Token):
            self.tokens.append(event)
        elif isinstance(event, Single):
            self.single = event
        elif isinstance(event, Computed):
            self.computed[event.layer] = max(event.seconds, self.computed.get(event.layer, 0))
        elif isinstance(event, Ready):
            self.ready[name] = event.pool_nbytes
        elif isinstance(event, Listening):
            self.addresses[name] = event.address
        elif isinstance(event, Held):
            self.held[name] = event
        else:
            self.ended[name] = event

    @property
    def decoded(self) -> list[int]:
        """The tokens, that of the prefill side first."""
        return [t.value for t in ([self.first] if self.first else []) + self.tokens]

    def problems(self) -> list[str]:
        """Return what differs from a perfect run, one sentence each."""
        out = []
        for name, end in sorted(self.ended.items()):
            if end.state != "done":
                out.append(f"{name}: {end.state}: {end.reason}")
            if not end.quiet:
                out.append(f"{name}: its pages are not free yet")
        truth = self.single
        for number in range(self.job.decode_tp):
            held = self.held.get(f"decode {number}")
            if held is None:
                out.append(f"decode {number} does not hold the prompt")
            elif truth is not None and held.digest != truth.digests[number]:
                out.append(f"decode {number}: keys and values differ from those of one process")
        if truth is None:
            out.append("the run in one process gave no result")
        elif self.decoded != truth.tokens:
            out.append("the tokens differ from those of one process")
        if len(self.decoded) != self.job.new_tokens:
            out.append(f"{len(self.decoded)} of {self.job.new_tokens} tokens were decoded")
        return out
