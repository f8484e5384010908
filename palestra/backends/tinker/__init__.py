"""The Tinker API through its official SDK: the hosted service, or any server that speaks it."""
