"""verl drives us: its trainer asks for rollouts, and our agent runs them on its servers.

Only this package and its tests import verl, Ray and TransferQueue; the parts that need none of them (`settings`, `rows`) say so.
"""
