"""Real repositories to measure and test code search on."""

from palestra.sources import Source

DJANGO = Source("django", "django-6.1.3", "b5d2d9e35295065d13b1927b3f19a59bd119f737aa6299def14ccca1ae3c8c0d")
SYMPY = Source("sympy", "sympy-1.14.0", "d3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517")
SCIKIT_LEARN = Source("scikit-learn", "scikit_learn-1.9.1", "629cada3e33e2b9bf376cdc7614a47a4140b8aedc1d836579e359736fbd82977")
