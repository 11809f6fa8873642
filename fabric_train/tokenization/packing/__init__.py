"""Encoded documents to rows, and rows to folders."""
