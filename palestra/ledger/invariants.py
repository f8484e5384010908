"""What must hold in every ledger at every instant, also just after a kill -9. Each rule is a query for the rows that break it."""

from palestra.errors import StorageError
from palestra.ledger.store import Store

RULES = {
    "a state that is unknown, or of another phase": """
        SELECT id, phase, state FROM trajectories WHERE (phase, state) NOT IN (VALUES
            ('train', 'finished'), ('train', 'failed'), ('train', 'consumed'), ('train', 'filtered'),
            ('eval', 'evaluated'), ('eval', 'failed'), ('greedy', 'evaluated'), ('greedy', 'failed'))""",
    "two trajectories in one slot": """
        SELECT phase, step, task_id, idx FROM trajectories GROUP BY phase, step, task_id, idx HAVING count(*) > 1""",
    "a trajectory that ended without a reward": "SELECT id FROM trajectories WHERE state != 'failed' AND reward IS NULL",
    "a failure with a reward": "SELECT id FROM trajectories WHERE state = 'failed' AND reward IS NOT NULL",
    "consumed or filtered by no committed step": """
        SELECT id FROM trajectories WHERE (state IN ('consumed', 'filtered') AND settled_by IS NULL)
            OR (settled_by IS NOT NULL AND settled_by NOT IN (SELECT step FROM steps))""",
    "settled by a step, yet neither consumed nor filtered nor failed": """
        SELECT id FROM trajectories WHERE state NOT IN ('consumed', 'filtered', 'failed') AND settled_by IS NOT NULL""",
    "committed steps with gaps (first, last, count)": """
        SELECT min(step), max(step), count(*) FROM steps HAVING count(*) > 0 AND (min(step) != 0 OR max(step) != count(*) - 1)""",
    "a step whose batch is not what it consumed": """
        SELECT steps.step FROM steps LEFT JOIN (
            SELECT settled_by, sum(state = 'consumed') AS consumed, sum(state = 'filtered') AS filtered
            FROM trajectories GROUP BY settled_by
        ) AS taken ON settled_by = steps.step
        WHERE steps.trained != coalesce(taken.consumed, 0) OR steps.filtered != coalesce(taken.filtered, 0)""",
    "segments of no trajectory": "SELECT trajectory FROM segments WHERE trajectory NOT IN (SELECT id FROM trajectories)",
    "segments that are not numbered 0, 1, …": """
        SELECT trajectory FROM segments GROUP BY trajectory HAVING min(number) != 0 OR max(number) != count(*) - 1""",
    "a segment whose arrays differ in length": """
        SELECT trajectory, number FROM segments WHERE length(tokens) != 4 * length(mask)
            OR length(logprobs) != 4 * length(mask) OR length(versions) != 4 * length(mask)""",
}


def violations(store: Store) -> list[str]:
    """One line for each rule that is broken, with the rows that break it."""
    try:
        with store.snapshot():
            damage = [line for (line,) in store.rows("PRAGMA integrity_check") if line != "ok"]
            broken = {rule: store.rows(query) for rule, query in RULES.items()}
    except StorageError as error:
        return [str(error)]
    return damage + [f"{rule}: {rows}" for rule, rows in broken.items() if rows]
