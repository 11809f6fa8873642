"""The demo: the whole way from text to an exported model on a laptop, and the real data it and the tests use."""
