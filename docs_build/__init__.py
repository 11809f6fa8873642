"""The documentation: pages and figures made from the code, and the site. ``__main__.py`` has the commands."""
