"""Token dataset → what is in it, for eyes: counted, held against its manifest, shown row by row."""
