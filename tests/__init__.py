"""The claims that the project makes, in the order of its subpackages; ``support/`` holds what they share."""
