"""The programs of the files at the top of the checkout: tokenize, convert, generate, evaluate and download."""
