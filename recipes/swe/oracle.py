"""An oracle that knows one instance's answer and uses the tools as an agent would: it reproduces, searches, views, edits, checks
and finishes. It shows that tools, environment and grading work end to end; see `docs/swe.md`.
"""

from palestra.message import JSON, Message, ToolCall, assistant

OLD = """        self.headers['Content-Length'] = '0'
        if hasattr(body, 'seek') and hasattr(body, 'tell'):"""
NEW = """        if hasattr(body, 'seek') and hasattr(body, 'tell'):"""
END = """            self.headers['Content-Length'] = str(len(body))
"""
NEW_END = f"""{END}        elif self.method not in ('GET', 'HEAD'):
            self.headers['Content-Length'] = '0'
"""
ASK = "python -c \"import requests; print(requests.Request('GET', 'http://localhost').prepare().headers)\""

STEPS: tuple[tuple[str, dict[str, JSON]], ...] = (
    ("bash", {"command": f"git log --oneline; ls; {ASK}"}),
    ("search_symbol", {"name": "prepare_content_length"}),
    ("view", {"path": "requests/models.py", "start": 380, "end": 400}),
    ("edit", {"path": "requests/models.py", "old": OLD, "new": NEW}),
    ("edit", {"path": "requests/models.py", "old": END, "new": NEW_END}),
    ("bash", {"command": f"git diff; {ASK}"}),
    ("finish", {"answer": "GET and HEAD without a body no longer send Content-Length."}),
)


def requests_1142(said: str) -> Message:
    """The next step: as many are done as there are answers of tools."""
    done = said.count("<tool_response>")
    name, arguments = STEPS[min(done, len(STEPS) - 1)]
    return assistant("", ToolCall(f"call_{done}", name, arguments))
