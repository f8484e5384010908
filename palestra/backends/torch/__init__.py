"""The embedded backend: a sampler and a trainer in this process, on CPU or GPU, for any causal language model of transformers."""

import os

# Threads that spin at every barrier bring a busy machine to a halt: with one other program running, a decode step was
# seen to take fifty times as long. A short spin (some microseconds) and then sleep costs nothing measurable.
# It has to be said before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
