"""Tools that agents are given."""
