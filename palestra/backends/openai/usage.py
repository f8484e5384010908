"""What an answer cost: requests, tokens and money, as numbers that can be added up."""

from palestra.config import Prices
from palestra.message import JSON

MILLION = 1e6


def usage_of(answer: JSON, tries: int, prices: Prices) -> dict[str, float]:
    """The account of one answer. A server that does not count its tokens leaves them, and the cost, at 0: `uncounted` says so."""
    counted = answer.get("usage")
    counted = counted if isinstance(counted, dict) else {}
    prompt, written = _count(counted, "prompt_tokens"), _count(counted, "completion_tokens")
    cached = min(prompt, _count(counted.get("prompt_tokens_details"), "cached_tokens"))
    cached_price = prices.input if prices.cached_input is None else prices.cached_input
    cost = ((prompt - cached) * prices.input + cached * cached_price + written * prices.output) / MILLION
    return {
        "requests": 1.0,
        "retries": tries - 1.0,
        "uncounted": 0.0 if counted else 1.0,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": written,
        "cost": cost,
    }


def _count(counts: JSON, key: str) -> float:
    value = counts.get(key) if isinstance(counts, dict) else None
    return float(value) if isinstance(value, int) and value >= 0 else 0.0
