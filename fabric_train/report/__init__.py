"""Write the report of one run, or a comparison of several, as a page and as Markdown, from the files of the runs."""
