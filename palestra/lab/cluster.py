"""Units that generate or train, and the policies that say how many do which. A unit that switches to training loses its KV,
unless the workload says otherwise. Publishing takes the units that do not train, which get the new weights; none moves meanwhile,
and the policy starts afresh after it.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from palestra.lab import workload
from palestra.lab.engine import Engine
from palestra.lab.precedence import First
from palestra.lab.progress import Progress


@dataclass(frozen=True, slots=True)
class Use:
    """Where the unit-seconds went. Generating counts only while there is a sequence in the step."""

    generating: float
    training: float
    publishing: float
    idle: float

    @property
    def share(self) -> float:
        """The share that was used for anything."""
        used = self.generating + self.training + self.publishing
        return used / (used + self.idle)


@dataclass(frozen=True, slots=True)
class Lost:
    """Unit-seconds for nothing: in KV that nobody held while others generated, and with nothing to do at all."""

    empty: float = 0.0
    idle: float = 0.0


class Policy(Protocol):
    def start(self, units: int) -> int:
        """How many generate from when the weights are published."""

    def generating(self, cluster: "Cluster") -> int:
        """How many go on generating, now that something has changed."""

    def returning(self, units: int) -> int:
        """How many generate now or will again, and so may keep their KV, where the workload lets them."""


class Cluster:
    def __init__(
        self, spec: workload.Engine, publish_seconds: float, policy: Policy, first: First, piece: int | None = None
    ) -> None:
        self.spec = spec
        self._publish_seconds = publish_seconds
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._born = self._loop.time()
        self._worked: Progress[asyncio.Future[None]] = Progress(self._finish)
        """Seconds of training work done, counted as if all units trained."""
        self._works = 0
        self._under_way = False
        self._turn = asyncio.Lock()
        self._publishing = False
        self._training_seconds = self._publishing_seconds = 0.0
        self.generating = policy.start(spec.units)
        self.engine = Engine(spec, self.generating, first, piece)
        self.engine.on_leaving = self.review
        self.lost_at_start = Lost()
        """Until there was training work for the first time."""
        self.trained: list[tuple[float, float]] = []
        """From when to when units trained."""
        self.backlog = 0
        """Complete groups that wait for training; whoever trains keeps it."""
        self.coming = 0
        """Runs of this training step that have not begun yet; whoever starts a step adds them."""
        self.to_come = 0
        """The same of all steps."""

    @property
    def has_training(self) -> bool:
        """Whether training work is waiting or under way."""
        return self._works > 0

    def begin_run(self) -> None:
        """A run is about to open its context."""
        self.coming -= 1
        self.to_come -= 1
        if self.to_come == 0:
            self.engine.hurry()

    async def train(self, seconds: float) -> None:
        """So many seconds of work for all units; longer on those that train. First come, first served."""
        if not seconds:
            return
        if not self.trained and not self._works:
            self.lost_at_start = Lost(self.engine.empty_seconds(), self.use().idle)
        self._works += 1
        self.review()
        try:
            async with self._turn:
                await self._work(seconds)
        finally:
            self._works -= 1

    async def publish(self) -> None:
        """Nothing is generated meanwhile; KV is kept. The units that train go on."""
        self._advance()
        started, trained, self._publishing = self._loop.time(), self._training_seconds, True
        self.engine.pause()
        try:
            await asyncio.sleep(self._publish_seconds)
        finally:
            self._advance()
            trained = self._training_seconds - trained
            self._publishing_seconds += (self._loop.time() - started) * self.spec.units - trained
            self._publishing = False
            self._give(self._policy.start(self.spec.units))
            self.engine.resume()
            self.review()

    def review(self) -> None:
        """Let the policy move units between generation and training."""
        if not self._publishing:
            self._give(self._policy.generating(self))

    def use(self) -> Use:
        self._advance()
        generating = self.engine.totals().unit_seconds
        used = generating + self._training_seconds + self._publishing_seconds
        whole = (self._loop.time() - self._born) * self.spec.units
        return Use(generating, self._training_seconds, self._publishing_seconds, whole - used)

    def _give(self, units: int) -> None:
        """So many units to generation, the others to training."""
        self._advance()
        if units != self.generating:
            self.generating = units
            with_kv = self._policy.returning(self.spec.units) if self.spec.switch_keeps_kv else units
            self.engine.resize(units, with_kv * self.spec.kv_tokens)
        self._go_on()

    async def _work(self, seconds: float) -> None:
        done = self._loop.create_future()
        self._advance()
        mark = self._worked.after(seconds, done)
        self._under_way = True
        self._go_on()
        try:
            await done
        except asyncio.CancelledError:
            self._advance()
            if self._under_way:
                self._worked.drop(mark)
                self._under_way = False
            self._go_on()
            raise

    def _finish(self) -> None:
        self._advance()
        for done in self._worked.due():
            self._under_way = False
            if not done.done():
                done.set_result(None)
        self._go_on()

    def _training_units(self) -> int:
        return self.spec.units - self.generating if self._under_way else 0

    def _advance(self) -> None:
        elapsed, training = self._worked.advance(), self._training_units()
        self._training_seconds += elapsed * training
        if elapsed and training:
            now = self._loop.time()
            started = now - elapsed
            if self.trained and self.trained[-1][1] >= started:  # without a break
                started = self.trained.pop()[0]
            self.trained.append((started, now))

    def _go_on(self) -> None:
        self._worked.run(self._training_units() / self.spec.units)


@dataclass(frozen=True, slots=True)
class Together:
    """All units generate, then all train."""

    def start(self, units: int) -> int:
        return units

    def generating(self, cluster: Cluster) -> int:
        return 0 if cluster.has_training else cluster.generating

    def returning(self, units: int) -> int:
        return units


@dataclass(frozen=True, slots=True)
class Elastic:
    """While there is training work, generation keeps the units it needs for the contexts that are left: enough KV for all,
    and steps that take at most `slack` longer than on all units."""

    slack: float = 0.05

    def start(self, units: int) -> int:
        return units

    def generating(self, cluster: Cluster) -> int:
        if not cluster.has_training or cluster.coming > 0:
            return cluster.generating
        return self.left(cluster, cluster.generating)

    def returning(self, units: int) -> int:
        return units

    def left(self, cluster: Cluster, units: int) -> int:
        """What generation keeps of so many units."""
        if not cluster.engine.contexts:
            return 0
        needed = self._needed(cluster.spec, cluster.engine.contexts, cluster.engine.kv_wanted())
        # Every switch loses KV: a single unit is not worth it, and none comes back before the weights are published.
        return needed if needed <= units - 2 else units

    def _needed(self, spec: workload.Engine, contexts: int, tokens: int) -> int:
        slowest = (1 + self.slack) * spec.step(spec.units, contexts)
        for units in range(1, spec.units):
            if tokens <= units * spec.kv_tokens and spec.step(units, contexts) <= slowest:
                return units
        return spec.units


@dataclass(slots=True)
class Balance:
    """All units generate until complete groups have piled up for the first time. From then on some always train, with one more
    from a pile until few are left: training and generation keep pace with each other, and little KV is lost. When the last runs
    of all have begun, all units generate again, and are given away as on-policy, though earlier: training fills the time until
    the last rewards, so runs may be slower."""

    training: int
    pile: int
    few: int
    begun: bool = False
    joined: bool = False
    ending: bool = False

    def start(self, units: int) -> int:
        return units - self.training - self.joined if self.begun and not self.ending else units

    def generating(self, cluster: Cluster) -> int:
        if self.ending:
            return Elastic(slack=0.2).generating(cluster)
        if cluster.backlog >= self.pile:
            self.begun = self.joined = True
        elif cluster.backlog <= self.few:
            self.joined = False
        self.ending = cluster.to_come == 0
        return self.start(cluster.spec.units)

    def returning(self, units: int) -> int:
        return units - self.training if self.begun and not self.ending else units


def balance(work: workload.Workload, generation_seconds: float) -> Policy:
    """As many units as training keeps busy for certain, where generation takes so long on all units, and one more from a quarter
    of a batch down to one sixteenth. One or two units take turns instead."""
    units, tasks, training_seconds = work.engine.units, work.batch.tasks, work.training.seconds
    if units < 3:
        return Elastic()
    training = min(max(1, int(units * training_seconds / (training_seconds + generation_seconds))), units - 2)
    return Balance(training, pile=max(1, tasks // 4), few=tasks // 16)
