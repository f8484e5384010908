"""Models behind an OpenAI-compatible server: hosted ones, vLLM, SGLang and others. It samples; it cannot train."""
