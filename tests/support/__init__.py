"""What tests and benchmarks share: tiny models and datasets, real ranks started in a second, chosen kills."""
