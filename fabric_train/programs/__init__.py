"""The programs that the scripts at the top of the repository start: tokenize, convert, generate, evaluate, download."""
