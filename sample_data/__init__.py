"""Real text, tokenizers and a real Llama out of ordinary packages, for the demo, the tests and the benchmarks."""
