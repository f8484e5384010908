"""Where tokens are sampled and gradients taken. Each backend imports its vendor's package itself, and only when opened."""
