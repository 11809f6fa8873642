"""The report of a run, or of several beside one another: one page and the same as Markdown, from files alone."""
