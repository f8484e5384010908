"""Tools that an agent is given: shell, editor, code search, and those of MCP servers."""
