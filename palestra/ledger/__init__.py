"""The run's durable record: every trajectory ends in exactly one named state, and every committed step names what it trained on.

It is one SQLite file with one writer and any number of readers. Weights live in checkpoints, beside it.
"""

from palestra.ledger.ledger import Ledger, Recorded, State, StepRecord

__all__ = ["Ledger", "Recorded", "State", "StepRecord"]
