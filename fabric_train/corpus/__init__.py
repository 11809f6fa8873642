"""From documents to a token dataset: sources, tokenizer, encoding, packing, manifest; driven by tokenize_dataset.py."""
