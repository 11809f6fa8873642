"""Pages and charts: one template, one style and one escaping, and charts that a page and a picture both show."""
