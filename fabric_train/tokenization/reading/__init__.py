"""Where documents come from: files, folders, URLs, datasets, and the rows in them."""
