"""Places apart in which agents' commands run. Tasks reach them through `palestra.sandboxes`."""
