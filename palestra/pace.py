"""How far rollouts may run ahead of training: the staleness rule, as plain counting.

A group's version is the policy version at its first run. With a staleness bound η, a step that trains version v takes groups of
the versions v-η … v. Groups are begun in the order of their numbers, never more than (1 + η) steps' worth beyond what was taken;
and a step leaves room for all that must be taken now. So no group ever becomes too old, and none is dropped for it.
"""

import asyncio
from collections.abc import Callable


class Pace:
    def __init__(self, groups: int, steps: int, *, staleness: int = 0, extra: int = 0, version: int = 0) -> None:
        """`groups` make a step, and `steps` are to come. `extra` groups are begun beyond, and abandoned if the step is full
        before they are complete."""
        self.version = version
        """The policy version that samples."""
        self._groups, self._steps, self._staleness, self._extra = groups, steps, staleness, extra
        self._begun: dict[int, int] = {}
        """Groups that are begun and not yet taken, with their versions."""
        self._recalled: dict[int, int] = {}
        self._abandoned: set[int] = set()
        self._taken = 0
        """Groups that the present step has."""
        self._unpublished = 0
        """Groups whose places are free again once the weights of the step before are published: those that it took or abandoned,
        and what was replaced since."""
        self._left = 0
        """Groups that the present step has abandoned."""
        self._settled = 0
        """Groups that were taken, replaced or abandoned, in all steps."""
        self._stopped = False
        self._changed = asyncio.Event()

    @property
    def full(self) -> bool:
        return self._taken == self._groups

    def allows(self, number: int) -> bool:
        """Whether the run of a group may start now."""
        extra = self._extra if self._steps and not (self.full or self.publishing) else 0
        places = self._ahead * self._groups + extra
        return number - self._settled + self._taken + self._left + self._unpublished < places

    @property
    def _ahead(self) -> int:
        """For how many steps groups may be begun by now; for none that will not come."""
        return min(1 + self._staleness, self._steps)

    async def planned(self, number: int, prewarm: bool) -> bool:
        """Wait until a group's rollouts may be made: when their run may start or, to prewarm, one step sooner. False when that
        will never be."""

        def due() -> bool:
            sooner = min(1, self._steps - self._ahead) * self._groups if prewarm else 0
            return self.allows(number - sooner)

        return await self._until(due)

    async def begin(self, number: int) -> bool:
        """Wait until the run of a group may start, and count it as begun. False when that will never be."""
        if not await self._until(lambda: self.allows(number)):
            return False
        self._open(number)
        return True

    def recall(self, number: int, version: int) -> None:
        """An interrupted run has left a part of this group, which it began under that version."""
        self._recalled[number] = version
        self._wake()

    def _open(self, number: int) -> None:
        if number not in self._begun:
            # A run that went back to an older checkpoint recalls versions that are not there yet.
            version = self._recalled.pop(number, self.version)
            self._begun[number] = min(self.version, max(self._trained - self._staleness, version))

    def may_take(self, number: int) -> bool:
        """Whether the present step may take a complete group: always one that must not wait any longer; another one only where
        enough places are left, in this step and those to come, for all that must be taken by then."""
        if not self.allows(number):  # of a later step, and complete already since none of its rollouts came to a run
            return False
        self._open(number)
        if self.staleness_of(number) > self._staleness:
            return False  # it will be abandoned when the weights are published
        versions = [version for version in self._begun.values() if self._trained - version <= self._staleness]
        oldest = min(versions)
        steps_before = oldest - (self._trained - self._staleness)  # nothing has to be taken in those
        places = self._groups - self._taken - 1 + steps_before * self._groups
        for last_call in range(oldest, self._begun[number]):
            if sum(version <= last_call for version in versions) > places:
                return False
            places += self._groups
        return True

    def staleness_of(self, number: int) -> int:
        """Were the present step to take it."""
        return self._trained - self._begun[number]

    @property
    def publishing(self) -> bool:
        """Whether a step is made whose weights are not published yet."""
        return self._unpublished > 0

    @property
    def _trained(self) -> int:
        """The version that the present step begins with: the one that samples, or is being published."""
        return self.version + self.publishing

    def take(self, number: int) -> None:
        """The present step has taken the group."""
        self._settle(number)
        self._taken += 1
        self._wake()

    def replace(self, number: int) -> None:
        """The group is of no use: another one may begin in its place."""
        self._settle(number)
        if self.publishing:
            self._unpublished += 1
        self._wake()

    def close_step(self) -> list[int]:
        """The step is full. Groups that are too old for the next one are abandoned: there can be such only where more were begun
        than a step takes."""
        too_old = [number for number, version in self._begun.items() if self._trained + 1 - version > self._staleness]
        for number in too_old:
            self._settle(number)
        self._left += len(too_old)
        self._abandoned.update(too_old)
        return too_old

    def update(self) -> None:
        """The step is made. The next one may take groups, though nothing more begins until the weights are published."""
        self._unpublished, self._taken, self._left = self._taken + self._left, 0, 0

    def publish(self) -> None:
        """There is a new version."""
        self.version += 1
        self._unpublished = 0
        self._steps -= 1
        self._wake()

    def has_abandoned(self, number: int) -> bool:
        return number in self._abandoned

    def has_outlived(self, version: int) -> bool:
        """Whether a group that an interrupted run began under that version is too old by now, and to be left out. There can be
        such only with oversampling."""
        return self._extra > 0 and version < self._trained - self._staleness

    def stop(self) -> None:
        """Nothing new begins any more."""
        self._stopped = True
        self._wake()

    def _settle(self, number: int) -> None:
        del self._begun[number]
        self._settled += 1

    def _wake(self) -> None:
        for number in [number for number in self._recalled if self.allows(number)]:
            self._open(number)  # its version counts from now on, whenever its next run starts
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> bool:
        while not self._stopped:
            if condition():
                return True
            await self._changed.wait()
        return False
