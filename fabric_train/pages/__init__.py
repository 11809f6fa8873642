"""Write pages in one style, and charts for both pages and pictures."""
